"""A daemon's life: reload, engines of other versions, an engine that forgets, a fork of one."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.daemons import ROOT, Daemon, Node, engram_node, running
from tierd.api import rest_client
from tierd.errors import AttachError
from tierd.gpu.client import Client, list_images
from tierd.gpu.link import Link
from tierd.io import _core, wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return engram_node(tmp_path_factory.mktemp("life"), rows=1000)


@pytest.fixture(scope="module")
def daemon(node: Node) -> Iterator[Daemon]:
    with running(node) as started:
        yield started
        assert started.stop() == 0


def eventually(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def attach(node: Node) -> Client:
    images = list_images(node.engine_socket, wait_s=PATIENCE_S)
    return Client.attach(node.engine_socket, images, engine="test", cache_rows=64, rows_max=32)


def clients(node: Node) -> list[dict[str, Any]]:
    return list(rest_client.get(node.api_socket, "/v1/clients")["clients"])


def events(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    return [entry for entry in daemon.events() if entry["event"] == name]


def test_reload_takes_what_can_change_and_keeps_going_on_a_mistake(tmp_path: Path) -> None:
    node = engram_node(tmp_path, rows=100)
    config = tmp_path / "tierd.toml"
    config.write_text("[channel]\nclients_max = 5\n")
    with running(node, "--config", config) as daemon:
        config.write_text("[channel]\nclients_max = 1\n[pump]\nspin_us = 3\n")
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: len(events(daemon, "reloaded")) == 1, "it did not reload")
        (entry,) = events(daemon, "reloaded")
        assert entry["changed"] == ["channel.clients_max"]
        assert entry["after_restart"] == ["pump.spin_us"]
        with attach(node):
            with pytest.raises(AttachError, match="1 clients are attached"):
                attach(node)
            config.write_text("[channel]\nclients_max = 'many'\n")
            daemon.process.send_signal(signal.SIGHUP)
            words = "the configuration is not taken; the present one stays"
            eventually(lambda: len(events(daemon, words)) == 1, "it did not look")
            assert f"{config}:2" in events(daemon, words)[0]["error"]
            with pytest.raises(AttachError, match="1 clients are attached"):
                attach(node)
        assert daemon.stop() == 0


def test_engines_of_other_versions(node: Node, daemon: Daemon) -> None:
    for abi in (wire.ABI_OLDEST, wire.ABI):
        link = Link.connect(str(node.engine_socket), PATIENCE_S)
        answer, _ = link.ask({"op": "hello", "abi": abi})
        assert answer["abi"] == abi
        link.close()
    link = Link.connect(str(node.engine_socket), PATIENCE_S)
    with pytest.raises(AttachError, match="ABI 99"):
        link.ask({"op": "hello", "abi": 99})
    link.close()
    (refusal,) = rest_client.get(node.api_socket, "/v1/status")["refusals"]
    assert refusal["pid"] == os.getpid()
    assert "the engine speaks attach ABI 99" in refusal["reason"]


def test_a_channel_of_the_version_before_is_served(node: Node, daemon: Daemon) -> None:
    info = list_images(node.engine_socket)[0]
    channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(8, 16, 0, 0)])
    channel.buffer()[4:8] = np.frombuffer(np.uint32(1).tobytes(), np.uint8)
    link = Link.connect(str(node.engine_socket), PATIENCE_S)
    request = {
        "op": "attach", "abi": 1, "engine": "old", "rank": 0, "world": 1, "expected_ranks": 1,
        "images": [{"image_id": f"{info.image_id:016x}", "generation": info.generation}],
    }  # fmt: skip
    link.attach(request, channel.fd)
    ring = _core.RingClient(channel, 0, link.wake_fd)
    zero = np.zeros(1, np.uint32)
    sequence = ring.publish(zero, zero, zero)
    assert ring.wait(sequence, 20 * 10**9) == _core.protocol.Status.ok
    # A memory file has one session at a time, whoever sends it.
    other = Link.connect(str(node.engine_socket), PATIENCE_S)
    with pytest.raises(AttachError, match="served by a session that is not over"):
        other.attach(request, channel.fd)
    other.close()
    link.detach()


def test_an_engine_that_forgets_to_close_is_not_mourned(node: Node, daemon: Daemon) -> None:
    code = (
        "import sys; from tierd.gpu.client import Client, list_images\n"
        "images = list_images(sys.argv[1])\n"
        "client = Client.attach(sys.argv[1], images, engine='x', cache_rows=64, rows_max=32)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(node.engine_socket)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60,
    )  # fmt: skip
    eventually(lambda: not clients(node), "the client was left")
    assert events(daemon, "detached")[-1]["why"] == "detached"
    client = attach(node)
    assert len(clients(node)) == 1
    del client
    gc.collect()
    eventually(lambda: not clients(node), "a dropped client was left")


@pytest.mark.usefixtures("daemon")
def test_a_fork_does_not_wait_for_threads_it_has_not(node: Node) -> None:
    with attach(node) as client:
        table = client.table("layers.1.engram")
        pid = os.fork()
        if pid == 0:
            client.close()
            del client, table
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        out = np.zeros((5, table.info.table.dim), np.uint16)
        table.gather(np.arange(5), out)
        assert out.any()
        assert len(clients(node)) == 1


@pytest.mark.usefixtures("daemon")
def test_status_says_who_serves(node: Node) -> None:
    with attach(node) as client:
        servers = [ring["server"] for one in clients(node) for ring in one["rings"]]
        assert servers == ["daemon", "daemon"]
        assert json.dumps(client.keeper.guardian_stats["takeovers"]) == "0"
