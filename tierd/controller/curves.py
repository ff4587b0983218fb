"""Live miss curves from sampled lookups (SHARDS): one table's misses as a function of cache rows.

A row is sampled or not by a hash of its number, so all its lookups are seen or none. Among sampled
rows the stack distance is ``rate`` times the true one; a histogram of distances gives the miss
ratio of an LRU cache of any size at once. Three things make it fit for a daemon:

- Constant memory. At most ``samples_max`` rows are remembered, the most recently used. A row that
  falls off has a distance beyond ``samples_max / rate`` rows, the **horizon**: for every smaller
  cache its next lookup is a miss either way, so forgetting it changes nothing. (Lowering the rate
  instead, as fixed-size SHARDS does, would coarsen the curve for as long as the daemon runs,
  because every day brings rows that never come back.)
- It follows the traffic: the histogram halves every ``half_life`` lookups.
- It knows what it does not know: sampled rows fall into 8 groups by another hash, each group is a
  curve of its own, and the spread of the groups gives the standard error at every size.

A few rows are looked up so often that sampling them or not shifts the whole curve. How many
lookups there were in all is known exactly, so what the sample has too many or too few is taken
from or given to the shortest distance (SHARDS-adj), where such rows are.

Decode and prefill lookups share the cache, hence one stack; each has its own histogram.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from tierd.controller.distances import previous_uses

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

SAMPLES_MAX = 1 << 16
RATE = 1 / 128
GROUPS = 8  # three bits of a hash
_CHUNK = 1024
_OCTAVE = 32  # buckets per doubling of the distance, from 2 * _OCTAVE on; exact below


class Phase(IntEnum):
    """Which part of serving a lookup belongs to."""

    DECODE = 0
    PREFILL = 1


def sample_hash(rows: ArrayLike) -> NDArray[np.uint32]:
    """Return the hash by which clients sample rows (``sample_hash`` of protocol.h)."""
    wide = np.asarray(rows).astype(np.uint64)
    high = (wide >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        x = wide.astype(np.uint32) ^ (high * np.uint32(0x9E3779B1) + np.uint32(0x51AB5EED))
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return np.asarray(x ^ (x >> np.uint32(16)), np.uint32)


def sampled(rows: ArrayLike, rate: float = RATE) -> NDArray[np.bool_]:
    """Tell which rows a sample of this rate holds; a lower rate's are among a higher rate's."""
    return np.asarray(sample_hash(rows).astype(np.float64) < rate * 2.0**32, np.bool_)


def _groups(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each row's group, by a hash that has nothing to do with being sampled."""
    with np.errstate(over="ignore"):
        x = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(x >> np.uint64(61), np.int64)


