"""The engine socket's server in this process: bounds that a daemon would take long to show."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import engram_node
from tests.halted import halted
from tierd.catalog import Catalog
from tierd.config import load
from tierd.daemon import attach, claims
from tierd.daemon.attach import AttachServer
from tierd.daemon.plane import DataPlane
from tierd.io import _core, wire
from tierd.io.pool import ALIGN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engram_node(tmp_path_factory.mktemp("sessions"), rows=100).device


def sockets(directory: Path) -> list[Path]:
    return list(directory.glob("*.sock*"))


def make_server(device: Path, tmp_path: Path, **more: Any) -> AttachServer:
    overrides = {"daemon.runtime_dir": str(tmp_path), "devices.paths": [str(device)], **more}
    settings = load(environ={}, overrides=overrides).settings
    catalog = Catalog(tmp_path / "catalog.db")
    plane = DataPlane.open(settings)
    made = AttachServer(settings, plane, catalog, boot_id="boot")
    path = settings.paths.engine_socket
    made.start(claims.Listener.open(path, socket.SOCK_SEQPACKET, mode=0o600))
    return made


@pytest.fixture
async def server(device: Path, tmp_path: Path) -> AsyncIterator[AttachServer]:
    made = make_server(device, tmp_path)
    yield made
    await made.stop(0.0)
    made.plane.close()
    made.catalog.close()
    assert sockets(tmp_path) == []


class Peer:
    """A client on the same event loop."""

    def __init__(self, server: AttachServer) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(server.settings.paths.engine_socket))
        self.sock.settimeout(PATIENCE_S)

    async def hear(self) -> dict[str, Any] | None:
        """Return the next message; None when the server has closed."""
        try:
            message, fds = await asyncio.to_thread(wire.receive, self.sock)
        except ConnectionError:
            return None
        wire.close_all(fds)
        return message

    async def ask(self, message: dict[str, Any], *fds: int) -> dict[str, Any] | None:
        wire.send(self.sock, message, fds)
        return await self.hear()


def attach_message(server: AttachServer) -> dict[str, Any]:
    image = next(iter(server.plane.images.values())).info
    return {
        "op": "attach",
        "abi": 1,
        "engine": "test",
        "rank": 0,
        "world": 1,
        "expected_ranks": 1,
        "images": [{"image_id": f"{image.image_id:016x}", "generation": image.generation}],
    }


def make_channel() -> Any:
    return _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(8, 16, 0, 0)])


async def test_visitors_that_say_nothing_are_sent_away(
    server: AttachServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "VISITOR_IDLE_S", 0.05)
    peer, channel = Peer(server), make_channel()
    assert await peer.hear() is None
    peer.sock.close()
    attached = Peer(server)
    answer = await attached.ask(attach_message(server), channel.fd)
    assert answer is not None
    assert answer["ok"]
    await asyncio.sleep(0.2)  # four times what a visitor may take
    assert await attached.ask({"op": "detach"}) == {"ok": True}
    assert await attached.hear() is None
    attached.sock.close()
    assert server.faults == 0


async def test_connections_are_bounded(
    server: AttachServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "VISITORS_MAX", 2 - server.settings.channel.clients_max)
    peers = [Peer(server) for _ in range(3)]
    hello = {"op": "hello", "abi": 1}
    for peer in peers[:2]:
        answer = await peer.ask(hello)
        assert answer is not None
        assert answer["ok"]
    refused = await peers[2].hear()
    assert refused is not None
    assert "too many connections" in refused["message"]
    assert await peers[2].hear() is None
    answer = await peers[0].ask(hello)
    assert answer is not None
    assert answer["ok"]
    for peer in peers:
        peer.sock.close()


async def test_a_fault_of_ours_costs_one_session(
    server: AttachServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, good = make_channel(), Peer(server)
    assert (await good.ask(attach_message(server), channel.fd) or {})["ok"]
    bad, other = Peer(server), make_channel()
    with monkeypatch.context() as broken:
        broken.setattr(server.plane, "attach", lambda *_: 1 // 0)
        assert await bad.ask(attach_message(server), other.fd) is None
    assert server.faults == 1
    assert len(server.clients) == 1
    assert (await good.ask({"op": "images", "model": None}) or {})["ok"]
    bad.sock.close()
    good.sock.close()


async def test_an_attach_that_fails_half_way_is_undone(
    server: AttachServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, channel = Peer(server), make_channel()
    store = server.plane.stores[0]

    def fail(*_: object) -> int:
        raise attach.AttachError("no descriptor to give")

    with monkeypatch.context() as broken:
        broken.setattr(store, "reader_fd", fail)
        answer = await peer.ask(attach_message(server), channel.fd)
    assert answer == {"ok": False, "error": "AttachError", "message": "no descriptor to give"}
    assert server.clients == {}
    assert server.attaching == 0
    assert all(image.clients == 0 for image in server.plane.images.values())
    assert (await peer.ask(attach_message(server), channel.fd) or {})["ok"]
    peer.sock.close()


async def test_leases_of_a_connection_are_bounded(device: Path, tmp_path: Path) -> None:
    pool = {"kv.pool_bytes": (attach.LEASES_MAX + 1) * ALIGN}
    server = make_server(device, tmp_path, **pool)
    greedy, other = Peer(server), Peer(server)
    ask = {"op": "kv_lease", "engine": "test", "bytes": 1}
    for _ in range(attach.LEASES_MAX):
        assert (await greedy.ask(ask) or {})["ok"]
    refused = await greedy.ask(ask)
    assert refused is not None
    assert "at most 16 leases" in refused["message"]
    assert (await other.ask(ask) or {})["ok"]
    for peer in (greedy, other):
        peer.sock.close()
    await server.stop(PATIENCE_S)
    server.plane.close()
    server.catalog.close()


async def test_a_pump_that_stands_still_holds_up_neither_clients_nor_a_stop(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "WORKERS_MAX", 2)
    monkeypatch.setattr(attach, "GIVE_UP_S", 20.0)  # none is needed: sessions see it by themselves
    server = make_server(device, tmp_path)
    channels = [make_channel() for _ in range(3)]
    peers = [Peer(server) for _ in channels]
    for peer, channel in zip(peers, channels, strict=True):
        assert (await peer.ask(attach_message(server), channel.fd) or {})["ok"]
    with halted("tierd-pump"):
        for peer in peers:
            peer.sock.close()
        # Nobody keeps a worker: clients that go, however many they are, wait in turns.
        for _ in range(4):
            await asyncio.get_running_loop().run_in_executor(server.workers, int)
        assert len(server.clients) == len(peers)
        await server.stop(0.0)
        assert server.left == len(peers)
        await asyncio.to_thread(server.plane.close)
        assert server.plane.stuck
    server.plane.stuck = False
    server.plane.close()
    assert not server.plane.stuck
    server.catalog.close()


async def test_a_stop_does_not_wait_for_workers_that_hang(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "GIVE_UP_S", 0.05)
    server, channel = make_server(device, tmp_path), make_channel()
    peer, hangs, goes_on = Peer(server), threading.Event(), threading.Event()
    assert (await peer.ask(attach_message(server), channel.fd) or {})["ok"]
    detach = server.plane.detach

    def hang(*words: Any) -> bool:
        hangs.set()
        return goes_on.wait(PATIENCE_S) and detach(*words)

    monkeypatch.setattr(server.plane, "detach", hang)
    peer.sock.close()
    assert await asyncio.to_thread(hangs.wait, PATIENCE_S)
    await server.stop(0.0)
    assert server.left == 1
    assert not goes_on.is_set()
    goes_on.set()
    while server.clients:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)
    server.plane.close()
    server.catalog.close()


async def test_a_commit_that_takes_long_holds_up_only_who_needs_its_store(
    server: AttachServer,
) -> None:
    """The event loop goes on while a device takes its time over a commit."""
    store, committing, done = server.plane.stores[0], threading.Event(), threading.Event()
    in_time = []

    def commit() -> None:
        with store._lock:
            committing.set()
            in_time.append(done.wait(PATIENCE_S))

    thread = threading.Thread(target=commit)
    thread.start()
    assert committing.wait(PATIENCE_S)
    attaching, visitor, channel = Peer(server), Peer(server), make_channel()
    answer = asyncio.create_task(attaching.ask(attach_message(server), channel.fd))
    while not server.clients:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)
    assert (await visitor.ask({"op": "hello", "abi": 1}) or {})["ok"]
    assert store.free_pages > 0
    assert not answer.done()
    done.set()
    assert (await answer or {})["ok"]
    thread.join()
    assert in_time == [True]
    for peer in (attaching, visitor):
        peer.sock.close()
