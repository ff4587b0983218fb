"""A medium that lies once: what a commit and an opening do about it.

Each was a bug that the simulator found (docs/simulator.md).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.memory_device import MemoryDevice
from tests.unit.test_store import MIB, info, put
from tierd.errors import DeviceError, DeviceFailedError
from tierd.io import signatures, superblock
from tierd.io.device import PAGE_BYTES
from tierd.io.formatting import write_empty
from tierd.io.layout import ROOT_OFFSETS, occupied
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable


class LyingDevice(MemoryDevice):
    """Answers chosen reads wrongly and loses chosen writes.

    ``lies`` maps a byte offset to what each of the next reads there brings: bytes to return, an
    error to raise, or None for the truth. ``lost`` counts the writes at an offset that are
    acknowledged and not done.
    """

    def __init__(self, medium: bytes, path: str = "memory") -> None:
        super().__init__(medium, path)
        self.lies: dict[int, list[bytes | DeviceError | None]] = {}
        self.lost: dict[int, int] = {}

    def read(self, offset: int, size: int) -> bytes:
        lies = self.lies.get(offset)
        lie = lies.pop(0) if lies else None
        if isinstance(lie, DeviceError):
            raise lie
        return super().read(offset, size) if lie is None else lie[:size]

    def write(self, offset: int, data: np.ndarray | bytes) -> None:
        if self.lost.get(offset, 0) > 0:
            self.lost[offset] -= 1
            self.log.append(("lost", offset))
            return
        super().write(offset, data)


@pytest.fixture
def device() -> LyingDevice:
    """A device after three commits; the last stages m/t."""
    made = LyingDevice(bytes(8 * MIB))
    write_empty(made)
    put(Store._open(made), "t", 10)
    return made


def newest(device: LyingDevice) -> superblock.Root:
    loaded = superblock.load(device)
    assert loaded is not None
    return loaded.root


def names(store: Store) -> list[str]:
    return [image.name for image in store.images]


# --- reading --------------------------------------------------------------------------------------


def test_a_root_that_reads_as_it_was_once_is_looked_at_again(device: LyingDevice) -> None:
    """The old content of a place is a right root, too: one look would go back without a word."""
    root = newest(device)
    place = ROOT_OFFSETS[root.slot]
    stale = dataclasses.replace(root, sequence=root.sequence - 2).pack()
    device.lies[place] = [stale]
    assert Store._open(device).sequence == root.sequence


@pytest.mark.parametrize(
    "lie",
    [bytes(PAGE_BYTES), b"\xff" * PAGE_BYTES, DeviceError("memory: read failed")],
    ids=["zeroes", "ones", "error"],
)
def test_a_root_that_cannot_be_read_once_is_read_again_and_told(device: LyingDevice, lie) -> None:
    root = newest(device)
    device.lies[ROOT_OFFSETS[root.slot]] = [lie]
    store = Store._open(device)
    assert store.sequence == root.sequence
    assert names(store) == ["m/t"]
    if not (isinstance(lie, bytes) and not any(lie)):
        assert f"root {'AB'[root.slot]}" in store.note, "a passing fault of a root is told"


@pytest.mark.parametrize("how", ["flipped", "error"])
def test_a_table_that_cannot_be_read_once_is_read_again(device: LyingDevice, how: str) -> None:
    root = newest(device)
    data = bytearray(device.medium[root.table_offset : root.table_offset + root.table_bytes])
    data[40] ^= 1
    lie = bytes(data) if how == "flipped" else DeviceError("memory: read failed")
    device.lies[root.table_offset] = [lie]
    store = Store._open(device)
    assert store.sequence == root.sequence
    assert names(store) == ["m/t"]


def test_a_device_whose_head_cannot_be_read_counts_as_content() -> None:
    device = LyingDevice(bytes(8 * MIB))
    device.lies[0] = [DeviceError("memory: read failed")] * 20
    assert "cannot be read" in (signatures.find_content(device) or "")


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["table", "root"])
def test_a_lost_write_of_a_commit_is_written_again(device: LyingDevice, what: str) -> None:
    store = Store._open(device)
    place = _next_place(store, what)
    device.lost[place] = 1
    store.set_placement("m/t", {"quota": 1})
    assert ("lost", place) in device.log, "the fault was reached"
    found = Store._open(MemoryDevice(device.medium))
    assert found.placements == {"m/t": {"quota": 1}}
    assert found.note == ""


@pytest.mark.parametrize("what", ["table", "root"])
def test_a_device_that_never_stores_fails_the_commit(device: LyingDevice, what: str) -> None:
    store = Store._open(device)
    device.lost[_next_place(store, what)] = 99
    with pytest.raises(DeviceFailedError, match="does not read back"):
        store.set_placement("m/t", {"quota": 1})
    with pytest.raises(DeviceError, match="opened anew"):
        store.set_placement("m/t", {"quota": 2})
    assert Store._open(MemoryDevice(device.medium)).placements == {}


def _next_place(store: Store, what: str) -> int:
    root = store._root
    areas = store._areas
    used = root.table_offset == areas.table_offset(0)
    return areas.table_offset(used) if what == "table" else ROOT_OFFSETS[1 - root.slot]


def test_roots_are_believed_only_after_a_flush(device: LyingDevice) -> None:
    """Those of a killed daemon may be in the cache alone, and go with the next power cut."""
    device.log.clear()
    reads: list[int] = []
    read = device.read

    def seen(offset: int, size: int) -> bytes:
        reads.append(len([entry for entry in device.log if entry[0] == "flush"]))
        return read(offset, size)

    device.read = seen  # type: ignore[method-assign]
    Store._open(device)
    assert reads
    assert min(reads) == 1, "the flush comes before the first read"


def test_a_reader_flushes_nothing(device: LyingDevice) -> None:
    device.writable = False
    device.log.clear()
    Store._open(device)
    assert device.log == []


# --- what a commit drops --------------------------------------------------------------------------


def _wipe(store: Store, name: str) -> None:
    store.delete_image(name, wipe=True)
    store.finish_wipe(*store.wipes)


@pytest.mark.parametrize(
    "change",
    [
        lambda store: put(store, "t", 20),
        lambda store: store.delete_image("m/t"),
        lambda store: _wipe(store, "m/t"),
    ],
    ids=["replace", "delete", "wipe"],
)
def test_nothing_is_given_up_while_either_root_names_it(
    device: LyingDevice, change: Callable[[Store], object]
) -> None:
    store = Store._open(device)
    old = store.image("m/t")
    start, end = occupied(old.extents[0])
    device.write(start, np.full(end - start, 7, np.uint8))
    bad: list[str] = []

    def check(what: str, offset: int) -> None:
        if start <= offset < end:
            for root in _whole_roots(device):
                table, _ = superblock._find_table(device, root)
                assert table is not None
                if old in table.images.values():
                    bad.append(f"{what} while root {root.sequence} names the image")

    _before(device, "discard", check)
    _before(device, "write", check)
    change(store)
    assert bad == []
    newest_slot = newest(device).slot
    device.medium[ROOT_OFFSETS[newest_slot]] ^= 0xFF  # the newest root rots
    found = Store._open(MemoryDevice(device.medium))
    assert old not in found.images, "the root before it does not lead to what is gone"


def test_room_of_a_deleted_image_is_not_given_out_by_the_next_daemon_at_once(
    device: LyingDevice,
) -> None:
    """A daemon that was killed right after its commit leaves a root that names the image."""
    store = Store._open(device)
    old = store.image("m/t")
    store._settle = lambda: None  # type: ignore[method-assign]
    store.delete_image("m/t")
    again = Store._open(device)
    before = again.sequence
    extents = again.allocate(10)
    assert again.sequence == before + 1, "one more commit, so that no root names the old image"
    again.commit_image(info(again, "u", 10), extents)
    device.medium[ROOT_OFFSETS[newest(device).slot]] ^= 0xFF
    assert old not in Store._open(MemoryDevice(device.medium)).images


def _whole_roots(device: LyingDevice) -> list[superblock.Root]:
    found = [superblock._find_root(device, slot)[0] for slot in (0, 1)]
    return [root for root in found if root is not None]


def _before(device: LyingDevice, name: str, look: Callable[[str, int], None]) -> None:
    original = getattr(device, name)

    def call(offset: int, *rest: object) -> object:
        look(name, offset)
        return original(offset, *rest)

    setattr(device, name, call)
