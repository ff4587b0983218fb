"""Hands events to whoever listens now, without ever waiting for a listener.

Events arrive from the catalog's writer thread, which gives each its number; listeners live on
event loops. A listener that does not keep up loses its place: its queue is closed, and it can
come back with the number of the last event it saw and read what it missed from history.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

QUEUE_MAX = 256


class Listener:
    """One reader's queue. Use only on the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(QUEUE_MAX)
        self.overrun = False

    async def get(self) -> dict[str, Any] | None:
        """Return the next event; None when there will be none."""
        return await self._queue.get()

    def offer(self, event: dict[str, Any] | None) -> None:
        """Queue an event, from any thread."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: dict[str, Any] | None) -> None:
        if self.overrun:
            return
        if event is not None and self._queue.qsize() >= QUEUE_MAX - 1:
            self.overrun = True
            event = None
        if not self._queue.full():
            self._queue.put_nowait(event)


class Hub:
    """All listeners of one daemon.

    Attributes:
        last_id: number of the newest event, 0 before the first.
    """

    def __init__(self) -> None:
        self.last_id = 0
        self._lock = threading.Lock()
        self._listeners: set[Listener] = set()
        self._closed = False

    def join(self) -> Listener:
        """Listen from now on."""
        listener = Listener()
        with self._lock:
            self._listeners.add(listener)
            if self._closed:
                listener.offer(None)
        return listener

    def leave(self, listener: Listener) -> None:
        """Listen no more."""
        with self._lock:
            self._listeners.discard(listener)

    def publish(self, event: dict[str, Any]) -> None:
        """Hand an event to every listener; from any thread."""
        with self._lock:
            self.last_id = max(self.last_id, event["id"])
            for listener in self._listeners:
                listener.offer(event)

    def close(self) -> None:
        """End every stream: the daemon stops."""
        with self._lock:
            self._closed = True
            for listener in self._listeners:
                listener.offer(None)
