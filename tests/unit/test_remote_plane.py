"""Peers' tiers in the data plane: replaced tables, odd offers, numbers that are used up."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit import remote_rig as rig
from tierd.config import load
from tierd.daemon import remotes
from tierd.daemon.plane import DataPlane
from tierd.daemon.remote_tiers import NO_NUMBER, strange
from tierd.io import _core
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tierd.types import ImageInfo

PEER, OTHER = "https://node2:9468", "https://node3:9468"
FIRST = "v41/layers.1.engram"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from rig.staged_device(tmp_path_factory.mktemp("plane"))


@pytest.fixture
def there(staged: Path, tmp_path: Path) -> Path:
    return rig.copy_of(staged, tmp_path, "there.img")


@pytest.fixture
def here(staged: Path, tmp_path: Path) -> Path:
    return rig.copy_of(staged, tmp_path, "here.img")


@pytest.fixture
def offered(staged: Path) -> ImageInfo:
    with StoreSet.open([staged], write=False) as stores:
        return next(image.info for image in stores.images if image.name == FIRST)


def opened(device: Path) -> DataPlane:
    given = {
        "devices.paths": [str(device)],
        "remote.peers": [PEER, OTHER],
        "remote.token_file": "/t",
    }
    return DataPlane.open(load(environ={}, overrides=given).settings)


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[DataPlane]:
    """A plane whose device is empty."""
    plane = opened(rig.empty_device(tmp_path))
    yield plane
    plane.close()


def free_numbers(plane: DataPlane) -> int:
    """How many more places the first pump takes."""
    (pump,) = plane.pumps
    taken = []
    try:
        while True:
            taken.append(pump.add_remote())
    except ValueError:
        for number in taken:
            pump.remove_device(number)
    return len(taken)


# --- tables that were replaced --------------------------------------------------------------------


async def test_engines_of_a_replaced_table_get_their_peer_back(
    there: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "BACKOFF_S", (0.005, 0.02))
    monkeypatch.setattr(remotes, "RENEW_S", 0.05)
    monkeypatch.setattr(remotes, "LOOK_S", 0.01)
    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        reading = rig.Reading(monkeypatch, here, rig.address(rest))
        plane = reading.plane
        await rest.until(reading.linked)
        before = plane.named(FIRST)
        engine = rig.Engine(plane, before)
        await asyncio.to_thread(plane.place, {FIRST: 7.0})
        assert plane.named(FIRST) is not before
        await rest.until(lambda: reading.peer.connects == 2 and reading.linked())
        (tier,) = before.remotes.values()
        assert tier.linked
        passed = plane.stats()[0]["passed_over"]
        assert engine.read([0, 1, 2]) == rig.OK
        assert plane.stats()[0]["passed_over"] == passed
        await asyncio.to_thread(reading.peer.stop, rig.PATIENCE_S)
        assert not tier.linked
        engine.close()
        await asyncio.to_thread(reading.close)


def test_a_tier_that_has_gone_meanwhile_is_not_linked(here: Path, offered: ImageInfo) -> None:
    """Another image may have its number by then."""
    plane = opened(here)
    try:
        (tier,) = plane.remote_tiers(PEER, [offered])[offered.image_id]
        number = tier.devices[0]
        plane.delete(FIRST)
        assert plane.pumps[0].add_remote() == number
        link = _core.QueueLink(64, rig.TIMEOUT_NS)
        link.open()
        places = [(0, offered.pages, 0, 0)]
        assert plane.link_peer([link], [(tier, places)])
        assert not tier.linked
        plane.unlink_peer(PEER, [link], "the end")
    finally:
        plane.close()


def test_trouble_of_a_link_is_told_of_its_tiers(here: Path, offered: ImageInfo) -> None:
    plane = opened(here)
    try:
        (tier,) = plane.remote_tiers(PEER, [offered])[offered.image_id]
        link = _core.QueueLink(64, rig.TIMEOUT_NS)
        link.open()
        assert plane.link_peer([link], [(tier, [(0, offered.pages, 0, 0)])])
        plane.note_trouble(PEER, "RLIMIT_MEMLOCK")
        plane.note_trouble(OTHER, "not this one")
        assert (tier.linked, tier.reason) == (True, "RLIMIT_MEMLOCK")
        plane.unlink_peer(PEER, [link], "the end")
        assert (tier.linked, tier.reason) == (False, "the end")
    finally:
        plane.close()


def test_an_image_whose_tables_are_being_made_is_no_fault(here: Path) -> None:
    plane = opened(here)
    try:
        plane.named(FIRST).remotes.clear()  # as a look between the two sees it
        assert plane.read_from(PEER) == []
        assert plane.remote_wanted(PEER)  # for the other one
    finally:
        plane.close()


# --- what peers offer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "table"),
    [
        ({"image_id": 1 << 64}, {}),
        ({"generation": 1 << 32}, {}),
        ({"generation": -1}, {}),
        ({"generation": True}, {}),
        ({"pages": 1 << 50}, {}),
        ({"pages": 1 << 50}, {"rows": 15 << 50}),
        ({"pages": 0}, {"rows": 0}),
        ({"pages": 3}, {}),
        ({"page_version": 99}, {}),
        ({"model": 7}, {}),
        ({"model": "a\nb"}, {}),
        ({"digest": "x" * 10_000}, {}),
        ({}, {"row_bytes": 0}),
        ({}, {"row_bytes": 1 << 40}),
        ({}, {"row_bytes": "264"}),
        ({}, {"rows": 1e300}),
        ({}, {"layer": 1 << 40}),
    ],
)
def test_what_is_no_image_is_not_taken(
    offered: ImageInfo, image: dict[str, Any], table: dict[str, Any]
) -> None:
    assert not strange(offered)
    changed = dataclasses.replace(offered.table, **table)
    assert strange(dataclasses.replace(offered, table=changed, **image))


def test_an_image_that_a_pump_refuses_leaves_no_numbers_behind(
    bare: DataPlane, offered: ImageInfo
) -> None:
    free = free_numbers(bare)
    odd = dataclasses.replace(offered, pages=1)  # fewer than its rows take
    assert bare.remote_tiers(PEER, [odd]) == {}
    assert not bare.images
    assert free_numbers(bare) == free


def test_an_adopted_image_makes_way_for_what_its_peer_has_now(
    bare: DataPlane, offered: ImageInfo
) -> None:
    first = dataclasses.replace(offered, generation=7)
    for now in (
        first,
        dataclasses.replace(first, generation=2),
        dataclasses.replace(first, generation=2, digest="0" * 64),
    ):
        assert list(bare.remote_tiers(PEER, [now])) == [offered.image_id]
        assert bare.images[offered.image_id].info == now
    link = _core.QueueLink(64, rig.TIMEOUT_NS)
    link.open()
    (tier,) = bare.remote_tiers(PEER, [now])[offered.image_id]
    assert bare.link_peer([link], [(tier, [(0, offered.pages, 0, 0)])])
    assert bare.remote_tiers(OTHER, [first]) == {}  # it is read
    bare.unlink_peer(PEER, [link], "the end")


def test_numbers_that_are_used_up_leave_tables_to_their_devices(
    here: Path, offered: ImageInfo, bare: DataPlane
) -> None:
    for plane in (bare, opened(here)):
        try:
            (pump,) = plane.pumps
            taken = [pump.add_remote() for _ in range(free_numbers(plane) - 1)]
            if plane is bare:
                assert plane.remote_tiers(PEER, [offered]) == {}
                assert not plane.images
            else:
                plane.place({FIRST: 7.0})  # a new table, which needs two
                engine = rig.Engine(plane, plane.named(FIRST))
                assert engine.read([0]) == rig.OK
                engine.close()
                assert OTHER in plane.named(FIRST).remotes
                plane.remote_tiers(OTHER, [offered])
                tier = plane.named(FIRST).remotes[OTHER]
                assert (tier.devices, tier.reason) == ([], NO_NUMBER)
            for number in taken:
                pump.remove_device(number)
        finally:
            plane.close()
