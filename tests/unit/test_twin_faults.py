"""What the CPU twin does about wrong rows, failed requests and servers that do not answer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.twin_rig import Engine, Image, Rig
from tierd.io import _core
from tierd.io._core import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

SOON = 5_000_000
PATIENT = 60_000_000_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Its file may be damaged. CRCs are checked on every page."""
    rig = Rig(
        tmp_path / "images", [(1500, 256, "e4m3_e8m0"), (400, 256, "e4m3_e8m0")], crc_sample=1
    )
    yield rig
    rig.close()


def damage(rig: Rig, image: Image, row: int) -> bytes:
    """Flip one bit of a row in the file and mend the page's CRC; returns the page as it was."""
    page_at = rig.offset_of(image, row) // 4096 * 4096
    before = os.pread(rig.fd, 4096, page_at)
    page = np.frombuffer(before, np.uint8).copy()
    page[rig.offset_of(image, row) % 4096 + 7] ^= 0x10
    page[4092:].view(np.uint32)[0] = _core.crc32c(page[:4092])
    os.pwrite(rig.fd, page.tobytes(), page_at)
    return before


def mend(rig: Rig, image: Image, row: int, page: bytes) -> None:
    os.pwrite(rig.fd, page, rig.offset_of(image, row) // 4096 * 4096)


def kick_often(engine: Engine, ids: NDArray[np.int64]) -> None:
    for _ in range(8):
        engine.tables[0].kick(ids)


def test_a_row_that_does_not_match_its_tag(rig: Rig) -> None:
    image = rig.images[0]
    with Engine(rig, [image], sets=8, quota=32) as engine:
        table = engine.tables[0]
        engine.check(0, np.arange(10))
        before = damage(rig, image, 100)
        for ids in (np.arange(95, 105), np.arange(100, 101)):  # both ways, twice each
            table.kick(ids)
            message = (
                f"request failed: row tag does not match, image {image.image_id:016x}, "
                f"generation 1, page {100 // 15}"
            )
            with pytest.raises(RuntimeError, match=message):
                engine.gather(0, ids)
            with pytest.raises(RuntimeError, match="row tag"):
                engine.gather(0, ids)
        assert table.stats()["tag_errors"] == table.stats()["failed"] == 4
        assert engine.cache.held(0) == 10  # none of the failed requests' rows is left
        engine.check(0, np.arange(10))
        engine.check(0, np.arange(300, 320))
        mend(rig, image, 100, before)
        engine.check(0, np.arange(95, 105))


def test_a_foreign_page_fails_its_request_alone(rig: Rig) -> None:
    image = rig.images[0]
    with Engine(rig, [image], sets=8, quota=32, rows_max=4) as engine:
        table = engine.tables[0]
        other = os.pread(rig.fd, 4096, rig.offset_of(image, 600) // 4096 * 4096)
        at = rig.offset_of(image, 150) // 4096 * 4096
        mine = os.pread(rig.fd, 4096, at)
        os.pwrite(rig.fd, other, at)
        # Three requests of four rows; the one in the middle meets the misplaced page.
        ids = np.array([0, 1, 2, 3, 20, 21, 150, 151, 40, 41, 42, 43])
        table.kick(ids)
        with pytest.raises(RuntimeError, match=r"failed: wrong_page, image \w{16}, .*page 1$"):
            engine.gather(0, ids)
        assert (table.stats()["failed"], table.stats()["tag_errors"]) == (1, 0)
        assert engine.cache.held(0) == 8
        good = np.concatenate([ids[:4], ids[8:]])
        hits = table.stats()["hits"]
        engine.check(0, good)
        assert table.stats()["hits"] - hits == 8
        os.pwrite(rig.fd, mine, at)
        engine.check(0, ids)


def test_a_corrupt_page_that_hits_elsewhere(rig: Rig) -> None:
    """A second kick that hits on a claim whose request then fails must not serve the slot."""
    image = rig.images[0]
    with Engine(rig, [image], sets=8, quota=32) as engine:
        before = damage(rig, image, 30)
        engine.tables[0].kick(np.array([30, 31]))
        engine.tables[0].kick(np.array([31, 30, 5]))
        with pytest.raises(RuntimeError, match="row tag"):
            engine.gather(0, np.array([31, 30, 5]))
        mend(rig, image, 30, before)
        engine.check(0, np.array([31, 30, 5]))
        engine.check(0, np.array([30, 31]))


def test_a_bypass_row_is_checked_too(rig: Rig) -> None:
    image = rig.images[0]
    with Engine(rig, [image], sets=1, quota=0) as engine:
        before = damage(rig, image, 77)
        with pytest.raises(RuntimeError, match="row tag"):
            engine.gather(0, np.array([1, 77]))
        engine.check(0, np.array([1, 78]))
        # Rows that bypass the cache belong to their kick: with another one, nobody wants them.
        engine.tables[0].kick(np.array([77]))
        engine.tables[0].kick(np.array([2]))
        engine.check(0, np.array([2]))
        mend(rig, image, 77, before)
        engine.check(0, np.array([1, 77]))
        assert engine.tables[0].stats()["bypasses"] == 8


def test_a_crowded_kick_meets_a_failure(rig: Rig) -> None:
    """The ring is full, so the kick itself fills an earlier request, which fails."""
    image = rig.images[0]
    with Engine(rig, [image], sets=32, quota=32, rows_max=4, arena_pages=4) as engine:
        before = damage(rig, image, 10)
        with pytest.raises(RuntimeError, match="row tag"):
            engine.tables[0].kick(np.arange(200))
        mend(rig, image, 10, before)
        engine.check(0, np.arange(200))
        engine.tables[0].kick(np.arange(1000, 1200))
        engine.check(0, np.arange(1000, 1200))


def test_no_answer_in_time(rig: Rig) -> None:
    image = rig.images[0]
    with Engine(rig, [image], sets=8, quota=32, serve=False, timeout_ns=SOON) as engine:
        table = engine.tables[0]
        ids = np.arange(40)  # three requests
        table.kick(ids)
        message = f"request failed: timeout, image {image.image_id:016x}, generation 1, page 0"
        with pytest.raises(RuntimeError, match=message):
            engine.gather(0, ids)
        assert engine.cache.held(0) == 0
        assert table.stats()["failed"] == 3
        with pytest.raises(RuntimeError, match="timeout"):
            engine.gather(0, ids[:10])
        # The ring is full of unanswered requests now: the kick itself gives up.
        with pytest.raises(RuntimeError, match="timeout"):
            kick_often(engine, ids + 100)
        assert engine.cache.held(0) == 0
        engine.attach()
        table.set_timeout(PATIENT)
        for first in (0, 100, 500):
            engine.check(0, ids + first)
        doorbell = engine.control_word(0, p.OFFSET_DOORBELL)
        assert engine.control_word(0, p.OFFSET_RETIRED) == doorbell


def test_an_answer_too_late_touches_nothing(rig: Rig) -> None:
    """Slots of a request that was given up belong to others by the time it is answered."""
    with Engine(rig, rig.images, sets=1, quota=32, serve=False) as engine:
        engine.attached = rig.pump.add_channel(engine.channel.fd)
        rig.pump.add_ring(engine.attached, 1, rig.images[1].served)
        engine.tables[0].set_timeout(SOON)
        with pytest.raises(RuntimeError, match="timeout"):
            engine.gather(0, np.arange(20))
        others = np.arange(32)
        engine.check(1, others)  # every way is table 1's now
        rig.pump.add_ring(engine.attached, 0, rig.images[0].served)
        engine.tables[0].set_timeout(PATIENT)
        engine.tables[0].set_quota(0)
        engine.check(0, np.arange(50, 60))
        hits = engine.tables[1].stats()["hits"]
        engine.check(1, others)
        assert engine.tables[1].stats()["hits"] - hits == 32


def test_a_server_that_goes_away_and_comes_back(rig: Rig) -> None:
    image = rig.images[0]
    with Engine(rig, [image], sets=8, quota=32) as engine:
        ids = np.arange(30)
        for turn in range(5):
            engine.check(0, ids + 100 * turn)
            number = engine.attached
            assert number is not None
            engine.attached = None
            rig.pump.remove_channel(number)
            engine.tables[0].set_timeout(SOON)
            with pytest.raises(RuntimeError, match="timeout"):
                engine.gather(0, ids + 100 * turn + 50)
            engine.check(0, ids + 100 * turn)  # hits need no server
            engine.attach()
            engine.tables[0].set_timeout(PATIENT)
