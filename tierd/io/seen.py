"""Seen-sets: which rows of a table traces ever read; lossy skipping leaves the others out.

SlackTier, section 6.8. A bit per row: 48 MB for a V4.1 table. A row without its bit is not read:
the decision falls before it claims a slot, so it never enters the cache, and its output is zero.
That changes what the model computes (the paper: agents' quality unchanged within its error, chat's
a little worse), so it is off unless an operator names a seen-set in ``lossy.seen_sets``.
"""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import SeenSetError
from tierd.types import SeenSet

if TYPE_CHECKING:
    from pathlib import Path

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


def is_wanted(bits: NDArray[np.uint8], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which rows are to be read, of any shape: those that were seen.

    Rows outside the table count as wanted, so that whoever looks them up refuses them by name.
    """
    inside = (ids >= 0) & (ids < 8 * len(bits))
    rows = np.where(inside, ids, 0)
    seen = (bits[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1
    return np.asarray((seen != 0) | ~inside, np.bool_)


def share(bits: NDArray[np.uint8], rows: int) -> float:
    """Return which share of a table's rows was seen."""
    return float(np.bitwise_count(bits).sum()) / max(rows, 1)


def save(made: SeenSet, path: Path) -> None:
    """Write a seen-set (numpy's npz).

    Raises:
        SeenSetError: the file cannot be written.
    """
    try:
        with path.open("wb") as file:
            np.savez_compressed(
                file, bits=made.bits, model=made.model, table=made.table, rows=made.rows,
                fingerprint=made.fingerprint, lookups=made.lookups, share=made.share,
            )  # fmt: skip
    except OSError as error:
        raise SeenSetError(f"{path}: cannot be written: {error.strerror}") from None


def load(path: Path) -> SeenSet:
    """Read a seen-set.

    Raises:
        SeenSetError: no such file, or not a seen-set.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            rows, bits = int(data["rows"]), data["bits"].astype(np.uint8)
            if len(bits) != -(-rows // 8):
                raise ValueError("its bits are not as many as its rows")
            return SeenSet(
                str(data["model"]), str(data["table"]), rows, str(data["fingerprint"]),
                int(data["lookups"]), float(data["share"]), bits,
            )  # fmt: skip
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise SeenSetError(f"{path}: not a seen-set ({error}); run: tierd trace seen") from None
