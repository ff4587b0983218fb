"""What feeds the controller, against clients and windows files that are nonsense."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.attach_world import World
from tests.daemons import engram_node
from tierd.api.controller import answer
from tierd.daemon import steering
from tierd.io import _core
from tierd.io._core import protocol
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PATIENCE_S = 10.0
WINDOWS = ProbedWindows(
    gpu="", engine="", model="", versions={}, date="2026-11-30",
    step_s={8: 0.002, 64: 0.02}, layers={1: {8: 1e-6}, 14: {8: 1e-4}},
).to_json()  # fmt: skip
# Words of eight bytes that somebody who means harm would try first.
EXTREMES = (0, 1, 33, 34, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engram_node(tmp_path_factory.mktemp("steering"), rows=100).device


def world_of(device: Path, directory: Path, windows: str) -> World:
    file = directory / "windows.json"
    file.write_text(windows)
    steers = {"controller.windows": str(file), "controller.interval_ms": 50}
    return World(device, directory, **steers)


@pytest.fixture
async def world(device: Path, tmp_path: Path) -> AsyncIterator[World]:
    made = world_of(device, tmp_path, json.dumps(WINDOWS))
    yield made
    await made.close()


def make_channel() -> Any:
    rings = [(8, 16, number, protocol.RING_FLAG_GUARDED) for number in range(2)]
    return _core.Channel(rank=0, world=1, client_id=bytes(16), rings=rings)


def cache(ways: dict[int, int]) -> dict[str, Any]:
    return {"sets": 8, "row_bytes": 264, "ways": ways}


@pytest.mark.parametrize(
    ("caches", "word"),
    [
        ([cache({-5: 3})], "greater than or equal to 0"),
        ([cache({64: 3})], "less than 64"),
        ([cache({0: 3}), cache({0: 4, 1: 1})], "ring 0 is in two caches"),
    ],
)
async def test_caches_of_rings_that_cannot_be_are_refused(
    world: World, caches: list[dict[str, Any]], word: str
) -> None:
    channel = make_channel()
    refused = await world.attach(channel, caches)
    assert (refused["ok"], refused["error"]) == (False, "AttachError")
    assert word in refused["message"]
    assert (await world.attach(channel, [cache({1: 3}), cache({})]))["ok"]
    await world.steering.look()
    assert world.server.faults == 0


@pytest.mark.parametrize("ways", [{0: 16, 1: 16}, {0: 32, 1: 32}, {1: 0}])
async def test_nonsense_in_a_channel_harms_nobody(world: World, ways: dict[int, int]) -> None:
    rng = np.random.default_rng(7)
    channel, honest = make_channel(), make_channel()
    assert (await world.attach(channel, [cache(ways)]))["ok"]
    assert (await world.attach(honest, [cache({0: 16, 1: 16})]))["ok"]
    bad, good = world.server.clients.values()
    await world.steering.look()
    for turn in range(60):
        for ring in bad.view.rings:
            stats = channel.buffer()[ring.stats : ring.stats + protocol.STATS_BYTES]
            if turn % 2:
                stats[:] = rng.integers(0, 256, stats.size, dtype=np.uint8)
            else:
                stats.view(np.uint64)[:] = rng.choice(np.array(EXTREMES, np.uint64), 16)
            head = channel.buffer()[ring.samples : ring.samples + protocol.SAMPLE_HEADER_BYTES]
            head.view(np.uint64)[:2] = rng.choice(np.array(EXTREMES, np.uint64), 2)
            size = 8 * protocol.SAMPLE_CAPACITY
            rows = channel.buffer()[ring.samples + head.size :][:size]
            rows[:] = rng.integers(0, 256, size, dtype=np.uint8)
            quota = ring.control + protocol.OFFSET_QUOTA
            channel.buffer()[quota : quota + 4] = rng.integers(0, 256, 4, dtype=np.uint8)
        if turn % 20 == 7:
            await world.steering.freeze("a test")
        if turn % 20 == 13:
            await world.steering.thaw()
            await world.steering.undo()
            await world.steering.thaw()
        await world.steering.look()
        shown = answer(world.steering)
        assert json.loads(shown.model_dump_json())
    assert world.steering.faults == 0
    # The other client is asked for nothing that its own numbers do not say.
    assert [good.view.stats(ring)["lookups"] for ring in (0, 1)] == [0, 0]
    assert all(one.caches[0].state.ways for one in world.steering.clients.values())


async def test_a_moved_split_outlives_the_daemon(world: World) -> None:
    """The next daemon begins with what is in force, not with what the engine said when it began."""
    channel = make_channel()
    first, second = channel.buffer(), (5, 27)
    entry = np.dtype([("at", "<u8", 6), ("words", "<u4", 4)])
    rings = first[protocol.OFFSET_RINGS :][: 2 * protocol.RING_ENTRY_BYTES]
    for ring, ways in enumerate(second):
        at = int(
            rings[ring * protocol.RING_ENTRY_BYTES :][: entry.itemsize].view(entry)["at"][0, 4]
        )
        first[at : at + protocol.STATS_BYTES].view(np.uint64)[12] = 1 + ways
    assert (await world.attach(channel, [cache({0: 16, 1: 16})]))["ok"]
    await world.steering.look()
    ((view,),) = (one.caches for one in world.steering.clients.values())
    assert view.follows
    assert dict(zip(view.order, view.in_force, strict=True)) == {0: 5, 1: 27}
    assert view.state.ways == view.in_force
    wishes = [channel.control(ring)[protocol.OFFSET_QUOTA :][:4].view(np.uint32) for ring in (0, 1)]
    assert [int(one[0]) for one in wishes] == [0, 0]


async def test_a_client_that_goes_while_it_is_thought_about(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel()
    assert (await world.attach(channel, [cache({0: 16, 1: 16})]))["ok"]
    for ring in next(iter(world.server.clients.values())).view.rings:
        channel.buffer()[ring.stats :][: protocol.STATS_BYTES].view(np.uint64)[12] = 17
    loop, think = asyncio.get_running_loop(), world.steering._think

    def slowly(looks: Any, seconds: float) -> None:
        think(looks, seconds)
        asyncio.run_coroutine_threadsafe(world.gone(), loop).result(PATIENCE_S)
        for one in world.steering.clients.values():  # as if it had decided to move ways
            view = one.caches[0]
            object.__setattr__(view.state, "ways", (8, 24))

    with monkeypatch.context() as patched:
        patched.setattr(world.steering, "_think", slowly)
        await world.steering.look()
    await world.steering.undo()
    await world.steering.look()
    assert world.steering.clients == {}


async def test_a_fault_in_the_controller_ends_no_daemon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make_channel()
    assert (await world.attach(channel, [cache({0: 16, 1: 16})]))["ok"]
    monkeypatch.setattr(steering, "FAULT_REST_S", 0.01)
    task = asyncio.get_running_loop().create_task(world.steering.run())
    with monkeypatch.context() as patched:
        patched.setattr(world.steering, "_think", lambda *_: 1 // 0)
        while world.steering.faults < 2:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    while not world.steering.clients:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    assert world.steering.decisions[-1].action == "fault"
    assert "ZeroDivisionError" in world.steering.decisions[-1].reason


NONSENSE = {
    "no JSON": "{",
    "binary": "\x00\x01",
    "nested": "[" * 100_000,
    "a list": "[]",
    "a number without end": json.dumps(WINDOWS).replace("0.002", "1" + "0" * 400),
    "no window": json.dumps({**WINDOWS, "layers": {"1": {"8": {}}}}),
    "layers by name": json.dumps({**WINDOWS, "layers": {"first": {}}}),
    "steps in a list": json.dumps({**WINDOWS, "step_s": [1, 2]}),
}
ODD = {
    "not numbers": json.dumps(WINDOWS).replace("1e-06", "NaN"),
    "for ever": json.dumps(WINDOWS).replace("0.002", "Infinity"),
    "below zero": json.dumps(WINDOWS).replace("1e-06", "-5"),
    "no step": json.dumps({**WINDOWS, "step_s": {}}),
    "no batch": json.dumps({**WINDOWS, "layers": {"1": {}, "14": {}}}),
    "odd names": json.dumps({**WINDOWS, "gpu": [], "engine": {}, "model": 0}),
}


@pytest.mark.parametrize("name", [*NONSENSE, *ODD])
async def test_windows_that_are_nonsense_are_said_and_decide_nothing(
    name: str, device: Path, tmp_path: Path
) -> None:
    world = world_of(device, tmp_path, {**NONSENSE, **ODD}[name])
    if name in NONSENSE:
        assert "not a windows file of the probe" in world.steering.problem
    channel = make_channel()
    assert (await world.attach(channel, [cache({0: 16, 1: 16})]))["ok"]
    ring = next(iter(world.server.clients.values())).view.rings[0]
    steps = channel.buffer()[ring.stats :][: protocol.STATS_BYTES].view(np.uint64)
    for turn in range(3):
        steps[5] = 100 * turn
        await world.steering.look()
        assert json.loads(answer(world.steering).model_dump_json())["decisions"] == []
    await world.close()
