"""The walker: every kind of damage is found, named and placed; whole images pass."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import checkpoints
from tierd.errors import DeviceError, ImageError, VerifyError
from tierd.io import _core, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.device import PAGE_BYTES, Device
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
NAME = "m/layers.1.engram"
ROWS = 15 * 1300 + 4  # two blocks, the last page with four rows


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A checkpoint, and the bytes of a device that it was staged on."""
    folder = tmp_path_factory.mktemp("walker")
    made = checkpoints.engram(folder / "c", layers=(1,), rows=ROWS)
    with Store.format(folder / "device", size=16 * MIB) as store:
        with Checkpoint.open(made.path) as checkpoint:
            stage(store, checkpoint, find_tables(checkpoint), model="m")
        image = store.image(NAME)
    return made, (folder / "device").read_bytes(), image


class Disk:
    """A copy of the staged device that a test may damage."""

    def __init__(self, path: Path, staged) -> None:
        self.made, medium, self.image = staged
        self.path = path
        self.medium = bytearray(medium)
        self.start = self.image.extents[0].device_page * PAGE_BYTES

    def page(self, number: int) -> slice:
        return slice(self.start + number * PAGE_BYTES, self.start + (number + 1) * PAGE_BYTES)

    def flip(self, page: int, offset: int, mask: int = 1) -> None:
        self.medium[self.page(page).start + offset] ^= mask

    def seal(self, page: int) -> None:
        """Make the page's checksum right again."""
        data = self.medium[self.page(page)]
        crc = _core.crc32c(np.frombuffer(bytes(data[:-4]), np.uint8))
        self.medium[self.page(page)] = data[:-4] + struct.pack("<I", crc)

    def verify(self, *, compare: bool = False, **options) -> walker.VerifyReport:
        self.path.write_bytes(self.medium)
        with Store.open(self.path) as store, Checkpoint.open(self.made.path) as checkpoint:
            return walker.verify(store, NAME, checkpoint=checkpoint if compare else None, **options)


@pytest.fixture
def disk(tmp_path: Path, staged) -> Disk:
    return Disk(tmp_path / "device", staged)


# --- what is whole --------------------------------------------------------------------------------


def test_a_whole_image_passes_in_full(disk: Disk) -> None:
    calls: list[tuple[int, int]] = []
    report = disk.verify(
        compare=True, full=True, sample=50, progress=lambda *call: calls.append(call)
    )
    assert report.ok
    assert (report.full, report.digest_ok, report.pages_bad, report.rows_wrong) == (
        True,
        True,
        0,
        0,
    )
    assert (report.pages_checked, report.bytes_read) == (1301, 1301 * PAGE_BYTES)
    assert 40 <= report.rows_compared <= 52
    assert calls == [(1024 * PAGE_BYTES, 1301 * PAGE_BYTES), (1301 * PAGE_BYTES, 1301 * PAGE_BYTES)]
    report.require_ok("device")
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_a_sample_always_holds_the_first_and_the_last_row(disk: Disk) -> None:
    report = disk.verify(compare=True, sample=0)
    assert (report.rows_compared, report.pages_checked, report.digest_ok) == (2, 2, None)
    assert not report.full
    disk.flip(1300, 3 * 264)  # the last row
    assert disk.verify(sample=0).first_bad_page == 1300


def test_a_sample_is_drawn_again_by_its_seed(disk: Disk) -> None:
    one, two = (disk.verify(compare=True, seed=77) for _ in range(2))
    assert (one.rows_compared, one.pages_checked, one.seed) == (
        two.rows_compared, two.pages_checked, 77,
    )  # fmt: skip
    assert disk.verify().seed != disk.verify().seed


# --- damage ---------------------------------------------------------------------------------------

DAMAGE = [
    (0, 0, "its checksum is wrong"),  # a row's first byte
    (700, 15 * 264 - 1, "its checksum is wrong"),  # its last
    (1023, 15 * 264, "its checksum is wrong"),  # a tag
    (1024, 4060, "its checksum is wrong"),  # padding
    (5, 4064, "no page of tierd's there"),  # magic
    (5, 4068, "a page of another format version"),
    (5, 4070, "a wrong number of rows"),
    (5, 4072, "a page of another image"),
    (5, 4080, "another page of the image"),
    (5, 4088, "a page of another generation"),
    (1300, 4092, "its checksum is wrong"),  # the checksum itself
]


@pytest.mark.parametrize(("page", "offset", "words"), DAMAGE)
def test_a_flipped_byte_is_found_and_named(disk: Disk, page: int, offset: int, words: str) -> None:
    disk.flip(page, offset)
    report = disk.verify(full=True, sample=0)
    assert not report.ok
    assert (report.pages_bad, report.first_bad_page, report.first_fault) == (1, page, words)
    with pytest.raises(VerifyError, match=rf"1 of 1301 pages are bad, the first is page {page} "):
        report.require_ok("device")


