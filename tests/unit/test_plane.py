"""The data plane's book while images come, change and go, and while a step of that fails."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Any

import pytest

from tests import checkpoints
from tests.daemons import engram_node
from tests.patched import replaced
from tierd.config import load
from tierd.daemon.plane import DataPlane
from tierd.errors import AttachError, DeviceBusyError, DeviceError, ImageError
from tierd.io import _core
from tierd.io.checkpoint import Checkpoint
from tierd.io.copying import copy_image
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.store_set import StoreSet
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "v41"
ONE, OTHER = "v41/layers.1.engram", "v41/layers.14.engram"


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """A device with two tables, and another with a copy of the first."""
    home = engram_node(tmp_path, rows=100).device
    copy = tmp_path / "copy.img"
    Store.format(copy, size=16 << 20).close()
    with StoreSet.open([home], write=False) as source, StoreSet.open([copy]) as target:
        copy_image(source, ONE, target)
    return [home, copy]


@pytest.fixture
def plane(disks: list[Path], tmp_path: Path) -> Iterator[DataPlane]:
    overrides = {"daemon.runtime_dir": str(tmp_path), "devices.paths": list(map(str, disks))}
    made = DataPlane.open(load(environ={}, overrides=overrides).settings)
    yield made
    made.close()
    assert not made.stuck


def stage_anew(plane: DataPlane, directory: Path, layers: tuple[int, ...]) -> None:
    made = checkpoints.engram(directory, layers=layers, rows=100, seed=7)
    with Checkpoint.open(made.path) as source:
        stage(plane.store_set, source, find_tables(source), model=MODEL)


def make_channel() -> Any:
    return _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(8, 16, 0, 0)])


def leases() -> int:
    """Descriptors of this process that are open."""
    return len(os.listdir("/proc/self/fd"))


class OutOfDescriptors:
    """For as long as it is entered, this process gets no descriptor but the first few."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [os.dup(0) for _ in range(self.left + 1)]
        for fd in free:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self.before)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_images_that_cannot_be_leased_leave_all_as_it_was(
    plane: DataPlane, tmp_path: Path, left: int
) -> None:
    before, old = dict(plane.images), plane.named(OTHER)
    stage_anew(plane, tmp_path / "anew", (2, 14, 20))
    open_before = leases()
    with OutOfDescriptors(left), pytest.raises(DeviceError, match="Too many open files"):
        plane.refresh()
    assert plane.images == before
    assert leases() == open_before
    channel = make_channel()
    attached = plane.attach(channel.fd, [old])  # what was replaced is served on meanwhile
    plane.refresh()
    assert plane.named(OTHER) is not old
    assert old.leases
    assert all(len(image.tables) == len(plane.pumps) for image in plane.images.values())
    assert plane.detach(attached)
    assert not old.leases
    attached = plane.attach(channel.fd, [plane.named("v41/layers.20.engram")])
    assert plane.detach(attached)


def test_a_pump_that_does_not_take_a_table_leaves_all_as_it_was(
    plane: DataPlane, tmp_path: Path
) -> None:
    before = dict(plane.images)
    stage_anew(plane, tmp_path / "anew", (2, 14))
    open_before = leases()
    add = DataPlane._add_table
    asked: list[Any] = []

    def refuse(self: DataPlane, number: int, image: Any) -> None:
        asked.append(image)
        if len(asked) == 2:
            raise ValueError("extents: none given")
        add(self, number, image)

    with replaced(DataPlane, "_add_table", refuse), pytest.raises(ValueError, match="extents"):
        plane.refresh()
    assert plane.images == before
    assert leases() == open_before
    plane.refresh()
    assert len(plane.images) == len(before) + 1


def test_an_attach_that_fails_by_any_fault_is_undone(plane: DataPlane) -> None:
    image, channel = plane.named(ONE), make_channel()
    with replaced(image, "tables", []), pytest.raises(IndexError):
        plane.attach(channel.fd, [image])
    assert image.clients == 0
    assert plane._loads == [0] * len(plane.pumps)
    two = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(8, 16, 0, 0)] * 2)
    with pytest.raises(AttachError):
        plane.attach(two.fd, [image] * 3)
    assert image.clients == 0
    plane.delete(ONE)  # no ring of a failed attach keeps its tables


@pytest.mark.parametrize("wipe", [False, True])
def test_an_image_that_is_being_deleted_is_not_served_again(plane: DataPlane, wipe: bool) -> None:
    delete = plane.store_set.delete
    steps: list[str] = []

    def deleted_beside_others(tier: Any, *, wipe: bool) -> Any:
        # As a PATCH of another table's window does, before each device.
        plane.place({OTHER: 100.0 + len(steps)})
        steps.append(tier.home.device.path)
        with pytest.raises(ImageError, match="there is no image"):
            plane.named(ONE)
        return delete(tier, wipe=wipe)

    assert len(plane.named(ONE).copies) == 1
    with replaced(plane.store_set, "delete", deleted_beside_others):
        plane.delete(ONE, wipe=wipe)
    assert sorted(steps) == sorted(store.device.path for store in plane.stores)
    assert [image.info.name for image in plane.images.values()] == [OTHER]
    assert not any(store.find(ONE) for store in plane.stores)
    assert not any(store.wipes for store in plane.stores)


def test_a_deletion_that_is_refused_is_served_again(plane: DataPlane) -> None:
    image = plane.named(ONE)
    held = image.store.reader_fd([image.striped.stored])
    with pytest.raises(DeviceBusyError):
        plane.delete(ONE)
    assert plane.named(ONE).clients == 0
    os.close(held)
    plane.delete(ONE)
    assert [image.info.name for image in plane.images.values()] == [OTHER]
