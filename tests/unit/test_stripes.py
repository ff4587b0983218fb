"""Images over several devices: the arithmetic, staging, loss of a device, leftovers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import checkpoints
from tests.memory_device import MemoryDevice, after_power_cut
from tierd.errors import (
    DeviceBusyError,
    DeviceDuplicateError,
    DeviceTooSmallError,
    ImageIncompleteError,
    ImageVersionError,
    VerifyError,
)
from tierd.io import stripes, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.extent_table import StoredImage
from tierd.io.formatting import write_empty
from tierd.io.layout import UNIT_PAGES, occupied
from tierd.io.rows import RowReader
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.store_set import StoreSet, StripedImage
from tierd.io.tables import find_tables
from tierd.types import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIB = 1 << 20
NAME = "m/layers.1.engram"
ROWS = 15 * (UNIT_PAGES * 3 + 100)  # four units, the last of a hundred pages


# --- arithmetic -----------------------------------------------------------------------------------


@given(pages=st.integers(1, 6000), devices=st.integers(1, 8))
def test_every_page_is_on_one_device_and_in_order_there(pages: int, devices: int) -> None:
    count = stripes.devices_used(pages, devices)
    assert sum(stripes.share_pages(pages, i, count) for i in range(count)) == pages
    assert all(stripes.share_pages(pages, i, count) > 0 for i in range(count))
    local = [0] * count
    page = 0
    for index, first, at, size in stripes.pieces(0, pages, count):
        assert (first, at) == (page, local[index])
        page += size
        local[index] += size
    assert page == pages
    assert local == [stripes.share_pages(pages, i, count) for i in range(count)]


@given(
    pages=st.integers(1, 6000),
    devices=st.integers(1, 8),
    cut=st.integers(1, 5),
    first=st.integers(0, 5999),
)
def test_extents_say_the_same_as_pieces(pages: int, devices: int, cut: int, first: int) -> None:
    count = stripes.devices_used(pages, devices)
    places: dict[int, tuple[int, int]] = {}
    for index in range(count):
        own = stripes.share_pages(pages, index, count)
        split = min(cut * UNIT_PAGES, own)
        extents = [Extent(0, split, 1 << 20)]
        if own > split:
            extents.append(Extent(split, own - split, 1 << 12))
        for extent in stripes.image_extents(extents, index, count):
            for page in range(extent.pages):
                where = (index, extent.device_page + page)
                assert places.setdefault(extent.first_page + page, where) == where
        for index_, page, local, size in stripes.pieces(0, pages, count):
            if index_ == index:
                for k in range(size):
                    start = (1 << 20) if local + k < split else (1 << 12) - split
                    assert places[page + k] == (index, start + local + k)
    assert sorted(places) == list(range(pages))
    first = min(first, pages - 1)
    assert next(iter(stripes.pieces(first, 1, count)))[0] == places[first][0]


# --- on devices -----------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(paths: Sequence[Path], *, write: bool = True) -> Iterator[StoreSet]:
    with StoreSet.open(paths, write=write) as stores:
        yield stores


def put(stores: StoreSet, made: checkpoints.TinyCheckpoint, model: str = "m"):
    with Checkpoint.open(made.path) as checkpoint:
        return stage(stores, checkpoint, find_tables(checkpoint), model=model)


def rows_of(image: StripedImage) -> np.ndarray:
    """All rows, by way of the image's extents as engines and pumps are given them."""
    info = image.info
    pages = np.zeros((info.pages, 4096), np.uint8)
    for index, share in enumerate(image.shares):
        for first, count, place in image.extent_rows(index).tolist():
            data = share.store.device.read(place * 4096, count * 4096)
            pages[first : first + count] = np.frombuffer(data, np.uint8).reshape(count, 4096)
    width = info.table.row_bytes
    flat = pages[:, : info.rows_per_page * width].reshape(-1, width)
    return flat[: info.table.rows]


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"device{i}" for i in range(3)]
    for path in paths:
        Store.format(path, size=16 * MIB).close()
    return paths


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.TinyCheckpoint:
    return checkpoints.engram(tmp_path_factory.mktemp("stripes") / "c", layers=(1,), rows=ROWS)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_row_over_any_number_of_devices(tmp_path: Path, made, count: int) -> None:
    paths = [tmp_path / f"d{i}" for i in range(count)]
    for path in paths:
        Store.format(path, size=12 * MIB).close()
    with opened(paths) as stores:
        put(stores, made)
    with opened(paths[::-1]) as stores:  # in whatever order they are named
        image = stores.image(NAME)
        assert len(image.shares) == min(count, 4), "four units are on four devices at most"
        assert image.home.device.path == str(paths[0])
        assert np.array_equal(rows_of(image), made.tables["layers.1.engram"])
        with Checkpoint.open(made.path) as source:
            assert walker.verify(stores, NAME, checkpoint=source, full=True).ok
            assert RowReader(source, image.info.table).read(7, 1).shape == (1, 264)
        assert put(stores, made)[0].written_bytes == 0
        stores.delete(NAME)
        assert [s.free_pages for s in stores.stores] == [s.capacity_pages for s in stores.stores]


