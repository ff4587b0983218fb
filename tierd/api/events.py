"""GET /v1/events: history, newest first."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tierd.api import schemas
from tierd.api.common import DAEMON, moment, reply
from tierd.catalog import READ_MAX

LIMIT_DEFAULT = 100
FLUSH_S = 0.5

routes = web.RouteTableDef()


@routes.get("/v1/events")
async def get_events(request: web.Request) -> web.Response:
    """Answer with up to ``?limit=N`` events, of ``?kind=KIND`` if that is given."""
    text = request.query.get("limit", str(LIMIT_DEFAULT))
    if not text.isdecimal() or not 1 <= int(text) <= READ_MAX:
        raise web.HTTPBadRequest(text=f"limit={text}: a number from 1 to {READ_MAX} is wanted")
    kind = request.query.get("kind")
    catalog = request.app[DAEMON].catalog
    # What has happened by now is to be seen, unless the disk is too slow for that.
    await asyncio.to_thread(catalog.flush, FLUSH_S)
    rows = await asyncio.to_thread(catalog.events, int(text), kind)
    events = [schemas.Event(**{**row, "time": moment(row["time"])}) for row in rows]
    return reply(schemas.Events(events=events))
