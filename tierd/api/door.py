"""The door of ``tierd dashboard``: a loopback port that shows a daemon to a browser, read-only.

It serves the dashboard's files and passes GET requests on to the daemon's Unix socket, as the user
who started it. A browser gets in with a code that works once; in exchange it gets a key, which it
keeps for its tab. The key is sent as a bearer token and not as a cookie: cookies of 127.0.0.1 go to
every port there, so to servers of other users of the node as well.

Fault model: the daemon may be gone, stand still or start anew at any time; requests meanwhile are
answered with a problem, and the page asks again. Whoever reaches the port without a key gets files
that are in the package anyway, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from tierd.api import pages
from tierd.api.access import PUBLIC
from tierd.api.problems import Problem, problem_middleware
from tierd.errors import DaemonError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aiohttp.typedefs import Handler

HOST = "127.0.0.1"
LOCAL_NAMES = {"127.0.0.1", "localhost", "[::1]"}
CONNECT_TIMEOUT_S = 5.0
# The daemon sends something every second, or it is not the daemon that answers.
READ_TIMEOUT_S = 20.0
CHUNK_BYTES = 64 * 1024
CONNECTIONS_MAX = 64
PASSED_ON = ("Accept", "If-None-Match", "Last-Event-ID")
PASSED_BACK = ("Content-Type", "ETag", "Retry-After")


class Door:
    """One loopback port.

    Attributes:
        address: ``http://127.0.0.1:PORT``.
    """

    def __init__(self, socket_path: Path, said: Callable[[str], None]) -> None:
        """Make a door that is shut.

        Args:
            socket_path: the daemon's REST socket.
            said: told of every address that lets one browser in.
        """
        self._path = socket_path
        self._said = said
        self._code = ""
        self._key = secrets.token_urlsafe(32)
        self._waiting = asyncio.Semaphore(CONNECTIONS_MAX)
        self.address = ""

    async def run(self, port: int) -> None:
        """Serve until cancelled.

        Raises:
            DaemonError: the port cannot be bound.
        """
        app = web.Application(middlewares=[problem_middleware, self._judge], client_max_size=0)
        pages.add_to(app)
        app.router.add_post("/v1/session", self._enter)
        app.router.add_route("GET", "/v1/{rest:.+}", self._pass_on)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        timeout = aiohttp.ClientTimeout(
            total=None, connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S
        )
        async with contextlib.AsyncExitStack() as stack:
            connector = aiohttp.UnixConnector(str(self._path), limit=CONNECTIONS_MAX)
            self._daemon = await stack.enter_async_context(
                aiohttp.ClientSession("http://tierd", connector=connector, timeout=timeout)
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, HOST, port)
            try:
                await site.start()
            except OSError as error:
                raise DaemonError(
                    f"{HOST}:{port} cannot be bound: {error.strerror}; "
                    f"run: ss -ltnp 'sport = :{port}'"
                ) from None
            self.address = f"http://{HOST}:{runner.addresses[0][1]}"
            self._offer()
            await asyncio.Event().wait()

    def _offer(self) -> None:
        """Make a new code and say the address that carries it."""
        self._code = secrets.token_urlsafe(24)
        # Behind the #, so that it is in no request, log or Referer.
        self._said(f"{self.address}/#code={self._code}")

    @web.middleware
    async def _judge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what no page of ours sends: names that a foreign site had resolved to here."""
        name = request.host.rpartition(":")[0] if ":" in request.host else request.host
        if name not in LOCAL_NAMES:
            raise Problem(
                HTTPStatus.FORBIDDEN, "this port is asked for as 127.0.0.1 or localhost only"
            )
        free = request.path in PUBLIC or request.method == "POST"
        if not free and not _same(_bearer(request), self._key):
            raise Problem(
                HTTPStatus.UNAUTHORIZED,
                "the key is missing or of an earlier run; use the last address that "
                "`tierd dashboard` has printed",
                headers={"WWW-Authenticate": 'Bearer realm="tierd"'},
            )
        return await handler(request)

    async def _enter(self, request: web.Request) -> web.StreamResponse:
        """Give the key for the code, once."""
        if not self._code or not _same(_bearer(request), self._code):
            raise Problem(
                HTTPStatus.UNAUTHORIZED,
                "this address has been used; use the last one that `tierd dashboard` has printed",
            )
        self._offer()
        return web.json_response({"key": self._key, "ends_at": None})

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Answer as the daemon does."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers["Accept-Encoding"] = "identity"  # it is packed here, for the way to the browser
        try:
            async with (
                self._waiting,
                self._daemon.get(request.raw_path, headers=headers) as answer,
            ):
                return await _send(request, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or "it does not answer"
            raise Problem(
                HTTPStatus.BAD_GATEWAY, f"no daemon at {self._path}: {reason}; run: tierd serve"
            ) from None


async def _send(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(
        status=answer.status,
        headers={name: answer.headers[name] for name in PASSED_BACK if name in answer.headers},
    )
    response.headers["Cache-Control"] = "no-store"
    if answer.content_type != "text/event-stream":
        response.enable_compression()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError, aiohttp.ClientError, TimeoutError):
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response
    # Half an answer must not look like a whole one.
    if request.transport is not None:
        request.transport.abort()
    return response


def _bearer(request: web.Request) -> str:
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
