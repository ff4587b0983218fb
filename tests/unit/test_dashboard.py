"""What stands behind the dashboard: overview, history, files, keys, and the door's rules."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest
from multidict import CIMultiDict

from tests import checkpoints
from tests.daemons import make_node
from tests.rest import Rest, serving
from tierd.api import pages
from tierd.api.door import Door
from tierd.api.overview import Overview, Past
from tierd.daemon import claims, recent
from tierd.daemon.recent import READ_TIME_BOUNDS_US, READ_TIME_BUCKETS, quantile_us
from tierd.gpu.client import Client, list_images

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dashboard")
    return make_node(directory, {"v41": checkpoints.engram(directory / "v41", rows=500)}).device


@pytest.fixture
async def rest(device: Path, tmp_path: Path) -> AsyncIterator[Rest]:
    async with serving(device, tmp_path) as made:
        yield made


@pytest.fixture
async def over_tcp(device: Path, tmp_path: Path) -> AsyncIterator[Rest]:
    """An interface with a TCP listener, asked over that."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    given = {"api.listen": "127.0.0.1:0", "api.token_file": str(token)}
    async with serving(device, tmp_path, **given) as made:
        await made.session.close()
        made.session = aiohttp.ClientSession(f"http://{made.api.addresses['api.listen']}")
        yield made
        await made.session.close()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


# --- overview and history ------------------------------------------------------------------------


async def test_an_overview_without_clients(rest: Rest) -> None:
    seen = Overview.model_validate(await rest.get("/v1/overview"))
    assert [table.layer for table in seen.tables] == [1, 14]
    assert all(table.window_source == "assumed" for table in seen.tables)
    assert all(table.read_p99_us is None and table.slack_us is None for table in seen.tables)
    assert (seen.still, seen.problems, seen.clients) == ("", [], [])
    assert seen.devices[0].images == 2


