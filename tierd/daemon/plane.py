"""The data plane: stores held exclusively, the images in them, and the pumps that serve them.

Everything here blocks (opens devices, registers memory, waits for reads to be reaped), so the
event loop calls it from worker threads. One lock keeps the book; the pumps have their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tierd.errors import AttachError, ConfigError, ImageError
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
STATS_MS = 1000  # for a pump to answer; its loop turns in far less
STOP_MS = 1000


@dataclasses.dataclass(slots=True)
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
        stuck: reads were in flight when it was closed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._loads: list[int] = []
        self.stores: list[Store] = []
        self.images: dict[int, ServedImage] = {}
        self.shadowed: list[str] = []
        self.pumps: list[Any] = []
        self.stuck = False
        self._stats: dict[int, dict[str, Any]] = {}

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
        names = set()
        for store in self.stores:
            for stored in store.images:
                info = stored.info
                if info.name in names or info.image_id in self.images:
                    self.shadowed.append(f"{info.name} on {store.device.path}")
                    continue
                names.add(info.name)
                self.images[info.image_id] = ServedImage(stored, store)

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
        self._stats[number] = dict(pump.stats())
        self.pumps.append(pump)
        self._loads.append(0)
        devices = {}
        for store in self.stores:
            # The exclusive descriptor itself: the kernel lets a successor have the device once
            # no read through it is in flight, which is what makes its open a drain fence.
            devices[id(store)] = pump.add_device(store.device.fileno())
        for image in self.images.values():
            table = pump.add_table(
                image_id=image.info.image_id,
                generation=image.info.generation,
                row_bytes=image.info.table.row_bytes,
                rows=image.info.table.rows,
                window_ns=image.window_ns,
                extents=_extent_array(image.extents, devices[id(image.store)]),
            )
            image.tables.append(table)
        pump.start()

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

    def attach(self, channel_fd: int, images: Sequence[ServedImage]) -> Attached:
        """Hand a channel to the pump with the fewest rings; image i becomes ring i.

        Raises:
            AttachError: the pump refuses the channel; the text says what is wrong with it.
        """
        with self._lock:
            number = min(range(len(self.pumps)), key=lambda pump: self._loads[pump])
            self._loads[number] += len(images)
        pump = self.pumps[number]
        channel = None
        try:
            channel = pump.add_channel(channel_fd)
            for ring, image in enumerate(images):
                pump.add_ring(channel, ring, image.tables[number])
        except (ValueError, OSError, RuntimeError) as error:
            if channel is not None:
                pump.remove_channel(channel)
            with self._lock:
                self._loads[number] -= len(images)
            raise AttachError(f"the channel cannot be served: {error}") from None
        with self._lock:
            for image in images:
                image.clients += 1
        return Attached(pump=number, channel=channel, images=tuple(images))

    def detach(self, attached: Attached, timeout_ms: int = -1) -> bool:
        """Let go of a channel once no read of it is in flight; False if there still is one."""
        if not self.pumps[attached.pump].remove_channel(attached.channel, timeout_ms):
            return False
        with self._lock:
            self._loads[attached.pump] -= len(attached.images)
            for image in attached.images:
                image.clients -= 1
        return True

    def stats(self) -> list[dict[str, Any]]:
        """Return each pump's counters; those of the last look for a pump that stands still."""
        for number, pump in enumerate(self.pumps):
            with contextlib.suppress(TimeoutError):
                self._stats[number] = dict(pump.stats(STATS_MS))
        return [self._stats[number] for number in sorted(self._stats)]

    def leave(self) -> None:
        """Ask the guardians of all clients, present and future, to take over."""
        for pump in self.pumps:
            pump.leave()

    def close(self) -> None:
        """Stop the pumps, then let go of the devices. Idempotent.

        A device that does not answer is waited for briefly. Then everything stays as it is, and
        ``stuck`` says that only the process's end frees it; until the last read has landed the
        kernel keeps the device from whoever comes next.
        """
        for pump in self.pumps:
            self.stuck |= not pump.stop(STOP_MS)
        if self.stuck:
            return
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
