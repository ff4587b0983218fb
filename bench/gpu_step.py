"""A decode step of V4.1's shape on one TP4 rank: what placements cost, on played devices.

The step is 40 layers of fixed-time kernels; layers 1 and 14 look rows up. A rank reads a quarter
of a step's rows: batch * 24 / 4 a layer. The baseline is the same step with both tables on the
dram tier, replayed in turn with ours on the same ids.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from bench.gpu_rig import DIM, ROW_BYTES, Bed, bed, graph_of
from bench.held import REMOTE, Held, Model
from bench.traces import decode_ids
from tierd.gpu.dram import DramTable
from tierd.gpu.kernels_sync import now_ns
from tierd.gpu.table import TableImage
from tierd.types import RowFormat

TRACE = Path(os.environ.get("TIERD_TRACE", "trace.npz"))
PAGES = 1 << 20  # 15.7 million rows a layer
SETS = 32768  # the paper's 1M rows of cache
SETTLE = 10  # steps played and not counted


@triton.jit
def work(nanoseconds, sink):
    """A layer's compute: one warp busy for a fixed time."""
    start = now_ns()
    now = start
    while now - start < nanoseconds:
        now = now_ns()
    if now == 0:
        tl.store(sink, now)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decode step: its length and when its two lookup layers come, in us."""

    step_us: float = 29_400.0
    first_us: float = 300.0
    second_us: float = 9_300.0
    batch: int = 128

    @property
    def count(self) -> int:
        return self.batch * 24 // 4


B128 = Shape()
B8 = Shape(11_000.0, 110.0, 3_480.0, 8)


class Step:
    """Our step and the baseline as graphs, over one bed."""

    def __init__(self, made: Bed, shape: Shape, first_in_dram: bool) -> None:
        self.made, self.shape = made, shape
        whole = np.memmap(made.file, np.uint8, "r+")
        span = made.pages * 4096
        self.dram = [
            DramTable(
                whole[n * span : (n + 1) * span],
                TableImage(
                    f"dram/{n}", n, *made.keys[n], made.rows, DIM, ROW_BYTES, RowFormat.E4M3_E8M0
                ),
            )
            for n in range(2)
        ]
        self.ids = [torch.zeros(shape.count, dtype=torch.int64, device="cuda") for _ in range(2)]
        self.out = [made.outputs(shape.count) for _ in range(2)]
        self.plain = [made.outputs(shape.count) for _ in range(2)]
        self.sink = torch.zeros(1, dtype=torch.int64, device="cuda")
        ours = [self.dram[0] if first_in_dram else made.tables[0], made.tables[1]]
        self.graphs = {
            "ours": graph_of(lambda: self._step(ours, self.out)),
            "dram": graph_of(lambda: self._step(self.dram, self.plain)),
        }

    def _step(self, tables: list[Any], out: list[torch.Tensor]) -> None:
        shape = self.shape
        for n in range(2):
            tables[n].kick(self.ids[n])
        self._work(shape.first_us)
        tables[0].gather(self.ids[0], out[0])
        self._work(shape.second_us - shape.first_us)
        tables[1].gather(self.ids[1], out[1])
        self._work(shape.step_us - shape.second_us)

    def _work(self, microseconds: float) -> None:
        work[(1,)](int(microseconds * 1000), self.sink, num_warps=1)

    def close(self) -> None:
        for table in self.dram:
            table.close()


def imposed(made: Bed, shape: Shape, shares: tuple[float, float], steps: int) -> torch.Tensor:
    """Ids [steps, 2, count]: `shares` of them from rows that are cached, the rest never seen."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    resident = 20_000
    draw = lambda low, high: torch.randint(  # noqa: E731
        low, high, (steps, 2, shape.count), device="cuda", generator=generator
    )
    hot, fresh = draw(0, resident), draw(resident, made.rows)
    share = torch.tensor(shares, device="cuda")[None, :, None]
    chosen = torch.rand(hot.shape, device="cuda", generator=generator) < share
    for n in range(2):
        if shares[n] > 0:
            for part in torch.arange(resident, device="cuda").split(2048):
                made.tables[n].warm(part)
    return torch.where(chosen, hot, fresh)


def warm_up(made: Bed, ids: torch.Tensor) -> None:
    """Bring what these steps would read into the cache, without their compute."""
    for one in ids:
        for n in range(2):
            if made.quotas[n]:
                made.tables[n].warm(one[n])


