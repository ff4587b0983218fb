"""Roots, extent table, commits: what survives a cut, a flipped bit, a reader, another program."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.memory_device import MemoryDevice, after_power_cut
from tierd.errors import (
    DeviceBusyError,
    DeviceDamagedError,
    DeviceError,
    DeviceForeignError,
    DeviceTooSmallError,
    DeviceVersionError,
    ImageError,
)
from tierd.io import signatures, superblock
from tierd.io.device import PAGE_BYTES, Device
from tierd.io.extent_table import Wipe
from tierd.io.formatting import write_empty
from tierd.io.layout import ROOT_OFFSETS, UNIT_BYTES, UNIT_PAGES, Areas, occupied
from tierd.io.store import Store
from tierd.types import ImageInfo, RowFormat, TableKind, TableSpec

MIB = 1 << 20
SIZE = 64 * MIB


def spec(table: str = "t", rows: int = 100) -> TableSpec:
    return TableSpec(
        name=table,
        kind=TableKind.TENSOR,
        layer=0,
        rows=rows,
        dim=264,
        row_bytes=264,
        row_format=RowFormat.RAW,
        group=table,
        tensors=(table,),
    )


def info(store: Store, table: str, pages: int) -> ImageInfo:
    image_id, generation = store.reserve_identity(f"m/{table}")
    return ImageInfo(
        image_id=image_id,
        generation=generation,
        model="m",
        table=spec(table, pages * 15),
        fingerprint="f",
        digest="d",
        digest_kind="none",
        rows_per_page=15,
        pages=pages,
        staged_at=0.0,
    )


def put(store: Store, table: str, pages: int):
    extents = store.allocate(pages)
    return store.commit_image(info(store, table, pages), extents)


def memory_store(size: int = 8 * MIB) -> tuple[MemoryDevice, Store]:
    device = MemoryDevice(bytes(size))
    write_empty(device)
    return device, Store._open(device)


def reopened(medium: bytes) -> Store:
    return Store._open(MemoryDevice(medium))


def state_of(store: Store):
    return store.images, store.placements, store.identities


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "device")


# --- format and open -----------------------------------------------------------------------------


def test_format_then_open(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        uuid = store.uuid
        assert store.images == []
        assert store.sequence == 1
        assert store.free_pages == store.capacity_pages == (SIZE - 2 * MIB) // PAGE_BYTES
    assert os.stat(path).st_blocks * 512 >= SIZE, "room is reserved"
    with Store.open(path) as store:
        assert (store.uuid, store.note, store.device.size) == (uuid, "", SIZE)


def test_a_new_file_needs_a_size(path: str) -> None:
    with pytest.raises(DeviceError, match="--size"):
        Store.format(path)
    assert not os.path.exists(path)


def test_a_file_that_is_too_small_is_not_made(path: str) -> None:
    with pytest.raises(DeviceTooSmallError, match="smallest"):
        Store.format(path, size=3 * MIB)
    assert not os.path.exists(path)


def test_no_room_on_the_file_system_leaves_no_file(path: str) -> None:
    free = os.statvfs(os.path.dirname(path))
    with pytest.raises(DeviceTooSmallError, match=r"no room for .* run: df"):
        Store.format(path, size=free.f_blocks * free.f_frsize + (1 << 30))
    assert not os.path.exists(path)


def test_an_existing_file_keeps_its_size(path: str) -> None:
    Path(path).write_bytes(bytes(8 * MIB))
    with pytest.raises(DeviceError, match="8388608"):
        Store.format(path, size=SIZE)
    with Store.format(path) as store:
        assert store.device.size == 8 * MIB


MARKS = [
    ("ext2/3/4", 0x438, b"\x53\xef"),
    ("XFS", 0, b"XFSB"),
    ("btrfs", 0x10040, b"_BHRfS_M"),
    ("GPT", 0x200, b"EFI PART"),
    ("GPT", 0x1000, b"EFI PART"),
    ("MBR", 510, b"\x55\xaa"),
    ("LVM", 0x200, b"LABELONE"),
    ("swap", 0xFF6, b"SWAPSPACE2"),
    ("LUKS", 0, b"LUKS\xba\xbe"),
    ("RAID", 0x1000, b"\xfc\x4e\x2b\xa9"),
    ("RAID", 8 * MIB - 0x2000, b"\xfc\x4e\x2b\xa9"),
    ("GPT partition table's backup", 8 * MIB - 0x200, b"EFI PART"),
    ("unknown kind", MIB - 1, b"x"),
]


@pytest.mark.parametrize(("name", "offset", "magic"), MARKS)
def test_format_refuses_what_others_wrote(path: str, name: str, offset: int, magic: bytes) -> None:
    content = bytearray(8 * MIB)
    content[offset : offset + len(magic)] = magic
    Path(path).write_bytes(content)
    with pytest.raises(DeviceForeignError, match=f"{name}.*run: tierd format {path} --force"):
        Store.format(path)
    with pytest.raises(DeviceForeignError, match="names /dev/other"):
        Store.format(path, force="/dev/other")
    assert Path(path).read_bytes() == content, "a refusal writes nothing"
    with Store.format(path, force=path) as store:
        assert signatures.find_content(store.device).startswith("a tierd store with 0 images")
    if offset < MIB or offset > 7 * MIB:
        assert Path(path).read_bytes()[offset : offset + len(magic)] != magic


@pytest.mark.parametrize("form", ["path", "name", "real"])
def test_force_accepts_the_devices_names(tmp_path: Path, form: str) -> None:
    real = tmp_path / "disk"
    real.write_bytes(b"x" * 8 * MIB)
    link = tmp_path / "by-id"
    link.symlink_to(real)
    force = {"path": str(link), "name": "by-id", "real": str(real)}[form]
    Store.format(link, force=force).close()


def test_format_refuses_a_store_that_has_images(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        put(store, "t", 10)
    with pytest.raises(DeviceForeignError, match="a tierd store with 1 image "):
        Store.format(path)
    with Store.open(path) as store:
        assert [image.name for image in store.images] == ["m/t"]


def test_open_refuses_what_was_never_formatted(path: str) -> None:
    Path(path).write_bytes(bytes(8 * MIB))
    with pytest.raises(DeviceForeignError, match=f"is empty; run: tierd format {path}"):
        Store.open(path)
    Path(path).write_bytes(bytes(0x438) + b"\x53\xef" + bytes(8 * MIB))
    with pytest.raises(DeviceForeignError, match="holds an ext2/3/4 file system"):
        Store.open(path)


def test_open_refuses_a_device_that_shrank_and_takes_one_that_grew(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        put(store, "t", 1000)
        capacity = store.capacity_pages
    os.truncate(path, SIZE // 2)
    with pytest.raises(DeviceError, match=r"33554432 bytes, but had 67108864.*shrank"):
        Store.open(path)
    os.truncate(path, SIZE * 2)
    with Store.open(path) as store:
        assert store.capacity_pages == capacity


def test_a_reader_opens_beside_a_writer(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        put(store, "t", 10)
        with Store.open(path, write=False) as reader:
            assert reader.images == store.images
            assert reader.free_pages == store.free_pages
            with pytest.raises(AssertionError):
                reader.allocate(1)


def test_a_second_writer_is_told_who_has_it(path: str) -> None:
    with (
        Store.format(path, size=SIZE),
        pytest.raises(DeviceBusyError, match=rf"{path} is in use: process {os.getpid()} "),
    ):
        Device.open(path, write=True, retry_s=0)


# --- what a root and a table are worth ------------------------------------------------------------


def damaged(medium: bytes, offset: int, mask: int = 1) -> bytearray:
    copy = bytearray(medium)
    copy[offset] ^= mask
    return copy


@pytest.fixture(scope="module")
def two_states():
    """A medium, its state, and the state one commit before."""
    device, store = memory_store()
    put(store, "a", 600)
    before = state_of(store)
    store.set_placement("m/a", {"tiers": ["disk"], "quota": 3})
    return bytes(device.medium), state_of(store), before, store._root


def test_every_flipped_byte_of_a_root_or_table_is_noticed(two_states) -> None:
    medium, now, before, root = two_states
    device = MemoryDevice(medium)
    assert Store._open(device).note == ""
    places = [
        (ROOT_OFFSETS[root.slot], PAGE_BYTES, before, "root"),
        (ROOT_OFFSETS[1 - root.slot], PAGE_BYTES, now, "root"),
        (root.table_offset, root.table_bytes, before, "extent table"),
    ]
    for start, size, expected, word in places:
        for i in range(size):
            device.medium[start + i] ^= 1 << i % 8
            store = Store._open(device)
            assert state_of(store) == expected, (word, i)
            assert word in store.note
            device.medium[start + i] ^= 1 << i % 8


def test_a_look_at_nothing_does_not_hide_a_damaged_root(monkeypatch) -> None:
    """A root rots between two looks, and the last look is led astray to an empty page."""
    device, _ = memory_store()
    whole = device.read
    looks = iter(range(100))

    def read(offset: int, size: int) -> bytes:
        data = whole(offset, size)
        if offset != superblock.ROOT_OFFSETS[0]:
            return data
        look = next(looks)
        if look == superblock._READS - 1:
            return bytes(size)
        return data if look == 0 else data[:-1] + bytes([data[-1] ^ 1])

    monkeypatch.setattr(device, "read", read)
    assert "checksum" in Store._open(device).note


def test_a_table_that_is_right_at_the_second_look_is_noted(monkeypatch) -> None:
    device, store = memory_store()
    table, whole = store._root.table_offset, device.read
    looks = iter(range(100))

    def read(offset: int, size: int) -> bytes:
        data = whole(offset, size)
        return bytes(size) if offset == table and next(looks) == 0 else data

    monkeypatch.setattr(device, "read", read)
    assert "extent table of root A: its checksum" in Store._open(device).note


def test_a_damaged_root_makes_every_name_start_under_a_new_identity(path: str) -> None:
    """The damaged one may have given out the next generation of any."""
    with Store.format(path, size=SIZE) as store:
        first = store.reserve_identity("m/t")
        second = store.reserve_identity("m/t")
        assert second == (first[0], first[1] + 1)
        newest = superblock.ROOT_OFFSETS[store._root.slot]
    with open(path, "r+b") as file:
        file.seek(newest)
        file.write(b"X")
    with Store.open(path) as store:
        assert store.note
        image_id, generation = store.reserve_identity("m/t")
        assert image_id != first[0]
        assert generation == 1
    with Store.open(path) as store:
        assert store.reserve_identity("m/t") == (image_id, 2)


def test_a_commit_after_a_damage_spares_the_root_in_force(two_states) -> None:
    medium, _, before, root = two_states
    device = MemoryDevice(damaged(medium, root.table_offset))
    store = Store._open(device)
    store.set_placement("m/a", {"tiers": ["dram"]})
    assert store.sequence == root.sequence + 1
    again = reopened(device.medium)
    assert again.placements == {"m/a": {"tiers": ["dram"]}}
    assert again.images == before[0]
    for stop in range(len(device.log) + 1):  # and cut anywhere, either state is there
        found = reopened(after_power_cut(medium, device.log, stop, random.Random(stop)))
        assert found.images == before[0]


@pytest.mark.parametrize("how", ["roots", "root and table", "zeroed roots", "tables"])
def test_both_roots_lost_is_damage_not_an_empty_device(two_states, how: str) -> None:
    medium, _, _, root = two_states
    bad = bytearray(medium)
    places = [*ROOT_OFFSETS]
    if how == "root and table":
        places = [ROOT_OFFSETS[1 - root.slot], root.table_offset]
    if how == "tables":
        areas = Areas.of(len(medium))
        places = [areas.table_offset(0), areas.table_offset(1)]
    for place in places:
        bad[place] ^= 0xFF
        if how == "zeroed roots":
            bad[place : place + PAGE_BYTES] = bytes(PAGE_BYTES)
    with pytest.raises(DeviceDamagedError, match=r"memory: neither root.*run: tierd format memory"):
        reopened(bad)


def test_a_newer_format_is_refused_whole(two_states) -> None:
    medium, _, _, root = two_states
    copy = bytearray(medium)
    place = ROOT_OFFSETS[root.slot]
    copy[place + 8 : place + 12] = struct.pack("<I", superblock.FORMAT_VERSION + 1)
    body = bytes(copy[place : place + PAGE_BYTES - 4])
    copy[place + PAGE_BYTES - 4 : place + PAGE_BYTES] = struct.pack("<I", superblock.crc(body))
    with pytest.raises(DeviceVersionError, match="format 3, this tierd knows up to 2"):
        reopened(copy)


def test_a_roots_bytes_are_those_of_the_format_page(two_states) -> None:
    medium, _, _, root = two_states
    place = ROOT_OFFSETS[root.slot]
    raw = medium[place : place + PAGE_BYTES]
    words = struct.unpack_from("<8sIIQ16sQQQQQI", raw)
    assert words[:4] == (b"TIERDVOL", 2, 512, root.sequence)
    assert words[4:7] == (root.uuid.bytes, place, 8 * MIB)
    assert words[7:] == (root.table_offset, root.table_bytes, 512 << 10, root.table_crc)
    assert raw[84:4084] == bytes(4000)
    assert raw[4084:4092] == b"TIERDVOL"
    assert ROOT_OFFSETS == (0, 65536)
    table = json.loads(medium[root.table_offset : root.table_offset + root.table_bytes])
    assert list(table) == [
            "format", "uuid", "sequence", "images", "parts", "placements", "identities", "wipes",
        ]  # fmt: skip
    assert list(table["images"][0]) == ["info", "state", "devices", "extents", "members"]
    assert table["images"][0]["extents"] == [[0, 600, 512]]


def test_a_root_at_the_other_roots_place_is_not_believed(two_states) -> None:
    medium, _, before, root = two_states
    newest, older = ROOT_OFFSETS[root.slot], ROOT_OFFSETS[1 - root.slot]
    copy = bytearray(medium)
    copy[newest : newest + PAGE_BYTES] = medium[older : older + PAGE_BYTES]
    store = reopened(copy)
    assert state_of(store) == before
    assert "another place" in store.note


def test_a_table_that_makes_no_sense_is_not_believed(two_states) -> None:
    medium, _, before, root = two_states
    data = medium[root.table_offset : root.table_offset + root.table_bytes]
    for old, new in [
        (b'"extents":[[0,600,', b'"extents":[[1,600,'),  # page 0 in no extent
        (b'"extents":[[0,600,512]]', b'"extents":[[0,600,513]]'),  # not aligned
        (b'"extents":[[0,600,512]]', b'"extents":[[0,600,0]]'),  # over the roots
        (b'"extents":[[0,600,512]]', b'"extents":[[0,600,512],[600,9,512]]'),  # overlap
        (b'"extents":[[0,600,512]]', b'"extents":[[0,600,1536]]'),  # beyond the end
        (b'"sequence":4', b'"sequence":3'),
        (b'"images":[', b'"images":7,"x":['),
    ]:
        assert data.count(old) >= 1, old
        changed = data.replace(old, new)
        copy = bytearray(medium)
        copy[root.table_offset : root.table_offset + len(changed)] = changed
        fields = {"table_bytes": len(changed), "table_crc": superblock.crc(changed)}
        place = ROOT_OFFSETS[root.slot]
        copy[place : place + PAGE_BYTES] = dataclasses.replace(root, **fields).pack()
        store = reopened(copy)
        assert state_of(store) == before, new
        assert "makes no sense" in store.note


# --- cuts -----------------------------------------------------------------------------------------


def test_a_cut_anywhere_leaves_the_state_before_or_after() -> None:
    device, store = memory_store(10 * MIB)
    put(store, "old", 100)
    steps = [
        lambda: put(store, "new", 700),
        lambda: put(store, "old", 50),
        lambda: store.delete_image("m/new"),
        lambda: store.set_placement("m/old", {"quota": 1}),
    ]
    rng = random.Random(7)
    for step in steps:
        start = bytes(device.medium)
        device.log.clear()
        seen = [state_of(store)]
        commit = store._commit

        def recording(commit=commit, seen=seen, **changes) -> None:
            commit(**changes)
            seen.append(state_of(store))

        store._commit = recording
        step()
        del store._commit
        flushes = [i for i, entry in enumerate(device.log) if entry[0] == "flush"]
        assert len(flushes) == 2 * (len(seen) - 1)
        for stop in range(len(device.log) + 1):
            for _ in range(5):
                found = reopened(after_power_cut(start, device.log, stop, rng))
                done = sum(flush < stop for flush in flushes)
                allowed = seen[done // 2 : done // 2 + 2]
                assert state_of(found) in allowed


def test_a_cut_before_the_table_is_flushed_is_noticed_if_the_order_were_wrong() -> None:
    """The test above can fail: a root written before its table is caught by it."""
    device, store = memory_store()
    start = bytes(device.medium)
    device.log.clear()
    put(store, "t", 10)
    table, _, root, *_ = device.log
    wrong = [root, ("flush",), table, ("flush",)]
    medium = after_power_cut(start, wrong, 2, random.Random(1))
    assert superblock.load(MemoryDevice(medium)).note != ""


def test_roots_are_never_both_in_flight_and_tables_go_first() -> None:
    device, store = memory_store()
    device.log.clear()
    put(store, "t", 10)
    put(store, "u", 10)
    kinds = []
    for entry in device.log:
        if entry[0] == "flush":
            kinds.append("flush")
        else:
            kinds.append("root" if entry[1] in ROOT_OFFSETS else "table")
    assert kinds == ["table", "flush", "root", "flush"] * 4
    places = [entry[1] for entry in device.log if entry[0] == "write"]
    assert places[1::2] == [ROOT_OFFSETS[1], ROOT_OFFSETS[0]] * 2
    assert len(set(places[0::2])) == 2


def test_after_a_failed_commit_the_store_must_be_opened_anew(monkeypatch) -> None:
    device, store = memory_store()
    put(store, "t", 10)
    before = state_of(store)

    def fail() -> None:
        raise DeviceError("memory: flush failed")

    monkeypatch.setattr(device, "flush", fail)
    with pytest.raises(DeviceError, match="flush failed"):
        store.delete_image("m/t")
    assert state_of(store) == before
    monkeypatch.undo()
    with pytest.raises(DeviceError, match="earlier commit failed"):
        store.delete_image("m/t")
    with pytest.raises(DeviceError, match="earlier commit failed"):
        store.allocate(1)


# --- images, generations, room -------------------------------------------------------------------


def test_generations_only_grow(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        first = put(store, "t", 10).info
        second = put(store, "t", 10).info
        store.delete_image("m/t")
        assert store.images == []
        tombstone = store.identities["m/t"]
        third = put(store, "t", 10).info
    assert first.image_id == second.image_id == tombstone.image_id == third.image_id
    assert [first.generation, second.generation, tombstone.generation, third.generation] == [
        1, 2, 3, 4,
    ]  # fmt: skip
    with Store.open(path) as store:
        assert store.image("m/t").info == third


def test_an_identity_is_used_up_by_an_attempt_that_dies(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        attempt = store.reserve_identity("m/t")
    with Store.open(path) as store:
        assert store.reserve_identity("m/t") == (attempt[0], attempt[1] + 1)


def test_replacing_frees_the_old_extents_only_after_the_commit(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        old = put(store, "t", 2000)
        free = store.free_pages
        extents = store.allocate(2000)
        assert not overlap(extents, old.extents)
        assert store.free_pages == free - 2048
        store.commit_image(info(store, "t", 2000), extents)
        assert store.free_pages == free


def test_unknown_image_lists_near_names(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        put(store, "layers.1.engram", 1)
        with pytest.raises(ImageError, match=r"near names: m/layers.1.engram; run: tierd im"):
            store.image("m/layers.1.engra")
        with pytest.raises(ImageError):
            store.delete_image("m/none")
        with pytest.raises(ImageError):
            store.set_placement("m/none", {})


def test_extents_are_aligned_and_whole_while_there_is_a_run(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        for index, pages in enumerate([1, 513, 700, 2048]):
            (extent,) = put(store, f"t{index}", pages).extents
            assert extent.device_page % UNIT_PAGES == 0
            assert extent.pages == pages


def test_a_fragmented_device_still_takes_an_image(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        names = [f"t{i}" for i in range(store.free_pages // UNIT_PAGES)]
        for name in names:
            put(store, name, UNIT_PAGES)
        assert store.free_pages == 0
        with pytest.raises(DeviceTooSmallError, match=r"has 0 bytes free.*need 4096 "):
            store.allocate(1)
        for name in names[::2]:
            store.delete_image(f"m/{name}")
        pages = store.free_pages
        image = put(store, "big", pages)
        assert len(image.extents) == len(names[::2])
        assert [e.first_page for e in image.extents] == list(range(0, pages, UNIT_PAGES))
    with Store.open(path) as store:
        assert store.image("m/big").extents == image.extents


def test_the_extent_table_is_bounded(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        put(store, "t", 1)
        before = (store.sequence, store.placements)
        with pytest.raises(DeviceError, match="room for 524288"):
            store.set_placement("m/t", {"note": "x" * 600_000})
        assert (store.sequence, store.placements) == before
        store.set_placement("m/t", {"note": "x"})


def test_wipe_writes_zeroes(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        image = put(store, "t", 600)
        start, end = occupied(image.extents[0])
        store.device.write(start, np.full(end - start, 7, np.uint8))
        store.delete_image("m/t", wipe=True)
        assert store.free_pages == store.capacity_pages - 1024, "not free before it is zero"
        store.finish_wipe(*store.wipes)
        assert (store.wipes, store.free_pages) == ((), store.capacity_pages)
    assert not any(Path(path).read_bytes()[start:end])


def test_wipe_reads_back_what_it_wrote(path: str, monkeypatch) -> None:
    with Store.format(path, size=SIZE) as store:
        image = put(store, "t", 600)
        start, end = occupied(image.extents[0])
        store.device.write(start, np.full(end - start, 7, np.uint8))
        monkeypatch.setattr(Device, "write", lambda self, offset, data: None)
        store._commit = lambda **changes: None
        with pytest.raises(DeviceError, match="not zero after they were wiped"):
            store.finish_wipe(Wipe("m/t", *image.identity, image.devices, image.extents))


# --- readers --------------------------------------------------------------------------------------


def overlap(one, other) -> bool:
    ranges = [(occupied(a), occupied(b)) for a in one for b in other]
    return any(a[0] < b[1] and b[0] < a[1] for a, b in ranges)


def test_what_a_reader_holds_is_neither_deleted_nor_reused(path: str) -> None:
    with Store.format(path, size=12 * MIB) as store:
        image = put(store, "t", 1024)
        other = put(store, "u", 10)
        fd = store.reader_fd([image])
        with pytest.raises(DeviceBusyError, match=r"attached by an engine.*run: tierd status"):
            store.delete_image("m/t")
        store.delete_image("m/u")
        replaced = put(store, "t", 1024)
        assert not overlap(replaced.extents, image.extents)
        assert store.free_pages == 512, "the replaced extents are still read"
        assert store.pages_after_dropping("m/t") == 1024
    with Store.open(path) as store:  # the lease outlives the daemon
        assert store.free_pages == 512
        with pytest.raises(DeviceTooSmallError):
            store.allocate(513)
        copy = os.dup(fd)
        os.close(fd)
        assert store.free_pages == 512
        os.close(copy)
        assert store.free_pages == 1536
        with pytest.raises(ImageError, match="deleted or replaced"):
            store.reader_fd([other])


def test_format_waits_for_readers(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        fd = store.reader_fd([put(store, "t", 10)])
    with pytest.raises(DeviceBusyError, match="still read by an engine"):
        Store.format(path, force=path)
    os.close(fd)
    Store.format(path, force=path).close()


def test_a_reader_keeps_no_daemon_out_and_cannot_write(path: str) -> None:
    with Store.format(path, size=SIZE) as store:
        fd = store.reader_fd([put(store, "t", 10)])
    with Store.open(path):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, bytes(4096), 0)
    os.close(fd)


# --- any sequence of operations -------------------------------------------------------------------


class StoreMachine(RuleBasedStateMachine):
    """A store on a real file against a model: names -> pages, leases, abandoned allocations."""

    pending = Bundle("pending")
    leases = Bundle("leases")

    @initialize()
    def make(self) -> None:
        place = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = tempfile.mkdtemp(dir=place)
        self.path = f"{self.folder}/device"
        self.store = Store.format(self.path, size=26 * MIB)
        self.model: dict[str, tuple[int, int]] = {}
        self.last: dict[str, int] = {}
        self.set_aside: list = []
        self.held: dict[int, list] = {}

    def teardown(self) -> None:
        for fd in self.held:
            os.close(fd)
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(target=pending, pages=st.integers(1, 2200))
    def allocate(self, pages: int):
        try:
            extents = self.store.allocate(pages)
        except DeviceTooSmallError:
            assert -(-pages // UNIT_PAGES) * UNIT_PAGES > self.store.free_pages
            return None
        for taken in [*self.set_aside, *self.held.values()]:
            assert not overlap(extents, taken)
        for image in self.store.images:
            assert not overlap(extents, image.extents)
        self.set_aside.append(extents)
        return extents

    @rule(extents=consumes(pending), name=st.sampled_from("abc"))
    def commit(self, extents, name: str) -> None:
        if extents is None or extents not in self.set_aside:
            return
        pages = sum(extent.pages for extent in extents)
        image = self.store.commit_image(info(self.store, name, pages), extents)
        self.set_aside.remove(extents)
        assert image.info.generation > self.last.get(name, 0)
        self.last[name] = image.info.generation
        self.model[name] = (pages, image.info.generation)

    @rule(extents=consumes(pending))
    def abandon(self, extents) -> None:
        if extents is not None and extents in self.set_aside:
            self.store.release(extents)
            self.set_aside.remove(extents)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        extents = self.store.image(f"m/{name}").extents
        if any(overlap(extents, held) for held in self.held.values()):
            with pytest.raises(DeviceBusyError):
                self.store.delete_image(f"m/{name}")
            return
        self.store.delete_image(f"m/{name}")
        del self.model[name]
        self.last[name] += 1

    @precondition(lambda self: self.model)
    @rule(target=leases, data=st.data())
    def lease(self, data) -> int:
        image = self.store.image(f"m/{data.draw(st.sampled_from(sorted(self.model)))}")
        fd = self.store.reader_fd([image])
        self.held[fd] = list(image.extents)
        return fd

    @rule(fd=consumes(leases))
    def leave(self, fd: int) -> None:
        os.close(fd)
        del self.held[fd]

    @rule()
    def reopen(self) -> None:
        before = state_of(self.store)
        self.store.close()
        self.store = Store.open(self.path)
        self.set_aside.clear()
        assert state_of(self.store) == before

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "store"):
            return
        stored = {
            image.info.table.name: (image.info.pages, image.info.generation)
            for image in self.store.images
        }
        assert stored == self.model
        assert {n.removeprefix("m/"): i.generation for n, i in self.store.identities.items()} == (
            self.last
        )
        used: set[int] = set()
        for extents in [
            *(image.extents for image in self.store.images), *self.set_aside, *self.held.values()
        ]:  # fmt: skip
            for start, end in map(occupied, extents):
                used |= set(range(start // UNIT_BYTES, end // UNIT_BYTES))
        total = self.store.capacity_pages // UNIT_PAGES
        assert self.store.free_pages // UNIT_PAGES == total - len(used)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, derandomize=True
)
