"""Server-sent events: a bounded number of readers, each with a bounded queue and bounded patience.

A reader that does not read is dropped after WRITE_TIMEOUT_S; it costs one place until then.
"""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from tierd.api.limits import LIMITS
from tierd.api.problems import Problem

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

WRITE_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 15.0
LOOK_S = 1.0  # how soon a place is free again after its reader has gone

Item = tuple[str, int | None, str]  # event name, id, data in one line


class Places:
    """How many readers there are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    @contextlib.contextmanager
    def take(self, request: web.Request) -> Iterator[None]:
        """Hold a place.

        Raises:
            Problem: 503; all are taken.
        """
        if self.taken >= self._most:
            request.app[LIMITS].refused["streams"] += 1
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._most} readers of events are here, as many as api.streams_max allows",
                headers={"Retry-After": "10"},
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


PLACES = web.AppKey("places", Places)


async def stream(request: web.Request, items: AsyncGenerator[Item, None]) -> web.StreamResponse:
    """Send items as they come, until there are no more, the reader goes, or it does not read.

    Raises:
        Problem: 503; there are too many readers already.
    """
    with request.app[PLACES].take(request):
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        try:
            await response.prepare(request)
            async for frame in _frames(request, items):
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(frame)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return response


async def _frames(request: web.Request, items: AsyncGenerator[Item, None]) -> AsyncIterator[bytes]:
    """Yield items as bytes, and comments while nothing happens; end when the reader has gone."""
    silent_s = 0.0
    coming = asyncio.ensure_future(anext(items))
    try:
        while request.transport is not None and not request.transport.is_closing():
            done, _ = await asyncio.wait({coming}, timeout=LOOK_S)
            if done:
                silent_s = 0.0
                try:
                    item = coming.result()
                except StopAsyncIteration:
                    return
                yield _frame(item)
                coming = asyncio.ensure_future(anext(items))
                continue
            silent_s += LOOK_S
            if silent_s >= KEEP_ALIVE_S:
                silent_s = 0.0
                yield b": still here\n\n"
    finally:
        coming.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await coming
        await items.aclose()


def _frame(item: Item) -> bytes:
    name, number, data = item
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {name}\ndata: {data}\n\n".encode()
