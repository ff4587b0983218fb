"""A decode step of V4.1's shape on one TP4 rank: what placements cost, on played devices.

The step is 40 layers of fixed-time kernels; layers 1 and 14 look rows up. A rank reads a quarter
of a step's rows: batch * 24 / 4 a layer. The baseline is the same step with both tables on the
dram tier, replayed in turn with ours on the same ids. A real pump reads loop devices over shared
memory and holds each burst back until the played device would have answered.
"""

from __future__ import annotations

import collections
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
from bench.traces import Feed, ids_zipf
from tierd.gpu.dram import DramTable
from tierd.gpu.kernels_sync import now_ns
from tierd.gpu.table import TableImage
from tierd.types import RowFormat

TRACE = Path(os.environ.get("TIERD_SESSIONS", "trace.npz"))
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


@dataclasses.dataclass(frozen=True)
class Played:
    """Devices: a burst of n pages of one of them takes base + n * page; 0, 0 is as it is."""

    base_us: float = 300.0  # the paper's disk, as one of four ranks sees it
    page_us: float = 3.05
    devices: int = 1
    transport: str = "auto"
    loops: int = 4  # loop devices behind each: one alone is slower than the paper's disk

    def bed(self) -> dict[str, Any]:
        """Options of a bed that plays them."""
        pump = {
            "transport": self.transport,
            "play_base_us": self.base_us,
            "play_page_us": self.page_us,
            "play_queues": self.devices,
        }
        loops = self.transport == "auto"
        return {
            "pump": pump,
            "devices": self.devices * (self.loops if loops else 1),
            "loops": loops,
        }

    def read_us(self, pages: float) -> float:
        """What a burst takes whose pages are spread evenly."""
        return self.base_us + self.page_us * pages / self.devices


ONE, FOUR, LOOP = Played(), Played(devices=4, loops=1), Played(0.0, 0.0, loops=1)
# 15 us + bytes at 100 Gb/s, from memory: the far node's reads go past its processors.
REMOTE = Played(15.0, 4096 / 12500.0, transport="memory")


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


@dataclasses.dataclass
class Ids:
    """What a run feeds: row numbers a step, and what prefills between steps bring in.

    Attributes:
        steps: int64 [steps, 2, count] on the GPU.
        prefill: per step, int64 [2, n] of the sessions whose turn begins there, or None.
    """

    steps: torch.Tensor
    prefill: list[torch.Tensor | None]


def feed(made: Bed, ids: Ids, at: int, *, decode: bool) -> None:
    """Bring in what prefills read before step `at`, and with `decode` that step's own rows."""
    for n in range(2):
        if not made.quotas[n]:
            continue
        prefill = ids.prefill[at]
        if prefill is not None:
            made.tables[n].warm(prefill[n])
        if decode:
            made.tables[n].warm(ids.steps[at, n])


class Gained:
    """What the timed steps alone have moved: counters of the tables, read times of the rings."""

    def __init__(self, made: Bed) -> None:
        self._made = made
        self.stats = [collections.Counter[str]() for _ in made.tables]
        self.reads = [(0, 0) for _ in made.tables]
        self._before: list[dict[str, int]] = []
        self._reads_before: list[tuple[int, int]] = []

    def begin(self) -> None:
        self._before = [t.stats() for t in self._made.tables]
        self._reads_before = self._made.read_times()

    def end(self) -> None:
        for n, table in enumerate(self._made.tables):
            after, before = table.stats(), self._before[n]
            self.stats[n].update({k: after[k] - before[k] for k in after})
        self.reads = [
            (ns + new[0] - old[0], requests + new[1] - old[1])
            for (ns, requests), new, old in zip(
                self.reads, self._made.read_times(), self._reads_before, strict=True
            )
        ]


