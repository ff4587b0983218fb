"""Exact stack distances: how many distinct rows were used since a row's last use.

An LRU cache of c rows hits exactly the lookups whose distance is below c, so one pass gives the
miss ratio of every size (Mattson). With prev(i) the last lookup of i's row, the distance of i is
the number of lookups j in (prev(i), i) whose own prev(j) is not after prev(i): the first use of
each row in between. All j up to prev(i) satisfy that as well, so one count of "earlier and not
greater" gives it; a merge sort counts those, here on whole levels of the sort at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

COLD = -1
"""The distance of a row's first lookup."""
_BASE = 64


def previous_uses(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each lookup the position of its row's last lookup, or -1."""
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    previous = np.full(len(ids), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def stack_distances(ids: ArrayLike) -> NDArray[np.int64]:
    """Return each lookup's stack distance.

    Args:
        ids: int64 [lookups], row numbers in the order of their use.

    Returns:
        int64 [lookups]; ``COLD`` (-1) for a row's first lookup. 10 million take about 10 s.
    """
    rows = np.asarray(ids, np.int64).reshape(-1)
    previous = previous_uses(rows)
    distances = _earlier_not_greater(previous) - previous - 1
    return np.where(previous < 0, COLD, distances)


def miss_ratios(distances: NDArray[np.int64], sizes: ArrayLike) -> NDArray[np.float64]:
    """Return the exact miss ratio of an LRU cache of each size, [sizes]; NaN without lookups."""
    wanted = np.asarray(sizes, np.int64)
    if not len(distances):
        return np.full(len(wanted), np.nan)
    warm = np.sort(distances[distances >= 0])
    return 1.0 - np.searchsorted(warm, wanted, side="left") / len(distances)


def _earlier_not_greater(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each position how many earlier values are not greater than its own."""
    count = len(values)
    size = _BASE
    while size < count:
        size *= 2
    # The filling stands behind everything, so it is earlier than nothing that counts.
    padded = np.full(size, np.iinfo(np.int64).max, np.int64)
    padded[:count] = values
    counts = np.zeros(size, np.int64)
    blocks = padded.reshape(-1, _BASE)
    earlier = np.tri(_BASE, k=-1, dtype=bool)
    for first in range(0, len(blocks), 4096):
        part = blocks[first : first + 4096]
        found = (part[:, None, :] <= part[:, :, None]) & earlier
        counts[first * _BASE : (first + len(part)) * _BASE] = found.sum(axis=2).reshape(-1)
    order = np.argsort(blocks, axis=1, kind="stable")
    order += np.arange(0, size, _BASE)[:, None]
    width = _BASE
    while width < size:
        order = _merge(padded, counts, order.reshape(-1, 2 * width), width)
        width *= 2
    return counts[:count]


def _merge(
    values: NDArray[np.int64], counts: NDArray[np.int64], order: NDArray[np.int64], width: int
) -> NDArray[np.int64]:
    """Merge two sorted halves of each row; add to the right halves what stands left of them."""
    # Stable, so of equal values the left half's come first; two runs merge in linear time.
    by_value = np.argsort(values[order], axis=1, kind="stable")
    merged = np.take_along_axis(order, by_value, axis=1)
    is_left = by_value < width
    left_before = np.cumsum(is_left, axis=1)
    right = ~is_left
    counts[merged[right]] += left_before[right]
    return merged
