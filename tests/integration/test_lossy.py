"""Lossy skipping: off unless asked for, loud when on, exact for every row that was seen."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests import checkpoints
from tests.daemons import Node, engram_node, refused_start, running, tierd
from tierd.api import rest_client
from tierd.gpu.client import Client, list_images
from tierd.hook import attach as hook_attach
from tierd.hook.settings import HookSettings
from tierd.io.tracefile import TracedTable, TraceWriter
from tierd.types import TableKind

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 1000
TABLE = "layers.1.engram"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return engram_node(tmp_path_factory.mktemp("lossy"), rows=ROWS)


def seen_set(node: Node, directory: Path, seen: np.ndarray, *, fingerprint: str = "") -> Path:
    """A seen-set of the even rows, made by the commands an operator would use."""
    listed = tierd("images", "--device", node.device, "--json").stdout
    if not fingerprint:
        image = next(i for i in json.loads(listed)["images"] if i["name"].endswith(TABLE))
        fingerprint = image["fingerprint"]
    trace, out = directory / "t.trace", directory / "seen.npz"
    with TraceWriter(trace, "v41", [TracedTable(TABLE, 1, ROWS, 264, 67, fingerprint)]) as writer:
        writer.add(0, seen)
    tierd("trace", "seen", trace, "--table", TABLE, "--out", out)
    return out


def rows_of(node: Node, table: str, ids: np.ndarray) -> tuple[np.ndarray, int]:
    """The rows, gathered twice, and how many lookups were skipped."""
    images = list_images(str(node.engine_socket), wait_s=10)
    with Client.attach(
        node.engine_socket, images, engine="t", cache_rows=64, rows_max=64
    ) as client:
        one = client.table(table)
        out = torch.full((*ids.shape, 256), 7.0, dtype=torch.bfloat16)
        one.kick(ids)
        one.gather(ids, out)
        again = np.full((*ids.shape, 256), 9, np.uint16)
        one.gather(ids, again)
        assert (out.view(torch.int16).numpy().view(np.uint16) == again).all()
        skipped = one.skipped
        # A rank may own none of a step's ids; and no rows may go into a copy.
        one.kick(ids[:0])
        one.gather(ids[:0], again[:0])
        for wrong in (np.zeros((*ids.shape, 512), np.uint16)[..., ::2], again[1:]):
            with pytest.raises(ValueError, match=r"contiguous|shape"):
                one.gather(ids, wrong)
        with pytest.raises(IndexError, match=str(ROWS)):
            one.kick(np.array([0, ROWS]))
        return again, skipped


def test_seen_rows_are_exact_and_the_others_zero(node: Node, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, ROWS, (40, 6))
    with running(node):
        exact = {name: rows_of(node, name, ids)[0] for name in (TABLE, "layers.14.engram")}
        status = rest_client.get(node.api_socket, "/v1/status")
        assert status["lossy"] == []
        assert "LOSSY" not in tierd("status", "--api-socket", node.api_socket).stdout
    path = seen_set(node, tmp_path, np.arange(0, ROWS, 2))
    config = tmp_path / "tierd.toml"
    config.write_text(f'[lossy]\nseen_sets = ["{path}"]\n')
    with running(node, "--config", config) as daemon:
        got, skipped = rows_of(node, TABLE, ids)
        even = ids % 2 == 0
        assert (got[even] == exact[TABLE][even]).all()
        assert (got[~even] == 0).all()
        assert skipped == 2 * int((~even).sum())
        # The other table has no seen-set.
        other, skipped = rows_of(node, "layers.14.engram", ids)
        assert (other == exact["layers.14.engram"]).all()
        assert skipped == 0
        (lossy,) = rest_client.get(node.api_socket, "/v1/status")["lossy"]
        assert (lossy["image"], lossy["seen_share"]) == (f"v41/{TABLE}", 0.5)
        shown = tierd("status", "--api-socket", node.api_socket).stdout
        assert shown.startswith(f"LOSSY: v41/{TABLE}: rows that no trace saw (50.0%")
        assert any("LOSSY" in event["event"] for event in daemon.events())


def test_a_model_that_is_loaded_tries_rows_that_are_read(node: Node, tmp_path: Path) -> None:
    """Its self-test compares rows with the checkpoint's: not those that are left out."""
    directory = node.checkpoints["v41"].path
    settings = HookSettings(str(node.engine_socket), None, 64, 10.0)
    # Of rows that the self-test draws some are read, then none.
    for seen in (np.arange(0, ROWS, 2), np.array([1])):
        config = tmp_path / "tierd.toml"
        config.write_text(f'[lossy]\nseen_sets = ["{seen_set(node, tmp_path, seen)}"]\n')
        with running(node, "--config", config):
            attached = hook_attach.attach_checkpoint(
                directory, sorted(directory.glob("*.safetensors")), TableKind.ENGRAM, settings,
                hook_attach.EngineRank("test"),
            )  # fmt: skip
            attached.client.close()


def test_seen_sets_that_do_not_fit_stop_the_start(node: Node, tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        return refused_start(node, **{"lossy.seen_sets": [str(path)]})

    assert "not a seen-set" in refusal(tmp_path / "nothing.npz")
    other = seen_set(node, tmp_path, np.arange(3), fingerprint="of another checkpoint")
    assert "another checkpoint's v41/layers.1.engram" in refusal(other)


def test_a_seen_set_of_nothing_here_keeps_nobody_waiting(node: Node, tmp_path: Path) -> None:
    trace = tmp_path / "o.trace"
    with TraceWriter(trace, "other", [TracedTable("x", 1, 10, 264, 1)]) as writer:
        writer.add(0, [1])
    tierd("trace", "seen", trace, "--table", "x", "--out", tmp_path / "x.npz")
    config = tmp_path / "tierd.toml"
    config.write_text(f'[lossy]\nseen_sets = ["{tmp_path}/x.npz"]\n')
    with running(node, "--config", config):
        assert rest_client.get(node.api_socket, "/v1/status")["lossy"] == []
        problems = rest_client.get(node.api_socket, "/v1/overview")["problems"]
        assert any("names other/x, which is not served" in one for one in problems)


def test_rows_of_another_staging_are_all_read(tmp_path: Path) -> None:
    """The same name, staged from another checkpoint under the running daemon."""
    node = engram_node(tmp_path, rows=ROWS)
    path = seen_set(node, tmp_path, np.arange(0, ROWS, 2))
    config = tmp_path / "tierd.toml"
    config.write_text(f'[lossy]\nseen_sets = ["{path}"]\n')
    other = checkpoints.engram(tmp_path / "other", rows=ROWS, seed=7)
    with running(node, "--config", config):
        assert len(rest_client.get(node.api_socket, "/v1/status")["lossy"]) == 1
        asked = {"kind": "stage", "checkpoint": str(other.path), "model": "v41"}
        job = rest_client.change(node.api_socket, "POST", "/v1/jobs", asked)["job"]
        *_, last = rest_client.follow(node.api_socket, f"/v1/jobs/{job}")
        assert last["state"] == "done"
        ids = np.arange(40).reshape(8, 5)
        got, skipped = rows_of(node, TABLE, ids)
        assert skipped == 0
        assert (got != 0).any(axis=2).all()
        assert rest_client.get(node.api_socket, "/v1/status")["lossy"] == []
