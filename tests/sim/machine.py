"""The processes of a simulated machine: a daemon that serves, and clients that ask."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.sim.model import places, trailer_of
from tierd.io import _core
from tierd.io.device import PAGE_BYTES
from tierd.io.layout import occupied
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from tests.sim.model import Known
    from tierd.io.simulated import SimulatedHost
    from tierd.io.store_set import StripedImage

TURN_NS = 1000
NO_SLOT = 0xFFFFFFFF


class Daemon:
    """Devices held exclusively and one pump, wired as the data plane does it.

    Attributes:
        sets: stores that share images, as an operator's configuration groups them.
    """

    def __init__(self, paths: list[list[str]], chance: random.Random, crc_sample: int) -> None:
        """Open every device; DeviceError if one refuses, and then nothing stays open."""
        self.sets: list[StoreSet] = []
        self._tables: dict[tuple[int, int], int] = {}
        self._channels: dict[int, int] = {}
        with contextlib.ExitStack() as stack:
            for group in paths:
                self.sets.append(stack.enter_context(StoreSet.open(group)))
            stack.pop_all()
        self.pump = _core.Pump(
            transport="simulated",
            queue_depth=chance.choice((1, 3, 8, 32)),
            crc_sample=crc_sample,
            seed=chance.getrandbits(64),
        )
        self._devices: dict[str, int] = {}
        for store in (store for stores in self.sets for store in stores.stores):
            fd = store.device.readonly_fd()
            try:
                self._devices[store.uuid] = self.pump.add_device(fd)
            finally:
                os.close(fd)

    def attach(self, client: Client) -> None:
        """Serve a client's channel, going on where an earlier daemon stopped."""
        channel = self.pump.add_channel(client.channel.fd)
        self._channels[id(client)] = channel
        for number, ring in enumerate(client.rings):
            self.pump.add_ring(channel, number, self._table(ring.image))
            ring.driven_by(self.pump)

    def _table(self, image: StripedImage) -> int:
        key = image.stored.identity
        if key not in self._tables:
            parts = []
            for index, share in enumerate(image.shares):
                rows = image.extent_rows(index)
                device = np.full(len(rows), self._devices[share.uuid], np.uint64)
                parts.append(np.stack([rows[:, 0], rows[:, 1], device, rows[:, 2]], axis=1))
            extents = np.concatenate(parts)
            self._tables[key] = self.pump.add_table(
                image_id=image.info.image_id,
                generation=image.info.generation,
                row_bytes=image.info.table.row_bytes,
                rows=image.info.table.rows,
                window_ns=(image.info.table.layer + 1) * 200_000,
                extents=extents[np.argsort(extents[:, 0])],
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
        for stores in self.sets:
            stores.close()


@dataclasses.dataclass
class Ring:
    """One image as a client reads it.

    Attributes:
        stores: number of the set that holds it.
        kicked: ids that a twin was last kicked with.
        outstanding: sequences and pages of a raw client's requests.
        places: where each page lies, as (native device, page of it).
        faulty: per image page asked for since the last answer, the device's counts of faulty and
            of flipped reads of it when it was asked for.
    """

    number: int
    stores: int
    image: StripedImage
    known: Known
    host: SimulatedHost
    control: NDArray[np.uint8]
    twin: Any = None
    raw: Any = None
    faulty: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    outstanding: list[tuple[int, NDArray[np.uint32]]] = dataclasses.field(default_factory=list)
    kicked: NDArray[np.int64] | None = None
    short_timeout: bool = False
    places: dict[int, tuple[Any, int]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.places = {
            page: (self.host.native_at(path), place) for page, path, place in places(self.image)
        }

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
            self.faulty.setdefault(page, self._counts(page))

    def faults_since(self) -> int:
        """The most faulty reads that any watched page has had."""
        return max((self._counts(page)[0] - n[0] for page, n in self.faulty.items()), default=0)

    def bits_since(self) -> bool:
        """Whether a watched page may have come with wrong bits and right identity and number.

        A pump that looks at no checksum lets only those through to the tags.
        """
        return any(
            self._counts(page)[1] > n[1] or (self.damaged(page) and self._is_itself(page))
            for page, n in self.faulty.items()
        )

    def _counts(self, page: int) -> tuple[int, int]:
        native, place = self.places[page]
        return int(native.faulty_reads(place)), int(native.flipped_reads(place))

    def _is_itself(self, page: int) -> bool:
        found = np.empty(PAGE_BYTES, np.uint8)
        native, place = self.places[page]
        native.peek(place * PAGE_BYTES, found)
        return found[-32:-4].tobytes() == trailer_of(self.known, page)

    def damaged(self, page: int) -> bool:
        native, place = self.places[page]
        return bool(native.damaged(place))


class Client:
    """An engine rank: a channel with a ring per image, leases on the images, caches.

    It outlives daemons, and dies with the machine.
    """

    def __init__(
        self,
        daemon: Daemon,
        host: SimulatedHost,
        wanted: list[tuple[int, StripedImage, Known]],
        chance: random.Random,
        *,
        raw_share: float = 0.5,
    ) -> None:
        """Attach to images, given as (number of the set, image, what the model knows).

        ``raw_share`` of the rings ask for pages, the others are twins.
        """
        rows_max = chance.randint(2, 16)
        specs = [(rows_max, rows_max * chance.randint(1, 8), i, 0) for i in range(len(wanted))]
        client_id = chance.getrandbits(128).to_bytes(16, "little")
        self.rows_max = rows_max
        self.channel = _core.Channel(rank=0, world=1, client_id=client_id, rings=specs)
        self.rings: list[Ring] = []
        caches: dict[int, Any] = {}
        for number, (stores, image, known) in enumerate(wanted):
            ring = Ring(number, stores, image, known, host, self.channel.control(number))
            if chance.random() < raw_share:
                ring.raw = _core.RingClient(self.channel, number, -1)
            else:
                self._make_twin(ring, caches, chance)
            self.rings.append(ring)
        self._leases: list[int] = []
        for _, image, _ in wanted:
            for share in image.shares:
                assert share.store is not None
                assert share.holding is not None
                self._leases.append(share.store.reader_fd([share.holding]))

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

    def leased(self, uuid: str) -> list[tuple[int, int]]:
        """Byte ranges of a device that this client keeps from being reused."""
        return [
            occupied(extent)
            for ring in self.rings
            for share in ring.image.shares
            if share.uuid == uuid
            for extent in share.extents
        ]

    def die(self) -> None:
        """Leave nothing but what the kernel keeps: leases end with their last descriptor."""
        for fd in self._leases:
            os.close(fd)
        self._leases = []
        self.rings = []
