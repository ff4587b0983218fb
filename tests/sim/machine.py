"""The processes of a simulated machine: a daemon that serves, and clients that ask."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.io import _core
from tierd.io.layout import occupied
from tierd.io.store import Store

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from tests.sim.model import Known
    from tierd.io.extent_table import StoredImage
    from tierd.io.simulated import SimulatedHost

TURN_NS = 1000
NO_SLOT = 0xFFFFFFFF


class Daemon:
    """Stores held exclusively and one pump, wired as the data plane does it."""

    def __init__(self, host: SimulatedHost, chance: random.Random, crc_sample: int) -> None:
        """Open every device; DeviceError if one refuses, and then nothing stays open."""
        self.stores: list[Store] = []
        self._tables: dict[tuple[int, int], int] = {}
        self._channels: dict[int, int] = {}
        with contextlib.ExitStack() as stack:
            for path in host.paths:
                self.stores.append(stack.enter_context(Store.open(path)))
            stack.pop_all()
        self.pump = _core.Pump(
            transport="simulated",
            queue_depth=chance.choice((1, 3, 8, 32)),
            crc_sample=crc_sample,
            seed=chance.getrandbits(64),
        )
        self._devices = []
        for store in self.stores:
            fd = store.device.readonly_fd()
            try:
                self._devices.append(self.pump.add_device(fd))
            finally:
                os.close(fd)

    def attach(self, client: Client) -> None:
        """Serve a client's channel, going on where an earlier daemon stopped."""
        channel = self.pump.add_channel(client.channel.fd)
        self._channels[id(client)] = channel
        for number, ring in enumerate(client.rings):
            self.pump.add_ring(channel, number, self._table(ring.store, ring.image))
            ring.driven_by(self.pump)

    def _table(self, store: int, image: StoredImage) -> int:
        key = (image.info.image_id, image.info.generation)
        if key not in self._tables:
            extents = [
                (e.first_page, e.pages, self._devices[store], e.device_page) for e in image.extents
            ]
            self._tables[key] = self.pump.add_table(
                image_id=image.info.image_id,
                generation=image.info.generation,
                row_bytes=image.info.table.row_bytes,
                rows=image.info.table.rows,
                window_ns=(image.info.table.layer + 1) * 200_000,
                extents=np.array(extents, np.uint64),
            )
        return self._tables[key]

    def detach(self, client: Client) -> None:
        """Let a client's channel go; what is outstanding is answered."""
        self.pump.remove_channel(self._channels.pop(id(client)))

    def stop(self) -> None:
        """End as a service does."""
        self.pump.stop()
        self._close()

    def kill(self) -> None:
        """End as a killed process does."""
        self.pump.abandon()
        self._close()

    def _close(self) -> None:
        for store in self.stores:
            store.close()


@dataclasses.dataclass
class Ring:
    """One image as a client reads it.

    Attributes:
        kicked: ids that a twin was last kicked with.
        outstanding: sequences and pages of a raw client's requests.
        faulty: per image page asked for since the last answer, the device's count of faulty reads
            of it when it was asked for.
    """

    store: int
    native: Any
    image: StoredImage
    known: Known
    number: int
    control: NDArray[np.uint8]
    twin: Any = None
    raw: Any = None
    faulty: dict[int, int] = dataclasses.field(default_factory=dict)
    outstanding: list[tuple[int, NDArray[np.uint32]]] = dataclasses.field(default_factory=list)
    kicked: NDArray[np.int64] | None = None
    short_timeout: bool = False
    device_pages: NDArray[np.int64] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        pages = np.empty(self.image.info.pages, np.int64)
        for extent in self.image.extents:
            pages[extent.first_page : extent.first_page + extent.pages] = np.arange(
                extent.device_page, extent.device_page + extent.pages
            )
        self.device_pages = pages

    def driven_by(self, pump: Any) -> None:
        (self.twin or self.raw).drive(pump)

    def idle(self) -> bool:
        """Whether every request is answered and retired."""
        doorbell, retired = (int(self.control[64 * line : 64 * line + 4].view(np.uint32)[0])
                             for line in (0, 1))  # fmt: skip
        return doorbell == retired

    def watch(self, pages: NDArray[Any]) -> None:
        """Remember how often these pages' reads were faulty before they are read now."""
        for page in np.unique(pages).tolist():
            self.faulty.setdefault(page, self._faulty_reads(page))

    def faults_since(self) -> int:
        """The most faulty reads that any watched page has had."""
        return max((self._faulty_reads(page) - n for page, n in self.faulty.items()), default=0)

    def _faulty_reads(self, page: int) -> int:
        return int(self.native.faulty_reads(int(self.device_pages[page])))

    def damaged(self, page: int) -> bool:
        return bool(self.native.damaged(int(self.device_pages[page])))


class Client:
    """An engine rank: a channel with a ring per image, leases on the images, caches.

    It outlives daemons, and dies with the machine.
    """

    def __init__(
        self,
        daemon: Daemon,
        host: SimulatedHost,
        wanted: list[tuple[int, StoredImage, Known]],
        chance: random.Random,
        *,
        raw_share: float = 0.5,
    ) -> None:
        """Attach to images, given as (store number, image, what the model knows).

        ``raw_share`` of the rings ask for pages, the others are twins.
        """
        rows_max = chance.randint(2, 16)
        specs = [(rows_max, rows_max * chance.randint(1, 8), i, 0) for i in range(len(wanted))]
        client_id = chance.getrandbits(128).to_bytes(16, "little")
        self.rows_max = rows_max
        self.channel = _core.Channel(rank=0, world=1, client_id=client_id, rings=specs)
        self.rings: list[Ring] = []
        caches: dict[int, Any] = {}
        for number, (store, image, known) in enumerate(wanted):
            ring = Ring(
                store, host.natives[store], image, known, number, self.channel.control(number)
            )
            if chance.random() < raw_share:
                ring.raw = _core.RingClient(self.channel, number, -1)
            else:
                self._make_twin(ring, caches, chance)
            self.rings.append(ring)
        self._leases = [
            daemon.stores[store].reader_fd([r.image for r in self.rings if r.store == store])
            for store in sorted({ring.store for ring in self.rings})
        ]

    def _make_twin(self, ring: Ring, caches: dict[int, Any], chance: random.Random) -> None:
        table = ring.known.spec
        if table.row_bytes not in caches:
            first = chance.choice((0, (1 << 24) - 5))
            caches[table.row_bytes] = _core.RowCache(
                sets=chance.randint(1, 3), row_bytes=table.row_bytes, first_stamp=first
            )
        ring.short_timeout = chance.random() < 0.1
        turns = chance.randint(2, 60) if ring.short_timeout else 20_000
        ring.twin = _core.TwinTable(
            caches[table.row_bytes],
            self.channel,
            ring.number,
            -1,
            table=ring.number,
            image_id=ring.image.info.image_id,
            generation=ring.image.info.generation,
            rows=table.rows,
            dim=table.dim,
            row_format=str(table.row_format),
            quota=chance.randint(1, 32),
            timeout_ns=turns * TURN_NS,
        )

    def leased(self, store: int) -> list[tuple[int, int]]:
        """Byte ranges that this client keeps from being reused."""
        return [occupied(e) for r in self.rings if r.store == store for e in r.image.extents]

    def die(self) -> None:
        """Leave nothing but what the kernel keeps: leases end with their last descriptor."""
        for fd in self._leases:
            os.close(fd)
        self._leases = []
        self.rings = []
