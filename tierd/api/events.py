"""/v1/events: history, newest first, or live as server-sent events."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from tierd.api import schemas
from tierd.api.common import moment
from tierd.api.parse import NUMBER, Query
from tierd.api.routing import Call, Routes
from tierd.api.streams import stream
from tierd.catalog import READ_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from aiohttp import web

    from tierd.api.streams import Item
    from tierd.daemon.service import Daemon

FLUSH_S = 0.5

routes = Routes("events", "What happened.")


class EventsQuery(Query):
    """Which events."""

    limit: Annotated[int, Field(ge=1, le=READ_MAX), NUMBER] = Field(
        100, description="As many at most; a stream gives all since `after`."
    )
    kind: str | None = Field(None, max_length=40, description="Of this kind only.")
    after: Annotated[int, Field(ge=0, le=2**53), NUMBER] = Field(
        0, description="With a larger id than this only."
    )


@routes.get("/v1/events", schemas.Events, query=EventsQuery, stream=schemas.Event)
async def get_events(call: Call) -> schemas.Events | web.StreamResponse:
    """Events, newest first.

    With `Accept: text/event-stream`, events as they happen; `Last-Event-ID` (or `after`) says
    where to go on. A reader that does not keep up is dropped and may come back.
    """
    query: EventsQuery = call.query
    if call.wants_stream:
        return await stream(call.request, _follow(call.daemon, query, _last_seen(call)))
    rows = await _read(call.daemon, query, query.after)
    return schemas.Events(events=[_event(row) for row in rows])


def _last_seen(call: Call) -> int | None:
    text = call.request.headers.get("Last-Event-ID", "")
    if text.isascii() and text.isdecimal() and len(text) < 18:
        return int(text)
    return call.query.after or None


async def _read(daemon: Daemon, query: EventsQuery, after: int) -> list[dict[str, Any]]:
    # What has happened by now is to be seen, unless the disk is too slow for that.
    await _ask(daemon, daemon.catalog.flush, FLUSH_S)
    read = daemon.catalog.events
    rows: list[dict[str, Any]] = await _ask(daemon, read, query.limit, query.kind, after)
    return rows


async def _ask(daemon: Daemon, read: Callable[..., Any], *words: Any, **more: Any) -> Any:
    """Read history in the thread that is there for it: its disk may never answer."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(daemon.history, functools.partial(read, *words, **more))


async def _follow(
    daemon: Daemon, query: EventsQuery, after: int | None
) -> AsyncGenerator[Item, None]:
    """Yield what the reader missed, then what happens."""
    listener = daemon.hub.join()  # before history is read, so that nothing falls between
    try:
        last = 0
        if after is not None:
            async for missed in _missed(daemon, query, after):
                last = missed["id"]
                yield _item(missed)
        while (row := await listener.get()) is not None:
            if query.kind in {None, row["kind"]} and not 0 < row["id"] <= last:
                yield _item(row)
    finally:
        daemon.hub.leave(listener)


async def _missed(
    daemon: Daemon, query: EventsQuery, after: int
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield what came after an event, oldest first, all of it."""
    newest = await _read(daemon, EventsQuery(limit=1), 0)
    if newest and newest[0]["id"] < after:
        after = 0  # of a history that is gone: everything in the present one came later
    while True:
        rows = await _ask(daemon, daemon.catalog.events, READ_MAX, query.kind, after, oldest=True)
        for row in rows:
            yield row
        if not rows:
            return
        after = rows[-1]["id"]


def _item(row: dict[str, Any]) -> Item:
    return row["kind"], row["id"] or None, _event(row).model_dump_json()


def _event(row: dict[str, Any]) -> schemas.Event:
    return schemas.Event(**{**row, "time": moment(row["time"])})