def play(step: Step, ids: torch.Tensor, held: Held, warm: int) -> dict[str, Any]:
    """Replay both graphs on the same ids; the first `warm` steps only warm the cache."""
    times: dict[str, list[float]] = {"ours": [], "dram": []}
    differing = 0
    before: list[dict[str, int]] = []
    warm_up(step.made, ids[: max(0, warm - SETTLE)])
    for at in range(max(0, warm - SETTLE), len(ids)):
        for n in range(2):
            step.ids[n].copy_(ids[at, n])
        if at == warm:
            before = [t.stats() for t in step.made.tables]
            for ring in range(2):
                held.read_time_us(ring)
        for name, graph in step.graphs.items():
            if at < warm and name == "dram":
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if at >= warm:
                times[name].append(start.elapsed_time(end) * 1e3)
        if at >= warm and at % 8 == 0:
            for n in range(2):
                got, want = step.out[n].view(torch.int16), step.plain[n].view(torch.int16)
                differing += int((got != want).any(-1).sum())
    steps = len(times["ours"])
    after = [t.stats() for t in step.made.tables]
    gained = [{k: a[k] - b[k] for k in a} for a, b in zip(after, before, strict=True)]
    growth = statistics.fmean(times["ours"]) - statistics.fmean(times["dram"])
    timed = ids[warm:]
    return {
        "steps": steps,
        "base_us": statistics.fmean(times["dram"]),
        "growth_us": growth,
        "growth_pct": 100 * growth / statistics.fmean(times["dram"]),
        "median_growth_us": statistics.median(times["ours"]) - statistics.median(times["dram"]),
        "stall_us": [g["stall_ns"] / 1e3 / steps for g in gained],
        "read_us": [held.read_time_us(ring) for ring in range(2)],
        "hit_share": [g["hits"] / g["lookups"] if g["lookups"] else 0.0 for g in gained],
        "distinct": [len(timed[:, n].unique()) / timed[:, n].numel() for n in range(2)],
        "differing": differing,
    }


def placement(
    shape: Shape,
    models: list[Model],
    *,
    quotas: tuple[int, int],
    shares: tuple[float, float] = (0.0, 0.0),
    dram1: bool = False,
    trace: str = "",
    steps: int = 120,
    warm: int = 10,
) -> dict[str, Any]:
    """One placement on a bed of its own; see Step and play."""
    with (
        bed(
            pages=PAGES, sets=SETS, quotas=quotas, rows_max=2048, served=False, keep_stored=False
        ) as made,
        Held(made, models) as held,
    ):
        step = Step(made, shape, dram1)
        if trace:
            found = decode_ids(
                TRACE, trace, batch=shape.batch, steps=warm + steps, ranks=4, rows=made.rows
            )
            ids = torch.from_numpy(found).cuda()
        else:
            ids = imposed(made, shape, shares, warm + steps)
        result = play(step, ids, held, warm)
        step.close()
    return result


ONE, FOUR = Model(), Model(devices=4)


def table2(steps: int = 120) -> dict[str, Any]:
    """SlackTier's table 2 with imposed hit shares, and how far equation 1 is from each step."""
    cases: dict[str, dict[str, Any]] = {
        "dram + one disk": {"models": [ONE, ONE], "quotas": (0, 0), "dram1": True},
        "one disk, uncached": {"models": [ONE, ONE], "quotas": (0, 0)},
        "four disks, uncached": {"models": [FOUR, FOUR], "quotas": (0, 0)},
        "one disk, cache on 14": {"models": [ONE, ONE], "quotas": (0, 16), "shares": (0, 0.85)},
        "one disk, split": {"models": [ONE, ONE], "quotas": (16, 16), "shares": (0.85, 0.85)},
        "four disks, split": {"models": [FOUR, FOUR], "quotas": (16, 16), "shares": (0.85, 0.85)},
        "all hits": {"models": [ONE, ONE], "quotas": (16, 16), "shares": (1.0, 1.0)},
    }
    found = {name: placement(B128, steps=steps, **case) for name, case in cases.items()}
    kappa = found["all hits"]["growth_us"]
    resolve = 5.0  # us from step start to the doorbell (gpu.hit_chain: kick alone)
    for name, one in found.items():
        first = 0.0 if "dram" in name else one["read_us"][0]
        d1 = max(0.0, resolve + first - B128.first_us) if first else 0.0
        d14 = max(0.0, resolve + one["read_us"][1] - B128.second_us - d1)
        one["predicted_us"] = d1 + d14 + kappa
        one["excess_us"] = one["growth_us"] - one["predicted_us"]
    return {"kappa_us": kappa, "worst": max(o["excess_us"] for o in found.values()), **found}


def remote(steps: int = 200) -> dict[str, Any]:
    """B=8, an 11 ms step, both tables at 15 us + bytes at 100 Gb/s, uncached."""
    return placement(B8, [REMOTE, REMOTE], quotas=(0, 0), steps=steps)


def traced(kind: str, steps: int = 120, warm: int = 1300) -> dict[str, Any]:
    """Agent or chat sessions through a split cache of 1M rows, on one disk and on four."""
    options = {"quotas": (16, 16), "trace": kind, "steps": steps, "warm": warm}
    return {
        "one": placement(B128, [ONE, ONE], **options),
        "uncached": placement(B128, [ONE, ONE], **{**options, "quotas": (0, 0), "warm": 10}),
        "dram + one disk": placement(
            B128, [ONE, ONE], **{**options, "quotas": (0, 0), "dram1": True, "warm": 10}
        ),
        "four": placement(B128, [FOUR, FOUR], **options),
    }
