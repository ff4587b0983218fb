"""REST under people who ask too much, too often, too slowly, or never stop listening."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from tests import checkpoints
from tests.daemons import make_node
from tests.rest import Rest, serving
from tierd.api import limits, parse, server, streams
from tierd.api.common import JUDGES
from tierd.api.limits import CALLERS_MAX, Limits
from tierd.daemon import hub

if TYPE_CHECKING:
    from pathlib import Path

    from tests.daemons import Node


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Node:
    directory = tmp_path_factory.mktemp("limits")
    return make_node(directory, {"v41": checkpoints.engram(directory / "v41", rows=100)})


@pytest.fixture
def device(staged: Node, tmp_path: Path) -> Path:
    return shutil.copy(staged.device, tmp_path / "device.img")


async def connect(rest: Rest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(rest.path))


# --- requests ------------------------------------------------------------------------------------


def test_a_caller_gets_its_rate_and_a_burst_of_as_many() -> None:
    bounds = Limits(requests_per_s=10, connections_max=8)
    assert [bounds.admit("a", 0.0) for _ in range(10)] == [0.0] * 10
    assert bounds.admit("a", 0.0) == pytest.approx(0.1)
    assert bounds.admit("b", 0.0) == 0.0
    assert bounds.admit("a", 0.1) == 0.0
    assert bounds.admit("a", 0.1) > 0
    for number in range(2 * CALLERS_MAX):
        bounds.admit(f"caller {number}", 0.2)
    assert len(bounds._buckets) == CALLERS_MAX


async def test_who_asks_too_often_is_told_when_to_come_back(device: Path, tmp_path: Path) -> None:
    async with serving(device, tmp_path, **{"api.requests_per_s": 1}) as rest:
        await rest.get("/v1/devices")
        _, headers, body = await rest.answer("GET", "/v1/devices")
        assert body["status"] == 429
        assert int(headers["Retry-After"]) >= 1
        await rest.get("/healthz")  # never counted
        await rest.get("/readyz")


# --- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_one_connection_too_many_is_told_so(device: Path, tmp_path: Path, make_loop: Any) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(_one_too_many(device, tmp_path))


async def _one_too_many(device: Path, tmp_path: Path) -> None:
    async with serving(device, tmp_path, **{"api.connections_max": 8}) as rest:
        held = [await connect(rest) for _ in range(8)]
        await asyncio.sleep(0)
        reader, writer = await connect(rest)
        answer = (await reader.read()).decode()
        head, _, body = answer.partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 503 ")
        assert "api.connections_max" in json.loads(body)["detail"]
        writer.close()
        for _, held_writer in held:
            held_writer.close()
            await held_writer.wait_closed()
        assert (await rest.get("/v1/status"))["name"] == "tierd"
        assert rest.app[server.LIMITS].refused["connections"] == 1


async def test_readers_of_metrics_take_no_place_from_the_operator(
    device: Path, tmp_path: Path
) -> None:
    bounds = {"api.connections_max": 8, "metrics.listen": "127.0.0.1:0", "api.requests_per_s": 5}
    async with serving(device, tmp_path, **bounds) as rest:
        address, _, port = rest.api.addresses["metrics.listen"].rpartition(":")
        held = [await asyncio.open_connection(address, port) for _ in range(8)]
        main, metrics = rest.api.slots
        await rest.until(lambda: metrics.taken == 8)
        reader, writer = await asyncio.open_connection(address, port)
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        assert main.taken == 0
        assert (await rest.get("/v1/status"))["name"] == "tierd"
        reader_of_all, writer_of_all = held[0]
        writer_of_all.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 60)
        statuses = []
        for _ in range(60):
            head = await reader_of_all.readuntil(b"\r\n\r\n")
            statuses.append(int(head.split(b" ")[1]))
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            await reader_of_all.readexactly(int(length))
        assert statuses[0] == 200
        assert 429 in statuses
        assert (await rest.get("/v1/status"))["name"] == "tierd"
        for _, each in [*held, (reader, writer)]:
            each.close()
        await rest.until(lambda: metrics.taken == 0)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("requests", [1, 40])
def test_who_does_not_read_the_answers_is_dropped(
    device: Path, tmp_path: Path, make_loop: Any, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STALL_S", 0.1)
    monkeypatch.setattr(server, "IDLE_S", 0.1)
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(_not_read(device, tmp_path, requests))


async def _not_read(device: Path, tmp_path: Path, requests: int) -> None:
    async with serving(device, tmp_path) as rest:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, str(rest.path))
            deaf.send(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * requests)
            (slots,) = rest.api.slots
            await rest.until(lambda: slots.taken == 1)
            await rest.until(lambda: slots.taken == 0)
        assert (await rest.get("/v1/status"))["name"] == "tierd"


async def test_slow_headers_and_slow_bodies_are_cut_off(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    monkeypatch.setattr(server, "LINGER_S", 0.1)
    monkeypatch.setattr(parse, "BODY_TIMEOUT_S", 0.2)
    async with serving(device, tmp_path) as rest:
        for start in (b"", b"GET /v1/status HTTP/1.1\r\nHost: ti"):
            reader, writer = await connect(rest)
            writer.write(start)
            assert await reader.read() == b""
            writer.close()
        reader, writer = await connect(rest)
        writer.write(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        answer = (await reader.read()).decode()
        assert answer.startswith("HTTP/1.1 408 ")
        assert "the body took longer" in answer
        writer.close()


# --- readers of events ---------------------------------------------------------------------------


async def events(response: Any, count: int) -> list[dict[str, Any]]:
    """The next events of a stream, with their ids."""
    found: list[dict[str, Any]] = []
    number = None
    async for line in response.content:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            number = int(value)
        if name == "data":
            found.append({**json.loads(value), "sent_id": number})
            number = None
            if len(found) == count:
                break
    return found


STREAM = {"Accept": "text/event-stream"}


async def test_events_come_as_they_happen_and_continue_without_a_gap(
    device: Path, tmp_path: Path
) -> None:
    async with serving(device, tmp_path) as rest:
        record = rest.daemon.catalog.record
        async with rest.session.get("/v1/events", headers=STREAM) as response:
            assert response.content_type == "text/event-stream"
            for number in range(3):
                record("attached", str(number))
            got = await events(response, 3)
        assert [event["subject"] for event in got] == ["0", "1", "2"]
        assert [event["sent_id"] for event in got] == [event["id"] for event in got]
        record("detached", "3")
        record("attached", "4")
        back = {**STREAM, "Last-Event-ID": str(got[1]["id"])}
        async with rest.session.get("/v1/events?kind=attached", headers=back) as response:
            record("attached", "5")
            again = await events(response, 3)
        assert [event["subject"] for event in again] == ["2", "4", "5"]
        # More than a page of history was missed: all of it comes, oldest first.
        for number in range(150):
            record("staged", str(number))
        last = again[-1]["id"]
        path = f"/v1/events?kind=staged&after={last}"
        async with rest.session.get(path, headers=STREAM) as response:
            missed = await events(response, 150)
        assert [event["subject"] for event in missed] == [str(n) for n in range(150)]
        # A number of a history that is gone: everything of the present one came later.
        gone = {**STREAM, "Last-Event-ID": "900000"}
        async with rest.session.get("/v1/events?kind=detached", headers=gone) as response:
            (only,) = await events(response, 1)
        assert only["subject"] == "3"


async def test_events_reach_readers_while_history_cannot_be_kept(
    device: Path, tmp_path: Path
) -> None:
    (tmp_path / "catalog.db").mkdir()
    async with (
        serving(device, tmp_path) as rest,
        rest.session.get("/v1/events", headers=STREAM) as response,
    ):
        rest.daemon.catalog.record("attached", "a")
        (event,) = await events(response, 1)
        assert (event["subject"], event["id"], event["sent_id"]) == ("a", 0, None)


async def test_readers_in_crowds_are_bounded_and_hurt_nobody(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LOOK_S", 0.05)
    bounds = {"api.streams_max": 16, "api.connections_max": 4096, "api.requests_per_s": 100_000}
    async with serving(device, tmp_path, **bounds) as rest, contextlib.AsyncExitStack() as stack:
        statuses = []
        for _ in range(400):
            response = await stack.enter_async_context(
                rest.session.get("/v1/events", headers=STREAM)
            )
            statuses.append(response.status)
        assert statuses == [200] * 16 + [503] * 384
        assert len(rest.daemon.hub._listeners) == 16
        assert rest.app[server.LIMITS].refused["streams"] == 384
        assert (await rest.get("/v1/status"))["name"] == "tierd"
        await stack.aclose()
        await rest.until(lambda: not rest.app[server.PLACES].taken)
        assert not rest.daemon.hub._listeners


async def test_a_reader_that_does_not_keep_up_is_dropped(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WRITE_TIMEOUT_S", 0.2)
    async with serving(device, tmp_path) as rest:
        reader, writer = await connect(rest)
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        while rest.app[server.PLACES].taken:
            rest.daemon.catalog.record("attached", "x" * 4_000)
            await asyncio.sleep(0)
        assert (await rest.get("/v1/status"))["name"] == "tierd"
        writer.close()


async def test_a_listener_whose_queue_is_full_is_closed() -> None:
    many = hub.Hub()
    listener = many.join()
    for number in range(2 * hub.QUEUE_MAX):
        many.publish({"id": number})
    await asyncio.sleep(0)
    got = []
    while (event := await listener.get()) is not None:
        got.append(event["id"])
    assert got == list(range(hub.QUEUE_MAX - 1))
    assert listener.overrun


# --- disks that do not answer --------------------------------------------------------------------


async def test_history_that_hangs_holds_up_only_its_readers(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(device, tmp_path, **{"api.requests_per_s": 1000}) as rest:
        answers, events = threading.Event(), rest.daemon.catalog.events
        monkeypatch.setattr(
            rest.daemon.catalog, "events", lambda *words: answers.wait(60) and events(*words)
        )
        readers = [asyncio.create_task(rest.get("/v1/events")) for _ in range(40)]
        for path in ("/healthz", "/readyz", "/v1/status", "/metrics"):
            await rest.get(path)
        window = {"placements": [{"image": "v41/layers.1.engram", "window_us": 5.0}]}
        status, _, _ = await rest.answer("PATCH", "/v1/placements", json=window)
        assert status == 200
        assert not any(reader.done() for reader in readers)
        answers.set()
        for reader in readers:
            assert "events" in await reader


async def test_a_checkpoint_that_hangs_holds_up_no_other_edit(device: Path, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    os.mkfifo(hanging / "model.safetensors")
    asked = {"kind": "stage", "checkpoint": str(hanging)}
    async with serving(device, tmp_path) as rest:
        posts = [asyncio.create_task(rest.answer("POST", "/v1/jobs", json=asked)) for _ in range(3)]
        # Two are looked at, in open(2), and one waits.
        await rest.until(lambda: rest.app[JUDGES]._work_queue.qsize() == 1)
        window = {"placements": [{"image": "v41/layers.1.engram", "window_us": 5.0}]}
        status, _, _ = await rest.answer("PATCH", "/v1/placements", json=window)
        assert status == 200
        status, _, _ = await rest.answer("DELETE", "/v1/images/v41/layers.1.engram?dry_run=true")
        assert status == 200
        assert not any(post.done() for post in posts)
        while not all(post.done() for post in posts):  # who opens it for writing ends that
            with contextlib.suppress(OSError):
                os.close(os.open(hanging / "model.safetensors", os.O_WRONLY | os.O_NONBLOCK))
            await asyncio.sleep(0.001)
        for post in posts:
            status, _, _ = await post
            assert status >= 400
