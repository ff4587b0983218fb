"""The pumps' counters for those who poll: many readers cost the pumps no more than one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# So many looks in a row are made while their reader waits; then so many a second are made behind
# the readers' backs, who get what the last look found.
BURST, PER_S = 10.0, 10.0


class Counters:
    """What the pumps counted a moment ago.

    Asking a pump means to wake it and to wait for its next turn, in a thread since it may be
    registering memory: on a busy machine four changes of context, each in a queue.
    """

    def __init__(self, count: Callable[[], list[dict[str, Any]]]) -> None:
        """Make one that has seen nothing.

        Args:
            count: asks every pump; may block.
        """
        self._count = count
        self._found: list[dict[str, Any]] = []
        self._allowed, self._at = BURST, time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def read(self) -> list[dict[str, Any]]:
        """Return the counters of each pump: as they are, or 0.1 s old for who asks all the time."""
        now = time.monotonic()
        self._allowed = min(BURST, self._allowed + PER_S * (now - self._at))
        self._at = now
        waits = self._allowed >= 2 or not self._found
        if self._task is not None and waits:
            await asyncio.shield(self._task)  # it may have begun before what this reader asks about
        if self._task is None and self._allowed >= 1:
            self._allowed -= 1
            self._task = asyncio.get_running_loop().create_task(self._look())
        if self._task is not None and waits:
            # A reader who goes away does not take the look from the others.
            await asyncio.shield(self._task)
        return self._found

    async def _look(self) -> None:
        try:
            self._found = await asyncio.to_thread(self._count)
        finally:
            self._task = None
