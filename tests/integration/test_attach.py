"""Engines and a real daemon: attach, read, leave, vanish, and misbehave."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from tests import checkpoints
from tests.daemons import Daemon, Node, engram_node, make_node, running
from tierd.api import rest_client
from tierd.daemon.attach import INLINE_BYTES_MAX
from tierd.errors import AttachError, RowError
from tierd.gpu.client import Client, list_images
from tierd.io import _core, wire
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from tierd.gpu.tables import Table
    from tierd.types import ImageInfo

spawn = multiprocessing.get_context("spawn")
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    directory = tmp_path_factory.mktemp("attach")
    models = {
        "v41": checkpoints.engram(directory / "v41", rows=1000),
        "gemma/4": checkpoints.per_layer(directory / "gemma", layers=10, vocab=256),
    }
    return make_node(directory, models, size=64 << 20)


@pytest.fixture(scope="module")
def daemon(node: Node) -> Iterator[Daemon]:
    with running(node) as started:
        yield started
        assert started.process.poll() is None, node.log.read_text()
        status = rest_client.get(node.api_socket, "/v1/status")
        assert status["session_faults"] == 0, node.log.read_text()
        assert started.stop() == 0


def attach(node: Node, model: str | None = None, **options: Any) -> Client:
    images = list_images(node.engine_socket, model)
    given = {"engine": "test", "cache_rows": 256, "rows_max": 64, "wait_s": 0.0, **options}
    return Client.attach(node.engine_socket, images, **given)


def expected(node: Node, info: ImageInfo, ids: np.ndarray) -> np.ndarray:
    rows = np.ascontiguousarray(node.checkpoints[info.model].tables[info.table.name][ids])
    return _core.decode_rows(rows, info.table.dim, info.table.row_format.value)


def assert_rows(node: Node, table: Table, ids: np.ndarray, *, kick: bool = True) -> None:
    out = np.zeros((*ids.shape, table.info.table.dim), np.uint16)
    if kick:
        table.kick(ids)
    table.gather(ids, out)
    assert np.array_equal(out, expected(node, table.info, ids))


def eventually(check: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does in its own time."""
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def clients_of(node: Node) -> list[dict[str, Any]]:
    return rest_client.get(node.api_socket, "/v1/clients")["clients"]


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# --- rows ----------------------------------------------------------------------------------------


def test_every_row_of_every_table_equals_the_checkpoints(daemon: Daemon, node: Node) -> None:
    rng = np.random.default_rng(1)
    with attach(node) as client:
        assert len(client.attached) == 12
        for info in client.attached:
            table = client.table(info.name)
            assert_rows(node, table, rng.permutation(info.table.rows))
            assert_rows(node, table, np.arange(info.table.rows).reshape(2, -1), kick=False)
            stats = table.stats()
            assert stats["lookups"] >= 2 * info.table.rows
            assert stats["failed"] == stats["tag_errors"] == 0


def test_several_kicks_in_flight_over_two_tables(daemon: Daemon, node: Node) -> None:
    rng = np.random.default_rng(2)
    with attach(node, "v41") as client:
        tables = [client.table("layers.1.engram"), client.table("layers.14.engram")]
        for _ in range(30):
            steps = [rng.integers(0, 1000, (3, 24)) for _ in tables]
            for table, ids in zip(tables, steps, strict=True):
                table.kick(ids)
            for table, ids in zip(tables, steps, strict=True):
                assert_rows(node, table, ids, kick=False)
        assert all(table.stats()["demands"] == 0 for table in tables)


def test_torch_tensors_and_strides(daemon: Daemon, node: Node) -> None:
    torch = pytest.importorskip("torch")
    with attach(node, "v41") as client:
        table = client.table("layers.1.engram")
        ids = torch.arange(600).reshape(20, 30).t()[::2]  # strided
        out = torch.empty((*ids.shape, 256), dtype=torch.bfloat16, requires_grad=True)
        table.kick(ids)
        table.gather(ids, out)
        bits = out.detach().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, expected(node, table.info, ids.numpy()))