async def test_the_overview_is_told_again_and_again(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.api.overview.LIVE_S", 0.01)
    seen = []
    headers = {"Accept": "text/event-stream"}
    async with rest.session.get("/v1/overview", headers=headers) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                seen.append(Overview.model_validate_json(line[6:]))
            if len(seen) == 3:
                break
    assert seen[0].uptime_s <= seen[2].uptime_s


async def test_what_an_engine_reads_is_in_the_overview(
    rest: Rest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "HISTORY_S", 0.0)
    monkeypatch.setattr(recent, "LIVE_S", 0.0)
    daemon = rest.daemon
    await daemon.recent.look(0.0)
    async with attached(rest, tmp_path) as client:
        await daemon.recent.look(0.0)
        table = None
        # On a busy machine the client's guardian may serve it; its reads are not the pump's.
        for first in range(0, 500, 50):
            await asyncio.to_thread(step, client, first)
            await daemon.recent.look(0.0)
            seen = Overview.model_validate(await rest.get("/v1/overview"))
            table = seen.tables[0]
            if table.reads and table.lookups_per_s:
                break
        assert table is not None
        assert table.reads > 0
        assert sum(table.read_times) == table.reads
        assert table.read_p50_us is not None
        assert table.read_p99_us is not None
        assert table.read_p50_us <= table.read_p99_us
        assert table.hit_ratio == 0.0
        assert seen.devices[0].read_p99_us is not None
        assert seen.devices[0].reads_per_s > 0
        (one,) = seen.clients
        assert (one.engine, one.tables, one.guardian, one.hit_ratio) == ("test", 2, 0, 0.0)
    history = Past.model_validate(await rest.get("/v1/history?points=2"))
    assert len(history.times) == len(history.hit_ratio) == 2
    assert max(history.reads_per_s) > 0


async def test_a_placed_window_has_slack(rest: Rest) -> None:
    change = {"placements": [{"image": "v41/layers.1.engram", "window_us": 1200}]}
    status, _, _ = await rest.answer("PATCH", "/v1/placements", json=change)
    assert status == 200
    table = Overview.model_validate(await rest.get("/v1/overview")).tables[0]
    assert (table.window_us, table.window_source) == (1200, "placement")


@contextlib.asynccontextmanager
async def attached(rest: Rest, directory: Path) -> AsyncIterator[Client]:
    """A client of the interface's own data plane."""
    path = directory / "engine.sock"
    listener = claims.Listener.open(path, socket.SOCK_SEQPACKET, mode=0o600, group="")
    rest.daemon.attach.start(listener)
    try:
        images = await asyncio.to_thread(list_images, str(path))
        client = await asyncio.to_thread(
            Client.attach, path, images, engine="test", cache_rows=1024, rows_max=512
        )
        yield client
        await asyncio.to_thread(client.close)
    finally:
        await rest.daemon.attach.stop(1.0)
        listener.close()


def step(client: Client, first: int) -> None:
    ids, out = np.arange(first, first + 50), np.empty((50, 256), np.uint16)
    for name in ("layers.1.engram", "layers.14.engram"):
        client.table(name).kick(ids)
        client.table(name).gather(ids, out)


def test_quantiles_are_bounds_of_buckets() -> None:
    counts = np.zeros(READ_TIME_BUCKETS, np.uint64)
    assert quantile_us(counts, 0.5) is None
    counts[[2, 10]] = 99, 1
    assert quantile_us(counts, 0.5) == quantile_us(counts, 0.99) == READ_TIME_BOUNDS_US[2] == 16.0
    assert quantile_us(counts, 0.995) == READ_TIME_BOUNDS_US[10] == 256.0
    counts[-1] = 1000
    assert quantile_us(counts, 0.9) == READ_TIME_BOUNDS_US[-1]


# --- files, keys ---------------------------------------------------------------------------------


async def test_the_files_are_anybodys_and_forbid_what_they_do_not_need(over_tcp: Rest) -> None:
    for name in pages.names():
        path = "/" if name == "index.html" else f"/dashboard/{name}"
        status, headers, text = await over_tcp.answer("GET", path)
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff"), path
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert text
        again, _, _ = await over_tcp.answer("GET", path, headers={"If-None-Match": headers["ETag"]})
        assert again == 304
    await over_tcp.problem("GET", "/dashboard/none.js", 401)
    await over_tcp.problem("GET", "/v1/overview", 401)


def test_no_file_names_another_origin() -> None:
    text = b"".join(pages.read(name).plain for name in pages.names() if name != "uplot.js")
    for scheme in (b"https://", b"http://"):
        allowed = text.count(b"http://www.w3.org/") if scheme == b"http://" else 0
        assert text.count(scheme) == allowed
    assert gzip.decompress(pages.read("main.js").packed) == pages.read("main.js").plain


async def test_a_key_reads_and_changes_nothing(over_tcp: Rest) -> None:
    status, _, made = await over_tcp.answer("POST", "/v1/session", headers=bearer(TOKEN))
    assert status == 200
    key = made["key"]
    assert (await over_tcp.answer("GET", "/v1/overview", headers=bearer(key)))[0] == 200
    await over_tcp.problem("POST", "/v1/controller/thaw", 403, headers=bearer(key))
    await over_tcp.problem("POST", "/v1/session", 403, headers=bearer(key))
    prefix, ends, signature = key.split(".")
    for forged in (
        f"{prefix}.{int(ends) + 1}.{signature}",
        f"{prefix}.{ends}.{signature[:-1]}0" if signature[-1] != "0" else f"{prefix}.{ends}.",
        f"{prefix}.1.{signature}",
        f"{prefix}.{ends}",
        f"{prefix}.x.y",
        f"{prefix}.",
    ):
        await over_tcp.problem("GET", "/v1/overview", 401, headers=bearer(forged))


async def test_there_is_no_key_without_a_token(rest: Rest) -> None:
    problem = await rest.problem("POST", "/v1/session", 409)
    assert "tierd dashboard" in problem["detail"]


# --- the door ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, list[str]]]:
    said: list[str] = []
    door = Door(path, said.append)
    task = asyncio.ensure_future(door.run(0))
    while not said and not task.done():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)
    try:
        async with aiohttp.ClientSession(door.address) as session:
            yield session, said
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def ask(
    session: aiohttp.ClientSession, method: str, path: str, **headers: str
) -> tuple[int, Mapping[str, str], Any]:
    async with session.request(method, path, headers=CIMultiDict(headers)) as answer:
        text = await answer.text()
        return answer.status, answer.headers, json.loads(text) if text[:1] == "{" else text


async def test_a_code_lets_one_browser_in(rest: Rest) -> None:
    async with opened(rest.path) as (session, said):
        assert (await ask(session, "GET", "/"))[0] == 200
        assert (await ask(session, "GET", "/v1/overview"))[0] == 401
        code = said[0].partition("#code=")[2]
        status, _, made = await ask(session, "POST", "/v1/session", **bearer(code))
        assert status == 200
        assert len(said) == 2  # the next browser's
        assert (await ask(session, "POST", "/v1/session", **bearer(code)))[0] == 401
        key = bearer(made["key"])
        status, headers, body = await ask(session, "GET", "/v1/overview", **key)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        Overview.model_validate(body)
        assert (await ask(session, "GET", "/v1/images/none/of/these", **key))[0] == 404
        for method in ("POST", "PATCH", "DELETE"):
            assert (await ask(session, method, "/v1/controller/thaw", **key))[0] in {401, 404, 405}
        assert (await ask(session, "GET", "/v1/overview", Host="evil.example", **key))[0] == 403


async def test_a_door_without_a_daemon_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path / "none.sock") as (session, said):
        code = said[0].partition("#code=")[2]
        _, _, made = await ask(session, "POST", "/v1/session", **bearer(code))
        status, _, problem = await ask(session, "GET", "/v1/overview", **bearer(made["key"]))
        assert status == 502
        assert "no daemon at" in problem["detail"]
