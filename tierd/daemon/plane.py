"""The data plane: stores held exclusively, the images in them, and the pumps that serve them.

Everything here blocks (opens devices, registers memory, waits for reads to be reaped), so the
event loop calls it from worker threads. One lock keeps the book; the pumps have their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import structlog

from tierd.daemon.plane_peers import PeerTables
from tierd.daemon.remote_tiers import NO_NUMBER, RemoteTier
from tierd.daemon.served import WINDOW_KEY, ServedImage, extent_array, placed_window_us
from tierd.errors import (
    AttachError,
    ConfigError,
    DeviceBusyError,
    DeviceDamagedError,
    DeviceError,
    DeviceFailedError,
    DeviceMissingError,
    ImageError,
    NoDeviceError,
)
from tierd.io import _core, find_devices
from tierd.io.copying import is_copy
from tierd.io.store import Store
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tierd.config import Settings
    from tierd.io.store_set import StripedImage

log = structlog.get_logger("tierd.daemon.plane")

COPIES_MAX = 7  # of an image that a pump reads; kTableCopiesMax in the core
BEAT_WAIT_S = 0.5
STATS_MS = 1000  # for a pump to answer; its loop turns in far less
STOP_MS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Attached:
    """A channel that a pump serves."""

    pump: int
    channel: int
    images: tuple[ServedImage, ...]


class DataPlane(PeerTables):
    """Stores, images and pumps of one daemon.

    Attributes:
        stores: those that are there, in the order of ``devices.paths``.
        store_set: the same, as one place for images.
        absent: configured devices that are not: as configured -> why.
        notes: what was odd about the devices when they were opened.
        images: image id -> image.
        incomplete: images that cannot be served, since a device is missing or for their format.
        shadowed: names that a second device holds as well; the first device serves them.
        pumps: running native pumps.
        stuck: reads were in flight when it was closed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._loads: list[int] = []
        self._devices: list[dict[str, int]] = []  # per pump: store's uuid -> the pump's number
        self._retired: list[ServedImage] = []  # replaced or deleted, and still attached
        self._adopted: dict[int, ServedImage] = {}  # that only peers hold, by image id
        self._deleting: set[str] = set()  # names of images that go, home and copies one by one
        self.stores: list[Store] = []
        self.absent: dict[str, str] = {}
        self.notes: list[str] = []
        # Replaced as a whole, never changed: others read them at any time, without a lock.
        self.images: dict[int, ServedImage] = {}
        self.incomplete: list[StripedImage] = []
        self.shadowed: list[str] = []
        self.pumps: list[Any] = []
        self.stuck = False
        self._stats: dict[int, dict[str, Any]] = {}

    @property
    def remote_first(self) -> bool:
        """Whether peers are asked before the devices here."""
        return self._settings.remote.order == "first"

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Open every device, make the pumps and start them.

        A device that is missing or broken does not keep the others from being served.

        Raises:
            ConfigError: no device is configured.
            DeviceError: a device is busy, foreign or of a newer format, or none of them can be
                used; nothing stays open.
        """
        if not settings.devices.paths:
            raise ConfigError(
                "devices.paths is empty: there is nothing to serve; name a device there, or with "
                "--device; run: tierd format DEVICE"
            )
        plane = cls(settings)
        try:
            plane._open_stores()
            plane._collect_images()
            for number in range(settings.pump.count):
                plane._start_pump(number)
        except BaseException:
            plane.close()
            raise
        return plane

    def _open_stores(self) -> None:
        errors: list[DeviceError] = []
        paths: list[str] = []
        for name in self._settings.devices.paths:
            try:
                paths.append(find_devices.resolve(name))
                find_devices.require_distinct(paths)
                self.stores.append(Store.open(paths[-1], write=True))
            except (DeviceMissingError, DeviceFailedError, DeviceDamagedError) as error:
                self.absent[name] = str(error)
                errors.append(error)
        if not self.stores:
            raise errors[0]
        self.store_set = StoreSet(self.stores)
        self.notes = self.store_set.notes + self.store_set.reclaim()
        self.notes += self.store_set.wipe_notes()

    def _collect_images(self) -> None:
        """Look through the stores; images that are served already stay the same objects."""
        known = {image.info.name: image for image in self.images.values()}
        names: set[str] = set()
        found: dict[int, list[StripedImage]] = {}
        shadowed: list[str] = []
        incomplete: list[StripedImage] = []
        for store in self.stores:
            for stored in store.images:
                image = self.store_set.striped(store, stored)
                info = image.info
                same = found.get(info.image_id)
                if info.name in self._deleting:
                    continue  # a lease taken now would leave it half deleted
                if image.fault:
                    incomplete.append(image)
                elif same is not None and is_copy(same[0], image):
                    if len(same) <= COPIES_MAX:
                        same.append(image)
                elif info.name in names or same is not None:
                    shadowed.append(f"{info.name} on {store.device.path}")
                else:
                    names.add(info.name)
                    found[info.image_id] = [image]
        images = {
            image_id: _unchanged(known.get(first.name), first, copies)
            or ServedImage(first, [], copies, placed_window_us(first))
            for image_id, (first, *copies) in found.items()
        }
        # What is here by itself now is no more adopted.
        adopted = {
            image_id: image
            for image_id, image in self._adopted.items()
            if image_id not in images and image.info.name not in names
        }
        self._prepare(images.values())
        self._adopted, self.images = adopted, {**images, **adopted}
        self.incomplete, self.shadowed = incomplete, shadowed

    def _prepare(self, images: Iterable[ServedImage]) -> None:
        """Lease images and tell the pumps of them, all or none: clients find only whole ones."""
        known = list(self.images.values())
        new = [image for image in images if image not in known]
        try:
            for image in new:
                image.lease()
                for number in range(len(self.pumps)):
                    self._add_table(number, image)
        except BaseException:
            for image in new:
                self._forget(image)
            raise

    def _start_pump(self, number: int) -> None:
        wanted = self._settings.pump
        pump = _core.Pump(
            transport=wanted.transport,
            queue_depth=wanted.queue_depth,
            read_threads=wanted.read_threads,
            spin_us=wanted.spin_us,
            park_us=wanted.park_us,
            crc_sample=self._settings.io.crc_sample,
            cpu=-1 if wanted.cpu < 0 else wanted.cpu + number,
            remote=bool(self._settings.remote.peers),
            remote_hold_ms=self._settings.remote.hold_ms,
        )
        self._stats[number] = dict(pump.stats())
        self.pumps.append(pump)
        self._loads.append(0)
        # The exclusive descriptor itself: the kernel lets a successor have the device once no read
        # through it is in flight, which is what makes its open a drain fence.
        devices = {store.uuid: pump.add_device(store.device.fileno()) for store in self.stores}
        self._devices.append(devices)
        for image in self.images.values():
            self._add_table(number, image)
        pump.start()

    def _add_table(self, number: int, image: ServedImage) -> None:
        try:
            first, *others = self._tiers(number, image)
            table = self.pumps[number].add_table(
                image_id=image.info.image_id,
                generation=image.info.generation,
                row_bytes=image.info.table.row_bytes,
                rows=image.info.table.rows,
                window_ns=image.window_ns,
                extents=first,
                copies=others[:COPIES_MAX],
            )
        except BaseException:
            self._remove_remotes(number, image)
            raise
        image.tables.append(table)

    def _tiers(self, number: int, image: ServedImage) -> list[NDArray[np.uint64]]:
        """Return where a pump finds an image, in order. Peers are away until they are linked."""
        remote = self._settings.remote
        there = []
        for peer in remote.peers:
            tier = image.remotes.setdefault(peer, RemoteTier(peer))
            if len(tier.devices) != number:
                continue  # another pump had no number left
            try:
                tier.devices.append(self.pumps[number].add_remote())
            except ValueError:
                if not image.local:
                    raise ConfigError(f"image {image.info.name}: {NO_NUMBER}") from None
                continue
            there.append(np.array([[0, image.info.pages, tier.devices[number], 0]], np.uint64))
        disks = [image.striped, *image.copies] if image.local else []
        here = [extent_array(one, self._devices[number]) for one in disks]
        # The first tier is tried twice; behind peers the first device has its second try last.
        return [*there, *here, *here[:1]] if self.remote_first and there else [*here, *there]

    def refresh(self) -> None:
        """Serve what the stores hold now: what was staged meanwhile, and no more what was deleted.

        Clients keep what they have attached: the tables of a replaced image go with its last one.

        Raises:
            DeviceError: a new image cannot be leased; what was served before is served on.
        """
        with self._lock:
            before = list(self.images.values())
            self._collect_images()
            after = list(self.images.values())
            self._retired += [image for image in before if image not in after]
            self._drop_retired()

    def _drop_retired(self) -> None:
        for image in [each for each in self._retired if not each.clients]:
            self._retired.remove(image)
            self._forget(image)

    def _forget(self, image: ServedImage) -> None:
        """Take an image from the pumps, also one that only some of them have been told of."""
        for pump, table in zip(self.pumps, image.tables, strict=False):
            pump.remove_table(table)
        self._forget_remotes(image)
        image.release()

    def delete(self, name: str, *, wipe: bool = False) -> None:
        """Delete an image that nobody has attached.

        Raises:
            ImageError: it is not served here.
            DeviceBusyError: somebody has attached it.
            DeviceError: the device could not be changed.
        """
        with self._lock:
            image = self.named(name)
            image.require_local()
            if image.clients:
                raise DeviceBusyError(
                    f"image {name} is attached by {image.clients} clients, so it cannot be "
                    "deleted; stop the engines first; run: tierd status"
                )
            self.images = {k: v for k, v in self.images.items() if v is not image}
            self._retired.append(image)
            self._drop_retired()
            self._deleting.add(name)
        try:
            for tier in (*image.copies, image.striped):
                self.store_set.delete(tier, wipe=wipe)
        finally:
            with self._lock:
                self._deleting.remove(name)
            self.refresh()  # it is served again if it is still there

    def owes_wipe(self, name: str) -> bool:
        """Whether there is no such image any more, and its wipe was cut off."""
        served = any(image.info.name == name for image in self.images.values())
        return not served and bool(self.store_set.wipes(name))

    def place(self, windows_us: Mapping[str, float | None]) -> None:
        """Set windows of images, all or none; clients that attach from now on get them.

        Raises:
            ImageError: an image is not served here.
            DeviceError: a device could not be changed; those before it were changed back.
        """
        by_home: dict[str, dict[str, float | None]] = {}
        for name, window in windows_us.items():
            self.named(name).require_local()
            by_home.setdefault(self.named(name).store.uuid, {})[name] = window
        done: list[tuple[Store, dict[str, dict[str, Any] | None]]] = []
        try:
            for uuid, windows in by_home.items():
                store = self.store_of(uuid)
                before = {name: store.placements.get(name) for name in windows}
                store.set_placements({n: _placed(before[n], w) for n, w in windows.items()})
                done.append((store, before))
        except BaseException:
            for store, before in done:
                store.set_placements(before)
            raise
        finally:
            self.refresh()

    def find(self, image_id: int, generation: int) -> ServedImage:
        """Return the image that a client asks for.

        Raises:
            ImageError: it is not served (the text names a device that is missing), or was staged
                anew since the client listed it.
        """
        image = self.images.get(image_id)
        if image is None:
            for other in self.incomplete:
                if other.info.image_id == image_id:
                    other.require_whole()
            raise ImageError(f"image {image_id:016x} is not served here; run: tierd images")
        if image.info.generation != generation:
            raise ImageError(
                f"image {image.info.name} has generation {image.info.generation}, "
                f"not {generation}: it was staged anew; list the images again"
            )
        return image

    def named(self, name: str) -> ServedImage:
        """Return the image called ``model/table``.

        Raises:
            ImageError: it is not served here.
        """
        for image in self.images.values():
            if image.info.name == name:
                return image
        near = difflib.get_close_matches(name, [i.info.name for i in self.images.values()], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; run: tierd images"
        raise ImageError(f"there is no image {name[:200]} here{hint}")

    def store_of(self, device: str) -> Store:
        """Return the store on a device, named by its path or its UUID.

        Raises:
            DeviceError: this daemon does not have it.
        """
        for store in self.stores:
            if device in {store.uuid, store.device.path}:
                return store
            with contextlib.suppress(OSError, ValueError):  # no such file, or no name of one
                if os.path.samefile(device, store.device.path):
                    return store
        raise NoDeviceError(f"{device[:200]}: not a device of this daemon; run: tierd status")

    def attach(
        self, channel_fd: int, images: Sequence[ServedImage], hints: bool = False
    ) -> Attached:
        """Hand a channel to the pump with the fewest rings; image i becomes ring i.

        With ``hints``, as many rings follow that hint at the images' pages.

        Raises:
            AttachError: the pump refuses the channel; the text says what is wrong with it.
        """
        with self._lock:
            number = min(range(len(self.pumps)), key=lambda pump: self._loads[pump])
            self._loads[number] += len(images)
            for image in images:
                image.clients += 1  # from here on its tables stay
        pump = self.pumps[number]
        channel = None
        try:
            channel = pump.add_channel(channel_fd)
            for ring, image in enumerate([*images, *images] if hints else images):
                pump.add_ring(channel, ring, image.tables[number])
        except Exception as error:
            # Whatever it is: what is not undone here would be mapped and counted for ever.
            if channel is not None:
                pump.remove_channel(channel)
            self._release(number, images)
            if not isinstance(error, ValueError | OSError | RuntimeError):
                raise
            raise AttachError(f"the channel cannot be served: {error}") from None
        return Attached(pump=number, channel=channel, images=tuple(images))

    def detach(self, attached: Attached, timeout_ms: int = -1) -> bool:
        """Let go of a channel once no read of it is in flight; False if there still is one."""
        if not self.pumps[attached.pump].remove_channel(attached.channel, timeout_ms):
            return False
        self._release(attached.pump, attached.images)
        return True

    def _release(self, number: int, images: Sequence[ServedImage]) -> None:
        with self._lock:
            self._loads[number] -= len(images)
            for image in images:
                image.clients -= 1
            self._drop_retired()

    def stats(self) -> list[dict[str, Any]]:
        """Return each pump's counters; those of the last look for a pump that stands still."""
        for number, pump in enumerate(self.pumps):
            with contextlib.suppress(TimeoutError):
                self._stats[number] = dict(pump.stats(STATS_MS))
        return [self._stats[number] for number in sorted(self._stats)]

    def device_names(self, pump: int) -> dict[int, str]:
        """Return a pump's numbers of devices -> their stores' UUIDs."""
        return {number: uuid for uuid, number in self._devices[pump].items()}

    def is_beating(self) -> bool:
        """Wake every pump and tell whether its loop counter moves within half a second."""
        before = [pump.beats for pump in self.pumps]
        for pump in self.pumps:
            os.eventfd_write(pump.wake_fd, 1)
        deadline = time.monotonic() + BEAT_WAIT_S
        for pump, beat in zip(self.pumps, before, strict=True):
            while pump.beats == beat:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        return True

    def leave(self) -> None:
        """Ask the guardians of all clients, present and future, to take over."""
        for pump in self.pumps:
            pump.leave()

    def close(self) -> None:
        """Stop the pumps, then let go of the devices. Idempotent.

        A device or pump that does not answer is waited for briefly. Then everything stays as it
        is, and ``stuck`` says that only the process's end frees it; until the last read has landed
        the kernel keeps the device from whoever comes next.
        """
        for pump in self.pumps:
            self.stuck |= not _stop(pump)
        if self.stuck:
            return
        self.pumps.clear()
        for image in [*self.images.values(), *self._retired]:
            image.release()
        for store in self.stores:
            store.close()
        self.stores.clear()


def _stop(pump: Any) -> bool:
    """Stop a pump; False if reads are left, or if it stands still.

    In a thread, for a client that was just being added to a pump that stands still has its lock.
    """
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(pump.stop(STOP_MS)), daemon=True)
    thread.start()
    thread.join(2 * STOP_MS / 1000)
    return ended == [True]


def _placed(placement: dict[str, Any] | None, window: float | None) -> dict[str, Any] | None:
    """Return a placement with another window; None if nothing is left in it."""
    rest = {key: value for key, value in (placement or {}).items() if key != WINDOW_KEY}
    return (rest if window is None else {**rest, WINDOW_KEY: window}) or None


def _unchanged(
    served: ServedImage | None, first: StripedImage, copies: list[StripedImage]
) -> ServedImage | None:
    """Return what is served already if it is this."""
    wanted = (first, copies, placed_window_us(first))
    same = served is not None and (served.striped, served.copies, served.window_us) == wanted
    return served if same else None
