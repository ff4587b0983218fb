"""A REST interface in the test's own process: real sockets, a real data plane, no daemon around."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import sqlite_utils  # noqa: F401 - else the first event of a test would wait for the import

from tierd.api.server import RestApi
from tierd.catalog import Catalog
from tierd.config import load
from tierd.daemon.attach import AttachServer
from tierd.daemon.counters import Counters
from tierd.daemon.exports import Exports
from tierd.daemon.jobs import Board
from tierd.daemon.plane import DataPlane
from tierd.daemon.recent import Recent
from tierd.daemon.scrub import Scrubber
from tierd.daemon.service import Daemon
from tierd.daemon.steering import Steering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from aiohttp import web

PROBLEM_KEYS = {"type", "title", "status", "detail", "instance"}


class Rest:
    """A client of one interface, and what lies behind it."""

    def __init__(self, daemon: Daemon, api: RestApi, path: Path) -> None:
        self.daemon = daemon
        self.api = api
        self.path = path
        self.session = aiohttp.ClientSession(
            "http://tierd", connector=aiohttp.UnixConnector(str(path), limit=0)
        )
        self._tcp: aiohttp.ClientSession | None = None

    @property
    def app(self) -> web.Application:
        return self.api._app

    @property
    def tcp(self) -> aiohttp.ClientSession:
        """For addresses of its own; closed with the other one."""
        if self._tcp is None:
            self._tcp = aiohttp.ClientSession()
        return self._tcp

    async def close(self) -> None:
        await self.session.close()
        if self._tcp is not None:
            await self._tcp.close()

    async def answer(
        self, method: str, path: str, **options: Any
    ) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers and the body, parsed if it is JSON."""
        async with self.session.request(method, path, **options) as response:
            text = await response.text()
            body = json.loads(text) if "json" in response.content_type else text
            return response.status, response.headers, body

    async def get(self, path: str, **options: Any) -> Any:
        status, _, body = await self.answer("GET", path, **options)
        assert status == 200, body
        return body

    async def problem(self, method: str, path: str, status: int, **options: Any) -> dict[str, Any]:
        """The problem that a request meets, held to its form."""
        got, headers, body = await self.answer(method, path, **options)
        assert got == status, body
        assert headers["Content-Type"].startswith("application/problem+json")
        assert set(body) - {"errors"} == PROBLEM_KEYS
        assert body["status"] == status
        assert "\n" not in body["detail"]
        return body

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the interface work until something is so; the test's own timeout bounds it."""
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)

    async def job(self, job: str) -> dict[str, Any]:
        """The job once it has ended, by its events."""
        last: dict[str, Any] = {}
        headers = {"Accept": "text/event-stream"}
        async with self.session.get(f"/v1/jobs/{job}", headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    last = json.loads(line[6:])
        return last


@contextlib.asynccontextmanager
async def serving(device: Path, directory: Path, **overrides: Any) -> AsyncIterator[Rest]:
    """Serve one device's images by REST, at ``directory/api.sock``."""
    given = {
        "daemon.state_dir": str(directory),
        "daemon.runtime_dir": str(directory),
        "devices.paths": [str(device)],
        **overrides,
    }
    daemon = Daemon(load(environ={}, overrides=given).settings, RestApi)
    path = directory / "api.sock"
    async with contextlib.AsyncExitStack() as stack:
        daemon.catalog = Catalog(directory / "catalog.db")
        daemon.catalog.listener = daemon.hub.publish
        stack.callback(daemon.catalog.close)
        daemon.plane = DataPlane.open(daemon.settings)
        stack.callback(daemon.plane.close)
        daemon.counters = Counters(lambda: daemon.plane.stats())  # noqa: PLW0108 - a test replaces it
        daemon.scrubber = Scrubber(daemon.plane, daemon.settings.io, directory)
        daemon.exports = Exports(daemon.settings.exports, daemon.plane)
        daemon.jobs = Board(daemon.catalog)
        stack.callback(daemon.jobs.close)
        daemon.attach = AttachServer(daemon.settings, daemon.plane, daemon.catalog, boot_id="boot")
        daemon.steering = Steering(
            daemon.settings.controller, daemon.plane, daemon.attach, daemon.catalog
        )
        daemon.recent = Recent(daemon.plane, daemon.attach, daemon.counters)
        api = RestApi(daemon)
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.bind(str(path))
        sock.setblocking(False)
        stack.push_async_callback(api.stop)
        stack.callback(daemon.hub.close)
        rest = Rest(daemon, api, path)
        stack.push_async_callback(rest.close)
        await api.start(sock)
        yield rest
