"""The controller beside a real daemon: what it sees of a client, and what the operator may say."""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.daemons import Node, engram_node, running, tierd
from tierd.api import rest_client
from tierd.gpu.client import Client, list_images
from tierd.gpu.tables import TableOptions
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENGINE = "test 1"
PATIENCE_S = 30.0
WINDOWS = ProbedWindows(
    gpu="", engine=ENGINE, model="v41", versions={}, date="2026-11-30",
    step_s={8: 0.002}, layers={1: {8: 1e-6}, 14: {8: 1e-6}},
)  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return engram_node(tmp_path_factory.mktemp("controller"), rows=20_000)


def configured(
    node: Node, directory: Path, mode: str = "advise", **windows: Any
) -> tuple[str, str]:
    """A configuration that names a windows file; looks come often, so that tests need not wait."""
    file = directory / "windows.json"
    file.write_text(json.dumps({**WINDOWS.to_json(), **windows}))
    path = directory / "tierd.toml"
    path.write_text(f'[controller]\nmode = "{mode}"\ninterval_ms = 50\nwindows = "{file}"\n')
    return "--config", str(path)


def play(client: Client, steps: int) -> None:
    """Layer 1 reuses 6,000 rows, layer 14 all of its own: the first one's window is worth more."""
    rng = np.random.default_rng(0)
    out = np.empty((256, 256), np.uint16)
    for _ in range(steps):
        for name, hot in (("layers.1.engram", 6000), ("layers.14.engram", 20_000)):
            ids = rng.integers(0, hot, 256)
            client.table(name).kick(ids)
            client.table(name).gather(ids, out)


