"""A node in simulated time for the split climber: traffic, an LRU cache by quotas, a disk, a GPU.

Real row numbers go through a cache whose tables are LRU within their quotas; what a table gives up
goes as the other's misses take it, as in the directory. A step's pages take what the paper's disk
takes, with noise, and stall the step by equation 1. The climber sees what a daemon would see:
sampled ids, mean read times and stalls of the last second, windows that the probe got 5 % wrong.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from tierd.controller import split as climber
from tierd.controller.curves import CurveSampler, Phase, sampled
from tierd.controller.exposure import stalls_ms
from tierd.controller.load import NodeLoad, TableLoad
from tierd.controller.readtime import PAPER_DISK, ReadFit, ReadTime, reads_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

STEPS_PER_S = 30
MINUTE = 60 * STEPS_PER_S
NOISE = 0.05
PROBE_ERROR = (1.05, 0.95, 1.05)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Tables, their windows and their traffic.

    Attributes:
        windows_ms: per table.
        draw: seed, steps -> per table a list of each step's distinct rows (dense numbers).
        sets: sets of the cache; 32 ways.
        disk: the device that all tables share.
        rate: share of rows that is sampled.
        prefill: per table and step, distinct rows that a prefill brings in before it; may be empty.
    """

    name: str
    windows_ms: tuple[float, ...]
    draw: Callable[[int, int], list[list[NDArray[np.int64]]]]
    sets: int
    disk: ReadTime = PAPER_DISK
    rate: float = 1 / 128
    prefill: list[list[NDArray[np.int64] | None]] = dataclasses.field(default_factory=list)


