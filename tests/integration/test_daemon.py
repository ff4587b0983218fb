"""The daemon's life: start, serve, stop, die, come back; and who else may run beside it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest

from tests.daemons import Daemon, Node, engram_node, refused_start, running, tierd
from tests.halted import halted
from tierd.api import rest_client
from tierd.gpu.client import Client, list_images
from tierd.io import _core, wire
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 300


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return engram_node(tmp_path, rows=ROWS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Daemon]]:
    """One daemon for the tests that only ask."""
    node = engram_node(tmp_path_factory.mktemp("served"), rows=ROWS)
    with running(node) as daemon:
        yield node, daemon
        assert daemon.stop() == 0


def attach(node: Node) -> Client:
    images = list_images(node.engine_socket)
    return Client.attach(
        node.engine_socket, images, engine="test", cache_rows=64, rows_max=64, wait_s=0.0
    )


def assert_serves(node: Node, client: Client) -> None:
    for info in client.attached:
        out = np.zeros((ROWS, info.table.dim), np.uint16)
        client.table(info.name).gather(np.arange(ROWS), out)
        rows = np.ascontiguousarray(node.checkpoints["v41"].tables[info.table.name])
        assert np.array_equal(
            out, _core.decode_rows(rows, info.table.dim, info.table.row_format.value)
        )


def leftovers(node: Node) -> set[str]:
    own = {"log", "notify.sock", "catalog.db", "scrub.json", "scrub.digests"}
    return {path.name for path in node.directory.iterdir()} - own


def other(node: Node, tmp_path: Path) -> Node:
    """Return a node on the same device with a directory of its own."""
    directory = tmp_path / "other"
    directory.mkdir(exist_ok=True)
    return Node(directory, node.device, node.checkpoints)


# --- start and stop ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_stop(node: Node, number: signal.Signals) -> None:
    with running(node) as daemon, attach(node) as client:
        assert_serves(node, client)
        daemon.process.send_signal(number)
        daemon.expect("STOPPING=1")
        assert daemon.process.wait(20) == 0
        assert leftovers(node) == set()
        events = [entry["event"] for entry in daemon.events()]
        assert events == ["device", "serving", "attached", "stopping", "detached", "stopped"]
        assert all(entry["timestamp"].endswith("Z") for entry in daemon.events())


@pytest.mark.parametrize("drain_ms", [20_000, 0])
def test_a_stop_answers_what_is_under_way(node: Node, tmp_path: Path, drain_ms: int) -> None:
    # Reads for a good part of a second, so that the signal comes in the middle of them.
    count = 1024
    image, ok = first_image(node), int(_core.protocol.Status.ok)
    config = tmp_path / "tierd.toml"
    config.write_text(f"[daemon]\ndrain_ms = {drain_ms}\n[pump]\nqueue_depth = 8\n")
    with running(node, "--config", config) as daemon:
        ring_spec = (count, 8 * count, 0, 0)
        channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[ring_spec])
        sock, wake_fd = attach_raw(node, channel, image)
        ring = _core.RingClient(channel, 0, wake_fd)
        pages = np.arange(count, dtype=np.uint32) % image.pages
        rows = np.zeros(count, np.uint32)
        sequences = [ring.publish(pages, rows, rows) for _ in range(8)]
        assert daemon.stop() == 0
        statuses = [ring.wait(sequence, 10**9) for sequence in sequences]
        if drain_ms:
            assert statuses == [ok] * 8
        else:
            cancelled = int(_core.protocol.Status.cancelled)
            assert cancelled in statuses
            assert set(statuses) <= {ok, cancelled}
        os.close(wake_fd)
        sock.close()


def test_a_stop_does_not_wait_for_a_pump_that_stands_still(node: Node, tmp_path: Path) -> None:
    config = tmp_path / "tierd.toml"
    config.write_text("[daemon]\ndrain_ms = 100\n")
    with running(node, "--config", config) as daemon:
        client = attach(node)
        with halted("tierd-pump", daemon.pid):
            assert daemon.stop() == 0
        (stopped,) = [entry for entry in daemon.events() if entry["event"] == "stopped"]
        assert (stopped["left"], stopped["reads_in_flight"]) == (1, True)
        client.close()
    assert not leftovers(node)


def test_a_stop_does_not_wait_for_a_disk_that_does_not_answer(node: Node, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    os.mkfifo(hanging / "model.safetensors")
    body = json.dumps({"kind": "stage", "checkpoint": str(hanging)})
    with running(node) as daemon, socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(node.api_socket))
        sock.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        # Two, one after the other: by then that request has been taken up.
        assert [status for status, *_ in ask(node, *[("GET", "/healthz")] * 2)] == [200, 200]
        assert daemon.stop() == 0
    assert not leftovers(node)


def first_image(node: Node) -> Any:
    with Store.open(node.device, write=False) as store:
        return store.images[0].info


def attach_raw(node: Node, channel: Any, image: Any) -> tuple[socket.socket, int]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(node.engine_socket))
    ref = {"image_id": f"{image.image_id:016x}", "generation": image.generation}
    request = {"op": "attach", "abi": 1, "engine": "raw", "rank": 0, "world": 1}
    wire.send(sock, {**request, "expected_ranks": 1, "images": [ref]}, [channel.fd])
    answer, (wake_fd, *rest) = wire.receive(sock)
    assert answer["ok"]
    wire.close_all(rest)
    return sock, wake_fd


def test_a_killed_daemon_is_succeeded(node: Node) -> None:
    with running(node) as first:
        client = attach(node)
        assert_serves(node, client)
        boot_id = client.boot_id
        first.process.kill()
        first.process.wait()
        assert leftovers(node) >= {"engine.sock", "api.sock"}
        client.close()  # nobody there to answer: no matter
    with running(node) as second, attach(node) as client:
        assert client.boot_id != boot_id
        assert client.daemon_pid == second.pid
        assert_serves(node, client)
        assert second.stop() == 0
    assert leftovers(node) == set()


def test_readers_of_a_dead_daemon_do_not_lock_the_next_out(node: Node) -> None:
    with running(node) as first:
        client = attach(node)  # holds read-only descriptors with leases
        first.process.kill()
        first.process.wait()
    with running(node), attach(node) as again:
        assert_serves(node, again)
    client.close()


# --- one owner each ------------------------------------------------------------------------------


def test_a_second_daemon_is_refused_by_name_socket_and_device(node: Node, tmp_path: Path) -> None:
    beside = other(node, tmp_path)
    with running(node) as daemon:
        text = refused_start(node, **{"daemon.name": "blue"})
        assert "a daemon named blue runs already" in text
        assert f"by pid {daemon.pid}; run: kill {daemon.pid}" in text
        text = refused_start(beside)
        assert str(node.device) in text
        assert str(daemon.pid) in text
        second = tmp_path / "second.img"
        Store.format(second, size=8 << 20).close()
        free = Node(beside.directory, second, {})
        text = refused_start(free, **{"engine.socket": str(node.engine_socket)})
        assert f"{node.engine_socket}: in use by a daemon" in text
        assert f"by pid {daemon.pid}; run: kill {daemon.pid}" in text
        text = refused_start(free, **{"api.socket": str(node.api_socket)})
        assert f"{node.api_socket}: in use by a daemon" in text
        with attach(node) as client:
            assert_serves(node, client)
    assert leftovers(beside) == set()


def test_two_daemons_live_side_by_side(tmp_path: Path) -> None:
    nodes = []
    for name in ("blue", "green"):
        (tmp_path / name).mkdir()
        nodes.append(engram_node(tmp_path / name, rows=ROWS))
    with running(nodes[0], "--name", "blue"), running(nodes[1], "--name", "green"):
        for node, name in zip(nodes, ("blue", "green"), strict=True):
            assert rest_client.get(node.api_socket, "/v1/status")["name"] == name
            with attach(node) as client:
                assert_serves(node, client)


def test_devices_in_use_are_named_by_offline_commands(served: tuple[Node, Daemon]) -> None:
    node, daemon = served
    checkpoint = node.checkpoints["v41"].path
    for words in (
        ("format", node.device, "--force", node.device),
        ("stage", checkpoint, "--device", node.device),
    ):
        done = tierd(*words, exit_code=1)
        assert f"process {daemon.pid}" in done.stderr
        assert "; run: systemctl stop tierd" in done.stderr
        assert done.stderr.count("\n") == 1
    # Reading is no harm to anybody.
    assert "v41/layers.1.engram" in tierd("images", "--device", node.device).stdout
    done = tierd("verify", "--device", node.device, "--checkpoint", checkpoint, "--json")
    reports = json.loads(done.stdout)["images"]
    assert [report["ok"] for report in reports] == [True, True]


# --- bad starts ----------------------------------------------------------------------------------


def test_starts_that_are_refused(node: Node, tmp_path: Path) -> None:
    missing = Node(node.directory, tmp_path / "missing.img", {})
    assert str(missing.device) in refused_start(missing)
    blank = tmp_path / "blank.img"
    blank.write_bytes(bytes(8 << 20))
    assert "no tierd store" in refused_start(Node(node.directory, blank, {}))
    config = tmp_path / "tierd.toml"
    config.write_text("[pump]\nspinus = 3\n")
    text = refused_start(node, config_path=config)
    assert f"{config}:2: unknown key pump.spinus; did you mean pump.spin_us?" in text
    config.write_text('[engine]\nsocket_group = "nosuchgroup"\n')
    assert "no group nosuchgroup" in refused_start(node, config_path=config)
    node.engine_socket.write_text("precious")
    assert "is not a socket" in refused_start(node)
    assert leftovers(node) == {"engine.sock"}


# --- REST ----------------------------------------------------------------------------------------


def ask(node: Node, *requests: tuple[str, str]) -> list[tuple[int, Any, Any]]:
    """Send (method, path) requests over the Unix socket; return status, headers, JSON."""

    async def run() -> list[tuple[int, Any, Any]]:
        connector = aiohttp.UnixConnector(str(node.api_socket))
        async with aiohttp.ClientSession("http://tierd", connector=connector) as session:
            answers = []
            for method, path in requests:
                async with session.request(method, path) as response:
                    answers.append(
                        (response.status, response.headers, await response.json(content_type=None))
                    )
            return answers

    return asyncio.run(run())


def test_rest_over_the_socket(served: tuple[Node, Daemon]) -> None:
    node, daemon = served
    with attach(node):
        answers = ask(
            node,
            ("GET", "/v1/status"),
            ("GET", "/v1/images"),
            ("GET", "/v1/images/v41/layers.14.engram"),
            ("GET", "/v1/clients"),
            ("GET", "/healthz"),
            ("GET", "/v1/events?limit=2"),
        )
        assert [status for status, _, _ in answers] == [200] * 6
        status, images, image, clients, health, events = [body for _, _, body in answers]
        assert status["pid"] == daemon.pid
        assert status["clients"] == 1
        assert status["rings"] == 2
        assert status["devices"][0]["path"] == str(node.device)
        assert status["pumps"][0]["transport"] in {"io_uring", "threads"}
        assert [entry["name"] for entry in images["images"]] == [
            "v41/layers.1.engram",
            "v41/layers.14.engram",
        ]
        assert image == images["images"][1]
        assert image["clients"] == 1
        assert len(clients["clients"]) == 1
        assert health == {"status": "ok", "pumps": 1}
        assert len(events["events"]) == 2
        assert events["events"][0]["kind"] == "attached"


def test_problems_over_the_socket(served: tuple[Node, Daemon]) -> None:
    node, _ = served
    answers = ask(
        node,
        ("GET", "/v2/nothing"),
        ("POST", "/v1/status"),
        ("GET", "/v1/images/v41/layers.2.engram"),
        ("GET", "/v1/events?limit=none"),
    )
    assert [status for status, _, _ in answers] == [404, 405, 404, 400]
    for status, headers, body in answers:
        assert headers["Content-Type"] == "application/problem+json; charset=utf-8"
        assert body["status"] == status
        assert body["title"]
        assert body["detail"]
    assert "GET" in answers[1][1]["Allow"]
    assert "there is no image v41/layers.2.engram" in answers[2][2]["detail"]


def test_garbage_on_the_rest_socket(served: tuple[Node, Daemon]) -> None:
    node, _ = served
    rng = np.random.default_rng(4)
    garbage = [rng.bytes(int(size)) for size in rng.integers(1, 3000, 20)]
    garbage += [b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 100_000, b"\r\n" * 100, b""]
    for data in garbage:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(10)
            peer.connect(str(node.api_socket))
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65_536):
                pass
    assert rest_client.get(node.api_socket, "/healthz")["status"] == "ok"


# --- history, transports, commands ---------------------------------------------------------------


def test_history_that_cannot_be_kept_degrades_the_status_only(node: Node) -> None:
    (node.directory / "catalog.db").mkdir()
    with running(node) as daemon:
        with attach(node) as client:
            assert_serves(node, client)
        for _ in range(100):  # each look gives the writer half a second
            assert rest_client.get(node.api_socket, "/v1/events")["events"] == []
            history = rest_client.get(node.api_socket, "/v1/status")["history"]
            if history["degraded"]:
                break
        assert str(node.directory / "catalog.db") in history["degraded"]
        assert history["lost"] >= 1
        shown = tierd("status", "--api-socket", node.api_socket).stdout
        assert "history is not being kept" in shown
        assert daemon.stop() == 0


def test_history_over_a_restart(node: Node) -> None:
    with running(node) as daemon, attach(node) as client:
        client.close()
        assert daemon.stop() == 0
    with running(node):
        events = rest_client.get(node.api_socket, "/v1/events")["events"]
    kinds = [e["kind"] for e in reversed(events) if e["kind"] != "scrubbed"]  # whenever that was
    assert kinds == ["started", "attached", "detached", "stopped", "started"]


def test_the_other_transport_and_several_pumps(node: Node, tmp_path: Path) -> None:
    config = tmp_path / "tierd.toml"
    config.write_text('[pump]\ntransport = "threads"\ncount = 2\nspin_us = 0\n')
    with running(node, "--config", config), attach(node) as one, attach(node) as two:
        assert_serves(node, one)
        assert_serves(node, two)
        status = rest_client.get(node.api_socket, "/v1/status")
        assert [pump["transport"] for pump in status["pumps"]] == ["threads"] * 2
        assert all(pump["requests"] > 0 for pump in status["pumps"])
        assert rest_client.get(node.api_socket, "/healthz") == {"status": "ok", "pumps": 2}


def test_commands_that_ask_the_daemon(served: tuple[Node, Daemon]) -> None:
    node, daemon = served
    with attach(node) as client:
        assert_serves(node, client)
        shown = tierd("status", "--api-socket", node.api_socket).stdout
        assert f"pid {daemon.pid}" in shown
        assert f"device {node.device}: 2 images" in shown
        assert "v41/layers.14.engram" in shown
        state = json.loads(tierd("status", "--json", "--api-socket", node.api_socket).stdout)
        assert state["totals"]["lookups"] == 2 * ROWS
        listed = json.loads(tierd("images", "--json", "--api-socket", node.api_socket).stdout)
        assert len(listed["images"]) == 2
        on_device = json.loads(tierd("images", "--json", "--device", node.device).stdout)
        without_clients = [
            {key: value for key, value in image.items() if key != "clients"}
            for image in listed["images"]
        ]
        assert on_device["images"] == without_clients
        done = tierd("status", "--api-socket", node.engine_socket, exit_code=1)
        assert done.stderr.startswith("tierd: ")


def test_from_a_checkpoint_to_a_served_row(tmp_path: Path) -> None:
    """The operator's page, command by command."""
    made = engram_node(tmp_path, rows=ROWS)
    device = tmp_path / "fresh.img"
    checkpoint = made.checkpoints["v41"].path
    config = tmp_path / "tierd.toml"
    config.write_text(f'[daemon]\nstate_dir = "{made.directory}"\n')
    tierd("format", device, "--size", "16MiB")
    words = ("stage", checkpoint, "--device", device, "--config", config)
    staged = json.loads(tierd(*words, "--json").stdout)
    assert [image["rows"] for image in staged["images"]] == [ROWS, ROWS]
    again = tierd(*words)
    assert again.stdout.count("is there already") == 2
    full = tierd("verify", "--device", device, "--full", "--checkpoint", checkpoint)
    assert full.stdout.count("digest of all rows right") == 2
    node = Node(made.directory, device, made.checkpoints)
    with running(node), attach(node) as client:
        assert_serves(node, client)
        events = rest_client.get(node.api_socket, "/v1/events?kind=staged")["events"]
        assert [event["subject"] for event in reversed(events)] == [
            image["name"] for image in staged["images"]
        ]


def test_verify_finds_damage(node: Node) -> None:
    name = "v41/layers.1.engram"
    with Store.open(node.device, write=False) as store:
        at = store.image(name).extents[0].device_page * 4096 + 100
    with node.device.open("rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    done = tierd("verify", "--device", node.device, "--full", exit_code=1)
    assert f"{name}: BAD" in done.stdout
    assert "v41/layers.14.engram: " in done.stdout
    assert done.stderr.startswith(f"tierd: {name} on {node.device}: 1 of ")
    assert done.stderr.count("\n") == 1


def test_only_the_tables_asked_for(tmp_path: Path) -> None:
    made = engram_node(tmp_path, rows=ROWS)
    device = tmp_path / "fresh.img"
    tierd("format", device, "--size", "16MiB")
    common = ("stage", made.checkpoints["v41"].path, "--device", device, "--model", "org/name")
    done = tierd(*common, "--table", "layers.2.engram", exit_code=1)
    assert "layers.1.engram" in done.stderr
    tierd(*common, "--table", "layers.14.engram")
    listed = json.loads(tierd("images", "--device", device, "--json").stdout)
    assert [image["name"] for image in listed["images"]] == ["org/name/layers.14.engram"]
