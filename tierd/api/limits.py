"""Bounds on what the REST interface does for its callers, so that none can starve the rest.

Connections are counted when they are made, those of each listener by themselves: who may only
read the metrics takes no place from the operator. Requests are counted a caller, by a token bucket;
readers of streams have places of their own (streams.py). Idle connections and slow headers are
closed by aiohttp's keep-alive timer, slow bodies by parse.py, answers that nobody reads here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from aiohttp import web

from tierd.api.access import CALLER
from tierd.api.problems import CONTENT_TYPE, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.typedefs import Handler

CALLERS_MAX = 1024
STALL_S = 10.0  # without a byte of an answer taken
UNLIMITED = frozenset({"/healthz", "/readyz"})


class Limits:
    """Counters of one daemon's REST interface.

    Attributes:
        answered: requests by class of status (``2xx``).
        refused: requests and connections turned away, by reason.
    """

    def __init__(self, requests_per_s: int, connections_max: int) -> None:
        self._rate = float(requests_per_s)
        self.connections_max = connections_max
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


class Slots:
    """The connections of one listener.

    Attributes:
        taken: those that are open.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.taken = 0

    def factory(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of a new connection, or one that says there are too many."""
        if self.taken >= self._limits.connections_max:
            self._limits.refused["connections"] += 1
            return _TooMany()
        return _Counted(make(), self)


LIMITS = web.AppKey("limits", Limits)


@web.middleware
async def limits_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn away who asks too often; count what is answered."""
    limits = request.app[LIMITS]
    if request.path not in UNLIMITED:
        # The metrics listener asks nobody who they are.
        known = request.get(CALLER)
        name = f"reader of metrics at {request.remote}" if known is None else known.name
        wait_s = limits.admit(name, time.monotonic())
        if wait_s:
            limits.refused["rate"] += 1
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{name} asks more often than api.requests_per_s allows",
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
    """Passes everything on, counts the connection, and ends it if its peer does not read."""

    _transport: asyncio.Transport

    def __init__(self, inner: asyncio.Protocol, slots: Slots) -> None:
        self._inner = inner
        self._slots = slots
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # So that we hear of every byte that waits: also a closing connection stays until the last
        # one has gone.
        self._transport.set_write_buffer_limits(high=0)
        self._slots.taken += 1
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._slots.taken -= 1
        self._stop_timer()
        self._inner.connection_lost(exc)

    def _watch(self, left: int) -> None:
        """Look again in a while whether the peer has taken any of what is left."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(STALL_S, self._look, left)

    def _look(self, before: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left >= before:
            self._transport.abort()
        else:
            self._watch(left)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._stop_timer()
        self._watch(self._transport.get_write_buffer_size())
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._stop_timer()
        self._inner.resume_writing()


class _TooMany(asyncio.Protocol):
    """Says 503 and closes, whatever was asked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's are none by their class
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
