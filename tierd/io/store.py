"""A store: the images on one device, their extents, and the commits that change them.

The device's root is the truth; this class holds a copy of it and replaces that copy only after a
commit has reached the medium. Free space is never written down: it is what no extent covers.
Extents that a reader still holds a lease on, or that a staging in progress was given, are not
free either. What a commit has dropped is neither reused nor discarded before the root that named
it is overwritten, too: the newest root may rot, and the one before it is then in force again.
One process has the store open for writing; its threads may share it.

An image may lie on several devices (:mod:`tierd.io.store_set`); a store knows its own share of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tierd.errors import (
    DeviceBusyError,
    DeviceError,
    DeviceFailedError,
    DeviceForeignError,
    DeviceTooSmallError,
    ImageError,
)
from tierd.io import formatting, opening, signatures, superblock
from tierd.io.device import PAGE_BYTES, Device, aligned_buffer
from tierd.io.extent_table import Identity, Member, Part, StoredImage, Wipe
from tierd.io.layout import Areas, choose_extents, free_ranges, occupied
from tierd.io.stripes import share_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tierd.types import Extent, ImageInfo

COMPLETE = "complete"
_GENERATION_MAX = (1 << 32) - 1
_WIPE_BYTES = 4 << 20

__all__ = ["COMPLETE", "Member", "Part", "Store", "StoredImage"]


class Store:
    """The images on one device.

    Attributes:
        device: the open device.
        note: what was odd when the store was opened, such as one damaged root; mostly empty.
    """

    def __init__(self, device: Device, loaded: superblock.Loaded) -> None:
        """Take over an open device and what :func:`superblock.load` found on it."""
        self.device = device
        self.note = loaded.note
        self._root = loaded.root
        self._table = loaded.table
        # A damaged root may have been the newest, and have given out the next generation of any of
        # these: none is counted on from, and the next commit drops them.
        self._doubted = frozenset(loaded.table.identities.values() if loaded.note else ())
        self._highest = loaded.highest_sequence
        self._areas = Areas.of(loaded.root.device_bytes)
        self._pending: list[Extent] = []
        # The commit that last dropped extents; unknown at the start, so it may have been this one.
        self._dropped_at = loaded.root.sequence if loaded.root.sequence > 1 else 0
        self._broken = ""
        self._lock = threading.RLock()

    # --- opening -------------------------------------------------------------------------------

    @classmethod
    def format(
        cls, path: str | os.PathLike[str], *, size: int | None = None, force: str | None = None
    ) -> Self:
        """Make an empty store.

        Args:
            path: a block device, or a file (made if it does not exist).
            size: bytes of the file; needed for a new one. Not for block devices.
            force: the device's own path or name, to overwrite what it holds.

        Raises:
            DeviceForeignError: it holds something, and ``force`` does not name it.
            DeviceBusyError: another process, or a reader's lease, holds it.
            DeviceTooSmallError: too small for the roots and 2 MiB of data, or the disk below is.
            DeviceError: it cannot be made, opened or written.
        """
        path = os.fspath(path)
        made = formatting.make_file(path, size)
        try:
            device = Device.open(path, write=True)
            try:
                formatting.refuse_content(device, path, force)
                formatting.write_empty(device)
                return cls._open(device)
            except BaseException:
                device.close()
                raise
        except BaseException:
            if made:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, write: bool = True) -> Self:
        """Open a store; with ``write=False`` beside a daemon that has it open.

        Raises:
            DeviceForeignError: the device was never formatted by tierd.
            DeviceDamagedError: neither root is whole.
            DeviceVersionError: a newer tierd wrote it.
            DeviceBusyError: another process writes it.
            DeviceError: it cannot be opened or read, or it shrank.
        """
        device = Device.open(path, write=write)
        try:
            return cls._open(device)
        except BaseException:
            device.close()
            raise

    @classmethod
    def _open(cls, device: Device) -> Self:
        if device.writable:
            # What a killed predecessor wrote may still be in the device's cache. It must not be
            # believed, and built upon, before it is sure to survive a power cut.
            device.flush()
        loaded = opening.load(device)
        if loaded is None:
            content = signatures.find_content(device)
            what = f"holds {content}" if content else "is empty"
            raise DeviceForeignError(
                f"{device.path} is no tierd store, it {what}; run: tierd format {device.path}"
            )
        return cls(device, loaded)

    def close(self) -> None:
        """Close the device; a second call does nothing."""
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what is there ---------------------------------------------------------------------------

    @property
    def uuid(self) -> str:
        """The device's identity, whatever its name is today."""
        return str(self._root.uuid)

    @property
    def sequence(self) -> int:
        """Number of the commit in force."""
        return self._root.sequence

    @property
    def images(self) -> list[StoredImage]:
        """All images, by name."""
        return sorted(self._table.images.values(), key=lambda image: image.name)

    @property
    def placements(self) -> dict[str, dict[str, Any]]:
        """What was stored by :meth:`set_placement`, by image name."""
        return dict(self._table.placements)

    @property
    def identities(self) -> dict[str, Identity]:
        """The last identity given to each name, deleted ones included."""
        return dict(self._table.identities)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Shares of images whose home is another device."""
        return self._table.parts

    @property
    def wipes(self) -> tuple[Wipe, ...]:
        """Deleted images that are still to be overwritten with zeroes here."""
        return self._table.wipes

    @property
    def free_runs(self) -> list[tuple[int, int]]:
        """Byte ranges (start, end) that can be allocated, in order: the free-space map."""
        with self._lock:
            return self._free()

    def find(self, name: str) -> StoredImage | None:
        """Return the image called ``name``, or None."""
        return self._table.images.get(name)

    def image(self, name: str) -> StoredImage:
        """Return the image called ``name``.

        Raises:
            ImageError: there is none; the message lists near names.
        """
        found = self.find(name)
        if found is None:
            near = difflib.get_close_matches(name, self._table.images, n=3, cutoff=0.4)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise ImageError(
                f"no image {name!r} on {self.device.path} ({len(self._table.images)} images)"
                f"{hint}; run: tierd images --device {self.device.path}"
            )
        return found

    # --- room ------------------------------------------------------------------------------------

    @property
    def capacity_pages(self) -> int:
        """Pages that an empty store of this size can hold."""
        return (self._areas.data_end - self._areas.data_start) // PAGE_BYTES

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now, in whole units of 512.

        Never waits: the daemon's event loop asks, and a commit holds the lock for as long as its
        device takes. Beside a commit it may count what that is just giving up.
        """
        return sum(end - start for start, end in self._free()) // PAGE_BYTES

    def pages_after_dropping(self, name: str) -> int:
        """Pages that dropping an image would free: none while a reader holds a lease on it."""
        with self._lock:
            found = self.find(name)
            if found is None or self.is_leased(found.extents):
                return 0
            return pages_of(found.extents)

    def allocate(self, pages: int) -> list[Extent]:
        """Set extents aside for an image of ``pages`` pages, in one run if there is room for it.

        They are this process's until :meth:`commit_image` makes them the image's, or
        :meth:`release` gives them back; the device learns nothing before the commit.

        Raises:
            DeviceTooSmallError: not enough room.
        """
        assert pages > 0, "an image has at least one page"
        with self._lock:
            self._require_writable()
            self._settle()
            free = self._free()
            extents = choose_extents(free, pages)
            if extents is None:
                raise self.too_small(pages, sum(end - start for start, end in free) // PAGE_BYTES)
            self._pending += extents
            return extents

    def release(self, extents: Iterable[Extent]) -> None:
        """Give back what :meth:`allocate` set aside; what a commit has used is passed over."""
        with self._lock:
            for extent in extents:
                if extent in self._pending:
                    self._pending.remove(extent)

    def too_small(self, pages: int, have: int) -> DeviceTooSmallError:
        """Return the error that says how much is needed and how much there is."""
        return DeviceTooSmallError(
            f"{self.device.path} has {have * PAGE_BYTES} bytes free, the tables need "
            f"{pages * PAGE_BYTES} ({(pages - have) * PAGE_BYTES} more); delete an image or use a "
            f"larger device; run: tierd images --device {self.device.path}"
        )

    def _free(self) -> list[tuple[int, int]]:
        # In this order: what a commit takes into the table leaves the list only after that.
        used = [occupied(extent) for extent in self._pending.copy()]
        used += [occupied(extent) for extent in self._table.all_extents()]
        used += self.device.leased_ranges(self._areas.data_start, self._areas.data_end)
        return free_ranges(self._areas, used)

    # --- readers ---------------------------------------------------------------------------------

    def reader_fd(self, images: Iterable[StoredImage | Part]) -> int:
        """Open the device for a reader of images, or parts of images, and return the descriptor.

        For as long as any copy of it is open, in any process and across restarts of this one,
        the images' extents are not reused, not discarded, and the images cannot be deleted.

        Raises:
            ImageError: an image was deleted or replaced meanwhile.
            DeviceError: the device cannot be opened again or has no byte-range locks.
        """
        images = list(images)
        ranges = [
            (start, end - start) for image in images for start, end in map(occupied, image.extents)
        ]
        with self._lock:  # no commit may drop the images between the look and the lease
            for image in images:
                known = image in self.parts if isinstance(image, Part) else self._has(image)
                if not known:
                    raise ImageError(
                        f"image {image.name} on {self.device.path} was deleted or replaced; "
                        f"attach again; run: tierd images --device {self.device.path}"
                    )
            return self.device.readonly_fd(ranges)

    def _has(self, image: StoredImage) -> bool:
        return self.find(image.name) == image

    def is_leased(self, extents: Iterable[Extent]) -> bool:
        """Whether a reader, in whatever process, holds a lease on any of these extents."""
        return any(self.device.leased_ranges(*occupied(extent)) for extent in extents)

    def require_unleased(self, image: StoredImage | Part) -> None:
        """Raise DeviceBusyError if a reader holds a lease on an image or a part of one."""
        if self.is_leased(image.extents):
            raise DeviceBusyError(
                f"image {image.name} on {self.device.path} is served by a daemon or attached by "
                "an engine, so it cannot be deleted; stop them first; run: tierd status"
            )

    # --- changing --------------------------------------------------------------------------------

    def reserve_identity(self, name: str) -> tuple[int, int]:
        """Commit and return a new (image id, generation) for ``name``.

        Committed before the first page is written: an attempt that is killed has used its
        generation up, so its pages can never pass for those of the next attempt.

        Raises:
            DeviceError: the commit failed.
        """
        with self._lock:
            identity = self._next_identity(name)
            self._commit(identities={**self._table.identities, name: identity})
            return identity.image_id, identity.generation

    def commit_image(
        self,
        info: ImageInfo,
        extents: Iterable[Extent],
        members: tuple[Member, ...] = (),
        *,
        copy: bool = False,
    ) -> StoredImage:
        """Make a staged image part of the store, in place of one of the same name.

        The caller has flushed every device after the last page, and committed the members' parts.
        The replaced image's extents are discarded unless a reader holds a lease on them.

        Args:
            info: the manifest.
            extents: the share of this device, the home.
            members: the shares of the others.
            copy: the image has its identity from another home. This home's own identities do not
                follow it, so that the two never give one identity to different rows.

        Raises:
            DeviceError: the commit failed; the store must be opened again.
        """
        own = tuple(extents)
        share = share_pages(info.pages, 0, 1 + len(members))
        assert sum(extent.pages for extent in own) == share, "extents cover the share"
        devices = (self.uuid, *(member.uuid for member in members))
        image = StoredImage(info, own, COMPLETE, devices, members)
        identity = Identity(info.image_id, info.generation)
        with self._lock:
            replaced = self.find(info.name)
            given = {} if copy else {info.name: identity}
            self._commit(
                images={**self._table.images, info.name: image},
                identities={**self._table.identities, **given},
            )
            self.release(own)
            dropped = () if replaced is None else replaced.extents
            self._drop(dropped)
        self._discard(dropped)
        return image

    def delete_image(self, name: str, *, wipe: bool = False) -> None:
        """Drop an image, raise its generation, and give its extents back to the device.

        Args:
            name: ``model/table``.
            wipe: keep its extents, in :attr:`wipes`, until :meth:`finish_wipe` has been there.

        Raises:
            ImageError: no such image.
            DeviceBusyError: a reader holds a lease on it.
            DeviceError: the commit failed.
        """
        with self._lock:
            image = self.image(name)
            self.require_unleased(image)
            images = {key: value for key, value in self._table.images.items() if key != name}
            placements = {k: v for k, v in self._table.placements.items() if k != name}
            self._commit(
                images=images,
                placements=placements,
                identities={**self._table.identities, name: self._next_identity(name)},
                wipes=(*self._table.wipes, *([_wipe_of_image(image)] if wipe else ())),
            )
            dropped = () if wipe else image.extents
            self._drop(dropped)
        self._discard(dropped)

    def add_part(self, part: Part) -> None:
        """Reserve this device's share of an image whose home is another device.

        Raises:
            DeviceTooSmallError: its extents are in use.
            DeviceError: the commit failed.
        """
        with self._lock:
            self.release(part.extents)
            free = self._free()
            for start, end in map(occupied, part.extents):
                if not any(low <= start and end <= high for low, high in free):
                    raise DeviceTooSmallError(
                        f"{self.device.path}: the extents of {part.name} at byte {start} are in "
                        f"use; run: tierd devices inspect {self.device.path}"
                    )
            self._commit(parts=(*self._table.parts, part))

    def drop_parts(self, parts: Iterable[Part], wipe: Sequence[str] = ()) -> None:
        """Give up shares of images that their home no longer names.

        Args:
            parts: those of them that are here.
            wipe: the devices of their image, its home first: keep their extents, in
                :attr:`wipes`, until :meth:`finish_wipe` has been there.

        Raises:
            DeviceError: the commit failed.
        """
        parts = [part for part in parts if part in self._table.parts]
        if not parts:
            return
        owed = [
            Wipe(part.name, part.image_id, part.generation, tuple(wipe), part.extents)
            for part in parts
            if wipe
        ]
        extents = [extent for part in parts if not wipe for extent in part.extents]
        with self._lock:
            self._commit(
                parts=tuple(part for part in self._table.parts if part not in parts),
                wipes=(*self._table.wipes, *owed),
            )
            self._drop(extents)
        self._discard(extents)

    def finish_wipe(self, wipe: Wipe, *, overwrite: bool = True) -> None:
        """Overwrite a deleted image's extents with zeroes, read them back, and free them.

        Args:
            wipe: one of :attr:`wipes`.
            overwrite: False gives the wipe up: the extents are free and keep what they hold.

        Raises:
            DeviceError: a write or commit failed, or the zeroes are not there; it is still owed.
        """
        if overwrite:
            self._settle(always=True)  # no root may name an image whose pages are gone
            self._overwrite(wipe.extents)
        with self._lock:
            self._commit(wipes=tuple(owed for owed in self._table.wipes if owed != wipe))
            self._drop(wipe.extents)
        self._discard(wipe.extents)

    def set_placement(self, name: str, placement: dict[str, Any] | None) -> None:
        """Store one image's placement; see :meth:`set_placements`."""
        self.set_placements({name: placement})

    def set_placements(self, changes: Mapping[str, dict[str, Any] | None]) -> None:
        """Store what must survive of images' placements (tiers, quota, window); None drops one.

        One commit: all of them, or none.

        Raises:
            ImageError: no such image.
            DeviceError: the commit failed.
        """
        with self._lock:
            for name in changes:
                self.image(name)
            placements = {**self._table.placements, **changes}
            self._commit(placements={k: v for k, v in placements.items() if v is not None})

    def _next_identity(self, name: str) -> Identity:
        known = self._table.identities.get(name)
        if known is None or known in self._doubted or known.generation >= _GENERATION_MAX:
            return Identity(secrets.randbits(64), 1)
        return Identity(known.image_id, known.generation + 1)

    def _commit(self, **changes: Any) -> None:
        """Write a changed extent table and the root that names it."""
        self._require_writable()
        table = dataclasses.replace(self._table, **changes)
        kept = {n: given for n, given in table.identities.items() if given not in self._doubted}
        table = dataclasses.replace(table, identities=kept)
        sequence = max(self._highest, self._root.sequence) + 1
        data = table.pack(self._root.uuid, sequence)
        if len(data) > self._areas.table_bytes:
            raise DeviceError(
                f"{self.device.path}: the extent table would have {len(data)} bytes, there is room "
                f"for {self._areas.table_bytes}; delete images; "
                f"run: tierd images --device {self.device.path}"
            )
        used = 0 if self._root.table_offset == self._areas.table_offset(0) else 1
        root = dataclasses.replace(
            self._root,
            sequence=sequence,
            slot=1 - self._root.slot,
            table_offset=self._areas.table_offset(1 - used),
            table_bytes=len(data),
            table_crc=superblock.crc(data),
        )
        table.check(root)
        try:
            superblock.store(self.device, root, data)
        except DeviceError as error:
            self._broken = str(error)
            raise
        self._root, self._table, self._highest = root, table, sequence

    def _drop(self, extents: Sequence[Extent]) -> None:
        """Right after a commit that no longer names them: nobody is given them yet."""
        if extents:
            self._dropped_at = self._root.sequence
            self._pending += extents

    def _settle(self, *, always: bool = False) -> None:
        """Commit once more if the other root still names extents that this one does not."""
        with self._lock:
            if always or self._root.sequence == self._dropped_at:
                self._commit()

    def _require_writable(self) -> None:
        assert self.device.writable, "the store was opened for reading"
        if self._broken:
            raise DeviceError(
                f"{self.device.path}: an earlier commit failed ({self._broken}), so the store "
                "must be opened anew before it is changed; run: systemctl restart tierd"
            )

    def _discard(self, extents: Sequence[Extent]) -> None:
        """Discard and release dropped extents; outside the lock, since it may take seconds.

        A hint: a device that cannot discard keeps the old bytes, which nothing names any more.
        """
        if not extents:
            return
        try:
            self._settle()
            for extent in extents:
                start, end = occupied(extent)
                if not self.device.leased_ranges(start, end):
                    self.device.discard(start, end - start)
        finally:
            self.release(extents)

    def _overwrite(self, extents: Iterable[Extent]) -> None:
        zeroes = aligned_buffer(_WIPE_BYTES)
        back = aligned_buffer(_WIPE_BYTES)
        for offset, length in _pieces(extents, _WIPE_BYTES):
            self.device.write(offset, zeroes[:length])
        self.device.flush()
        for offset, length in _pieces(extents, _WIPE_BYTES):
            self.device.read_into(offset, back[:length])
            if np.any(back[:length]):
                raise DeviceFailedError(
                    f"{self.device.path}: bytes at {offset} are not zero after they were wiped; "
                    "the device does not store what it is told; run: dmesg"
                )


def _wipe_of_image(image: StoredImage) -> Wipe:
    return Wipe(image.name, *image.identity, image.devices, image.extents)


def pages_of(extents: Iterable[Extent]) -> int:
    """Pages that extents occupy, whole units."""
    return sum(end - start for start, end in map(occupied, extents)) // PAGE_BYTES


def _pieces(extents: Iterable[Extent], size: int) -> Iterator[tuple[int, int]]:
    for extent in extents:
        start, end = occupied(extent)
        for offset in range(start, end, size):
            yield offset, min(size, end - offset)
