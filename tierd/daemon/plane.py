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

from tierd.errors import AttachError, ConfigError, ImageError, NoDeviceError
from tierd.io import _core
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tierd.config import Settings
    from tierd.io.store import StoredImage
    from tierd.types import Extent, ImageInfo

# Until a probe has measured them, windows are taken to grow by this much a layer: only their
# order matters to a pump, and deeper layers do read later.
LAYER_NS = 200_000
BEAT_WAIT_S = 0.5


@dataclasses.dataclass(slots=True, eq=False)
class ServedImage:
    """An image and where it lies.

    Attributes:
        tables: its handle in each pump.
        clients: how many clients have attached it now.
    """

    stored: StoredImage
    store: Store
    tables: list[int] = dataclasses.field(default_factory=list)
    clients: int = 0

    @property
    def info(self) -> ImageInfo:
        """What the device's root says of it."""
        return self.stored.info

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where its pages lie on the device."""
        return self.stored.extents

    @property
    def window_ns(self) -> int:
        """Time from step start until its layer reads, as far as known."""
        return (self.info.table.layer + 1) * LAYER_NS


@dataclasses.dataclass(frozen=True, slots=True)
class Attached:
    """A channel that a pump serves."""

    pump: int
    channel: int
    images: tuple[ServedImage, ...]


class DataPlane:
    """Stores, images and pumps of one daemon.

    Attributes:
        stores: in the order of ``devices.paths``.
        images: image id -> image.
        shadowed: names that a second device holds as well; the first device serves them.
        pumps: running native pumps.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._loads: list[int] = []
        self._devices: list[dict[str, int]] = []  # per pump: store's uuid -> the pump's number
        self._retired: list[ServedImage] = []  # replaced or deleted, and still attached
        self.stores: list[Store] = []
        self.images: dict[int, ServedImage] = {}  # replaced, never changed
        self.shadowed: list[str] = []
        self.pumps: list[Any] = []

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Open every device, make the pumps and start them.

        Raises:
            ConfigError: no device is configured.
            DeviceError: a device is busy, foreign, damaged or not there; nothing stays open.
        """
        if not settings.devices.paths:
            raise ConfigError(
                "devices.paths is empty: there is nothing to serve; name a device there, or with "
                "--device; run: tierd format DEVICE"
            )
        plane = cls(settings)
        try:
            for path in settings.devices.paths:
                plane.stores.append(Store.open(path, write=True))
            plane._collect_images()
            for number in range(settings.pump.count):
                plane._start_pump(number)
        except BaseException:
            plane.close()
            raise
        return plane

    def _collect_images(self) -> None:
        """Look through the stores; images that are served already stay the same objects."""
        known = {image.info.name: image for image in self.images.values()}
        names, images, shadowed = set(), {}, []
        for store in self.stores:
            for stored in store.images:
                info = stored.info
                if info.name in names or info.image_id in images:
                    shadowed.append(f"{info.name} on {store.device.path}")
                    continue
                names.add(info.name)
                served = known.get(info.name)
                if served is None or (served.stored, served.store) != (stored, store):
                    served = ServedImage(stored, store)
                images[info.image_id] = served
        # Replaced as a whole: others read it at any time, without a lock.
        self.images, self.shadowed = images, shadowed

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
        )
        self.pumps.append(pump)
        self._loads.append(0)
        devices = {}
        for store in self.stores:
            fd = store.device.readonly_fd()
            try:
                devices[store.uuid] = pump.add_device(fd)
            finally:
                os.close(fd)
        self._devices.append(devices)
        for image in self.images.values():
            self._add_table(number, image)
        pump.start()

    def _add_table(self, number: int, image: ServedImage) -> None:
        table = self.pumps[number].add_table(
            image_id=image.info.image_id,
            generation=image.info.generation,
            row_bytes=image.info.table.row_bytes,
            rows=image.info.table.rows,
            window_ns=image.window_ns,
            extents=_extent_array(image.extents, self._devices[number][image.store.uuid]),
        )
        image.tables.append(table)

    def refresh(self) -> None:
        """Serve what the stores hold now: what was staged meanwhile, and no more what was deleted.

        Clients keep what they have attached: the tables of a replaced image go with its last one.
        """
        with self._lock:
            before = list(self.images.values())
            self._collect_images()
            after = list(self.images.values())
            for image in after:
                for number in range(len(image.tables), len(self.pumps)):
                    self._add_table(number, image)
            self._retired += [image for image in before if image not in after]
            self._drop_retired()

    def _drop_retired(self) -> None:
        for image in [each for each in self._retired if not each.clients]:
            self._retired.remove(image)
            for pump, table in zip(self.pumps, image.tables, strict=False):
                pump.remove_table(table)

    def delete(self, name: str, *, wipe: bool = False) -> None:
        """Delete an image that nobody has attached.

        Raises:
            ImageError: it is not served here.
            DeviceBusyError: somebody has attached it.
            DeviceError: the device could not be changed.
        """
        self.named(name).store.delete_image(name, wipe=wipe)
        self.refresh()

    def find(self, image_id: int, generation: int) -> ServedImage:
        """Return the image that a client asks for.

        Raises:
            ImageError: it is not served, or was staged anew since the client listed it.
        """
        image = self.images.get(image_id)
        if image is None:
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
            with contextlib.suppress(OSError):
                if os.path.samefile(device, store.device.path):
                    return store
        raise NoDeviceError(f"{device[:200]}: not a device of this daemon; run: tierd status")

    def attach(self, channel_fd: int, images: Sequence[ServedImage]) -> Attached:
        """Hand a channel to the pump with the fewest rings; image i becomes ring i.

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
            for ring, image in enumerate(images):
                pump.add_ring(channel, ring, image.tables[number])
        except (ValueError, OSError, RuntimeError) as error:
            if channel is not None:
                pump.remove_channel(channel)
            self._release(number, images)
            raise AttachError(f"the channel cannot be served: {error}") from None
        return Attached(pump=number, channel=channel, images=tuple(images))

    def detach(self, attached: Attached) -> None:
        """Let go of a channel; returns once no read of it is in flight."""
        self.pumps[attached.pump].remove_channel(attached.channel)
        self._release(attached.pump, attached.images)

    def _release(self, number: int, images: Sequence[ServedImage]) -> None:
        with self._lock:
            self._loads[number] -= len(images)
            for image in images:
                image.clients -= 1
            self._drop_retired()

    def stats(self) -> list[dict[str, Any]]:
        """Return each pump's counters."""
        return [dict(pump.stats()) for pump in self.pumps]

    def is_beating(self) -> bool:
        """Wake every pump and tell whether its loop counter moves within half a second."""
        before = [pump.stats()["beats"] for pump in self.pumps]
        for pump in self.pumps:
            os.eventfd_write(pump.wake_fd, 1)
        deadline = time.monotonic() + BEAT_WAIT_S
        for pump, beat in zip(self.pumps, before, strict=True):
            while pump.stats()["beats"] == beat:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        return True

    def close(self) -> None:
        """Stop the pumps, then let go of the devices. Idempotent."""
        for pump in self.pumps:
            pump.stop()
        self.pumps.clear()
        for store in self.stores:
            store.close()
        self.stores.clear()


def image_map(images: Sequence[ServedImage]) -> dict[str, Any]:
    """Return the image map of protocol.md."""
    return {
        "images": [
            {
                "image_id": f"{image.info.image_id:016x}",
                "generation": image.info.generation,
                "row_bytes": image.info.table.row_bytes,
                "rows": image.info.table.rows,
                "devices": [
                    {
                        "uuid": image.store.uuid,
                        "extents": [[e.first_page, e.pages, e.device_page] for e in image.extents],
                    }
                ],
            }
            for image in images
        ]
    }


def by_store(images: Sequence[ServedImage]) -> list[tuple[Store, list[StoredImage]]]:
    """Return the stores that hold these images, each once, with the images on it."""
    found: dict[str, tuple[Store, list[StoredImage]]] = {}
    for image in images:
        found.setdefault(image.store.uuid, (image.store, []))[1].append(image.stored)
    return list(found.values())


def _extent_array(extents: Sequence[Extent], device: int) -> NDArray[np.uint64]:
    ordered = sorted(extents, key=lambda extent: extent.first_page)
    rows = [(e.first_page, e.pages, device, e.device_page) for e in ordered]
    return np.array(rows, dtype=np.uint64).reshape(-1, 4)
