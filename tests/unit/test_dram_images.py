"""Images in memory while what they come from hangs, goes away or is refused."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.attach_world import World
from tests.daemons import Node, engram_node
from tierd.config import load
from tierd.daemon import dram as rooms
from tierd.daemon import keeper
from tierd.daemon.dram import DramImages
from tierd.daemon.plane import DataPlane
from tierd.io import _core, shared_image
from tierd.io.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 20.0
FIRST, SECOND = "v41/layers.1.engram", "v41/layers.14.engram"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return engram_node(tmp_path, rows=300)


@pytest.fixture
def plane(node: Node) -> Iterator[DataPlane]:
    overrides = {
        "daemon.runtime_dir": str(node.directory),
        "devices.paths": [str(node.device)],
        "dram.images": ["v41/*"],
    }
    made = DataPlane.open(load(environ={}, overrides=overrides).settings)
    yield made
    made.close()


@pytest.fixture
def dram(plane: DataPlane) -> Iterator[DramImages]:
    made = DramImages(plane._settings.dram, plane)
    yield made
    made.stop()


def states(dram: DramImages) -> dict[str, str]:
    return {held.image.info.name: held.state for held in dram.listing()}


class Slow:
    """A device whose reads wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        read_into = Device.read_into

        def read(device: Device, *args: Any) -> Any:
            self.asked.set()
            assert self.answer.wait(PATIENCE_S)
            return read_into(device, *args)

        monkeypatch.setattr(Device, "read_into", read)


def test_a_device_that_hangs_does_not_keep_the_daemon_from_stopping(
    dram: DramImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "STOP_S", 0.05)
    slow = Slow(monkeypatch)
    dram.start()
    assert slow.asked.wait(PATIENCE_S)
    loader = dram._thread
    stopper = threading.Thread(target=dram.stop, daemon=True)
    stopper.start()
    stopper.join(PATIENCE_S / 2)
    hung = stopper.is_alive()
    slow.answer.set()  # and what was read last lands in memory that is there still
    assert loader is not None
    loader.join(PATIENCE_S)
    assert not hung
    assert not loader.is_alive()
    assert states(dram) == {}


def test_an_image_that_is_deleted_while_it_loads_is_no_fault(
    dram: DramImages, plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud: list[str] = []
    monkeypatch.setattr(rooms.log, "error", lambda event, **_: loud.append(event))
    slow = Slow(monkeypatch)
    looker = threading.Thread(target=dram.look)
    looker.start()
    assert slow.asked.wait(PATIENCE_S)
    (loading,) = (held.image for held in dram.listing())
    other = SECOND if loading.info.name == FIRST else FIRST
    with monkeypatch.context() as patched:  # the delete reads roots, which do not hang here
        patched.setattr(plane.store_set, "delete", lambda *_, **__: None)
        patched.setattr(plane, "refresh", lambda: None)
        plane.delete(loading.info.name)
    slow.answer.set()
    looker.join(PATIENCE_S)
    assert states(dram)[other] == "ready"
    dram.look()
    assert states(dram) == {other: "ready"}
    assert dram.take(loading) is None
    assert loud == []


def test_engines_do_not_wait_for_memory_that_is_given_up(
    dram: DramImages, plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    dram.look()
    assert states(dram) == {FIRST: "ready", SECOND: "ready"}
    close = rooms.Held.close
    free: list[bool] = []
    (second,) = (held for held in dram.listing() if held.image.info.name == SECOND)

    def closes(held: rooms.Held) -> None:
        free.append(dram._lock.acquire(blocking=False) and dram._lock.release() is None)
        close(held)

    def fail(*_: object) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(rooms.Held, "close", closes)
    plane.delete(FIRST)
    dram.look()
    dram._held.clear()  # and loaded anew, which fails
    close(second)
    monkeypatch.setattr(shared_image.SharedImage, "load", fail)
    dram.look()
    assert states(dram) == {SECOND: "failed"}
    dram.stop()
    assert free == [True] * 3


@pytest.mark.parametrize("how", ["little", "memfd", "seal"])
def test_memory_that_is_refused_leaves_images_to_their_devices(
    dram: DramImages, plane: DataPlane, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(24, os.strerror(24))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        if how == "little":
            patched.setattr(shared_image, "memory_available", lambda: 0)
            patched.setattr(shared_image, "HUGE_BYTES", 1 << 62)  # there are no such pages
        elif how == "memfd":
            patched.setattr(os, "memfd_create", refuse)
        else:
            patched.setattr(shared_image.fcntl, "fcntl", refuse)
        dram.look()
    assert set(states(dram).values()) == {"failed"}
    for held in dram.listing():
        assert held.reason
        assert dram.take(held.image) is None
    assert len(os.listdir("/proc/self/fd")) == before
    plane.delete(FIRST)
    dram.look()
    assert states(dram) == {SECOND: "failed"}


async def test_two_hundred_engines_leave_no_descriptor_and_no_memory_behind(
    node: Node, tmp_path: Path
) -> None:
    def held() -> list[str]:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sorted(os.readlink(link) for link in links if os.path.lexists(link))

    def kinds(links: list[str]) -> list[str]:
        return sorted(link.split(":[")[0] for link in links)

    rings = [(8, 16, number, _core.protocol.RING_FLAG_GPU) for number in range(2)]
    world = World(node.device, tmp_path, **{"dram.images": ["v41/*"]})
    world.server.dram.look()
    before: list[str] = []
    for number in range(210):
        if number == 10:  # what is made once is there
            assert world.catalog.flush(PATIENCE_S)  # which opens its file in its own time
            before = held()
            # Of each image the file, and what Python's mmap keeps of it.
            assert sum("tierd-image" in link for link in before) == 4
        channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=rings)
        if number % 4:
            answer = await world.attach(channel, [])
            assert [one["image"] for one in answer["dram"]] == [0, 1]
        else:  # gone before the answer
            await world.attach(channel, [], hear=False)
        del channel
        await world.gone()
        await world.settled()
    assert kinds(held()) == kinds(before)
    assert world.server.faults == 0
    world.server.dram.stop()
    assert not any("tierd-image" in link for link in held())
    await world.close()
