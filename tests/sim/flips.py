"""A flipped bit at every byte of a page, a root and an extent table: each must be noticed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.sim import crash, pool, seams
from tests.sim.machine import NO_SLOT
from tierd.io import _core, superblock
from tierd.io.device import PAGE_BYTES
from tierd.io.layout import ROOT_BYTES, ROOT_OFFSETS, Areas
from tierd.io.simulated import SimulatedHost
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tierd.io.extent_table import StoredImage

TURNS_NS = 1_000_000


def undetected(bits: Iterable[int] = range(8), step: int = 1) -> dict[str, tuple[int, int]]:
    """Flip each bit of ``bits`` in every byte, or in one of ``step``.

    Returns per place (flips tried, flips nobody noticed).

    A page is read by a walker's check and by a pump that looks at every checksum.
    """
    bits = list(bits)
    with seams.small_sizes():
        areas = Areas.of(8 << 20)
    power = _core.SimPower()
    native = _core.SimDevice(
        areas.data_start + 20 * seams.UNIT_PAGES * PAGE_BYTES,
        tables_start=seams.SIZES["RESERVED_BYTES"],
        data_start=areas.data_start,
        seed=1,
        power=power,
    )
    host = SimulatedHost([native], power)
    pool.sources()
    with (
        seams.simulated_machine(host, random.Random(1)),
        Store.format(host.paths[0]) as store,
    ):
        crash.stage("engram", 0)(store)
        image = store.images[0]
        loaded = superblock.load(store.device)
        assert loaded is not None
        root = loaded.root

        def loads_as_if_nothing_was() -> bool:
            try:
                found = superblock.load(store.device)
            except superblock.DeviceError:
                return False
            return found is None or (found.root == root and not found.note)

        page = image.extents[0].device_page * PAGE_BYTES
        looks = {"page, walker": _walker(native, image), "page, pump": _pump(store, image)}
        places = {
            **{name: (page, PAGE_BYTES, look) for name, look in looks.items()},
            "root": (ROOT_OFFSETS[root.slot], ROOT_BYTES, loads_as_if_nothing_was),
            "extent table": (root.table_offset, root.table_bytes, loads_as_if_nothing_was),
        }
        return {
            name: _flip_all(native, range(start, start + size, step), look, bits)
            for name, (start, size, look) in places.items()
        }


def _flip_all(
    native: Any, place: range, is_fine: Callable[[], bool], bits: list[int]
) -> tuple[int, int]:
    assert is_fine(), "it is not noticed because nothing works"
    byte = np.empty(1, np.uint8)
    tried = missed = 0
    for position in place:
        native.peek(position, byte)
        for bit in bits:
            native.poke(position, byte ^ np.uint8(1 << bit))
            tried += 1
            missed += is_fine()
        native.poke(position, byte)
    assert is_fine()
    return tried, missed


def _walker(native: Any, image: StoredImage) -> Callable[[], bool]:
    page, fault = np.empty(PAGE_BYTES, np.uint8), np.empty(1, np.uint8)
    info = image.info

    def is_fine() -> bool:
        native.peek(image.extents[0].device_page * PAGE_BYTES, page)
        _core.check_pages(
            page, info.table.row_bytes, info.table.rows, 0, info.image_id, info.generation,
            True, True, fault,
        )  # fmt: skip
        return not fault[0]

    return is_fine


def _pump(store: Store, image: StoredImage) -> Callable[[], bool]:
    pump = _core.Pump(transport="simulated", crc_sample=1)
    number = pump.add_device(store.device.fileno())
    extents = [(e.first_page, e.pages, number, e.device_page) for e in image.extents]
    table = pump.add_table(
        image_id=image.info.image_id,
        generation=image.info.generation,
        row_bytes=image.info.table.row_bytes,
        rows=image.info.table.rows,
        window_ns=1,
        extents=np.array(extents, np.uint64),
    )
    channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(1, 1, 0, 0)])
    pump.add_ring(pump.add_channel(channel.fd), 0, table)
    client = _core.RingClient(channel, 0, -1)
    client.drive(pump)
    zero, slot = np.zeros(1, np.uint32), np.array([NO_SLOT], np.uint32)

    def is_fine() -> bool:
        sequence = client.publish(zero, zero, slot)
        status = int(client.wait(sequence, TURNS_NS))
        client.retire(sequence)
        return status == int(_core.protocol.Status.ok)

    return is_fine