def test_numbers_seen_over_rest_are_the_clients(daemon: Daemon, node: Node) -> None:
    with attach(node, "v41", engine="an engine 1.0", rank=2, world=4) as client:
        table = client.table("layers.14.engram")
        assert_rows(node, table, np.arange(50))
        (seen,) = [entry for entry in clients_of(node) if entry["client"] == client.client_id]
        assert (seen["engine"], seen["rank"], seen["world"]) == ("an engine 1.0", 2, 4)
        assert seen["pid"] == os.getpid()
        ring = seen["rings"][1]
        assert ring["image"] == "v41/layers.14.engram"
        assert ring["outstanding"] == 0
        counted = table.stats()
        assert counted.pop("quota") == 1 + ring["ways"]
        assert {key: ring[key] for key in counted} == counted
        assert ring["hit_ratio"] == 0.0
    assert client.client_id not in {entry["client"] for entry in clients_of(node)}


def test_ids_outside_the_table(daemon: Daemon, node: Node) -> None:
    with attach(node, "v41") as client:
        table = client.table("layers.1.engram")
        with pytest.raises(IndexError, match="1000"):
            table.kick(np.array([3, 1000]))
        with pytest.raises(TypeError):
            table.kick(np.array([1.0]))
        assert_rows(node, table, np.arange(10))


def test_a_closed_client_says_so(daemon: Daemon, node: Node) -> None:
    client = attach(node, "v41")
    table = client.table("layers.1.engram")
    with pytest.raises(AttachError, match=r"layers\.2\.engram is not attached.*layers\.14\.engram"):
        client.table("layers.2.engram")
    client.close()
    client.close()
    with pytest.raises(RowError, match="closed"):
        table.kick(np.array([1]))
    with pytest.raises(AttachError, match="closed"):
        client.images()


def test_a_forked_child_does_not_detach_its_parent(daemon: Daemon, node: Node) -> None:
    with attach(node, "v41") as client:
        child = os.fork()
        if child == 0:
            client.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert client.client_id in {entry["client"] for entry in clients_of(node)}
        assert_rows(node, client.table("layers.1.engram"), np.arange(100))


# --- several at once, and their ends -------------------------------------------------------------


def read_in_process(node: Node, seed: int, done: Connection) -> None:
    rng = np.random.default_rng(seed)
    with attach(node, engine=f"reader {seed}") as client:
        for _ in range(5):
            for info in client.attached:
                ids = rng.integers(0, info.table.rows, 100)
                assert_rows(node, client.table(info.name), ids)
    done.send("read")


def attach_and_hang(node: Node, ready: Connection) -> None:
    client = attach(node, "v41", engine="doomed")
    client.table("layers.1.engram").kick(np.arange(40))
    ready.send(client.client_id)
    signal.pause()


