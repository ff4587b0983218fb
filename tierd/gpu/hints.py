"""Hints: what a prefill will read, told to the daemon before its forward starts.

The scheduler knows a prompt's tokens, and so its rows, a chunk ahead. The daemon reads their pages
into memory of its own and finds them there when the GPU asks; a hint claims no slot of any cache,
and a wrong or late one costs nothing but a read. Hints come from host code, one thread.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Callable

_REQUESTS = int(_core.protocol.RING_DEPTH)
_PREFILL = int(_core.protocol.Priority.prefill)


def hint_rows(pages: int) -> int:
    """Return how many pages one request of a hint ring lists: all depth of them fill its memory."""
    return max(1, pages // _REQUESTS)


class HintRing:
    """One table's hints.

    Attributes:
        given: pages asked for so far.
        skipped: pages left out, because the memory was still being read into.
    """

    def __init__(
        self, channel: Any, ring: int, wake_fd: int, *, rows: int, per_page: int, pages: int
    ) -> None:
        """Bind a hint ring.

        Args:
            channel: ``_core.Channel``.
            ring: the hint ring's index.
            wake_fd: the pump's eventfd.
            rows: of the table.
            per_page: rows in a page.
            pages: the ring's memory, in pages.
        """
        self._client = _core.RingClient(channel, ring, wake_fd)
        self._per_page = per_page
        self._rows = rows
        self._room = pages
        self._at_once = hint_rows(pages)
        self._out: collections.deque[tuple[int, int]] = collections.deque()  # sequence, pages
        self.given = 0
        self.skipped = 0

    @property
    def rewake(self) -> Callable[[int], None]:
        """What to call with a new daemon's eventfd."""
        rewake: Callable[[int], None] = self._client.rewake
        return rewake

    def give(self, ids: Any) -> int:
        """Ask for the pages of these rows; the oldest hints make room.

        Args:
            ids: integer row numbers of any shape, numpy or a CPU torch tensor; those outside the
                table are ignored here, since the lookup refuses them by name.

        Returns:
            How many pages were asked for.
        """
        rows = np.asarray(ids).reshape(-1)
        rows = rows[(rows >= 0) & (rows < self._rows)]
        pages = np.unique(rows // self._per_page).astype(np.uint32)
        before = self.given
        for start in range(0, len(pages), self._at_once):
            part = pages[start : start + self._at_once]
            if not self._make_room(len(part)):
                self.skipped += len(pages) - start
                break
            zeros = np.zeros(len(part), np.uint32)
            self._out.append((self._client.publish(part, zeros, zeros, _PREFILL), len(part)))
            self.given += len(part)
        return self.given - before

    def _make_room(self, pages: int) -> bool:
        """Let go of the oldest hints until there is room; False if these are still being read."""
        while len(self._out) >= _REQUESTS or sum(n for _, n in self._out) + pages > self._room:
            if not self._out:
                return False
            sequence, _ = self._out[0]
            try:
                self._client.wait(sequence, 0)
            except TimeoutError:
                return False
            self._client.retire(sequence)
            self._out.popleft()
        return True
