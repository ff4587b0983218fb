"""Several stores as one place for images: striping, and the order of commits between devices.

An image commits on one **home** device, whose root names the others and their extents. The order
of a staging is: every page written and flushed on every device; each member's root reserves its
part; the home's root, last, names them all. So an image is absent or complete, whenever this stops.
A deletion goes the other way: the home's root first, then the members give their parts up.

What a stop in between leaves behind is a part that no home names. It is given up when the two are
opened for writing together again. While the home is away nobody can know, so the part is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from typing import TYPE_CHECKING, Self

from tierd.errors import (
    DeviceDuplicateError,
    DeviceTooSmallError,
    ImageError,
    ImageIncompleteError,
    ImageVersionError,
)
from tierd.io import _core, find_devices, layout, stripes
from tierd.io.device import PAGE_BYTES
from tierd.io.extent_table import Member, Part, StoredImage, Wipe
from tierd.io.store import Store, pages_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tierd.io.layout import Run
    from tierd.types import Extent, ImageInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one device holds of an image.

    Attributes:
        uuid: the device's.
        path: its name now, or when the image was staged if it is not there.
        extents: in local page numbers.
        store: None if the device is not there, or has lost its part.
        holding: what names the extents in the store's own root; None before the commit.
        fault: why ``store`` is None; empty if it is not.
    """

    uuid: str
    path: str
    extents: tuple[Extent, ...]
    store: Store | None
    holding: StoredImage | Part | None = None
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class StripedImage:
    """An image with the stores that hold it, the home's share first."""

    stored: StoredImage
    shares: tuple[Share, ...]

    @property
    def info(self) -> ImageInfo:
        """The manifest."""
        return self.stored.info

    @property
    def name(self) -> str:
        """``model/table``."""
        return self.info.name

    @property
    def home(self) -> Store:
        """The store whose root names the image."""
        store = self.shares[0].store
        assert store is not None, "an image is found by its home"
        return store

    @property
    def stores(self) -> list[Store]:
        """Those that are there, the home first."""
        return [share.store for share in self.shares if share.store is not None]

    @property
    def fault(self) -> str:
        """Why the image cannot be read, in one line; empty if it can."""
        missing = [share for share in self.shares if share.store is None]
        if missing:
            return "; ".join(f"device {s.uuid} ({s.path}) {s.fault}" for s in missing)
        if self.info.page_version > _core.PAGE_VERSION:
            return (
                f"its pages have format {self.info.page_version}, this tierd reads up to "
                f"{_core.PAGE_VERSION}"
            )
        return ""

    def require_whole(self) -> None:
        """Raise unless every page can be read.

        Raises:
            ImageIncompleteError: a device is missing; the text names it.
            ImageVersionError: a newer tierd wrote the pages.
        """
        if any(share.store is None for share in self.shares):
            raise ImageIncompleteError(
                f"image {self.name} is not whole: {self.fault}; attach that device and name it, "
                "too, or delete the image and stage it again; run: tierd devices list"
            )
        if self.fault:
            raise ImageVersionError(f"image {self.name}: {self.fault}; install a newer tierd")

    def runs(self, first_page: int, pages: int) -> Iterator[tuple[Store, Run]]:
        """Split image pages into runs that one read of one device can fetch each."""
        count = len(self.shares)
        for index, first, local, size in stripes.pieces(first_page, pages, count):
            store, extents = self.shares[index].store, self.shares[index].extents
            assert store is not None, "an image that is not whole is not read"
            for run in layout.runs(extents, local, size):
                at = first + run.first_page - local
                yield store, dataclasses.replace(run, first_page=at)

    def extent_rows(self, index: int) -> NDArray[np.uint64]:
        """Where share ``index`` lies: uint64 [n, 3] of (page in the image, pages, device page)."""
        return stripes.image_rows(self.shares[index].extents, index, len(self.shares))