def test_clients_in_several_processes_at_once(daemon: Daemon, node: Node) -> None:
    pipes = [spawn.Pipe() for _ in range(3)]
    workers = [
        spawn.Process(target=read_in_process, args=(node, seed, there))
        for seed, (_, there) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    for here, _ in pipes:
        assert here.poll(PATIENCE_S), "a reader did not end"
        assert here.recv() == "read"
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


def test_a_killed_client_is_dropped_and_the_others_go_on(daemon: Daemon, node: Node) -> None:
    before = descriptors(daemon.pid)
    here, there = spawn.Pipe()
    doomed = spawn.Process(target=attach_and_hang, args=(node, there))
    doomed.start()
    name = here.recv()
    with attach(node, "v41") as client:
        assert name in {entry["client"] for entry in clients_of(node)}
        doomed.kill()
        doomed.join()
        eventually(
            lambda: name not in {entry["client"] for entry in clients_of(node)},
            "the killed client was not dropped",
        )
        assert_rows(node, client.table("layers.1.engram"), np.arange(200))
    eventually(lambda: descriptors(daemon.pid) <= before, "descriptors were left behind")
    dropped = [e for e in daemon.events() if e["event"] == "detached" and e["client"] == name]
    assert [event["why"] for event in dropped] == ["the connection closed"]


def test_attach_cycles_leave_nothing_behind(daemon: Daemon, node: Node) -> None:
    def footprint(pid: int | str) -> tuple[int, int]:
        return descriptors(int(pid)), len(Path(f"/proc/{pid}/maps").read_text().splitlines())

    for _ in range(3):
        attach(node, "v41").close()
    eventually(lambda: not clients_of(node), "clients were left")
    ours, theirs = footprint(os.getpid()), footprint(daemon.pid)
    for _ in range(30):
        with attach(node, "v41") as client:
            assert_rows(node, client.table("layers.1.engram"), np.arange(5))
    eventually(lambda: descriptors(daemon.pid) <= theirs[0], "descriptors were left behind")
    now_ours, now_theirs = footprint(os.getpid()), footprint(daemon.pid)
    assert now_ours[0] <= ours[0]
    assert now_theirs[0] <= theirs[0]
    assert now_ours[1] <= ours[1] + 8  # allocators map a little more now and then
    assert now_theirs[1] <= theirs[1] + 8


# --- refusals ------------------------------------------------------------------------------------


class Raw:
    """A peer that speaks the protocol as it likes."""

    def __init__(self, node: Node) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(node.engine_socket))

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        wire.send(self.sock, message, fds)
        answer, received = wire.receive(self.sock)
        wire.close_all(received)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def never_listen(peer: Raw) -> None:
    """Ask until the daemon has had enough of answers that nobody takes."""
    for _ in range(100_000):
        try:
            wire.send(peer.sock, {"op": "images"})
        except ConnectionError:
            return
    raise AssertionError("the daemon still listens")


def request(node: Node, **changes: Any) -> dict[str, Any]:
    image = list_images(node.engine_socket, "v41")[0]
    ref = {"image_id": f"{image.image_id:016x}", "generation": image.generation}
    return {
        "op": "attach",
        "abi": 1,
        "engine": "raw",
        "rank": 0,
        "world": 1,
        "expected_ranks": 1,
        "images": [ref],
    } | changes


def make_channel(rings: int = 1, rows_max: int = 8, arena_pages: int = 16) -> Any:
    specs = [(rows_max, arena_pages, ring, 0) for ring in range(rings)]
    return _core.Channel(rank=0, world=1, client_id=uuid.uuid4().bytes, rings=specs)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"abi": 3}, "attach ABI 3, the daemon 1 to 2"),
        ({"engine": "x" * 65}, "attach: engine"),
        ({"engine": "a\nb"}, "attach: engine"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"rank": -1}, "attach: rank"),
        ({"world": "many"}, "attach: world"),
        ({"images": []}, "attach: images"),
        ({"images": [{"image_id": "xyz", "generation": 1}]}, "attach: images.0.image_id"),
        ({"images": [{"image_id": "0" * 16, "generation": 1}]}, "is not served here"),
        ({"images": None}, "attach: images"),
        ({"op": "conquer"}, "unknown op 'conquer'"),
        ({"op": None}, "unknown op None"),
        ({"op": ["attach"]}, "unknown op"),
    ],
)
def test_requests_that_are_refused_keep_the_connection(
    daemon: Daemon, node: Node, changes: dict[str, Any], text: str
) -> None:
    channel = make_channel()
    with Raw(node) as peer:
        answer = peer.ask(request(node, **changes), (channel.fd,))
        assert answer["ok"] is False
        assert text in answer["message"]
        assert peer.ask(request(node), (channel.fd,))["ok"] is True
        assert "attached already" in peer.ask(request(node), (channel.fd,))["message"]
        assert peer.ask({"op": "detach"}) == {"ok": True}


def test_an_image_that_was_staged_anew_is_told_apart(daemon: Daemon, node: Node) -> None:
    channel, message = make_channel(), request(node)
    message["images"][0]["generation"] += 1
    with Raw(node) as peer:
        answer = peer.ask(message, (channel.fd,))
    assert answer["error"] == "ImageError"
    assert "staged anew" in answer["message"]


