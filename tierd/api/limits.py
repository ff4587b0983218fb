"""Bounds on what the REST interface does for its callers, so that none can starve the rest.

Connections are counted when they are made; requests are counted a caller, by a token bucket;
readers of streams have places of their own (streams.py). Idle connections and slow headers are
closed by aiohttp's keep-alive timer, slow bodies by parse.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from tierd.api.access import CALLER
from tierd.api.problems import CONTENT_TYPE, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.typedefs import Handler

CALLERS_MAX = 1024
UNLIMITED = frozenset({"/healthz", "/readyz"})


class Limits:
    """Counters of one daemon's REST interface.

    Attributes:
        answered: requests by class of status (``2xx``).
        refused: requests and connections turned away, by reason.
    """

    def __init__(self, requests_per_s: int, connections_max: int) -> None:
        self._rate = float(requests_per_s)
        self._connections_max = connections_max
        self._connections = 0
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.answered = dict.fromkeys(("1xx", "2xx", "3xx", "4xx", "5xx"), 0)
        self.refused = {"rate": 0, "connections": 0, "streams": 0}

    def admit(self, caller: str, now: float) -> float:
        """Count a request; return 0, or the seconds after which one will be admitted."""
        left, last = self._buckets.pop(caller, (self._rate, now))
        left = min(self._rate, left + (now - last) * self._rate)
        admitted = left >= 1
        self._buckets[caller] = (left - 1 if admitted else left, now)
        if len(self._buckets) > CALLERS_MAX:  # the longest silent one; its bucket was full again
            self._buckets.popitem(last=False)
        return 0.0 if admitted else (1 - left) / self._rate

    def factory(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of a new connection, or one that says there are too many."""
        if self._connections >= self._connections_max:
            self.refused["connections"] += 1
            return _TooMany()
        return _Counted(make(), self)

    def opened(self) -> None:
        """Count a connection."""
        self._connections += 1

    def closed(self) -> None:
        """Forget a connection."""
        self._connections -= 1


LIMITS = web.AppKey("limits", Limits)


@web.middleware
async def limits_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn away who asks too often; count what is answered."""
    limits = request.app[LIMITS]
    if request.path not in UNLIMITED:
        wait_s = limits.admit(request[CALLER].name, time.monotonic())
        if wait_s:
            limits.refused["rate"] += 1
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{request[CALLER].name} asks more often than api.requests_per_s allows",
                headers={"Retry-After": str(max(1, round(wait_s)))},
            )
    return await handler(request)


@web.middleware
async def count_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count answers by class of status; outermost, so that problems count as well."""
    answer = await handler(request)
    request.app[LIMITS].answered[f"{answer.status // 100}xx"] += 1
    return answer


class _Counted(asyncio.Protocol):
    """Passes everything on, and counts the connection."""

    def __init__(self, inner: asyncio.Protocol, limits: Limits) -> None:
        self._inner = inner
        self._limits = limits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._limits.opened()
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.closed()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class _TooMany(asyncio.Protocol):
    """Says 503 and closes, whatever was asked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        status = HTTPStatus.SERVICE_UNAVAILABLE
        body = json.dumps(
            {
                "type": "about:blank",
                "title": status.phrase,
                "status": int(status),
                "detail": "as many connections are open as api.connections_max allows; try again",
                "instance": "",
            }
        )
        head = (
            f"HTTP/1.1 {int(status)} {status.phrase}\r\nContent-Type: {CONTENT_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        transport.write((head + body).encode())
        transport.close()