class StoreSet:
    """Stores that are used together.

    Attributes:
        stores: each once; an image's home is the first unless it has one already.
        notes: what was odd when they were opened, by path.
    """

    def __init__(self, stores: Iterable[Store], notes: Iterable[str] = ()) -> None:
        """Take over open stores.

        Raises:
            DeviceDuplicateError: two of them bear one UUID.
        """
        self.stores = tuple(stores)
        self.notes = [f"{s.device.path}: {s.note}" for s in self.stores if s.note] + list(notes)
        self._by_uuid: dict[str, Store] = {}
        for store in self.stores:
            twin = self._by_uuid.setdefault(store.uuid, store)
            if twin is not store:
                raise DeviceDuplicateError(
                    f"{twin.device.path} and {store.device.path} both say that they are device "
                    f"{store.uuid}; one is a copy of the other, or the same by another name; name "
                    "one of them; run: tierd devices list"
                )

    @classmethod
    def open(cls, paths: Iterable[str | os.PathLike[str]], *, write: bool = True) -> Self:
        """Open stores; for writing, give up parts that no home names (:meth:`reclaim`).

        Raises:
            DeviceError: as :meth:`tierd.io.store.Store.open`; nothing stays open.
        """
        paths = list(paths)
        if write:
            find_devices.require_distinct(paths)
        with contextlib.ExitStack() as stack:
            opened = cls(stack.enter_context(Store.open(path, write=write)) for path in paths)
            if write:
                opened.notes += opened.reclaim()
            opened.notes += opened.wipe_notes()
            stack.pop_all()
        return opened

    @classmethod
    def of(cls, store: Store | StoreSet) -> StoreSet:
        """Return a set; one store alone is a set, too, and stays the caller's to close."""
        return store if isinstance(store, StoreSet) else cls([store])

    def close(self) -> None:
        """Close every store."""
        for store in self.stores:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> str:
        """The devices' names, for messages."""
        return " ".join(store.device.path for store in self.stores)

    # --- what is there ---------------------------------------------------------------------------

    @property
    def images(self) -> list[StripedImage]:
        """Every image whose home is here, by name, whether or not all its devices are."""
        found = [self.striped(store, image) for store in self.stores for image in store.images]
        return sorted(found, key=lambda image: image.name)

    def home_of(self, image: StoredImage) -> Store:
        """The store that names an image; KeyError if it is not here."""
        return self._by_uuid[image.devices[0]]

    def striped(self, home: Store, image: StoredImage) -> StripedImage:
        """Return an image of ``home`` with the stores that hold its shares."""
        own = Share(home.uuid, home.device.path, image.extents, home, image)
        return StripedImage(image, (own, *(self._share(home, image, m) for m in image.members)))

    def _share(self, home: Store, image: StoredImage, member: Member) -> Share:
        store = self._by_uuid.get(member.uuid)
        if store is None:
            return Share(member.uuid, member.path, member.extents, None, None, "is not there")
        part = _part_of(home, image, member)
        path = store.device.path
        if part not in store.parts:
            return Share(member.uuid, path, member.extents, None, None, "has lost its part")
        return Share(member.uuid, path, member.extents, store, part)

    def find(self, name: str) -> StripedImage | None:
        """Return the image called ``name``, or None; of several the one on the first device."""
        for store in self.stores:
            image = store.find(name)
            if image is not None:
                return self.striped(store, image)
        return None

    def image(self, name: str) -> StripedImage:
        """Return the image called ``name``.

        Raises:
            ImageError: there is none; the message lists near names.
            ImageIncompleteError: there are parts of it only; the message names its home.
        """
        found = self.find(name)
        if found is None and (orphans := self.orphans(name)):
            store, part = orphans[0]
            raise ImageIncompleteError(
                f"{store.device.path} holds a part of {name}, whose home, device {part.home}, is "
                "not named; name it, too; if it is gone for good, give the part up; "
                f"run: tierd images delete {name} --parts --device {store.device.path}"
            )
        if found is None:
            names = sorted({image.name for store in self.stores for image in store.images})
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise ImageError(
                f"no image {name!r} on {self.path} ({len(names)} images){hint}; "
                f"run: tierd images --device {self.stores[0].device.path}"
            )
        return found

    # --- staging ---------------------------------------------------------------------------------

    def order_for(self, name: str) -> tuple[Store, ...]:
        """The stores in the order in which an image of this name is dealt out: its home first."""
        home = next((store for store in self.stores if store.find(name) is not None), None)
        if home is None:
            return self.stores
        return (home, *(store for store in self.stores if store is not home))

    def allocate(self, name: str, pages: int) -> tuple[Share, ...]:
        """Set extents aside on every device for an image; :meth:`release` gives them back.

        Raises:
            DeviceTooSmallError: a device lacks the room for its share; nothing is set aside.
        """
        order = self.order_for(name)
        order = order[: stripes.devices_used(pages, len(order))]
        shares: list[Share] = []
        try:
            for index, store in enumerate(order):
                extents = store.allocate(stripes.share_pages(pages, index, len(order)))
                shares.append(Share(store.uuid, store.device.path, tuple(extents), store))
        except BaseException:
            self.release(shares)
            raise
        return tuple(shares)

    def release(self, shares: Iterable[Share]) -> None:
        """Give back what :meth:`allocate` set aside; what a commit has used is passed over."""
        for share in shares:
            if share.store is not None:
                share.store.release(share.extents)

    def commit(
        self, info: ImageInfo, shares: Sequence[Share], *, copy: bool = False
    ) -> StripedImage:
        """Make a staged image exist: each member's part, then the home's root.

        The caller has flushed every device. An image of the same name on the same home is
        replaced, and its parts are given up.

        Raises:
            DeviceError: a commit failed; that store must be opened again.
        """
        home = shares[0].store
        assert home is not None, "pages were written there"
        replaced = home.find(info.name)
        members = tuple(Member(share.uuid, share.path, share.extents) for share in shares[1:])
        for share in shares[1:]:
            assert share.store is not None, "pages were written there"
            share.store.add_part(
                Part(info.image_id, info.generation, home.uuid, share.extents, info.name)
            )
        image = home.commit_image(info, shares[0].extents, members, copy=copy)
        if replaced is not None:
            self._drop_parts(home, replaced)
        return self.striped(home, image)

    # --- giving up -------------------------------------------------------------------------------

    def delete(self, image: StripedImage | str, *, wipe: bool = False) -> StripedImage:
        """Delete an image, or the one of a name, from its devices; return what it was.

        A device that is missing keeps its part until it is opened together with the home again.

        Raises:
            ImageError: no such image.
            ImageIncompleteError: it shall be wiped, and one of its devices is not there.
            DeviceBusyError: a reader holds a lease on it.
            DeviceError: a commit or the wipe failed.
        """
        if isinstance(image, str):
            image = self.image(image)
        name = image.name
        if wipe and any(share.store is None for share in image.shares):
            raise ImageIncompleteError(
                f"image {name} cannot be wiped: {image.fault}; attach that device and name it, "
                "too; run: tierd devices list"
            )
        for share in image.shares:
            if share.store is not None and share.holding is not None:
                share.store.require_unleased(share.holding)
        try:
            image.home.delete_image(name, wipe=wipe)
        finally:
            if image.home.find(name) is None:
                self._drop_parts(image.home, image.stored, wipe=wipe)
        # Every device has written down by now what it owes, so this may stop anywhere.
        if wipe:
            self.finish_wipes(name)
        return image

    def _drop_parts(self, home: Store, image: StoredImage, *, wipe: bool = False) -> None:
        devices = image.devices if wipe else ()
        with contextlib.ExitStack() as stack:  # every one is tried, whatever another one raises
            for member in image.members:
                store = self._by_uuid.get(member.uuid)
                if store is not None:
                    stack.callback(store.drop_parts, [_part_of(home, image, member)], devices)

    def orphans(self, name: str) -> list[tuple[Store, Part]]:
        """Parts of an image whose home is not here, with their devices."""
        return [
            (store, part)
            for store in self.stores
            for part in store.parts
            if part.name == name and part.home not in self._by_uuid
        ]

    def drop_orphans(self, name: str, *, wipe: bool = False) -> int:
        """Give up what these devices hold of an image whose home is gone for good.

        Returns:
            Bytes that are free by that.

        Raises:
            ImageError: they hold no part of it, or its home is here.
            DeviceBusyError: a reader holds a lease on it.
            DeviceError: a commit or the wipe failed.
        """
        orphans = self.orphans(name)
        if not orphans:
            raise ImageError(
                f"{self.path}: no part of {name} whose home is elsewhere; "
                f"run: tierd devices inspect {self.stores[0].device.path}"
            )
        for store, part in orphans:
            store.require_unleased(part)
        for store, part in orphans:
            store.drop_parts([part], (store.uuid,) if wipe else ())
        if wipe:
            self.finish_wipes(name)
        return sum(pages_of(part.extents) for _, part in orphans) * PAGE_BYTES

    def wipes(self, name: str | None = None) -> list[tuple[Store, Wipe]]:
        """Wipes that were begun and not finished, of all images or of one, with their devices."""
        return [
            (store, wipe)
            for store in self.stores
            for wipe in store.wipes
            if name in (None, wipe.name)
        ]

    def finish_wipes(self, name: str, *, overwrite: bool = True) -> int:
        """Finish the wipes of a deleted image; return how many bytes are free by that.

        Args:
            name: the image's, as it was.
            overwrite: False gives the wipes up: the room is free and keeps what it holds.

        Raises:
            ImageIncompleteError: a device that held a part of it is not there.
            DeviceError: as :meth:`tierd.io.store.Store.finish_wipe`; the others are tried.
        """
        owed = self.wipes(name)
        away = {uuid for _, wipe in owed for uuid in wipe.devices if uuid not in self._by_uuid}
        if away and overwrite:
            raise ImageIncompleteError(
                f"the wipe of {name} cannot be finished: device {min(away)} is not there; attach "
                "it and name it, too, or give the wipe up by deleting without --wipe; "
                f"run: tierd images delete {name}"
            )
        with contextlib.ExitStack() as stack:
            for store, wipe in owed:
                stack.callback(store.finish_wipe, wipe, overwrite=overwrite)
        return sum(pages_of(wipe.extents) for _, wipe in owed) * PAGE_BYTES

    def wipe_notes(self) -> list[str]:
        """Say of each wipe that was cut off what is left of it and how it is finished."""
        return [
            f"{store.device.path}: the wipe of {wipe.name} was cut off, and "
            f"{pages_of(wipe.extents) * PAGE_BYTES} bytes may still hold its rows; "
            f"run: tierd images delete {wipe.name} --wipe"
            for store, wipe in self.wipes()
        ]

    def reclaim(self) -> list[str]:
        """Give up parts that their home, which is here, does not name; return what was done.

        A share whose own device no longer names it (that device's newest root was damaged) is
        reserved again if its extents are still free. Its pages carry their identity, so whatever
        else lies there cannot pass for them.
        """
        notes = []
        named: dict[str, set[Part]] = {store.uuid: set() for store in self.stores}
        for home in self.stores:
            for image in home.images:
                for member in image.members:
                    if member.uuid in named:
                        named[member.uuid].add(_part_of(home, image, member))
        owed = {(*_identity(w), w.devices[0]): w.devices for _, w in self.wipes()}
        for store in self.stores:
            left = [p for p in store.parts if p.home in named and p not in named[store.uuid]]
            for part in [p for p in left if (*_identity(p), p.home) in owed]:
                store.drop_parts([part], owed[*_identity(part), part.home])
                left.remove(part)
            if left:
                names = ", ".join(sorted({part.name for part in left}))
                notes.append(f"{store.device.path}: gave up what a staging of {names} left behind")
                store.drop_parts(left)
            for part in sorted(named[store.uuid] - set(store.parts), key=lambda part: part.name):
                with contextlib.suppress(DeviceTooSmallError):
                    store.add_part(part)
                    notes.append(f"{store.device.path}: reserved its part of {part.name} again")
        return notes

    # --- room ------------------------------------------------------------------------------------

    def require_room(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Play the allocations of (name, pages) through, in order.

        Each replaced image frees its room once its successor is in.

        Raises:
            DeviceTooSmallError: a device lacks the room for its shares.
        """
        free = {store.uuid: store.free_pages for store in self.stores}
        need = dict.fromkeys(free, 0)
        lacking = dict.fromkeys(free, 0)
        for name, pages in wanted:
            order = self.order_for(name)
            count = stripes.devices_used(pages, len(order))
            for index, store in enumerate(order[:count]):
                share = stripes.share_pages(pages, index, count)
                units = layout.units_of(share) * layout.UNIT_PAGES
                need[store.uuid] += units
                free[store.uuid] -= units
                lacking[store.uuid] = max(lacking[store.uuid], -free[store.uuid])
            self._free_after_dropping(name, free)
        for store in self.stores:
            if lacking[store.uuid]:
                raise store.too_small(need[store.uuid], need[store.uuid] - lacking[store.uuid])

    def _free_after_dropping(self, name: str, free: dict[str, int]) -> None:
        home = self.order_for(name)[0]
        replaced = home.find(name)
        if replaced is None:
            return
        free[home.uuid] += home.pages_after_dropping(name)
        for member in replaced.members:
            store = self._by_uuid.get(member.uuid)
            if store is not None and not store.is_leased(member.extents):
                free[store.uuid] += pages_of(member.extents)


def _identity(one: Part | Wipe) -> tuple[int, int]:
    return one.image_id, one.generation


def _part_of(home: Store, image: StoredImage, member: Member) -> Part:
    return Part(*image.identity, home.uuid, member.extents, image.name)
