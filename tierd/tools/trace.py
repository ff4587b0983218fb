"""``tierd trace``: record what an engine looks up, and replay it against caches and splits."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.controller import split as climber
from tierd.controller.curves import MissCurve
from tierd.controller.distances import stack_distances
from tierd.controller.load import NodeLoad, TableLoad, from_pages
from tierd.errors import QuotaError, TraceError, TraceModelError
from tierd.gpu.tracing import VARIABLE
from tierd.io.seen import empty, mark, share
from tierd.io.tracefile import Trace, read_trace
from tierd.tools import policies
from tierd.types import SeenSet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tierd.controller.readtime import ReadTime

SIZES = 16
SPLITS = 17


def record(command: Sequence[str], out: Path, *, socket: str | None, model: str | None) -> int:
    """Run a command as ``tierd run`` does, with what it looks up written to a trace.

    Returns:
        the command's exit code.

    Raises:
        TraceError: the command looked nothing up through tierd.
        TierdError: as ``tierd run``.
    """
    before = out.stat().st_mtime_ns if out.exists() else None
    words = [sys.executable, "-m", "tierd.cli", "run"]
    words += ["--socket", socket] if socket else []
    words += ["--model", model] if model else []
    environment = {**os.environ, VARIABLE: str(out.absolute())}
    done = subprocess.run([*words, "--", *command], env=environment, check=False)
    after = out.stat().st_mtime_ns if out.exists() else None
    if done.returncode == 0 and after == before:
        raise TraceError(f"{out}: nothing was looked up through tierd; run: tierd images")
    return done.returncode


@dataclasses.dataclass(frozen=True)
class Lookups:
    """One table's lookups in a trace.

    Attributes:
        ids: int64 [lookups].
        step: int64 [lookups], the kick they belong to.
        counted: bool [lookups], decode (all of them where a trace has no decode).
        first: where replays begin to count: the cache has been filled by then.
    """

    number: int
    ids: NDArray[np.int64]
    step: NDArray[np.int64]
    counted: NDArray[np.bool_]
    first: int


def lookups_of(trace: Trace, number: int, *, warm: float) -> Lookups:
    """Return one table's lookups; the first share ``warm`` of its kicks only warms caches."""
    ids, step, prefill = trace.of_table(number)
    counted = ~prefill if not prefill.all() else np.ones(len(ids), bool)
    first = int((step.max(initial=-1) + 1) * warm)
    return Lookups(number, ids, step, counted & (step >= first), first)


def load(path: Path, *, model: str | None, decode_needed: bool = True) -> Trace:
    """Read a trace and check whose it is.

    Raises:
        TraceError: unreadable, or empty.
        TraceModelError: of another model than the one asked for.
    """
    trace = read_trace(path)
    if model is not None and trace.model != model:
        raise TraceModelError(
            f"{path}: a trace of {trace.model}, not of {model}; run: tierd trace record --help"
        )
    if decode_needed and not len(trace.ids):
        raise TraceError(f"{path}: an empty trace; record a longer run")
    return trace


def replay(
    trace: Trace,
    *,
    chosen: Sequence[str],
    sizes: Sequence[int] | None,
    warm: float = 0.3,
) -> dict[str, Any]:
    """Play a trace through caches of several sizes and policies.

    Args:
        trace: the trace.
        chosen: policies.
        sizes: cache rows of one table; None: 16 sizes up to the rows that the trace touches.
        warm: share of the kicks that only warms the caches.

    Returns:
        JSON-ready: per table lookups, distinct rows, sizes and hit ratios by policy.
    """
    tables = []
    for number, table in enumerate(trace.tables):
        mine = lookups_of(trace, number, warm=warm)
        if not len(mine.ids):
            continue
        distinct = len(np.unique(mine.ids))
        wanted = list(sizes) if sizes else _sizes(distinct)
        steps = len(np.unique(mine.step[mine.counted]))
        tables.append(
            {
                "name": table.name,
                "layer": table.layer,
                "lookups": len(mine.ids),
                "lookups_per_step": float(mine.counted.sum() / max(steps, 1)),
                "distinct_rows": distinct,
                "sizes": wanted,
                "hit_ratio": {
                    policy: policies.hit_ratios(mine.ids, mine.counted, wanted, policy)
                    for policy in chosen
                },
            }
        )
    return {"model": trace.model, "kicks": len(trace.table), "cut": trace.cut, "tables": tables}


