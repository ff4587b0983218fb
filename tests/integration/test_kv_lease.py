"""Engines lease KV memory of a real daemon: over the socket, shown by REST, gone with its owner."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.daemons import Daemon, engram_node, running
from tierd.api.rest_client import get
from tierd.errors import KvPoolError
from tierd.io import wire
from tierd.io.pool import ALIGN, HEAD_BYTES
from tierd.kv.lease import PoolLease
from tierd.kv.shape import KvShape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPE = KvShape(layers=2, kv_heads=2, group=2, head_dim=16, dtype=torch.float16)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    node = engram_node(tmp_path_factory.mktemp("kv"), rows=100)
    config = node.directory / "tierd.toml"
    config.write_text(f"[kv]\npool_bytes = {4 * ALIGN}\n")
    with running(node, "--config", config) as made:
        yield made


def kv(daemon: Daemon) -> dict[str, Any]:
    return get(daemon.node.api_socket, "/v1/kv")


def wait_until_free(daemon: Daemon) -> None:
    """The daemon sees a closed connection on its own time; the test's own limit bounds this."""
    while kv(daemon)["free_bytes"] < 4 * ALIGN:
        pass


def test_a_lease_is_shown_with_its_owner_s_counters(daemon: Daemon) -> None:
    lease = PoolLease.ask(daemon.node.engine_socket, SHAPE, 1000, engine="test")
    lease.view.count(steps=4, bytes=4096, wanted=10, hit=7, judged=8, agreed=6)
    shown = kv(daemon)
    (one,) = shown["leases"]
    assert (shown["pool_bytes"], shown["free_bytes"]) == (4 * ALIGN, 3 * ALIGN)
    assert one["lease"] == lease.number
    assert one["owner"].startswith("test (pid ")
    assert one["counters"]["bytes_per_step"] == 1024
    assert one["counters"]["resident_ratio"] == 0.7
    assert one["counters"]["agreement_ratio"] == 0.75
    lease.close()
    wait_until_free(daemon)
    after = kv(daemon)
    assert after["free_bytes"] == 4 * ALIGN
    assert after["totals"]["steps"] == 4  # what was counted stays


def test_leases_end_with_their_connection_and_read_as_zeroes(daemon: Daemon) -> None:
    first = PoolLease.ask(daemon.node.engine_socket, SHAPE, 1000, engine="a")
    first.view.memory[8192:] = 0x5A
    first.close()
    wait_until_free(daemon)
    second = PoolLease.ask(daemon.node.engine_socket, SHAPE, 1000, engine="b")
    assert second.view.memory[8192:].max() == 0
    second.close()
    wait_until_free(daemon)


ENGINE = """
import mmap, os, socket, sys
from tierd.io import wire
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
wire.send(sock, {"op": "kv_lease", "engine": "killed", "bytes": 4 * (2 << 20)})
answer, fds = wire.receive(sock, fds_max=1)
memory = mmap.mmap(fds[0], answer["bytes"], offset=answer["offset"])
memory[:] = b"K" * len(memory)
print("has all of it", flush=True)
sys.stdin.read()
"""


def test_a_killed_engine_s_memory_reaches_the_next_one_empty(daemon: Daemon) -> None:
    """It held the whole pool and was writing when it was killed."""
    command = [sys.executable, "-c", ENGINE, str(daemon.node.engine_socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"has all of it\n"
        with pytest.raises(KvPoolError, match="0 of 8388608 are free"):
            PoolLease.ask(daemon.node.engine_socket, SHAPE, 1000, engine="next")
        engine.kill()
        engine.wait()
    wait_until_free(daemon)
    lease = PoolLease.ask(daemon.node.engine_socket, SHAPE, 25_000, engine="next")
    assert lease.view.layout.pages >= 25_000 // 16
    assert not lease.view.memory[HEAD_BYTES:].any()
    lease.close()
    wait_until_free(daemon)


@pytest.mark.parametrize(
    "size", [0, -1, 1 << 60, "all", None, 2.5, True],
)  # fmt: skip
def test_odd_sizes_are_refused_and_cost_nothing(daemon: Daemon, size: object) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(daemon.node.engine_socket))
        wire.send(sock, {"op": "kv_lease", "engine": "odd", "bytes": size})
        answer, fds = wire.receive(sock, fds_max=1)
        assert not fds
        assert not answer["ok"]
    assert kv(daemon)["free_bytes"] == 4 * ALIGN


def test_a_pool_that_is_full_says_so(daemon: Daemon) -> None:
    tokens = int(2.4 * ALIGN / 256)  # 256 bytes a token: three quarters of the pool
    first = PoolLease.ask(daemon.node.engine_socket, SHAPE, tokens, engine="a")
    with pytest.raises(KvPoolError, match=r"kv\.pool_bytes"):
        PoolLease.ask(daemon.node.engine_socket, SHAPE, 40 * tokens, engine="b")
    with pytest.raises(KvPoolError, match="are free"):
        PoolLease.ask(daemon.node.engine_socket, SHAPE, tokens, engine="b")
    first.close()
    wait_until_free(daemon)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(KvPoolError, match="no KV lease: No such file"):
        PoolLease.ask(tmp_path / "none.sock", SHAPE, 100, engine="a")
