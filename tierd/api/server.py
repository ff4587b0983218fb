"""Puts the routes together and serves them on the daemon's socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from tierd.api import clients, events, health, images, status
from tierd.api.common import DAEMON
from tierd.api.problems import problem_middleware

if TYPE_CHECKING:
    import socket

    from tierd.daemon import Daemon

# Clients on this socket are local; one that takes longer than this has gone.
SHUTDOWN_TIMEOUT_S = 2.0
BACKLOG = 128


def make_app(daemon: Daemon) -> web.Application:
    """Return the application, all routes in it."""
    app = web.Application(middlewares=[problem_middleware], client_max_size=64 * 1024)
    app[DAEMON] = daemon
    for module in (status, images, clients, events, health):
        app.add_routes(module.routes)
    return app


class RestApi:
    """The REST interface of one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._runner = web.AppRunner(
            make_app(daemon), access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )

    async def start(self, sock: socket.socket) -> None:
        """Serve on a bound socket."""
        await self._runner.setup()
        await web.SockSite(self._runner, sock, backlog=BACKLOG).start()

    async def stop(self) -> None:
        """Close connections and stop serving."""
        await self._runner.cleanup()