def test_a_wrong_row_under_a_right_checksum_is_found_by_its_tag(disk: Disk) -> None:
    disk.flip(40, 100)
    disk.seal(40)
    report = disk.verify(full=True, sample=0)
    assert (report.first_bad_page, report.first_fault) == (40, "a row's tag is wrong")


def test_swapped_pages_are_both_found(disk: Disk) -> None:
    one, two = disk.medium[disk.page(3)], disk.medium[disk.page(9)]
    disk.medium[disk.page(3)], disk.medium[disk.page(9)] = two, one
    report = disk.verify(full=True, sample=0)
    assert (report.pages_bad, report.first_bad_page) == (2, 3)
    assert report.first_fault == "another page of the image"


def test_pages_that_were_forged_whole_are_found_by_the_digest(disk: Disk) -> None:
    page = 1299
    rows = disk.made.tables["layers.1.engram"][page * 15 : page * 15 + 15].copy()
    rows[:, 7] ^= 1
    forged = np.empty(PAGE_BYTES, np.uint8)
    info = disk.image.info
    _core.pack_pages(rows.reshape(-1), 264, page, info.image_id, info.generation, forged)
    disk.medium[disk.page(page)] = forged.tobytes()
    report = disk.verify(full=True, sample=0)
    assert (report.pages_bad, report.digest_ok, report.ok) == (0, False, False)
    with pytest.raises(VerifyError, match="the digest of all rows is not the one of the import"):
        report.require_ok("device")
    compared = disk.verify(compare=True, sample=2000, seed=4)  # the checkpoint knows it, too
    assert compared.rows_wrong > 0
    assert compared.first_wrong_row // 15 == page
    with pytest.raises(VerifyError, match=r"\d of \d+ rows differ .* the first is row 194\d\d;"):
        compared.require_ok("device")


def test_a_range_that_was_zeroed_is_counted(disk: Disk) -> None:
    first, last = disk.page(1000), disk.page(1099)
    disk.medium[first.start : last.stop] = bytes(100 * PAGE_BYTES)
    report = disk.verify(full=True, sample=0)
    assert (report.pages_bad, report.first_bad_page) == (100, 1000)


def test_unreadable_pages_do_not_hide_their_neighbours(disk: Disk, monkeypatch) -> None:
    disk.flip(51, 0)
    bad = range(disk.page(50).start, disk.page(51).start)
    read_into = Device.read_into

    def failing(self, offset: int, buffer) -> None:
        if offset < bad.stop and offset + buffer.size > bad.start:
            raise DeviceError("device: read failed")
        read_into(self, offset, buffer)

    monkeypatch.setattr(Device, "read_into", failing)
    report = disk.verify(full=True, sample=0)
    assert (report.pages_bad, report.first_bad_page) == (2, 50)
    assert report.first_fault == "the device cannot read it"
    assert report.pages_checked == 1301


# --- what is not there, or another ----------------------------------------------------------------


def test_another_checkpoint_is_refused(disk: Disk, tmp_path: Path) -> None:
    disk.path.write_bytes(disk.medium)
    other = checkpoints.engram(tmp_path / "other", layers=(1,), rows=ROWS, seed=99)
    third = checkpoints.ple(tmp_path / "third")
    for made, words in [(other, "its fingerprint is another"), (third, "it has no layers.1.eng")]:
        with (
            Store.open(disk.path) as store,
            Checkpoint.open(made.path) as checkpoint,
            pytest.raises(ImageError, match=rf"{NAME} was not staged from .*: {words}"),
        ):
            walker.verify(store, NAME, checkpoint=checkpoint)


def test_an_unknown_image(disk: Disk) -> None:
    disk.path.write_bytes(disk.medium)
    with Store.open(disk.path) as store, pytest.raises(ImageError, match="near names: m/"):
        walker.verify(store, "m/layers.2.engram")


def test_while_it_is_walked_an_image_is_not_deleted(disk: Disk) -> None:
    disk.path.write_bytes(disk.medium)

    def delete(*_: object) -> None:
        with pytest.raises(DeviceError, match="attached"):
            store.delete_image(NAME)

    with Store.open(disk.path) as store:
        assert walker.verify(store, NAME, full=True, progress=delete).ok
        store.delete_image(NAME)


def test_a_reader_verifies_beside_the_daemon(disk: Disk) -> None:
    disk.path.write_bytes(disk.medium)
    with Store.open(disk.path), Store.open(disk.path, write=False) as reader:
        assert walker.verify(reader, NAME, full=True).ok
