"""Lossy skipping: rows that no trace ever saw are not read (SlackTier, section 6.8; opt-in).

A bit per row says whether traces of the operator's own traffic saw it: 48 MB for a V4.1 table. The
decision falls before a row claims a slot, so a skipped row never enters the cache; its output is
zero. That changes what the model computes: the paper saw agent quality unchanged within its error,
and takes it for agent workloads only. It is off unless a seen-set is named in the configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def empty(rows: int) -> NDArray[np.uint8]:
    """Return a seen-set of a table in which nothing was seen, uint8 [ceil(rows / 8)]."""
    return np.zeros(-(-rows // 8), np.uint8)


def mark(bits: NDArray[np.uint8], ids: ArrayLike) -> None:
    """Mark rows as seen, in place. IndexError for a row outside the table."""
    rows = np.unique(np.asarray(ids, np.int64))
    if len(rows) and (rows[0] < 0 or rows[-1] >= 8 * len(bits)):
        raise IndexError(f"rows {rows[0]}..{rows[-1]} in a table of at most {8 * len(bits)}")
    np.bitwise_or.at(bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))


def is_seen(bits: NDArray[np.uint8], ids: ArrayLike) -> NDArray[np.bool_]:
    """Tell for each row whether it was seen; rows that were not may be skipped on a miss."""
    rows = np.asarray(ids, np.int64)
    return np.asarray((bits[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1, np.bool_)


def share(bits: NDArray[np.uint8], rows: int) -> float:
    """Return which share of a table's rows was seen."""
    return float(np.bitwise_count(bits).sum()) / max(rows, 1)
