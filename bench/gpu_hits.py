"""What a step costs when every row is cached: the main stream's share, and the whole path."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from bench.gpu_rig import (
    CHAIN,
    DIM,
    ROW_BYTES,
    Bed,
    bare_gather,
    bed,
    busy,
    chain,
    compare,
    graph_of,
    replays,
)
from tierd.gpu import kernels_fill, state
from tierd.gpu.table import GRACE_NS

BUSY_CYCLES = 30_000  # about 16 us: longer than a kick, as any layer is


def bare(made: Bed, count: int, out: torch.Tensor, rows: int) -> None:
    table = made.tables[0]
    bare_gather[(-(-count // rows),)](
        table.lanes[0].desc, made.cache.slots, out, count, ROWS=rows, DIM=DIM, STRIDE=ROW_BYTES,
        num_warps=1,
    )  # fmt: skip


def warm_ids(made: Bed, count: int, table: int = 0) -> torch.Tensor:
    """Ids that are all in the cache."""
    ids = torch.randint(0, made.rows, (count,), device="cuda")
    out = made.outputs(count)
    for _ in range(3):
        made.tables[table].kick(ids)
        made.tables[table].gather(ids, out)
    before = made.tables[table].stats()["misses"]
    made.tables[table].kick(ids)
    made.tables[table].gather(ids, out)
    assert made.tables[table].stats()["misses"] == before
    assert made.differing(table, ids, out) == 0
    return ids


def hits(batch: int) -> dict[str, Any]:
    """Times of one batch size; 24 rows a sequence."""
    count = batch * 24
    with bed(sets=8192, quotas=(32,)) as made:
        table = made.tables[0]
        ids, out = warm_ids(made, count), made.outputs(count)
        sink = torch.zeros(1, dtype=torch.int64, device="cuda")
        misses = table.stats()["misses"]

        def path() -> None:
            table.kick(ids)
            table.gather(ids, out)

        def consume() -> None:
            table._launch_wait_fill(table.lanes[0], count)
            table._launch_gather(ids, table._accept(ids), table.lanes[0], out)

        def kick() -> None:
            table.kick(ids)
            table._join()

        def work() -> None:
            busy[(1,)](BUSY_CYCLES, sink, num_warps=1)

        def step() -> None:
            table.kick(ids)
            work()
            table.gather(ids, out)

        candidates = {
            f"bare{rows}": chain(lambda r=rows: bare(made, count, out, r)) for rows in (1, 2, 4)
        }
        plain = compare(candidates, 100)
        rows = int(min(plain, key=plain.__getitem__)[4:])

        def baseline() -> None:
            work()
            bare(made, count, out, rows)

        graphs = {
            "bare": chain(lambda: bare(made, count, out, rows)),
            "path": chain(path),
            "consume": chain(consume),
            "kick": chain(kick),
            "wait_fill": chain(lambda: table._launch_wait_fill(table.lanes[0], count)),
            "gather": chain(
                lambda: table._launch_gather(ids, table._accept(ids), table.lanes[0], out)
            ),
            "step": chain(step),
            "baseline": chain(baseline),
        }
        times = replays(graphs, 300)
        found = {name: statistics.median(v) / CHAIN for name, v in times.items()}
        assert table.stats()["misses"] == misses
        assert made.differing(0, ids, out) == 0
        main = sorted(
            (a - b) / CHAIN for a, b in zip(times["step"], times["baseline"], strict=True)
        )
        series = sorted((a - b) / CHAIN for a, b in zip(times["path"], times["bare"], strict=True))
    return {
        "count": count,
        "bare_variants": plain,
        **found,
        "main_extra": statistics.median(main),
        "main_spread": [main[len(main) // 10], main[-len(main) // 10]],
        "chain_extra": statistics.median(series),
        "chain_spread": [series[len(series) // 10], series[-len(series) // 10]],
    }


def tag_check(misses: int = 300) -> dict[str, Any]:
    """What checking tags adds to filling `misses` rows: the same request filled again and again."""
    count = 3072
    with bed(sets=8192, quotas=(32,)) as made:
        table = made.tables[0]
        ids = torch.cat([warm_ids(made, count)[misses:], torch.arange(misses, device="cuda")])
        out = made.outputs(count)
        before = table.ring.words[state.R_FILLED.value].clone()
        table.kick(ids)
        table.gather(ids, out)
        assert table.stats()["misses"] >= misses
        filled = table.ring.words[state.R_FILLED.value :][:1]
        ring, lane = table.ring, table.lanes[0]

        def fill(check: bool) -> None:
            filled.copy_(before)
            kernels_fill.wait_fill[(528,)](
                lane.words, table.image.number, ring.words, ring.control64, ring.list_rows,
                ring.list_slots, ring.arena, ring.arena_g_words, table._slots, made.cache.words,
                ring.fault_words, ring.stats, ring.rows_max, ring.arena_pages, *ring.keys,
                10**10, GRACE_NS, **table.image.geometry, CHECK=check, num_warps=1,
            )  # fmt: skip

        graphs = {
            "checked": chain(lambda: fill(True)),
            "unchecked": chain(lambda: fill(False)),
            "reset": chain(lambda: filled.copy_(before)),
        }
        times = replays(graphs, 200)
        filled.copy_(table.lanes[0].words[:1])
    extra = sorted(
        (a - b) / CHAIN for a, b in zip(times["checked"], times["unchecked"], strict=True)
    )
    return {
        "misses": misses,
        **{name: statistics.median(v) / CHAIN for name, v in times.items()},
        "extra": statistics.median(extra),
        "spread": [extra[len(extra) // 10], extra[-len(extra) // 10]],
    }


def single(batch: int = 128, share: float = 0.1) -> dict[str, Any]:
    """One step's kick and gather in one graph with a share of misses, from shared memory."""
    count = batch * 24
    with bed(sets=8192, quotas=(32,)) as made:
        table = made.tables[0]
        ids, out = warm_ids(made, count), made.outputs(count)

        def path() -> None:
            table.kick(ids)
            table.gather(ids, out)

        graph = graph_of(path)
        times = []
        for _ in range(100):
            cold = torch.rand(count, device="cuda") < share
            fresh = torch.randint(0, made.rows, (count,), device="cuda")
            ids.copy_(torch.where(cold, fresh, ids))
            torch.cuda.synchronize()
            times.append(_once(graph))
        wrong = made.differing(0, ids, out)
        stats = table.stats()
    return {"median_us": statistics.median(times), "wrong": wrong, **stats}


def _once(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3
