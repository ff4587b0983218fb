"""Whether rows are right: against the engines' arithmetic, under evictions, resizes and quotas."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu_rig import DIM, Bed, bed, busy, expected, graph_of

if TYPE_CHECKING:
    from types import ModuleType


def stock_gather() -> ModuleType | None:
    """SGLang's own engram_gather, loaded from its file; None where there is none."""
    path = Path(os.environ.get("TIERD_SGLANG_GATHER", "engram_gather.py"))
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("stock_engram_gather", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Oracle:
    """SGLang's gather over copies of the tables in HBM, or plain torch where it is missing."""

    def __init__(self, made: Bed) -> None:
        self.module = stock_gather()
        self.made = made
        self.weights = [s[:, :DIM].contiguous() for s in made.stored]
        self.scales = [s[:, DIM:].contiguous() for s in made.stored]

    @property
    def name(self) -> str:
        return "sglang engram_gather" if self.module else "torch"

    def rows(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        if self.module is None:
            return expected(self.made.stored[table], ids)
        out = torch.empty(ids.numel(), DIM, dtype=torch.bfloat16, device="cuda")
        self.module.engram_gather(
            self.weights[table].data_ptr(), self.scales[table].data_ptr(), ids.reshape(-1), out,
            DIM, 32,
        )  # fmt: skip
        return out.view(torch.int16)


def compared(steps: int = 1700, count: int = 3072) -> dict[str, Any]:
    """Two tables in a cache far smaller than what they read; every row of every step compared."""
    with bed(sets=1024, quotas=(16, 16)) as made:
        oracle = Oracle(made)
        hot = torch.randint(0, made.rows, (60_000,), device="cuda")
        ids = [torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2)]
        out = [made.outputs(count) for _ in range(2)]

        def step() -> None:
            for n in range(2):
                made.tables[n].kick(ids[n])
            for n in range(2):
                made.tables[n].gather(ids[n], out[n])

        graph = graph_of(step)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        rows = 0
        for _ in range(steps):
            for n in range(2):
                fresh = hot[torch.randint(0, len(hot), (count,), device="cuda")]
                fresh[: count // 8] = fresh[count // 8 : count // 4]
                ids[n].copy_(fresh)
            graph.replay()
            for n in range(2):
                got = out[n].view(torch.int16)
                wrong += (got != oracle.rows(n, ids[n])).any(dim=-1).sum()
                rows += count
        stats = [t.stats() for t in made.tables]
        return {"rows": rows, "differing": int(wrong), "oracle": oracle.name, "stats": stats}


def replayed(replays: int = 10_000, count: int = 768) -> dict[str, Any]:
    """A step of about 1 ms, changing ids, resizes and quota moves, sequences from 2^24 - 100."""
    start = (1 << 24) - 100
    with bed(
        sets=512, quotas=(16, 16), rows_max=1024, first_kick=start, first_sequence=start
    ) as made:
        oracle = Oracle(made)
        ids = [torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2)]
        out = [made.outputs(count) for _ in range(2)]
        sink = torch.zeros(1, dtype=torch.int64, device="cuda")

        def step() -> None:
            for n in range(2):
                made.tables[n].kick(ids[n])
            busy[(1,)](300_000, sink, num_warps=1)
            made.tables[0].gather(ids[0], out[0])
            busy[(1,)](1_200_000, sink, num_warps=1)
            made.tables[1].gather(ids[1], out[1])

        graph = graph_of(step)
        hot = torch.randint(0, made.rows, (20_000,), device="cuda")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        began = time.perf_counter()
        for replay in range(replays):
            for n in range(2):
                ids[n].copy_(hot[torch.randint(0, len(hot), (count,), device="cuda")])
            graph.replay()
            for n in range(2):
                got = out[n].view(torch.int16)
                wrong += (got != oracle.rows(n, ids[n])).any(dim=-1).sum()
            if replay % 37 == 0:
                made.cache.resize(1 + (replay * 7919) % 512)
            if replay % 23 == 0:
                ways = 1 + replay % 31
                if replay < replays // 2:
                    made.cache.set_quotas({0: ways, 1: 32 - ways})
                else:  # as a daemon does it, beside the running graph
                    made.wish(ways, 32 - ways)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        stats = [t.stats() for t in made.tables]
        return {
            "replays": replays, "wrong": int(wrong), "seconds": seconds, "stats": stats,
            "directory_bytes_per_slot": made.cache.directory_bytes / (made.cache.sets * 32),
        }  # fmt: skip


def stress(lookups: int = 100_000_000, count: int = 16384) -> dict[str, Any]:
    """Four sets, two tables, heavy duplicates, quotas moving; every row compared."""
    with bed(pages=4096, sets=4, quotas=(16, 16), rows_max=count) as made:
        oracle = Oracle(made)
        ids = [torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2)]
        out = [made.outputs(count) for _ in range(2)]

        def step() -> None:
            for n in range(2):
                made.tables[n].kick(ids[n])
            for n in range(2):
                made.tables[n].gather(ids[n], out[n])

        graph = graph_of(step)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        steps = -(-lookups // (2 * count))
        began = time.perf_counter()
        for at in range(steps):
            for n in range(2):
                # Mostly the same few dozen rows, so that a step's programs meet on words.
                skew = torch.rand(count, device="cuda").pow_(6).mul_(90).long()
                ids[n].copy_((skew + at * 3) % made.rows)
            graph.replay()
            for n in range(2):
                got = out[n].view(torch.int16)
                wrong += (got != oracle.rows(n, ids[n])).any(dim=-1).sum()
            if at % 11 == 0:
                ways = 1 + at % 31
                made.cache.set_quotas({0: ways, 1: 32 - ways})
        torch.cuda.synchronize()
        stats = [t.stats() for t in made.tables]
        return {
            "lookups": steps * 2 * count, "wrong": int(wrong),
            "seconds": time.perf_counter() - began, "stats": stats,
        }  # fmt: skip