def _sizes(distinct: int) -> list[int]:
    low = max(32, distinct // 1000)
    return sorted({int(size) for size in np.geomspace(low, max(distinct, low + 1), SIZES)})


def curve_of(table: dict[str, Any]) -> MissCurve:
    """Return a replayed table's LRU curve."""
    sizes, hits = table["sizes"], table["hit_ratio"]["lru"]
    # Without a cache everything misses, whatever the smallest size played was.
    miss = np.minimum.accumulate(np.clip([1.0, *(1 - hit for hit in hits)], 0, 1))
    return MissCurve.of([0.0, *map(float, sizes)], miss)


def splits(
    trace: Trace,
    *,
    cache_rows: int,
    windows_ms: dict[str, float],
    device: ReadTime,
    ways: Sequence[int] | None = None,
    warm: float = 0.3,
) -> dict[str, Any]:
    """Play splits of one cache between the tables: pages, reads and growth of every step.

    Args:
        trace: the trace; all its tables share the device.
        cache_rows: rows of the whole cache.
        windows_ms: by table.
        device: what a read takes.
        ways: this split only; None: 17 splits of two tables, every 4 ways of three and more.
        warm: share of the kicks that only warms the cache.

    Raises:
        QuotaError: the quotas do not fit.
    """
    order = sorted(range(len(trace.tables)), key=lambda n: windows_ms[trace.tables[n].name])
    names = [trace.tables[n].name for n in order]
    tried = [tuple(ways)] if ways is not None else _tried(len(order))
    for split in tried:
        if trouble := climber.check_ways(split, len(order)):
            raise QuotaError(f"quotas {','.join(map(str, split))}: {trouble}")
    sets = cache_rows / climber.WAYS
    steps, misses = _step_misses(
        trace, order, sorted({way for s in tried for way in s}), sets, warm
    )
    node = _node(trace, order, windows_ms, device)
    found = []
    for split in tried:
        pages = np.stack([misses[at][way] for at, way in enumerate(split)], axis=-1)
        seen = from_pages(node, pages)
        found.append(
            {
                "ways": list(split),
                "share": split[0] / climber.WAYS,
                "growth_ms": float(seen.growth_ms.mean()),
                "pages": seen.pages.mean(axis=0).tolist(),
                "reads_ms": seen.reads_ms.mean(axis=0).tolist(),
                "stalls_ms": seen.stalls_ms.mean(axis=0).tolist(),
            }
        )
    windows = [windows_ms[name] for name in names]
    return {
        "tables": names, "windows_ms": windows, "steps": steps, "cache_rows": cache_rows,
        "splits": found,
    }  # fmt: skip


def _node(
    trace: Trace, order: Sequence[int], windows_ms: dict[str, float], device: ReadTime
) -> NodeLoad:
    nothing = MissCurve.of([0.0, 1.0], [1.0, 1.0])  # pages are played, not predicted
    tables = [trace.tables[number] for number in order]
    return NodeLoad(
        tuple(
            TableLoad(
                table.name, windows_ms[table.name], 0.0, nothing, float(table.pages or np.inf)
            )
            for table in tables
        ),
        (device,),
    )


def _tried(tables: int) -> list[tuple[int, ...]]:
    step = {1: 32, 2: 2, 3: 4}.get(tables, 8)
    found: list[tuple[int, ...]] = [()]
    for left in range(tables - 1, -1, -1):
        found = [
            (*head, way)
            for head in found
            for way in (
                range(0, climber.WAYS - sum(head) + 1, step) if left else [climber.WAYS - sum(head)]
            )
        ]
    return found


def _step_misses(
    trace: Trace, order: Sequence[int], ways: Sequence[int], sets: float, warm: float
) -> tuple[int, list[dict[int, NDArray[np.float64]]]]:
    """Return the steps that count and, per table and ways, the rows each of them misses."""
    found, steps = [], 0
    for number in order:
        mine = lookups_of(trace, number, warm=warm)
        distances = stack_distances(mine.ids)[mine.counted]
        _, step = np.unique(mine.step[mine.counted], return_inverse=True)
        count = int(step.max(initial=-1)) + 1
        steps = min(steps or count, count)
        found.append(
            {
                way: np.bincount(
                    step[(distances < 0) | (distances >= way * sets)], minlength=count
                ).astype(np.float64)
                for way in ways
            }
        )
    return steps, [{way: misses[:steps] for way, misses in one.items()} for one in found]


def seen_set(traces: Sequence[Trace], table: str) -> SeenSet:
    """Build the seen-set of a table from traces of one model.

    Raises:
        TraceModelError: the traces are of different models or tables.
    """
    first = traces[0]
    numbers = [t.name for t in first.tables]
    if table not in numbers:
        raise TraceModelError(f"the trace has no table {table}; there are: {', '.join(numbers)}")
    spec = first.tables[numbers.index(table)]
    bits, lookups = empty(spec.rows), 0
    for trace in traces:
        names = [t.name for t in trace.tables]
        if trace.model != first.model or table not in names:
            raise TraceModelError(
                f"traces of {first.model} and of {trace.model} do not go together"
            )
        ids, _, _ = trace.of_table(names.index(table))
        mark(bits, ids)
        lookups += len(ids)
    return SeenSet(
        first.model, table, spec.rows, spec.fingerprint, lookups, share(bits, spec.rows), bits
    )