class Cache:
    """One table's rows in LRU caches of changing sizes, a step at a time.

    What was used when is the same for every size; a size only decides how old a use may be.
    """

    def __init__(self, rows: int, steps: int, sizes: int = 1) -> None:
        self._last = np.full(rows, -1, np.int64)
        self._used = np.zeros(steps + 1, np.int64)  # by step of last use; the last: never used
        self._oldest = np.zeros(sizes, np.int64)
        self.resident = np.zeros(sizes, np.int64)

    def use(self, rows: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        """Look distinct rows up; return how many were missing, for each size."""
        last = np.sort(self._last[rows])
        missing = np.searchsorted(last, self._oldest)
        starts = np.flatnonzero(np.concatenate([[True], last[1:] != last[:-1]]))
        self._used[last[starts]] -= np.diff(starts, append=len(last))
        # A row that was resident moves, one that was not comes.
        self._last[rows] = step
        self._used[step] += len(rows)
        self.resident += missing
        return missing

    def shrink(self, sizes: ArrayLike, step: int) -> None:
        """Drop the least recently used beyond each size."""
        for n, size in enumerate(np.atleast_1d(sizes)):
            while self.resident[n] > size and self._oldest[n] <= step:
                self.resident[n] -= self._used[self._oldest[n]]
                self._oldest[n] += 1


@dataclasses.dataclass
class Run:
    """What happened, step by step."""

    growth_ms: NDArray[np.float64]
    moves: list[tuple[int, str]]
    ways: tuple[int, ...]
    decide_ms: list[float]

    def mean_ms(self, first: int, last: int | None = None) -> float:
        return float(self.growth_ms[first:last].mean())


def play(
    scenario: Scenario,
    traffic: list[list[NDArray[np.int64]]],
    ways: tuple[int, ...],
    *,
    follow: bool,
    hold_until: int = 0,
    seed: int = 0,
    limits: climber.Limits | None = None,
    decide: Callable[..., tuple[climber.Decision, climber.SplitState]] = climber.decide,
) -> Run:
    """Play all steps of the traffic; with `follow` the climber decides from `hold_until` on."""
    steps, tables = len(traffic[0]), len(traffic)
    rng = np.random.default_rng(seed)
    caches = [Cache(_rows(n, scenario, one), steps) for n, one in enumerate(traffic)]
    windows = np.array(scenario.windows_ms)
    seen_windows = windows * np.array(PROBE_ERROR[:tables])
    shares = np.ones((tables, 1))
    state = climber.SplitState.start(ways)
    samplers = [CurveSampler(rate=scenario.rate, half_life=np.inf) for _ in traffic]
    fit = ReadFit.start(ReadTime(0.2, 4.0, 0.0))
    noise = np.exp(rng.normal(0, NOISE, (steps, tables)))
    out = Run(np.zeros(steps), [], ways, [])
    pages, times = np.zeros((steps, tables)), np.zeros((steps, tables))
    for step in range(steps):
        for n, (cache, one) in enumerate(zip(caches, traffic, strict=True)):
            if scenario.prefill and (rows := scenario.prefill[n][step]) is not None:
                cache.use(rows, step)
                chosen = rows[sampled(rows, scenario.rate)]
                samplers[n].add(chosen, lookups=len(rows), phase=Phase.PREFILL)
            pages[step, n] = cache.use(one[step], step)[0]
        _evict(caches, state.ways, scenario.sets, step)
        if step % STEPS_PER_S != STEPS_PER_S - 1:
            continue
        span = slice(step - STEPS_PER_S + 1, step + 1)
        times[span] = reads_ms(pages[span], (scenario.disk,), shares) * noise[span]
        stalls = stalls_ms(times[span], windows).sum(axis=1)
        out.growth_ms[span] = stalls
        if not follow:
            continue
        fit = _observe(fit, pages[span], times[span])
        for n, one in enumerate(traffic):
            lookups = sum(len(rows) for rows in one[span])
            samplers[n].half_life = MINUTE * lookups / STEPS_PER_S
            seen_rows = np.concatenate(one[span])
            samplers[n].add(seen_rows[sampled(seen_rows, scenario.rate)], lookups=lookups)
        if step < hold_until:
            continue
        load = NodeLoad(
            tuple(
                TableLoad(
                    f"table {n}", float(seen_windows[n]),
                    float(np.mean([len(rows) for rows in traffic[n][span]])), samplers[n].curve(),
                )
                for n in range(tables)
            ),
            (fit.model,),
        )  # fmt: skip
        began = time.perf_counter()
        seen = climber.Observation(load, scenario.sets, STEPS_PER_S, float(stalls.mean()))
        decision, state = decide(seen, state, limits)
        out.decide_ms.append((time.perf_counter() - began) * 1e3)
        if decision.action != "hold":
            out.moves.append((step, f"{decision.action} {state.ways}: {decision.reason}"))
    out.ways = state.ways
    return out


def _rows(table: int, scenario: Scenario, traffic: list[NDArray[np.int64]]) -> int:
    brought = (
        [rows for rows in scenario.prefill[table] if rows is not None] if scenario.prefill else []
    )
    return int(max(rows.max(initial=0) for rows in [*traffic, *brought])) + 1


def _evict(caches: list[Cache], ways: tuple[int, ...], sets: int, step: int) -> None:
    """Hold every table to its quota and what of the others' quotas is still empty."""
    empty = [max(0, way * sets - c.resident[0]) for way, c in zip(ways, caches, strict=True)]
    for n, (way, cache) in enumerate(zip(ways, caches, strict=True)):
        cache.shrink(way * sets + sum(empty) - empty[n], step)


def _observe(fit: ReadFit, pages: NDArray[np.float64], times: NDArray[np.float64]) -> ReadFit:
    """Feed the fit with the means of a second, a table at a time."""
    mean, read = pages.mean(axis=0), times.mean(axis=0)
    for n in range(len(mean)):
        if mean[n] > 1:
            fit = fit.observed(
                own=mean[n], before=mean[:n].sum(), later=mean[n + 1 :].sum(), read_ms=read[n]
            )
    return fit


def compositions(tables: int, step: int) -> list[tuple[int, ...]]:
    """Every split of 32 ways in multiples of `step`."""
    if tables == 1:
        return [(climber.WAYS,)]
    found = []

    def extend(head: tuple[int, ...], left: int) -> None:
        if len(head) == tables - 1:
            found.append((*head, left))
            return
        for way in range(0, left + 1, step):
            extend((*head, way), left - way)

    extend((), climber.WAYS)
    return found


def fixed(
    scenario: Scenario, traffic: list[list[NDArray[np.int64]]], *, step: int = 4, seed: int = 0
) -> dict[tuple[int, ...], NDArray[np.float64]]:
    """Growth of every step under every fixed split in multiples of `step` ways (and the even)."""
    steps, tables = len(traffic[0]), len(traffic)
    splits = {*compositions(tables, step), even(tables)}
    noise = np.exp(np.random.default_rng(seed).normal(0, NOISE, (steps, tables)))
    missing: dict[tuple[int, int], NDArray[np.float64]] = {}
    for n in range(tables):
        ways = np.array(sorted({split[n] for split in splits}))
        cache = Cache(_rows(n, scenario, traffic[n]), steps, len(ways))
        found = np.zeros((steps, len(ways)))
        for at in range(steps):
            if scenario.prefill and (rows := scenario.prefill[n][at]) is not None:
                cache.use(rows, at)
            found[at] = cache.use(traffic[n][at], at)
            cache.shrink(ways * scenario.sets, at)
        missing |= {(n, int(way)): found[:, place] for place, way in enumerate(ways)}
    out = {}
    for split in splits:
        pages = np.stack([missing[n, way] for n, way in enumerate(split)], axis=1)
        times = reads_ms(pages, (scenario.disk,), np.ones((tables, 1))) * noise
        out[split] = stalls_ms(times, np.array(scenario.windows_ms)).sum(axis=1)
    return out


def even(tables: int) -> tuple[int, ...]:
    """The even split."""
    base, rest = divmod(climber.WAYS, tables)
    return tuple(base + (n < rest) for n in range(tables))


# --- traffic -------------------------------------------------------------------------------------


def hot_and_fresh(
    lookups: int, hot: int, share: float
) -> Callable[[np.random.Generator, int], list[NDArray[np.int64]]]:
    """Uniform over `hot` rows with `share`, the rest never seen before."""

    def draw(rng: np.random.Generator, steps: int) -> list[NDArray[np.int64]]:
        out, fresh = [], hot
        known = rng.integers(0, max(hot, 1), (steps, lookups))
        for count, row in zip(rng.binomial(lookups, share, steps), known, strict=True):
            warm = np.unique(row[:count])
            new = lookups - len(warm) if share < 1 else 0
            out.append(np.concatenate([warm, np.arange(fresh, fresh + new)]))
            fresh += new
        return out

    return draw


def sessions(
    lookups: int, places: int, own: int, shared: int, length: int
) -> Callable[[np.random.Generator, int], list[NDArray[np.int64]]]:
    """Sessions as agents have them: each reuses rows of its own, all share a head, some are new.

    A place in the batch holds a session for `length` steps; a session draws, with quarter each,
    from its most recent rows, its own rows, the shared head (Zipf-like), and new ones.
    """

    def draw(rng: np.random.Generator, steps: int) -> list[NDArray[np.int64]]:
        per, out = lookups // places, []
        first = shared + rng.integers(0, length, places) * 0 + np.arange(places) * own
        fresh = int(shared + (places + steps // length * places + places) * own)
        nexts = int(shared + places * own)
        ends = rng.integers(1, length, places)
        for step in range(steps):
            for place in np.flatnonzero(ends <= step):
                first[place], nexts = nexts, nexts + own
                ends[place] = step + length
            kind = rng.random((places, per))
            mine = first[:, None] + (own * rng.random((places, per)) ** 3).astype(np.int64)
            head = (shared * rng.random((places, per)) ** 4).astype(np.int64)
            new = kind > 0.9
            ids = np.where(kind < 0.55, mine, head)
            ids[new] = fresh + np.arange(int(new.sum()))
            fresh += int(new.sum())
            out.append(np.unique(ids))
        return out

    return draw


def together(
    *tables: Callable[[np.random.Generator, int], list[NDArray[np.int64]]],
) -> Callable[[int, int], list[list[NDArray[np.int64]]]]:
    """Independent traffic of several tables."""

    def draw(seed: int, steps: int) -> list[list[NDArray[np.int64]]]:
        return [table(np.random.default_rng([seed, n]), steps) for n, table in enumerate(tables)]

    return draw


def alternating(
    lookups: int, hot: int, period: int
) -> Callable[[int, int], list[list[NDArray[np.int64]]]]:
    """Two tables that take turns in reusing rows; the other one sees only new rows meanwhile."""

    def draw(seed: int, steps: int) -> list[list[NDArray[np.int64]]]:
        out: list[list[NDArray[np.int64]]] = [[], []]
        for n in range(2):
            rng, fresh = np.random.default_rng([seed, n]), hot
            for step in range(steps):
                if (step // period) % 2 == n:
                    out[n].append(np.unique(rng.integers(0, hot, lookups)))
                else:
                    out[n].append(np.arange(fresh, fresh + lookups))
                    fresh += lookups
        return out

    return draw


def scenarios(scale: int = 1) -> dict[str, Scenario]:
    """The four in which a split matters, at 1/scale of the paper's size with the same times."""
    lookups, sets = 768 // scale, 4096 // scale
    disk = ReadTime(PAPER_DISK.base_ms, PAPER_DISK.page_us * scale, PAPER_DISK.later_us * scale)
    way = sets
    rate = min(1 / 16, scale / 128)

    def make(name: str, windows: tuple[float, ...], *tables) -> Scenario:
        return Scenario(name, windows, together(*tables), sets, disk, rate)

    return {
        one.name: one
        for one in (
            make(
                "short window, cheap to cache", (0.27, 9.35),
                hot_and_fresh(lookups, 24 * way, 0.97), hot_and_fresh(lookups, 40 * way, 0.9),
            ),
            make(
                "the reverse", (0.27, 0.6),
                hot_and_fresh(lookups // 12, 1, 0.0), hot_and_fresh(lookups, 24 * way, 0.97),
            ),
            make(
                "three tables", (0.27, 0.6, 9.35),
                hot_and_fresh(lookups, 8 * way, 0.97), hot_and_fresh(lookups, 15 * way, 0.97),
                hot_and_fresh(lookups, 30 * way, 0.9),
            ),
            make(
                "the paper's", (0.27, 9.35),
                sessions(lookups, 32, 2 * way // 2, 8 * way, 900),
                sessions(lookups, 32, 2 * way // 2, 8 * way, 900),
            ),
        )
    }  # fmt: skip


def adversaries(scale: int = 1) -> dict[str, Scenario]:
    """Traffic that would lead a climber astray."""
    lookups, sets = 768 // scale, 4096 // scale
    disk = ReadTime(PAPER_DISK.base_ms, PAPER_DISK.page_us * scale, PAPER_DISK.later_us * scale)
    rate = min(1 / 16, scale / 128)
    scan = hot_and_fresh(lookups, 1, 0.0)
    mixed = hot_and_fresh(lookups, 20 * sets, 0.97)

    def one_row(rng: np.random.Generator, steps: int) -> list[NDArray[np.int64]]:
        del rng
        return [np.zeros(1, np.int64)] * steps

    return {
        "scan": Scenario("scan", (0.27, 9.35), together(mixed, scan), sets, disk, rate),
        "one hot row": Scenario(
            "one hot row", (0.27, 0.9), together(one_row, mixed), sets, disk, rate
        ),
        "alternating phases": Scenario(
            "alternating phases", (0.27, 0.9), alternating(lookups, 14 * sets, 20 * STEPS_PER_S),
            sets, disk, rate,
        ),
        "alternating fast": Scenario(
            "alternating fast", (0.27, 0.9), alternating(lookups, 14 * sets, 5 * STEPS_PER_S),
            sets, disk, rate,
        ),
    }  # fmt: skip


class Naive:
    """A rejected design, kept to show what the bars are for: it hill-climbs on measured stalls.

    Every five seconds it compares the mean stall with the sample before; better: on in the same
    direction, worse: turn round. It takes what traffic does for what the move did.
    """

    def __init__(self) -> None:
        self._direction, self._last, self._sum, self._seen = 1, float("inf"), 0.0, 0

    def decide(
        self, seen: climber.Observation, state: climber.SplitState, limits: object = None
    ) -> tuple[climber.Decision, climber.SplitState]:
        del limits
        self._sum += seen.stall_ms or 0.0
        self._seen += 1
        if self._seen < 5:
            return climber.Decision("hold", state.ways, "sampling"), state
        mean, self._sum, self._seen = self._sum / self._seen, 0.0, 0
        if mean > self._last:
            self._direction = -self._direction
        self._last = mean
        first = int(np.clip(state.ways[0] + 4 * self._direction, 0, climber.WAYS))
        rest = climber.WAYS - first
        ways = (first, rest, *state.ways[2:])
        if ways == state.ways:
            self._direction = -self._direction
            return climber.Decision("hold", ways, "at the end"), state
        return climber.Decision("move", ways, "climb"), dataclasses.replace(state, ways=ways)