def test_channels_that_are_refused(daemon: Daemon, node: Node, tmp_path: Path) -> None:
    plain = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    lying, double, whole = make_channel(), make_channel(rings=2), make_channel()
    lying.buffer()[0] ^= 0xFF
    long = make_channel(rows_max=1 << 17, arena_pages=1 << 17)
    wide = make_channel(rows_max=8, arena_pages=1 << 19)
    cases = [
        ((), "needs one descriptor"),
        ((plain,), "not a memfd"),
        ((lying.fd,), "not one of ours"),
        ((double.fd,), "2 rings for 1 images"),
        ((long.fd,), "channel.rows_max"),
        ((wide.fd,), "channel.arena_pages_max"),
    ]
    with Raw(node) as peer:
        for fds, text in cases:
            answer = peer.ask(request(node), fds)
            assert answer["ok"] is False
            assert text in answer["message"]
        assert peer.ask(request(node), (whole.fd,))["ok"] is True
    os.close(plain)


def test_a_control_block_that_points_outside_is_refused(daemon: Daemon, node: Node) -> None:
    protocol = _core.protocol
    for word in range(protocol.RING_ENTRY_BYTES // 8):
        channel = make_channel()
        at = protocol.OFFSET_RINGS + 8 * word
        channel.buffer()[at : at + 8] = 0xFF
        with Raw(node) as peer:
            answer = peer.ask(request(node), (channel.fd,))
            if word not in {5, 7}:  # samples are not read; table and flags are the client's
                assert answer["ok"] is False
    with attach(node, "v41") as client:
        assert_rows(node, client.table("layers.1.engram"), np.arange(10))


def test_garbage_costs_only_its_sender(daemon: Daemon, node: Node) -> None:
    before = descriptors(daemon.pid)
    rng = np.random.default_rng(3)
    garbage = [b"{", b"[]", b"\x00" * 65_536, b'{"op":"hello"}', b"{}", b"[" * 50_000]
    garbage += [rng.bytes(int(size)) for size in rng.integers(1, 2000, 30)]
    with attach(node, "v41") as client:
        for data in garbage:
            with Raw(node) as peer:
                socket.send_fds(peer.sock, [data], [0, 1, 2])
                answer, _ = wire.receive(peer.sock)
                assert answer["ok"] is False
                assert "\n" not in answer["message"]
        with Raw(node) as deaf:
            never_listen(deaf)
        assert_rows(node, client.table("layers.1.engram"), np.arange(200))
    eventually(lambda: descriptors(daemon.pid) <= before, "descriptors were left behind")


# --- the client alone ----------------------------------------------------------------------------


def test_nobody_there(tmp_path: Path) -> None:
    missing = tmp_path / "engine.sock"
    with pytest.raises(AttachError, match=r"no such socket.*run: systemctl start tierd"):
        list_images(missing)
    with pytest.raises(AttachError, match=r"waited 0\.1 s"):
        list_images(missing, wait_s=0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(missing))
    with pytest.raises(AttachError, match="nobody listens"):
        list_images(missing)


def test_the_rest_socket_is_told_apart(daemon: Daemon, node: Node) -> None:
    with pytest.raises(AttachError, match="not an engine socket"):
        list_images(node.api_socket)


def test_what_cannot_be_attached(daemon: Daemon, node: Node) -> None:
    images = list_images(node.engine_socket, "v41")
    options: dict[str, Any] = {"engine": "test", "cache_rows": 64, "rows_max": 8}
    with pytest.raises(AttachError, match="no image to attach"):
        Client.attach(node.engine_socket, [], **options)
    with pytest.raises(AttachError, match="listed twice"):
        Client.attach(node.engine_socket, [images[0], images[0]], **options)
    with pytest.raises(AttachError, match="rows_max must be"):
        Client.attach(node.engine_socket, images, **options | {"rows_max": 0})
    with pytest.raises(AttachError, match="at most 64"):
        Client.attach(node.engine_socket, images * 33, **options)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"rubbish", "malformed"),
        (b"", "went away"),
        (json.dumps({"ok": True, "abi": 3}).encode(), "speaks attach ABI 3"),
        (json.dumps({"ok": False, "message": "no"}).encode(), "refused hello: no"),
    ],
)
def test_a_daemon_that_answers_nonsense(tmp_path: Path, reply: bytes, text: str) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65_536)
                peer.send(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(AttachError, match=text):
            list_images(path)
        thread.join()


# --- daemons of their own ------------------------------------------------------------------------


def test_an_engine_may_start_first(tmp_path: Path) -> None:
    node = engram_node(tmp_path)
    found: list[ImageInfo] = []
    waiting = threading.Thread(
        target=lambda: found.extend(list_images(node.engine_socket, wait_s=PATIENCE_S))
    )
    waiting.start()
    with running(node):
        waiting.join()
        assert [image.name for image in found] == ["v41/layers.1.engram", "v41/layers.14.engram"]


def test_limits_of_the_daemon(tmp_path: Path) -> None:
    node = engram_node(tmp_path)
    config = tmp_path / "tierd.toml"
    config.write_text("[engine]\nexpected_ranks = 2\n[channel]\nclients_max = 2\n")
    with running(node, "--config", config):
        with pytest.raises(AttachError, match=r"has 1 ranks; engine\.expected_ranks .* is 2"):
            attach(node)
        first, second = attach(node, world=2, rank=0), attach(node, world=2, rank=1)
        with pytest.raises(AttachError, match=r"2 clients .* channel\.clients_max"):
            attach(node, world=2)
        second.close()
        attach(node, world=2, rank=1).close()
        first.close()


def test_more_images_than_fit_a_message(tmp_path: Path) -> None:
    tiny = checkpoints.per_layer(tmp_path / "wide", layers=70, vocab=16)
    model = "wide-" + "x" * 190
    node = make_node(tmp_path, {model: tiny}, size=160 << 20)
    with running(node):
        images = list_images(node.engine_socket)
        listed = json.dumps([image.to_json() for image in images])
        assert len(listed) > INLINE_BYTES_MAX, "the list would go inline"
        assert {image.table.layer for image in images} == set(range(70))
        with Client.attach(
            node.engine_socket, images[:64], engine="t", cache_rows=64, rows_max=8
        ) as client:
            assert_rows(node, client.table("layers.1.per_layer"), np.arange(16))


def test_a_damaged_page_is_an_error_and_never_a_row(tmp_path: Path) -> None:
    node = engram_node(tmp_path)
    name = "v41/layers.1.engram"
    with running(node) as daemon, attach(node, "v41") as client:
        with Store.open(node.device, write=False) as store:
            extent = store.image(name).extents[0]
        with node.device.open("rb+") as file:
            file.seek((extent.device_page + 2) * 4096 + 5)  # in row 30: 15 rows a page
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fdatasync(file.fileno())
        table = client.table("layers.1.engram")
        out = np.zeros((1, 256), np.uint16)
        table.kick(np.array([30]))
        with pytest.raises(RowError) as caught:
            table.gather(np.array([30]), out)
        text = str(caught.value)
        assert text.startswith(f"{name}: request failed: ")
        assert f"; run: tierd verify --device {node.device} {name}" in text
        assert "\n" not in text
        assert_rows(node, table, np.array([0, 29, 45, 999]))
        with pytest.raises(RowError):
            table.gather(np.array([30]), out)
        assert daemon.process.poll() is None


def test_a_stale_page_is_recorded_as_a_failed_request(tmp_path: Path) -> None:
    node = engram_node(tmp_path)
    name = "v41/layers.14.engram"
    with running(node), attach(node, "v41") as client:
        with Store.open(node.device, write=False) as store:
            extent = store.image(name).extents[0]
        with node.device.open("rb+") as file:
            file.seek((extent.device_page + 3) * 4096)
            file.write(bytes(4096))
            file.flush()
            os.fdatasync(file.fileno())
        out = np.zeros((1, 256), np.uint16)
        with pytest.raises(RowError, match=r"wrong.page"):
            client.table("layers.14.engram").gather(np.array([45]), out)

        def failed() -> list[dict[str, Any]]:
            return rest_client.get(node.api_socket, "/v1/events?kind=failed")["events"]

        eventually(lambda: bool(failed()), "no event was recorded")
        (event,) = failed()
        assert event["subject"] == name
        assert event["details"]["status"] == "wrong_page"
        assert event["details"]["client"] == client.client_id