def test_a_device_that_is_missing_is_named(devices: list[Path], made) -> None:
    with opened(devices) as stores:
        put(stores, made)
        lost = stores.stores[2].uuid
    with opened(devices[:2]) as stores:
        image = stores.image(NAME)
        assert lost in image.fault
        assert str(devices[2]) in image.fault
        with pytest.raises(ImageIncompleteError, match=f"{lost}.*run: tierd devices list"):
            walker.verify(stores, NAME)
        with pytest.raises(ImageIncompleteError, match="cannot be wiped"):
            stores.delete(NAME, wipe=True)
        with pytest.raises(ImageIncompleteError, match="or delete the image and stage it again"):
            put(stores, made)  # it is there already, and of no use
    with opened([devices[2]]) as stores:
        (part,) = stores.stores[0].parts
        assert part.name == NAME
        assert stores.notes == [], "without its home a part is kept"
    with opened(devices) as stores:
        assert stores.image(NAME).fault == ""


def test_a_part_is_given_up_once_its_home_does_not_name_it(devices: list[Path], made) -> None:
    with opened(devices) as stores:
        put(stores, made)
    with opened(devices[:2]) as stores:
        stores.delete(NAME)
    with opened(devices) as stores:
        assert len(stores.notes) == 1
        assert "gave up what a staging of m/layers.1.engram left behind" in stores.notes[0]
        assert stores.stores[2].parts == ()
        assert stores.stores[2].free_pages == stores.stores[2].capacity_pages


def test_the_same_name_is_replaced_on_every_device(devices: list[Path], made, tmp_path) -> None:
    other = checkpoints.engram(tmp_path / "other", layers=(1,), rows=ROWS, seed=9)
    with opened(devices) as stores:
        put(stores, made)
        free = [store.free_pages for store in stores.stores]
        put(stores, other)
        image = stores.image(NAME)
        assert image.info.generation == 2
        assert np.array_equal(rows_of(image), other.tables["layers.1.engram"])
        assert [store.free_pages for store in stores.stores] == free
        assert [len(store.parts) for store in stores.stores] == [0, 1, 1]


def test_a_lease_on_any_share_keeps_the_image(devices: list[Path], made) -> None:
    with opened(devices) as stores:
        put(stores, made)
        share = stores.image(NAME).shares[1]
        fd = share.store.reader_fd([share.holding])
        with pytest.raises(DeviceBusyError, match=f"{NAME} on {devices[1]}"):
            stores.delete(NAME)
        os.close(fd)
        assert stores.image(NAME).fault == ""
        stores.delete(NAME)


def test_room_is_asked_of_every_device(devices: list[Path], made, tmp_path: Path) -> None:
    small = tmp_path / "small"
    Store.format(small, size=4 * MIB).close()
    with opened([devices[0], small]) as stores:
        before = stores.stores[1].sequence
        with pytest.raises(DeviceTooSmallError, match=str(small)):
            put(stores, made)
        assert stores.stores[1].sequence == before
        assert stores.stores[0].free_pages == stores.stores[0].capacity_pages


def test_wiping_reaches_every_device(devices: list[Path], made) -> None:
    with opened(devices) as stores:
        put(stores, made)
        image = stores.image(NAME)
        places = [
            (share.path, extent.device_page * 4096, extent.pages * 4096)
            for share in image.shares
            for extent in share.extents
        ]
        stores.delete(NAME, wipe=True)
    for path, start, size in places:
        data = Path(path).read_bytes()
        assert not any(data[start : start + size])


