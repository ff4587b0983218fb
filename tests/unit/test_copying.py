"""Copies of images on other devices: the same pages, and no identity for two contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import checkpoints
from tests.unit.test_stripes import NAME, opened, put, rows_of
from tierd.errors import DeviceTooSmallError, ImageError, VerifyError
from tierd.io import walker
from tierd.io.copying import copy_image, is_copy
from tierd.io.layout import UNIT_PAGES
from tierd.io.store import Store

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
ROWS = 15 * (2 * UNIT_PAGES + 30)


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"disk{i}" for i in range(4)]
    for path in paths:
        Store.format(path, size=16 * MIB).close()
    return paths


@pytest.fixture
def made(tmp_path: Path) -> checkpoints.TinyCheckpoint:
    return checkpoints.engram(tmp_path / "c", layers=(1,), rows=ROWS)


def test_a_copy_holds_the_same_pages_in_another_layout(disks: list[Path], made) -> None:
    with opened(disks[:1]) as source:
        put(source, made)
    with opened(disks[:1], write=False) as source, opened(disks[1:]) as target:
        result = copy_image(source, NAME, target)
        assert result.written_bytes == result.info.pages * 4096
        one, two = source.image(NAME), target.image(NAME)
        assert is_copy(one, two)
        assert (len(one.shares), len(two.shares)) == (1, 3)
        assert np.array_equal(rows_of(two), made.tables["layers.1.engram"])
        assert walker.verify(target, NAME, full=True).ok
        before = target.stores[0].sequence
        assert copy_image(source, NAME, target).written_bytes == 0
        assert target.stores[0].sequence == before


def test_two_homes_never_give_one_identity_to_different_rows(
    disks: list[Path], made, tmp_path: Path
) -> None:
    one = checkpoints.engram(tmp_path / "one", layers=(1,), rows=ROWS, seed=3)
    two = checkpoints.engram(tmp_path / "two", layers=(1,), rows=ROWS, seed=4)
    with opened(disks[:1]) as source, opened(disks[1:2]) as target:
        put(source, made)
        copy_image(source, NAME, target)
        seen = {source.image(NAME).stored.identity}
        for stores, checkpoint in ((source, one), (target, two)):
            put(stores, checkpoint)
            assert stores.image(NAME).stored.identity not in seen
            seen.add(stores.image(NAME).stored.identity)
        assert not is_copy(source.image(NAME), target.image(NAME))
        target.delete(NAME)
        copy_image(source, NAME, target)
        assert is_copy(source.image(NAME), target.image(NAME))


def test_a_bad_page_is_not_copied(disks: list[Path], made) -> None:
    with opened(disks[:1]) as source:
        put(source, made)
        place = source.image(NAME).stored.extents[0].device_page * 4096
    with disks[0].open("r+b") as file:
        file.seek(place + 700 * 4096 + 5)
        file.write(b"\xaa\x55")
    with opened(disks[:1], write=False) as source, opened(disks[1:]) as target:
        with pytest.raises(VerifyError, match=f"page 700 on {disks[0]} is bad .its checksum"):
            copy_image(source, NAME, target)
        assert target.images == []
        assert all(store.free_pages == store.capacity_pages for store in target.stores)


def test_where_a_copy_cannot_go(disks: list[Path], made, tmp_path: Path) -> None:
    small = tmp_path / "small"
    Store.format(small, size=4 * MIB).close()
    with opened(disks[:2]) as source:
        put(source, made)
    with opened(disks[:2], write=False) as source:
        with opened(disks[1:3]) as target, pytest.raises(ImageError, match="on other devices only"):
            copy_image(source, NAME, target)
        with opened([small]) as target, pytest.raises(DeviceTooSmallError):
            copy_image(source, NAME, target)
