"""The simulated device: its cache, its faults, and that a pump reads it."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tierd.errors import DeviceBusyError, DeviceError
from tierd.io import _core
from tierd.io.device import PAGE_BYTES
from tierd.io.simulated import PowerCut, SimulatedHost

SIZE = 64 * PAGE_BYTES
DATA = 8 * PAGE_BYTES


def machine(seed: int = 1) -> tuple[SimulatedHost, object]:
    power = _core.SimPower()
    native = _core.SimDevice(
        SIZE, tables_start=4 * PAGE_BYTES, data_start=DATA, seed=seed, power=power
    )
    return SimulatedHost([native], power, block_size=512), native


def page(value: int) -> np.ndarray:
    return np.full(PAGE_BYTES, value, np.uint8)


def peek(native, number: int) -> np.ndarray:
    out = np.empty(PAGE_BYTES, np.uint8)
    native.peek(number * PAGE_BYTES, out)
    return out


def test_reads_see_unflushed_writes_and_a_cut_undoes_them() -> None:
    host, _ = machine()
    with host.open(host.paths[0], write=True) as device:
        device.write(DATA, page(1))
        device.flush()
        device.write(DATA, page(2))
        assert device.read(DATA, 1) == b"\2"
        host.power_up(_core.SimLoss.all)
        assert device.read(DATA, 1) == b"\1"
        device.write(DATA, page(3))
        host.power_up(_core.SimLoss.none)
        assert device.read(DATA, 1) == b"\3"


def test_a_torn_write_mixes_sectors() -> None:
    host, native = machine()
    with host.open(host.paths[0], write=True) as device:
        seen = set()
        for _ in range(20):
            device.write(DATA, page(1))
            device.flush()
            device.write(DATA, page(2))
            host.power_up(_core.SimLoss.torn)
            sectors = peek(native, 8).reshape(8, 512)
            assert all(len(set(sector.tolist())) == 1 for sector in sectors)
            seen.add(tuple(sectors[:, 0].tolist()))
    assert len(seen) > 5


def test_unflushed_writes_are_lost_in_any_order() -> None:
    host, native = machine()
    with host.open(host.paths[0], write=True) as device:
        outcomes = set()
        for _ in range(60):
            for number in (0, 1):
                device.write(DATA + number * PAGE_BYTES, page(1))
            device.flush()
            for number in (0, 1):
                device.write(DATA + number * PAGE_BYTES, page(2))
            host.power_up(_core.SimLoss.random)
            outcomes.add((int(peek(native, 8)[0]), int(peek(native, 9)[0])))
    assert outcomes == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_nothing_goes_on_after_a_cut() -> None:
    host, _ = machine()
    with host.open(host.paths[0], write=True) as device:
        host.power.cut_after(1)
        device.write(DATA, page(1))
        for call in (device.flush, lambda: device.read(0, 1), lambda: device.write(0, page(1))):
            with pytest.raises(PowerCut):
                call()
        host.power_up(_core.SimLoss.none)
        device.flush()


READS = ["misdirected_read", "stale_read", "flipped_read", "rotten_page"]


@pytest.mark.parametrize("kind", READS)
def test_faults_of_reads_change_what_is_read(kind: str) -> None:
    host, native = machine()
    with host.open(host.paths[0], write=True) as device:
        for value in (1, 2):
            for number in range(8, 64):
                device.write(number * PAGE_BYTES, page(value + number))
        device.flush()
        native.set_fault(_core.SimFault[kind], _core.SimZone.data, 1_000_000, 1)
        first, second = device.read(DATA, PAGE_BYTES), device.read(DATA, PAGE_BYTES)
    right = page(10).tobytes()
    assert first != right
    assert (second != right) == (kind == "rotten_page")
    assert native.faulty_reads(8) == (2 if kind == "rotten_page" else 1)
    assert native.damaged(8) == (kind == "rotten_page")
    assert native.counts()[kind] == (0, 0, 1)


def test_errors_once_and_for_ever() -> None:
    host, native = machine()
    with host.open(host.paths[0], write=True) as device:
        native.set_fault(_core.SimFault.read_error, _core.SimZone.data, 1_000_000, 1)
        with pytest.raises(DeviceError, match="Input/output error"):
            device.read(DATA, 10)
        device.read(DATA, 10)
        native.set_fault(_core.SimFault.dead_page, _core.SimZone.data, 1_000_000, 1)
        for _ in range(3):
            with pytest.raises(DeviceError):
                device.read(DATA, 10)
        assert native.dead(8)
        device.write(DATA, page(5))  # the disk maps another sector in
        assert device.read(DATA, 1) == b"\5"


def test_a_short_read_is_gone_on_with() -> None:
    host, native = machine()
    with host.open(host.paths[0], write=True) as device:
        for number in range(8):
            device.write(DATA + number * PAGE_BYTES, page(number))
        native.set_fault(_core.SimFault.short_read, _core.SimZone.data, 1_000_000, 1)
        data = device.read(DATA, 8 * PAGE_BYTES)
        assert data[::PAGE_BYTES] == bytes(range(8))
        assert native.counts()["short_read"] == (0, 0, 1)


@pytest.mark.parametrize("kind", ["lost_write", "torn_write", "misdirected_write"])
def test_acknowledged_writes_that_are_not_there(kind: str) -> None:
    host, native = machine()
    with host.open(host.paths[0], write=True) as device:
        native.set_fault(_core.SimFault[kind], _core.SimZone.data, 1_000_000, 1)
        device.write(DATA, page(7))
        device.flush()
        assert device.read(DATA, PAGE_BYTES) != page(7).tobytes()
        assert native.damaged(8)
        elsewhere = [n for n in range(64) if n != 8 and peek(native, n).any()]
        assert bool(elsewhere) == (kind == "misdirected_write")
        assert all(native.damaged(n) for n in elsewhere)
        device.write(DATA, page(7))
        assert not native.damaged(8)


def test_failed_writes_and_flushes() -> None:
    host, native = machine()
    with host.open(host.paths[0], write=True) as device:
        for kind in ("write_error", "flush_error"):
            native.set_fault(_core.SimFault[kind], _core.SimZone.data, 1_000_000, 1)
        with pytest.raises(DeviceError):
            device.write(DATA, page(1))
        device.write(DATA, page(1))
        with pytest.raises(DeviceError):
            device.flush()
        device.flush()
        host.power_up(_core.SimLoss.all)
        assert device.read(DATA, 1) == b"\1"


def test_a_device_is_opened_by_one_writer() -> None:
    host, _ = machine()
    with host.open(host.paths[0], write=True):
        with pytest.raises(DeviceBusyError):
            host.open(host.paths[0], write=True)
        host.open(host.paths[0], write=False).close()
    host.open(host.paths[0], write=True).close()


def test_a_seed_draws_the_same_faults() -> None:
    def run() -> tuple[list[int], dict]:
        _, native = machine(seed=9)
        for kind in _core.SimFault:
            native.set_fault(kind, _core.SimZone.data, 300_000, 5)
        buffer = np.zeros(4 * PAGE_BYTES, np.uint8)  # a failed read leaves what was there
        results = []
        for step in range(60):
            at = DATA + step % 10 * PAGE_BYTES
            results.append(native.write(at, page(step)) if step % 3 else native.flush())
            results.append(native.read(DATA, buffer))
            results.append(int(buffer.sum()))
        return results, native.counts()

    first, second = run(), run()
    assert first == second
    assert -errno.EIO in first[0]


def test_a_pump_is_turned_by_hand() -> None:
    host, native = machine()
    geometry_rows, row_bytes = 30, 264
    rows = np.arange(geometry_rows * row_bytes, dtype=np.uint32).astype(np.uint8)
    pages = np.empty(2 * PAGE_BYTES, np.uint8)
    _core.pack_pages(rows, row_bytes, 0, 77, 1, pages)
    native.write(DATA, pages)
    pump = _core.Pump(transport="simulated", seed=3)
    with pytest.raises(RuntimeError, match="turn"):
        pump.start()
    with host.open(host.paths[0], write=False) as device:
        number = pump.add_device(device.fileno())
    extents = np.array([[0, 2, number, 8]], np.uint64)
    table = pump.add_table(
        image_id=77, generation=1, row_bytes=row_bytes, rows=30, window_ns=1, extents=extents
    )
    channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(4, 8, 0, 0)])
    pump.add_ring(pump.add_channel(channel.fd), 0, table)
    client = _core.RingClient(channel, 0, -1)
    client.drive(pump)
    asked = np.array([1, 0], np.uint32)
    sequence = client.publish(asked, asked, asked)
    assert client.wait(sequence, 1_000_000) == int(_core.protocol.Status.ok)
    assert np.array_equal(client.pages(sequence)[0], pages[PAGE_BYTES:])
    client.retire(sequence)
    client.publish(asked, asked, asked)
    pump.abandon()
    with pytest.raises(TimeoutError):
        client.wait(sequence + 1, 50_000)
    pump.stop()


def test_only_a_simulated_pump_is_turned() -> None:
    pump = _core.Pump(transport="threads")
    with pytest.raises(RuntimeError, match="simulated"):
        pump.turn()
    with pytest.raises(RuntimeError, match="simulated"):
        pump.abandon()