def test_a_copy_of_a_device_is_refused(devices: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(devices[0].read_bytes())
    with pytest.raises(DeviceDuplicateError, match=f"{devices[0]} and {copy} both"):
        StoreSet.open([devices[0], copy])


def test_damage_names_the_device(devices: list[Path], made) -> None:
    with opened(devices) as stores:
        put(stores, made)
        share = stores.image(NAME).shares[1]
        place = share.extents[0].device_page * 4096 + 100
        page = bytearray(share.store.device.read(place, 1))
    with devices[1].open("r+b") as file:
        file.seek(place)
        file.write(bytes([page[0] ^ 1]))
    with opened(devices, write=False) as stores:
        report = walker.verify(stores, NAME, full=True)
        assert (report.pages_bad, report.first_bad_page) == (1, UNIT_PAGES)
        assert report.first_bad_device == str(devices[1])
        with pytest.raises(VerifyError, match=f"on {devices[1]}; .*--device"):
            report.require_ok(*map(str, devices))


def test_a_page_format_of_tomorrow_is_refused_by_name(devices: list[Path], made) -> None:
    with opened(devices[:1]) as stores:
        put(stores, made)
        store = stores.stores[0]
        image = store.image(NAME)
        newer = dataclasses.replace(image, info=dataclasses.replace(image.info, page_version=2))
        store._commit(images={NAME: newer})
    with opened(devices[:1]) as stores:
        with pytest.raises(ImageVersionError, match="format 2, this tierd reads up to 1"):
            walker.verify(stores, NAME)
        assert stores.images[0].name == NAME, "it is listed all the same"


# --- stops in between -----------------------------------------------------------------------------


def _memory_set(media: Sequence[bytes]) -> StoreSet:
    found = [MemoryDevice(medium, f"memory{i}") for i, medium in enumerate(media)]
    return StoreSet([Store._open(device) for device in found])


@pytest.mark.parametrize("what", ["stage", "replace", "delete"])
def test_a_power_cut_anywhere_leaves_the_image_absent_or_complete(
    tmp_path: Path, what: str
) -> None:
    old = checkpoints.engram(tmp_path / "old", layers=(1,), rows=15 * 600, seed=1)
    new = checkpoints.engram(tmp_path / "new", layers=(1,), rows=15 * 700, seed=2)
    found = [MemoryDevice(bytes(10 * MIB), f"memory{i}") for i in range(2)]
    for device in found:
        write_empty(device)
    stores = StoreSet([Store._open(device) for device in found])
    if what != "stage":
        put(stores, old)
    start = [bytes(device.medium) for device in found]
    log: list[tuple] = []
    for number, device in enumerate(found):
        device.log = _Tagged(log, number)
    if what == "delete":
        stores.delete(NAME)
    else:
        put(stores, new)
    rng = random.Random(5)
    outcomes = set()
    for stop in range(len(log) + 1):
        logs = [[e for n, e in log[:stop] if n == number] for number in range(2)]
        media = [after_power_cut(start[i], logs[i], len(logs[i]), rng) for i in range(2)]
        again = _memory_set(media)
        named = again.find(NAME)
        assert named is None or named.fault == "", (
            "parts are committed before their home names them"
        )
        again.reclaim()
        image = again.find(NAME)
        if image is not None:
            assert image.fault == ""
            assert walker.verify(again, image, full=True, sample=0).ok
            rows = {old.path.name: old, new.path.name: new}
            matches = [
                name for name, c in rows.items()
                if np.array_equal(rows_of(image), c.tables["layers.1.engram"])
            ]  # fmt: skip
            outcomes.add(matches[0])
            parts = 1
        else:
            outcomes.add("none")
            parts = 0
        assert [len(store.parts) for store in again.stores] == [0, parts]
        if what != "delete" and stop % 4 == 0:
            put(again, new)  # and it can be done again
            assert np.array_equal(rows_of(again.image(NAME)), new.tables["layers.1.engram"])
    assert outcomes == {"stage": {"none", "new"}, "replace": {"old", "new"}}.get(
        what, {"old", "none"}
    )


def test_a_power_cut_anywhere_in_a_wipe_leaves_no_row_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is whole, or the next start says that it is not wiped and finishes it."""
    monkeypatch.setattr(MemoryDevice, "discard", lambda *_: False)  # or it would do the wipe's work
    made = checkpoints.engram(tmp_path / "c", layers=(1,), rows=15 * 600, seed=1)
    found = [MemoryDevice(bytes(10 * MIB), f"memory{i}") for i in range(2)]
    for device in found:
        write_empty(device)
    stores = StoreSet([Store._open(device) for device in found])
    put(stores, made)
    held = [share.extents for share in stores.image(NAME).shares]
    start = [bytes(device.medium) for device in found]
    log: list[tuple] = []
    for number, device in enumerate(found):
        device.log = _Tagged(log, number)
    stores.delete(NAME, wipe=True)
    rng = random.Random(5)
    outcomes = set()
    for stop in range(len(log) + 1):
        logs = [[e for n, e in log[:stop] if n == number] for number in range(2)]
        media = [after_power_cut(start[i], logs[i], len(logs[i]), rng) for i in range(2)]
        again = _memory_set(media)
        again.reclaim()
        image = again.find(NAME)
        owed = again.wipes(NAME)
        if image is not None:
            assert walker.verify(again, image, full=True, sample=0).ok
            again.delete(NAME, wipe=True)
        elif owed:
            notes = again.wipe_notes()
            assert f"run: tierd images delete {NAME} --wipe" in notes[0]
            assert len(notes) == len(owed)
            again.finish_wipes(NAME)
        outcomes.add("whole" if image is not None else len(owed))
        assert again.wipes() == []
        for store, extents in zip(again.stores, held, strict=True):
            assert store.free_pages == store.capacity_pages
            for low, high in map(occupied, extents):
                assert not any(store.device.medium[low:high]), f"stop {stop}"
    assert outcomes == {"whole", 2, 1, 0}, "both devices owe it, one still does, none does"


def test_a_wipe_waits_for_its_devices_or_is_given_up(tmp_path: Path, devices, made) -> None:
    with opened(devices) as stores:
        put(stores, made)
        home, image = stores.stores[0], stores.image(NAME)
        home.delete_image(NAME, wipe=True)
        assert image.shares[1].store.parts, "as if the process had been killed here"
    with StoreSet.open(devices[:1]) as alone:
        with pytest.raises(ImageIncompleteError, match=r"is not there; .* without --wipe"):
            alone.finish_wipes(NAME)
        assert alone.wipes(NAME)
    with opened(devices) as stores:
        assert len(stores.wipes(NAME)) == len(image.shares)
        put(stores, made)  # in other places
        assert walker.verify(stores, NAME, full=True).ok
        size = stores.finish_wipes(NAME, overwrite=False)
        assert size == sum(end - low for s in image.shares for low, end in map(occupied, s.extents))
        assert walker.verify(stores, NAME, full=True).ok


class _Tagged(list):
    """One device's log inside the common one."""

    def __init__(self, log: list[tuple], number: int) -> None:
        self._log, self._number = log, number

    def append(self, entry: tuple) -> None:
        self._log.append((self._number, entry))


def test_a_member_that_went_back_gets_its_part_again(devices: list[Path], made) -> None:
    """Its newest root is damaged, the one before does not know the part; the home does."""
    with opened(devices[:2]) as stores:
        put(stores, made)
        slot = stores.stores[1]._root.slot
    with devices[1].open("r+b") as file:
        file.seek((0, 64 << 10)[slot])
        file.write(bytes(4096))
    with opened(devices[:2]) as stores:
        assert any("reserved its part" in note for note in stores.notes)
        assert stores.image(NAME).fault == ""
        assert walker.verify(stores, NAME, full=True).ok


def test_version_one_is_read(devices: list[Path]) -> None:
    """A table as version 1 wrote it: no members, parts without a name."""
    image = {
        "info": checkpoints_info(),
        "state": "complete",
        "devices": ["u"],
        "extents": [[0, 10, 512]],
    }
    from tierd.io import extent_table  # noqa: PLC0415

    stored = extent_table._image(image)
    assert isinstance(stored, StoredImage)
    assert (stored.members, stored.info.page_version) == ((), 1)
    part = extent_table._part(
        {"image_id": "0a", "generation": 2, "home": "h", "extents": [[0, 1, 512]]}
    )
    assert part.name == ""


def checkpoints_info() -> dict[str, object]:
    return {
        "image_id": "000000000000000a",
        "generation": 1,
        "model": "m",
        "table": {
            "name": "t", "kind": "tensor", "layer": 0, "rows": 150, "dim": 264, "row_bytes": 264,
            "row_format": "raw", "group": "t", "tensors": ["t"], "scalar_scale": None,
        },
        "fingerprint": "f",
        "digest": "d",
        "digest_kind": "none",
        "rows_per_page": 15,
        "pages": 10,
        "staged_at": 0.0,
    }  # fmt: skip