def once(graph: torch.cuda.CUDAGraph) -> float:
    """Replay; returns us."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def play(step: Step, ids: Ids, warm: int, played: Played) -> dict[str, Any]:
    """Replay both graphs on the same ids; the first `warm` steps only warm the cache."""
    made = step.made
    times: dict[str, list[float]] = {"ours": [], "dram": []}
    differing, gained = 0, Gained(made)
    for at in range(max(0, warm - SETTLE)):
        feed(made, ids, at, decode=True)
    for at in range(max(0, warm - SETTLE), len(ids.steps)):
        feed(made, ids, at, decode=False)
        for n in range(2):
            step.ids[n].copy_(ids.steps[at, n])
        torch.cuda.synchronize()
        graphs = step.graphs if at >= warm else {"ours": step.graphs["ours"]}
        for name, graph in graphs.items():
            if at < warm:
                once(graph)
            elif name == "ours":
                gained.begin()
                times[name].append(once(graph))
                gained.end()
            else:
                times[name].append(once(graph))
        if at >= warm and at % 8 == 0:
            for n in range(2):
                got, want = step.out[n].view(torch.int16), step.plain[n].view(torch.int16)
                differing += int((got != want).any(-1).sum())
    return account(step, ids.steps[warm:], times, gained, played) | {"differing": differing}


def account(
    step: Step,
    timed: torch.Tensor,
    times: dict[str, list[float]],
    gained: Gained,
    played: Played,
) -> dict[str, Any]:
    """What the timed steps cost, and where the time went."""
    made, shape, steps = step.made, step.shape, len(times["ours"])
    read_us = [ns / max(1, requests) / 1e3 for ns, requests in gained.reads]
    grown = [a - b for a, b in zip(times["ours"], times["dram"], strict=True)]
    growth, base = statistics.fmean(grown), statistics.fmean(times["dram"])
    pages = [(g["misses"] + g["bypasses"]) / steps for g in gained.stats]
    stall_us = [g["stall_ns"] / 1e3 / steps for g in gained.stats]
    parts = [100 * statistics.fmean(grown[i::4]) / base for i in range(4)]
    return {
        "steps": steps,
        "base_us": base,
        "growth_us": growth,
        "growth_pct": 100 * growth / base,
        "growth_pct_quarters": [round(part, 3) for part in parts],
        "median_growth_us": statistics.median(grown),
        "stall_us": stall_us,
        "late_steps": [g["late_steps"] for g in gained.stats],
        "read_us": read_us,
        "model_us": [played.read_us(n) if n else 0.0 for n in pages],
        "pages": pages,
        # Where the growth goes: the step's start to the doorbell seen, and the answer on its way
        # back; the read; what comes after the wait (fill, gather) beyond the dram gather.
        "outside_read_us": stall_us[0] + shape.first_us - read_us[0] if stall_us[0] > 1 else 0.0,
        "read_beyond_model_us": read_us[0] - played.read_us(pages[0]) if pages[0] else 0.0,
        "after_wait_us": growth - sum(stall_us),
        "hit_share": [g["hits"] / g["lookups"] if g["lookups"] else 0.0 for g in gained.stats],
        "distinct": [len(timed[:, n].unique()) / timed[:, n].numel() for n in range(2)],
        "distinct_in_step": [
            statistics.fmean(len(one.unique()) / one.numel() for one in timed[:16, n])
            for n in range(2)
        ],
        "devices": made.loops.kind if made.loops else "memory",
    }


def placement(
    shape: Shape,
    played: Played,
    *,
    quotas: tuple[int, int],
    shares: tuple[float, float] = (0.0, 0.0),
    dram1: bool = False,
    trace: str = "",
    steps: int = 120,
    warm: int = 10,
) -> dict[str, Any]:
    """One placement on a bed of its own; see Step and play."""
    options = {"pages": PAGES, "sets": SETS, "quotas": quotas, "rows_max": 2048}
    with bed(**options, **played.bed(), keep_stored=False) as made:
        step = Step(made, shape, dram1)
        if trace in {"agent", "chat"}:
            found = Feed(TRACE, trace, rows=made.rows, ranks=4).take(shape.batch, warm + steps)
            prefill = [None if p is None else torch.from_numpy(p).cuda() for p in found.prefill]
            ids = Ids(torch.from_numpy(found.steps).cuda(), prefill)
        else:
            total = warm + steps
            if trace == "zipf":
                plain = torch.from_numpy(ids_zipf(made.rows, (total, 2, shape.count))).cuda()
            elif trace == "uniform":
                plain = torch.randint(0, made.rows, (total, 2, shape.count), device="cuda")
            else:
                plain = imposed(made, shape, shares, total)
            ids = Ids(plain, [None] * total)
        result = play(step, ids, warm, played)
        step.close()
    return result


def table2(steps: int = 200) -> dict[str, Any]:
    """SlackTier's table 2 with imposed hit shares, and how far equation 1 is from each step."""
    cases: dict[str, dict[str, Any]] = {
        "dram + one disk": {"played": ONE, "quotas": (0, 0), "dram1": True},
        "one disk, uncached": {"played": ONE, "quotas": (0, 0)},
        "four disks, uncached": {"played": FOUR, "quotas": (0, 0)},
        "one disk, cache on 14": {"played": ONE, "quotas": (0, 16), "shares": (0, 0.85)},
        "one disk, split": {"played": ONE, "quotas": (16, 16), "shares": (0.85, 0.85)},
        "four disks, split": {"played": FOUR, "quotas": (16, 16), "shares": (0.85, 0.85)},
        "loop device as it is, split": {"played": LOOP, "quotas": (16, 16), "shares": (0.85, 0.85)},
        "loop device as it is, uncached": {"played": LOOP, "quotas": (0, 0)},
        "all hits": {"played": ONE, "quotas": (16, 16), "shares": (1.0, 1.0)},
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


def remote(steps: int = 400) -> dict[str, Any]:
    """B=8, an 11 ms step, both tables at 15 us + bytes at 100 Gb/s, uncached."""
    return placement(B8, REMOTE, quotas=(0, 0), steps=steps)


def traced(kind: str, steps: int = 200, warm: int = 1200) -> dict[str, Any]:
    """Agent or chat sessions through a split cache of 1M rows, on one disk and on four."""
    options: dict[str, Any] = {"quotas": (16, 16), "trace": kind, "steps": steps, "warm": warm}
    plain = {**options, "quotas": (0, 0), "warm": 10, "steps": steps // 2}
    return {
        "one": placement(B128, ONE, **options),
        "one, 24 ways for layer 1": placement(B128, ONE, **{**options, "quotas": (24, 8)}),
        "four": placement(B128, FOUR, **options),
        "uncached": placement(B128, ONE, **plain),
        "dram + one disk": placement(B128, ONE, **{**plain, "dram1": True, "steps": steps}),
    }


def synthetic(kind: str, steps: int = 100, warm: int = 400) -> dict[str, Any]:
    """Uniform or Zipf ids through the same split cache on one disk."""
    return placement(B128, ONE, quotas=(16, 16), trace=kind, steps=steps, warm=warm)
