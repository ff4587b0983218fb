"""Cache policies played over a trace: LRU, CLOCK, S3-FIFO, a static hot set.

LRU is exact for every size at once (stack distances). CLOCK and S3-FIFO are played row by row, at
each size, on a sample of the rows in a cache smaller by the same factor (a miniature simulation):
a trace of ten million lookups takes seconds, not hours. The static hot set is chosen from the
first half of the trace and judged on the second, as an offline list would be.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from tierd.controller.curves import sampled
from tierd.controller.distances import miss_ratios, stack_distances

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

POLICIES = ("lru", "clock", "s3fifo", "static")
PLAYED_MAX = 150_000
"""Lookups played row by row; longer traces are sampled down to about this."""


def hit_ratios(
    ids: NDArray[np.int64],
    counted: NDArray[np.bool_],
    sizes: Sequence[int],
    policy: str,
) -> list[float]:
    """Return the hit ratio of the counted lookups for every cache size, in rows.

    Args:
        ids: int64 [lookups], in order; all of them pass through the cache.
        counted: bool [lookups]; those that a hit ratio is made of (decode).
        sizes: cache rows.
        policy: one of POLICIES.

    Returns:
        one ratio a size; NaN where nothing is counted.
    """
    if not counted.any():
        return [float("nan")] * len(sizes)
    match policy:
        case "lru":
            # The lookups that do not count have moved the others' distances already.
            ratios = miss_ratios(stack_distances(ids)[counted], sizes)
            return [float(1 - ratio) for ratio in ratios]
        case "static":
            return [_static(ids, counted, size) for size in sizes]
        case "clock":
            return _miniature(ids, counted, sizes, _clock)
        case "s3fifo":
            return _miniature(ids, counted, sizes, _s3fifo)
        case _:
            raise ValueError(f"{policy} is none of {', '.join(POLICIES)}")


def _static(ids: NDArray[np.int64], counted: NDArray[np.bool_], size: int) -> float:
    half = len(ids) // 2
    rows, uses = np.unique(ids[:half], return_counts=True)
    hot = np.sort(rows[np.argsort(-uses, kind="stable")[:size]])
    judged = ids[half:][counted[half:]]
    if not len(judged):
        return float("nan")
    at = np.minimum(np.searchsorted(hot, judged), max(len(hot) - 1, 0))
    return float((hot[at] == judged).mean()) if len(hot) else 0.0


def _miniature(
    ids: NDArray[np.int64],
    counted: NDArray[np.bool_],
    sizes: Sequence[int],
    play: Callable[[list[int], list[bool], int], int],
) -> list[float]:
    rate = min(1.0, PLAYED_MAX / len(ids))
    chosen = sampled(ids, rate) if rate < 1 else np.ones(len(ids), bool)
    rows, judged = ids[chosen].tolist(), counted[chosen].tolist()
    # Rows looked up very often are in the sample or not by chance: what is too many or too few is
    # a hit at any size (SHARDS-adj).
    expected = float(counted.sum()) * rate
    lacking = expected - sum(judged)
    return [
        float(np.clip((play(rows, judged, max(1, round(size * rate))) + lacking) / expected, 0, 1))
        for size in sizes
    ]


def _clock(rows: list[int], judged: list[bool], size: int) -> int:
    """Return how many judged lookups hit: one reference bit a slot, a hand that clears them."""
    place: dict[int, int] = {}
    slots = [-1] * size
    used = [False] * size
    hand = hits = 0
    for row, counts in zip(rows, judged, strict=True):
        at = place.get(row)
        if at is not None:
            used[at] = True
            hits += counts
            continue
        while used[hand]:
            used[hand] = False
            hand = (hand + 1) % size
        if slots[hand] >= 0:
            del place[slots[hand]]
        slots[hand] = row
        place[row] = hand
        hand = (hand + 1) % size
    return hits


def _s3fifo(rows: list[int], judged: list[bool], size: int) -> int:
    """Return how many judged lookups hit: a small queue (a tenth), a main one, a list of ghosts.

    Yang et al., SOSP 2023: a row enters the small queue; used again it moves to the main one, else
    it leaves a ghost; a row whose ghost is known enters the main queue at once.
    """
    small_max = max(1, size // 10)
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghosts: dict[int, None] = {}
    uses: dict[int, int] = {}
    hits = 0

    def shrink_main() -> None:
        while True:
            row = main.popleft()
            if uses[row] == 0:
                del uses[row]
                return
            uses[row] -= 1
            main.append(row)

    def shrink_small() -> None:
        row = small.popleft()
        if uses[row] > 0:
            uses[row] = 0
            main.append(row)
            return
        del uses[row]
        ghosts[row] = None
        if len(ghosts) > size:
            del ghosts[next(iter(ghosts))]

    for row, counts in zip(rows, judged, strict=True):
        if row in uses:
            uses[row] = min(3, uses[row] + 1)
            hits += counts
            continue
        while len(uses) >= size:
            if main and (len(small) < small_max or not small):
                shrink_main()
            else:
                shrink_small()
        uses[row] = 0
        if row in ghosts:
            del ghosts[row]
            main.append(row)
        else:
            small.append(row)
    return hits
