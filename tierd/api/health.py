"""GET /healthz: green only while every pump's loop turns."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from aiohttp import web

from tierd.api import schemas
from tierd.api.common import DAEMON, reply
from tierd.api.problems import problem

routes = web.RouteTableDef()


@routes.get("/healthz")
async def get_health(request: web.Request) -> web.Response:
    """Wake the pumps and see their counters move."""
    plane = request.app[DAEMON].plane
    if not await asyncio.to_thread(plane.is_beating):
        text = "a pump stands still: rows are not served; run: systemctl restart tierd"
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, text, instance=request.path)
    return reply(schemas.Health(status="ok", pumps=len(plane.pumps)))
