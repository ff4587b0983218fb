"""An engine outlives its daemons: killed, stopped and restarted under it, every row right."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.daemons import Daemon, Node, engram_node, running
from tierd.api import rest_client
from tierd.gpu.client import Client, list_images
from tierd.gpu.keeper import Keeper
from tierd.gpu.link import ANSWER_TIMEOUT_S
from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
ROWS = 4000


def eventually(check: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does in its own time."""
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Engine:
    """An attached client whose cache is far smaller than its tables, so that every step misses."""

    def __init__(self, node: Node) -> None:
        self.node = node
        images = list_images(node.engine_socket, wait_s=PATIENCE_S)
        self.client = Client.attach(
            node.engine_socket, images, engine="test", cache_rows=64, rows_max=64
        )
        self.tables = [self.client.table(image.name) for image in images]
        self.expected = [
            _core.decode_rows(
                node.checkpoints[image.model].tables[image.table.name],
                image.table.dim,
                image.table.row_format.value,
            )
            for image in images
        ]
        self.rng = np.random.default_rng(5)

    def step(self, rows: int = 48) -> None:
        ids = self.rng.integers(0, ROWS, (len(self.tables), rows))
        for table, wanted in zip(self.tables, ids, strict=True):
            table.kick(wanted)
        for table, wanted, rows_right in zip(self.tables, ids, self.expected, strict=True):
            out = np.zeros((rows, table.info.table.dim), np.uint16)
            table.gather(wanted, out)
            assert np.array_equal(out, rows_right[wanted])

    @property
    def takeovers(self) -> int:
        return self.client.keeper.takeovers

    def served_by_daemon(self) -> bool:
        rings = self.client.keeper.guardian_stats["rings"]
        return not any(ring["serving"] for ring in rings)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return engram_node(tmp_path_factory.mktemp("guardian"), rows=ROWS)


@pytest.fixture
def daemon(node: Node) -> Iterator[Daemon]:
    with running(node) as started:
        yield started


@pytest.fixture
def engine(node: Node, daemon: Daemon) -> Iterator[Engine]:
    made = Engine(node)
    made.step()
    yield made
    made.client.close()


def status(node: Node) -> dict[str, Any]:
    return dict(rest_client.get(node.api_socket, "/v1/status"))


def test_a_killed_daemon_and_its_successor(node: Node, daemon: Daemon, engine: Engine) -> None:
    daemon.process.kill()
    for _ in range(20):
        engine.step()
    daemon.process.wait()
    assert engine.takeovers >= 2
    first = engine.client.boot_id
    with running(node) as second:
        eventually(lambda: engine.client.boot_id != first, "the engine did not attach again")
        assert engine.client.daemon_pid == second.pid
        eventually(engine.served_by_daemon, "the rings were not handed back")
        before = status(node)["pumps"][0]["pages"]
        for _ in range(20):
            engine.step()
        eventually(lambda: status(node)["pumps"][0]["pages"] > before, "the daemon read nothing")
        assert second.stop() == 0
    for _ in range(5):
        engine.step()


def test_an_orderly_stop_is_not_noticed(node: Node, daemon: Daemon, engine: Engine) -> None:
    daemon.process.send_signal(signal.SIGTERM)
    while daemon.process.poll() is None:
        engine.step()
    assert daemon.process.returncode == 0
    for _ in range(5):
        engine.step()
    words = [entry["event"] for entry in daemon.events()]
    assert "clients are left although they have not let go" not in words
    assert words[-1] == "stopped"


def test_a_stopped_daemon_goes_on(node: Node, daemon: Daemon, engine: Engine) -> None:
    for _ in range(3):
        before = engine.takeovers
        os.kill(daemon.pid, signal.SIGSTOP)
        for _ in range(10):
            engine.step()
        assert engine.takeovers > before
        os.kill(daemon.pid, signal.SIGCONT)
        eventually(engine.served_by_daemon, "the rings were not handed back")
        for _ in range(10):
            engine.step()
    assert engine.client.keeper.attaches == 1


def test_false_alarms_are_harmless(daemon: Daemon, engine: Engine) -> None:
    for _ in range(50):
        engine.client.keeper.alarm()
        engine.step()
    eventually(lambda: engine.takeovers >= 50, "the guardian did not take the rings")
    eventually(engine.served_by_daemon, "the rings were not handed back")
    engine.step()


def test_an_engine_ends_while_its_next_daemon_says_nothing(
    node: Node, daemon: Daemon, engine: Engine
) -> None:
    daemon.process.kill()
    daemon.process.wait()
    node.engine_socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(str(node.engine_socket))
        mute.listen()
        mute.settimeout(PATIENCE_S)
        peer, _ = mute.accept()
        with peer, ThreadPoolExecutor(1) as pool:
            assert b"hello" in peer.recv(4096)
            # Less than what the keeper gives a daemon to answer.
            pool.submit(engine.client.close).result(ANSWER_TIMEOUT_S / 2)
    node.engine_socket.unlink()


class _Hanging:
    """A guardian that begins to serve when it is looked at, with a read that comes back later."""

    def __init__(self) -> None:
        self.removals = 0
        self.ended = False

    def stats(self) -> dict[str, Any]:
        return {"in_flight": self.removals, "rings": [], "takeovers": 0}

    def remove_channel(self, _: int, __: int) -> bool:
        self.removals += 1
        return self.removals == 3

    def stop(self, _: int) -> bool:
        self.ended = True
        return True


def test_a_removal_that_has_begun_is_brought_to_an_end() -> None:
    """A guardian that lets go takes nothing new, so one that failed to must be asked again."""
    keeper: Any = object.__new__(Keeper)
    before = _Hanging()
    made: list[_Hanging] = []

    def make_guardian(_: Any) -> Any:
        made.append(_Hanging())
        return made[-1], 0, {}

    keeper.link, keeper._make_guardian = None, make_guardian
    keeper._lock, keeper._stopping, keeper._takeovers_before = threading.Lock(), False, 0
    keeper._guardian, keeper._guarded = before, 0
    keeper._stale, keeper._removing = True, False
    for _ in range(3):
        keeper._renew_guardian()
    assert not keeper._stale
    assert keeper._guardian is made[2]
    assert [one.ended for one in [before, *made]] == [True, True, True, False]
    keeper._stale = True
    keeper._guardian.removals = 1  # busy, and not told to let go: left alone
    keeper._renew_guardian()
    assert len(made) == 3
