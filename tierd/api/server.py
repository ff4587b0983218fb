"""Puts the routes together and serves them: Unix socket, TCP where configured, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from tierd.api import (
    clients,
    controller,
    devices,
    doctor,
    events,
    exports,
    health,
    images,
    jobs,
    kv,
    metrics,
    openapi,
    overview,
    pages,
    placements,
    session,
    status,
)
from tierd.api.access import ACCESS, Access, access_middleware
from tierd.api.common import DAEMON, EDITS, JUDGES
from tierd.api.doctor import EXAMINATION, Examination
from tierd.api.limits import LIMITS, Limits, Slots, count_middleware, limits_middleware
from tierd.api.problems import problem_middleware
from tierd.api.streams import PLACES, Places
from tierd.config.listen import is_loopback, parse_listen
from tierd.errors import ConfigError, DaemonError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.api.doctor import Examine
    from tierd.api.routing import Routes
    from tierd.config import ApiSection
    from tierd.daemon.service import Daemon

log = structlog.get_logger("tierd.api")

SHUTDOWN_TIMEOUT_S = 2.0
BACKLOG = 128
JUDGES_MAX = 2  # requests for jobs that are looked at at a time
BODY_BYTES_MAX = 64 * 1024
# A connection that has sent no whole request for this long is closed, also right at its start.
IDLE_S = 15.0
# What is left of a body that was refused is read for this long, so that its sender sees why.
LINGER_S = 1.0

RESOURCES: tuple[Routes, ...] = (
    status.routes,
    overview.routes,
    devices.routes,
    images.routes,
    placements.routes,
    clients.routes,
    kv.routes,
    exports.routes,
    controller.routes,
    jobs.routes,
    events.routes,
    doctor.routes,
    health.routes,
    metrics.routes,
    session.routes,
    openapi.routes,
)
READ_ONLY: tuple[Routes, ...] = (health.routes, metrics.routes)


def make_app(daemon: Daemon) -> web.Application:
    """Return the application, all routes in it.

    Raises:
        ConfigError: the token's file or the administrators' group cannot be used.
    """
    settings = daemon.settings.api
    app = web.Application(
        middlewares=[count_middleware, problem_middleware, access_middleware, limits_middleware],
        client_max_size=BODY_BYTES_MAX,
    )
    app[ACCESS] = Access(settings, daemon.settings.exports)
    app[LIMITS] = Limits(settings.requests_per_s, settings.connections_max)
    app[PLACES] = Places(settings.streams_max)
    app[EXAMINATION] = Examination()
    app[JUDGES] = ThreadPoolExecutor(JUDGES_MAX, thread_name_prefix="tierd-judge")
    app[openapi.RESOURCES] = RESOURCES
    _share(app, daemon, RESOURCES)
    pages.add_to(app)
    return app


def make_metrics_app(daemon: Daemon, main: web.Application) -> web.Application:
    """Return what the metrics listener serves: nothing that changes or names anybody."""
    app = web.Application(middlewares=[problem_middleware, limits_middleware], client_max_size=0)
    app[LIMITS], app[PLACES], app[EXAMINATION] = main[LIMITS], main[PLACES], main[EXAMINATION]
    _share(app, daemon, READ_ONLY)
    return app


def _share(app: web.Application, daemon: Daemon, resources: Sequence[Routes]) -> None:
    app[DAEMON] = daemon
    app[EDITS] = asyncio.Lock()
    for routes in resources:
        for endpoint in routes:
            app.router.add_route(endpoint.method, endpoint.path, endpoint.__call__)


class RestApi:
    """The REST interface of one daemon."""

    def __init__(self, daemon: Daemon, examine: Examine | None = None) -> None:
        """Build the application.

        Args:
            daemon: what it shows and changes.
            examine: looks at the machine once the daemon serves; None: nobody does.

        Raises:
            ConfigError: the configuration cannot be served.
        """
        self._daemon = daemon
        self._examine = examine
        self._app = make_app(daemon)
        self.addresses: dict[str, str] = {}  # key -> HOST:PORT that is listened on
        self.slots: list[Slots] = []  # of each listener, the Unix socket's first
        self._stack = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, sock: socket.socket) -> None:
        """Serve on a bound Unix socket, and on TCP where the configuration says so.

        Raises:
            DaemonError: a TCP address cannot be bound.
            ConfigError: certificate or key cannot be used.
        """
        settings = self._daemon.settings
        make = await self._serve(self._app)
        await self._listen(make, sock, None)
        if settings.api.listen:
            await self._listen(
                make, self._bind("api.listen", settings.api.listen), _tls(settings.api)
            )
        if settings.metrics.listen:
            host, _ = parse_listen("metrics.listen", settings.metrics.listen)
            if not is_loopback(host):
                log.warning("other machines can read the metrics", listen=settings.metrics.listen)
            quiet = await self._serve(make_metrics_app(self._daemon, self._app))
            await self._listen(quiet, self._bind("metrics.listen", settings.metrics.listen), None)
        if self.addresses:
            log.info("listening on TCP", **self.addresses)
        if self._examine is not None:
            seen = self._app[EXAMINATION].run(self._examine, settings)
            task = asyncio.get_running_loop().create_task(seen)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Close connections and stop serving."""
        for task in self._tasks:
            task.cancel()
        await self._stack.aclose()
        self._app[JUDGES].shutdown(wait=False, cancel_futures=True)

    async def _serve(self, app: web.Application) -> Any:
        """Return the factory of protocols that serve the application."""
        runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        return runner.server

    def _bind(self, key: str, listen: str) -> socket.socket:
        sock = _bind(key, listen)
        host, port = sock.getsockname()[:2]
        self.addresses[key] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return sock

    async def _listen(self, make: Any, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop, slots = asyncio.get_running_loop(), Slots(self._app[LIMITS])
        self.slots.append(slots)
        server = await loop.create_server(
            lambda: slots.factory(make), sock=sock, backlog=BACKLOG, ssl=tls
        )
        self._stack.callback(server.close)


def _bind(key: str, listen: str) -> socket.socket:
    host, port = parse_listen(key, listen)
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(kind, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise DaemonError(
            f"{key}: {listen} cannot be bound: {error.strerror}; run: ss -ltnp 'sport = :{port}'"
        ) from None
    return sock


def _tls(settings: ApiSection) -> ssl.SSLContext | None:
    if not settings.tls_certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"api.tls_certificate {settings.tls_certificate} and api.tls_key {settings.tls_key} "
            f"cannot be used: {error.strerror or error}"
        ) from None
    return context
