"""GET /healthz: green only while every pump's loop turns."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from tierd.api import schemas
from tierd.api.common import DAEMON, reply
from tierd.api.problems import problem

routes = web.RouteTableDef()


@routes.get("/healthz")
async def get_health(request: web.Request) -> web.Response:
    """Ask the watchdog, then wake the pumps and see their counters move."""
    daemon = request.app[DAEMON]
    if stuck := await daemon.vitals():
        text = f"{stuck} stands still: engines serve themselves; run: systemctl restart tierd"
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, text, instance=request.path)
    return reply(schemas.Health(status="ok", pumps=len(daemon.plane.pumps)))
