"""What a step is predicted to cost under a split: curves -> pages -> read times -> stalls."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tierd.controller.exposure import stalls_ms
from tierd.controller.readtime import PAPER_DISK, ReadTime, reads_ms

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from tierd.controller.curves import MissCurve


@dataclasses.dataclass(frozen=True)
class TableLoad:
    """One table as the steps of the present traffic use it.

    Attributes:
        name: for people.
        window_ms: W at the present step time.
        lookups: rows that one rank looks up in a decode step.
        curve: miss ratio as a function of cache rows.
        pages: pages of the table; few pages let several missing rows share one.
        shares: share of its pages on each device; all 0 for a table in dram.
    """

    name: str
    window_ms: float
    lookups: float
    curve: MissCurve
    pages: float = float("inf")
    shares: tuple[float, ...] = (1.0,)

    def problem(self, devices: int) -> str:
        """Say what makes this table unusable on so many devices, "" if nothing does."""
        if len(self.shares) != devices:
            return f"shares of {len(self.shares)} devices where there are {devices}"
        if not (np.isfinite(self.window_ms) and self.window_ms >= 0):
            return f"a window of {self.window_ms} ms"
        if not (np.isfinite(self.lookups) and self.lookups >= 0):
            return f"{self.lookups} lookups a step"
        trouble = self.curve.problem()
        return f"nonsense curve: {trouble}" if trouble else ""


@dataclasses.dataclass(frozen=True)
class NodeLoad:
    """All tables of one rank, in the order in which a step reaches them.

    Attributes:
        tables: by window, shortest first; that is also the order of submission.
        devices: what the tables lie on.
        resolve_ms: s, from step start until the ids are resolved.
        kappa_ms: fixed cost of a step.
    """

    tables: tuple[TableLoad, ...]
    devices: tuple[ReadTime, ...] = (PAPER_DISK,)
    resolve_ms: float = 0.0
    kappa_ms: float = 0.0

    @property
    def windows_ms(self) -> NDArray[np.float64]:
        """Windows, [tables]."""
        return np.array([table.window_ms for table in self.tables])

    def problem(self) -> str:
        """Say what makes this load unusable, "" if nothing does."""
        if not self.tables:
            return "there is no table"
        for table in self.tables:
            if trouble := table.problem(len(self.devices)):
                return f"{table.name}: {trouble}"
        if (np.diff(self.windows_ms) < 0).any():
            return "tables are not in the order of their windows"
        return ""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the model says of one or many splits.

    Attributes:
        pages: [..., tables] that a step reads.
        reads_ms: [..., tables], T.
        stalls_ms: [..., tables], d.
        growth_ms: [...], their sum and kappa.
    """

    pages: NDArray[np.float64]
    reads_ms: NDArray[np.float64]
    stalls_ms: NDArray[np.float64]
    growth_ms: NDArray[np.float64]


def distinct_pages(rows: NDArray[np.float64], pages: float) -> NDArray[np.float64]:
    """Return how many pages random rows lie on: 740 rows in 6.4 million pages share 0.04."""
    if not np.isfinite(pages) or pages <= 1:
        return np.minimum(rows, pages)
    return np.asarray(-np.expm1(rows * np.log1p(-1.0 / pages)) * pages, np.float64)


def predict(load: NodeLoad, cache_rows: ArrayLike, *, by_group: bool = False) -> Prediction:
    """Predict steps under splits of the cache.

    Args:
        load: tables, devices and curves.
        cache_rows: [..., tables], rows of cache that each table has.
        by_group: judge by each group's curves alone, to learn how sure a difference is; every
            result gets a leading axis of groups. A curve that is known exactly is the same in all.
    """
    rows = np.asarray(cache_rows, np.float64)
    groups = max((len(t.curve.groups) for t in load.tables), default=0) if by_group else 0
    pages = np.empty((*((groups,) if by_group else ()), *rows.shape))
    for number, table in enumerate(load.tables):
        pages[..., number] = _pages_at(table, rows[..., number], by_group=by_group)
    return from_pages(load, pages)


def predict_ways(load: NodeLoad, ways: NDArray[np.int64], sets: int) -> Prediction:
    """Predict many splits of one cache, ways [..., tables]: curves are looked at once each size."""
    pages = np.empty(ways.shape)
    sizes = np.arange(ways.max(initial=0) + 1) * float(sets)
    for number, table in enumerate(load.tables):
        pages[..., number] = _pages_at(table, sizes)[ways[..., number]]
    return from_pages(load, pages)


def _pages_at(
    table: TableLoad, rows: NDArray[np.float64], *, by_group: bool = False
) -> NDArray[np.float64]:
    """Return the pages that a step reads with so many rows of cache, [..., rows.shape]."""
    curve = table.curve
    if by_group and len(curve.groups):
        # All groups share the curve's points, so one search serves them all.
        place = np.interp(rows, curve.rows, np.arange(len(curve.rows)))
        low = np.minimum(place.astype(np.int64), len(curve.rows) - 2)
        part = place - low
        miss = curve.groups[:, low] * (1 - part) + curve.groups[:, low + 1] * part
    else:
        miss = np.interp(rows, curve.rows, curve.miss)
    return distinct_pages(table.lookups * miss, table.pages)


def from_pages(load: NodeLoad, pages: ArrayLike) -> Prediction:
    """Predict steps that read known numbers of pages, [..., tables]."""
    wanted = np.asarray(pages, np.float64)
    shares = np.array([table.shares for table in load.tables])
    times = reads_ms(wanted, load.devices, shares)
    stalls = stalls_ms(times, load.windows_ms, load.resolve_ms)
    return Prediction(wanted, times, stalls, stalls.sum(axis=-1) + load.kappa_ms)