def awaited(node: Node, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The controller's state once it is good."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        state = rest_client.get(node.api_socket, "/v1/controller")
        if good(state):
            return state
        assert time.monotonic() < deadline, json.dumps(state)
        time.sleep(0.05)


def attached_client(node: Node, cache_rows: int = 8192) -> Client:
    images = list_images(str(node.engine_socket), wait_s=10)
    return Client.attach(
        node.engine_socket, images, engine=ENGINE, cache_rows=cache_rows, rows_max=4096,
        options=TableOptions(sample_rate=1 / 128),
    )  # fmt: skip


def test_what_is_seen_is_explained_and_the_operator_has_the_last_word(
    node: Node, tmp_path: Path
) -> None:
    with running(node, *configured(node, tmp_path)) as daemon:
        with attached_client(node) as client:
            awaited(node, lambda state: bool(state["clients"]))
            play(client, 200)
            state = awaited(node, lambda s: s["clients"] and s["clients"][0]["steps"] == 200)
            (seen,) = state["clients"]
            assert (seen["engine"], seen["problem"]) == (ENGINE, "")
            first, second = seen["tables"]
            assert first["lookups_per_step"] == pytest.approx(256, rel=0.02)
            # 4,096 rows of cache for 6,000 and for 20,000 that are used alike.
            assert first["predicted_hit_ratio"] == pytest.approx(first["hit_ratio"], abs=0.12)
            assert second["predicted_hit_ratio"] == pytest.approx(second["hit_ratio"], abs=0.12)
            assert (first["ways"], second["ways"]) == (16, 16)
            assert first["read_ms"] > 0
            assert first["window_ms"] == pytest.approx(0.001)
            (pump,) = state["devices"]
            assert pump["seen"] > 0
            assert pump["base_ms"] + pump["page_us"] > 0
            (cache,) = seen["caches"]
            assert cache["tables"] == ["layers.1.engram", "layers.14.engram"]
            assert cache["size"]
            assert cache["decision"].startswith(("hold: ", "move: "))

            curves = rest_client.get(node.api_socket, "/v1/curves")["curves"]
            assert {curve["table"] for curve in curves} == {
                "v41/layers.1.engram", "v41/layers.14.engram",
            }  # fmt: skip
            assert all(np.diff(curve["miss"]).max() <= 0 for curve in curves)
            windows = rest_client.get(node.api_socket, "/v1/windows")
            assert windows["layers"]["1"] == {"8": pytest.approx(0.001)}

            shown = tierd("explain", "--api-socket", node.api_socket).stdout
            assert "layers.14.engram" in shown
            assert "pump 0: reads take" in shown
            post = "POST"
            frozen = rest_client.change(
                node.api_socket, post, "/v1/controller/freeze", {"reason": "maintenance"}
            )
            assert frozen["frozen"] == "maintenance"
            play(client, 40)
            state = awaited(node, lambda s: s["clients"][0]["steps"] == 240)
            assert "frozen: maintenance" in state["clients"][0]["caches"][0]["decision"]
            assert rest_client.change(node.api_socket, post, "/v1/controller/thaw")["frozen"] == ""
            undone = rest_client.change(node.api_socket, post, "/v1/controller/undo?dry_run=true")
            assert "changes" in undone
            rest_client.change(node.api_socket, post, "/v1/controller/undo")
            events = rest_client.get(node.api_socket, "/v1/events?kind=controller")["events"]
            assert {"freeze", "thaw"} <= {event["details"]["action"] for event in events}
        awaited(node, lambda state: not state["clients"])
        assert daemon.stop() == 0


def skewed(client: Client, steps: range) -> None:
    """Layer 1 goes over 2,560 rows again and again, which 20 ways hold; layer 14 over all."""
    out = np.empty((64, 256), np.uint16)
    for step in steps:
        first = np.arange(64) + 64 * (step % 40)
        second = (np.arange(64) + 64 * step) % 20_000
        for name, ids in (("layers.1.engram", first), ("layers.14.engram", second)):
            client.table(name).kick(ids)
            client.table(name).gather(ids, out)


def test_the_split_follows_the_traffic_and_the_operator(node: Node, tmp_path: Path) -> None:
    # Layer 14's window hides every read, so ways are worth something at layer 1 alone.
    layers = {"1": {"8": {"window_s": 1e-6}}, "14": {"8": {"window_s": 10.0}}}
    configuration = configured(node, tmp_path, "steer", layers=layers)
    with running(node, *configuration), attached_client(node, 4096) as client:
        steps = itertools.count(0, 30)
        names = ("layers.1.engram", "layers.14.engram")

        def ways() -> list[int]:
            return [client.table(name).quota for name in names]

        def goes_on_until(good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            def turn(state: dict[str, Any]) -> bool:
                step = next(steps)
                skewed(client, range(step, step + 30))
                return bool(state["clients"]) and good(state["clients"][0]["caches"][0])

            return awaited(node, turn)

        assert ways() == [16, 16]
        goes_on_until(lambda cache: cache["follows"] and cache["ways"][0] > 16)
        assert ways()[0] > 16
        assert sum(ways()) == 32
        moved = rest_client.get(node.api_socket, "/v1/events?kind=controller")["events"][0]
        assert moved["details"]["action"] == "move", moved
        api = ("--api-socket", node.api_socket)
        would = tierd("controller", "undo", "--dry-run", *api).stdout
        assert "test 1 rank 0" in would
        assert "becomes" in would
        assert "splits are as before" in tierd("controller", "undo", *api).stdout
        goes_on_until(lambda cache: cache["ways"] == cache["advised_ways"])
        settled = ways()
        assert sum(settled) == 32
        skewed(client, range(200))
        assert ways() == settled  # undoing freezes
        assert "splits may move" in tierd("controller", "thaw", *api).stdout
        frozen = json.loads(tierd("controller", "freeze", "--json", *api).stdout)
        assert frozen["frozen"] == "by the operator"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"engine": "another 2"}, "measured for engine another 2, not test 1"),
        ({"model": "gemma"}, "measured for model gemma, not v41"),
        ({"layers": {"1": {"8": {"window_s": 0.001}}}}, "no window of layer 14"),
    ],
)
def test_windows_that_say_nothing_here_give_no_decisions(
    node: Node, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    with running(node, *configured(node, tmp_path, **changes)), attached_client(node) as client:
        play(client, 3)
        state = awaited(node, lambda s: s["clients"] and s["clients"][0]["steps"] >= 1)
        assert any(word in problem for problem in state["problems"])
        assert word in state["clients"][0]["caches"][0]["decision"]
        assert word in tierd("explain", "--api-socket", node.api_socket).stdout


def test_without_windows_there_are_curves_and_a_way_to_get_them(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "tierd.toml"
    path.write_text(f'[controller]\ninterval_ms = 50\nwindows = "{tmp_path}/none.json"\n')
    with running(node, "--config", path), attached_client(node) as client:
        play(client, 5)
        state = awaited(node, lambda s: s["clients"] and s["clients"][0]["steps"] >= 1)
        assert "no windows there" in state["problems"][0]
        assert rest_client.get(node.api_socket, "/v1/windows")["problem"] == state["problems"][0]


def test_a_trace_is_recorded_from_a_client(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.trace"
    with running(node):
        monkeypatch.setenv("TIERD_TRACE", str(out))
        with attached_client(node) as client:
            play(client, 4)
            table = client.table("layers.1.engram")
            prompt = np.arange(60).reshape(2, 30)
            table.kick(prompt)
            table.gather(prompt, np.empty((2, 30, 256), np.uint16))
    found = json.loads(tierd("trace", "replay", out, "--sizes", "100", "--json").stdout)
    assert found["model"] == "v41"
    assert [one["lookups"] for one in found["tables"]] == [4 * 256 + 60, 4 * 256]