@dataclasses.dataclass(frozen=True)
class MissCurve:
    """What share of a table's lookups an LRU cache of some rows misses.

    Attributes:
        rows: [points], ascending from 0.
        miss: [points], from 1 down.
        error: [points], one standard error.
        groups: [groups, points], the curve of each group of rows; empty where unknown.
        samples: lookups that it stands on, after forgetting.
    """

    rows: NDArray[np.float64]
    miss: NDArray[np.float64]
    error: NDArray[np.float64]
    groups: NDArray[np.float64]
    samples: float

    @classmethod
    def of(cls, rows: ArrayLike, miss: ArrayLike) -> MissCurve:
        """Make a curve that is known exactly (a replayed trace, an operator's figure)."""
        sizes, values = np.asarray(rows, np.float64), np.asarray(miss, np.float64)
        return cls(sizes, values, np.zeros_like(sizes), np.empty((0, len(sizes))), np.inf)

    def at(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return the miss ratio at cache sizes; beyond the last point it stays as it is there."""
        return np.asarray(np.interp(np.asarray(rows, np.float64), self.rows, self.miss), np.float64)

    def problem(self) -> str:
        """Say why this cannot be a miss curve, "" if it can."""
        rows, miss = self.rows, self.miss
        # Every decision asks, so a sound curve passes at once; what is not a number fails these.
        if (
            1 < len(rows) == len(miss)
            and rows[0] >= 0
            and np.isfinite(rows[-1])
            and -1e-9 <= miss[-1] <= miss[0] <= 1 + 1e-9
            and (rows[1:] - rows[:-1]).min() > 0
            and (miss[1:] - miss[:-1]).max() <= 1e-6
        ):
            return ""
        return self._explain()

    def _explain(self) -> str:
        if len(self.rows) < 2 or len(self.rows) != len(self.miss):
            return f"{len(self.rows)} sizes and {len(self.miss)} miss ratios"
        if not (np.isfinite(self.rows).all() and np.isfinite(self.miss).all()):
            return "a size or a miss ratio is not a number"
        if not (np.diff(self.rows) > 0).all() or self.rows[0] < 0:
            return "sizes do not ascend"
        if self.miss.min() < -1e-9 or self.miss.max() > 1 + 1e-9:
            worst = self.miss[np.argmax(np.abs(self.miss - 0.5))]
            return f"a miss ratio of {worst:.3g}"
        rise = np.diff(self.miss)
        at = int(self.rows[int(np.argmax(rise)) + 1])
        return f"more misses with more cache (at {at} rows)"


class CurveSampler:
    """One table's live curves. Memory is constant: see :attr:`nbytes`."""

    def __init__(
        self,
        *,
        rate: float = RATE,
        samples_max: int = SAMPLES_MAX,
        half_life: float = float("inf"),
    ) -> None:
        """Start with nothing seen.

        Args:
            rate: share of the rows that the caller samples.
            samples_max: rows remembered; ``samples_max / rate`` is the largest cache judged.
            half_life: lookups after which what was seen counts half.
        """
        self.rate = rate
        self.half_life = half_life
        self._recent = np.empty(samples_max + _CHUNK, np.int64)  # oldest use first
        self._count = 0
        self._samples_max = samples_max
        buckets = _bucket(np.array([samples_max + _CHUNK]))[0] + 1
        # The last bucket of each row is what no cache within the horizon hits.
        self._seen = np.zeros((len(Phase), GROUPS, buckets + 1))
        self._lookups = np.zeros(len(Phase))

    @property
    def horizon(self) -> float:
        """The largest cache, in rows, of which the curve says anything."""
        return self._samples_max / self.rate

    @property
    def nbytes(self) -> int:
        """Bytes held between calls."""
        return self._recent.nbytes + self._seen.nbytes + self._lookups.nbytes

    def add(self, ids: ArrayLike, *, lookups: float, phase: Phase = Phase.DECODE) -> None:
        """Take in sampled lookups.

        Args:
            ids: row numbers in the order of their use, only those of sampled rows.
            lookups: how many lookups there were in all, sampled or not.
            phase: what they were for.
        """
        if lookups > 0 and np.isfinite(self.half_life):
            kept = 0.5 ** (lookups / self.half_life)
            self._seen *= kept
            self._lookups *= kept
        self._lookups[phase] += lookups
        rows = np.asarray(ids, np.int64).reshape(-1)
        for first in range(0, len(rows), _CHUNK):
            self._add_chunk(rows[first : first + _CHUNK], phase)

    def _add_chunk(self, rows: NDArray[np.int64], phase: Phase) -> None:
        """Count one chunk's distances against what is remembered and within the chunk."""
        known = self._recent[: self._count]
        count, size = self._count, len(rows)
        previous = previous_uses(rows)
        last = np.where(previous >= 0, previous + count, -1)
        fresh = np.flatnonzero(previous < 0)
        order = np.argsort(known)
        place = np.searchsorted(known, rows[fresh], sorter=order)
        at = order[np.minimum(place, count - 1)] if count else np.zeros(len(fresh), np.int64)
        found = (known[at] == rows[fresh]) if count else np.zeros(len(fresh), bool)
        last[fresh[found]] = at[found]
        # As in distances.py; what is remembered has no earlier use in this order.
        not_after = np.tri(size, k=-1, dtype=bool) & (last[None, :] <= last[:, None])
        distance = not_after.sum(axis=1) + count - last - 1
        bucket = np.where(last < 0, self._seen.shape[2] - 1, _bucket(distance))
        np.add.at(self._seen[phase], (_groups(rows), bucket), 1.0)
        self._remember(rows, last)

    def _remember(self, rows: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        """Move the chunk's rows to the recent end and drop the oldest beyond the bound."""
        again = np.zeros(self._count + len(rows), bool)
        again[last[last >= 0]] = True  # used again: the earlier place is void
        kept = self._recent[: self._count][~again[: self._count]]
        newest = rows[~again[self._count :]]
        both = np.concatenate([kept, newest])[-self._samples_max :]
        self._count = len(both)
        self._recent[: self._count] = both

    def curve(self, phase: Phase = Phase.DECODE) -> MissCurve:
        """Return the curve as it stands: "misses everything" while nothing was seen."""
        seen = self._seen[phase]
        lookups = float(self._lookups[phase])
        edges = _edges(seen.shape[1]) / self.rate
        if lookups <= 0:
            flat = np.ones(len(edges))
            return MissCurve(edges, flat, np.ones(len(edges)), np.empty((0, len(edges))), 0.0)
        expected = lookups * self.rate
        groups = _miss(seen, expected / GROUPS)
        miss = _miss(seen.sum(axis=0, keepdims=True), expected)[0]
        error = groups.std(axis=0, ddof=1) / np.sqrt(GROUPS)
        return MissCurve(edges, miss, error, groups, float(seen.sum()))


def _miss(seen: NDArray[np.float64], expected: float) -> NDArray[np.float64]:
    """Return miss ratios at the buckets' edges, [histograms, edges].

    Hits within a size are all distances below it; what the sample lacks of (or has beyond) the
    expected lookups is at distance 0.
    """
    adjusted = seen.copy()
    adjusted[:, 0] += expected - seen.sum(axis=1)
    hits = np.cumsum(adjusted[:, :-1], axis=1)
    ratio = 1.0 - np.concatenate([np.zeros((len(seen), 1)), hits], axis=1) / max(expected, 1e-9)
    # With few samples the adjustment can push a curve out of its bounds or make it rise.
    return np.minimum.accumulate(np.clip(ratio, 0.0, 1.0), axis=1)


def _bucket(distance: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket of each distance: exact up to 64, then 32 to a doubling."""
    exact = 2 * _OCTAVE
    safe = np.maximum(distance, exact).astype(np.float64)
    shift = np.frexp(safe)[1].astype(np.int64) - exact.bit_length()
    coarse = exact + shift * _OCTAVE + (np.maximum(distance, exact) >> (shift + 1)) - _OCTAVE
    return np.where(distance < exact, np.maximum(distance, 0), coarse)


def _edges(buckets: int) -> NDArray[np.float64]:
    """Return the lower edges of all buckets but the last (misses), and the upper edge behind."""
    exact = 2 * _OCTAVE
    number = np.arange(buckets)
    shift = np.maximum(number - exact, 0) // _OCTAVE
    coarse = ((number - exact) % _OCTAVE + _OCTAVE) << (shift + 1)
    return np.where(number < exact, number, coarse).astype(np.float64)
