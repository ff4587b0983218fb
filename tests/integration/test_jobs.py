"""The command line beside a daemon: what takes long is the daemon's job, and served at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import checkpoints
from tests.daemons import Daemon, Node, engram_node, running, tierd
from tierd.api import rest_client
from tierd.gpu.client import Client, list_images
from tierd.io import _core
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 300


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Node, Daemon]]:
    node = engram_node(tmp_path, rows=ROWS)
    with running(node) as daemon:
        yield node, daemon
        assert daemon.stop() == 0


def attach(node: Node, model: str) -> Client:
    images = list_images(node.engine_socket, model)
    options = {"engine": "test", "cache_rows": 64, "rows_max": 64, "wait_s": 0.0}
    return Client.attach(node.engine_socket, images, **options)


def assert_serves(client: Client, tables: dict[str, np.ndarray]) -> None:
    for info in client.attached:
        out = np.zeros((ROWS, info.table.dim), np.uint16)
        client.table(info.name).gather(np.arange(ROWS), out)
        rows = np.ascontiguousarray(tables[info.table.name])
        form = info.table.row_format.value
        assert np.array_equal(out, _core.decode_rows(rows, info.table.dim, form))


def test_staged_replaced_and_deleted_without_a_restart(
    served: tuple[Node, Daemon], tmp_path: Path
) -> None:
    node, daemon = served
    where = ("--api-socket", node.api_socket)
    old = node.checkpoints["v41"].tables
    new = checkpoints.engram(tmp_path / "new" / "v41", rows=ROWS, seed=9)
    qwen = checkpoints.ple(tmp_path / "qwen", rows=ROWS)
    with attach(node, "v41") as before:
        assert_serves(before, old)
        made = json.loads(tierd("stage", qwen.path, "--json", *where).stdout)
        assert [image["name"] for image in made["images"]] == ["qwen/layers.0.ple"]
        with attach(node, "qwen") as client:
            assert_serves(client, qwen.tables)
            refused = tierd("images", "delete", "qwen/layers.0.ple", *where, exit_code=1)
            assert "is attached by 1 clients" in refused.stderr
        # By the device's name as well: the command finds the daemon that has it.
        words = ("stage", new.path, "--device", node.device, *where)
        assert tierd(*words).stdout.count("staged") == 2
        assert tierd(*words).stdout.count("is there already") == 2
        assert_serves(before, old)  # what was attached stays what it was
        with attach(node, "v41") as after:
            assert_serves(after, new.tables)
    assert "deleted" in tierd("images", "delete", "qwen/layers.0.ple", *where).stdout
    assert list_images(node.engine_socket, "qwen") == []
    whole = tierd("verify", "--full", "--checkpoint", new.path, *where)
    assert whole.stdout.count("digest of all rows right") == 2
    assert daemon.process.poll() is None
    with Store.open(node.device, write=False) as store:
        assert len(store.images) == 2


def test_commands_on_jobs_and_events(served: tuple[Node, Daemon], tmp_path: Path) -> None:
    node, _ = served
    where = ("--api-socket", node.api_socket)
    assert tierd("jobs", "list", *where).stdout == "no jobs\n"
    qwen = checkpoints.ple(tmp_path / "qwen", rows=ROWS)
    tierd("stage", qwen.path, *where)
    (job,) = json.loads(tierd("jobs", "list", "--json", *where).stdout)["jobs"]
    assert (job["kind"], job["state"]) == ("stage", "done")
    assert job["job"] in tierd("jobs", "list", *where).stdout
    shown = tierd("jobs", "show", job["job"], *where).stdout
    assert f"job {job['job']}: stage {qwen.path}, done" in shown
    assert "qwen/layers.0.ple" in shown
    assert "there is no job 'x'" in tierd("jobs", "show", "x", *where, exit_code=1).stderr
    assert job["job"] in tierd("jobs", "cancel", job["job"], *where).stdout
    lines = tierd("events", *where).stdout.splitlines()
    kinds = [line.split()[2] for line in lines]
    assert [kind for kind in kinds if kind != "scrubbed"] == ["started", "staged", "job"]
    found = json.loads(tierd("events", "--kind", "staged", "--json", *where).stdout)["events"]
    assert [event["subject"] for event in found] == ["qwen/layers.0.ple"]


def test_a_job_that_fails_is_one_line(served: tuple[Node, Daemon], tmp_path: Path) -> None:
    node, _ = served
    bad = checkpoints.engram(tmp_path / "bad", rows=ROWS)
    shard = bad.shards[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    done = tierd("stage", bad.path, "--api-socket", node.api_socket, exit_code=1)
    assert done.stderr.startswith("tierd: ")
    assert done.stderr.count("\n") == 1
    assert str(shard) in done.stderr


def test_top_shows_unknown_where_nothing_was_measured(served: tuple[Node, Daemon]) -> None:
    node, daemon = served
    where = ("--api-socket", node.api_socket)
    with attach(node, "v41") as client:
        assert_serves(client, node.checkpoints["v41"].tables)
        lines = tierd("top", "--once", *where).stdout.splitlines()
        assert lines[0].startswith(f"tierd 0.1.0, pid {daemon.pid}")
        (line,) = (line for line in lines if line.startswith("v41/layers.1.engram"))
        assert set(line.split()[1:]) == {"unknown"}
        look = json.loads(tierd("top", "--json", *where).stdout)
        tables = {table["name"]: table for table in look["tables"]}
        assert tables["v41/layers.1.engram"]["lookups"] == ROWS
    # Counters of clients that have gone still count.
    daemon_tables = rest_client.get(node.api_socket, "/v1/tables")["tables"]
    assert {table["lookups"] for table in daemon_tables} == {ROWS}
