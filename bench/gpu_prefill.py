"""Time to first token of prefills whose rows come from four played disks, against the dram tier.

A prefill goes through 40 layers in chunks of 2,048 tokens, 55 us of compute a token, on one TP4
rank (a quarter of the rows); layers 1 and 14 look rows up where the decode step's windows are.
Nothing is captured. The scheduler is one chunk ahead: when it launches a chunk it hints the next
one's rows, and it launches no chunk before the last but one is over. Prompts are agent sessions'
text; each is played once, so that only what prompts share is cached.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.gpu_rig import DIM, ROW_BYTES, Bed, bed
from bench.gpu_step import B128, FOUR, PAGES, SETS, TRACE, work
from bench.traces import Feed
from tierd.gpu.dram import DramTable
from tierd.gpu.table import TableImage
from tierd.types import RowFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKEN_US = 55.0
CHUNK = 2048  # tokens
WIDTH = 6  # rows a token and layer, of one rank in four
ROWS_MAX = 4096
HINT_PAGES = 4 * CHUNK * WIDTH  # a chunk's pages, the next one's, and as much again
SHARES = (B128.first_us / B128.step_us, B128.second_us / B128.step_us)


class Prompts:
    """Rows of prompts, each given out once."""

    def __init__(self, rows: int) -> None:
        feed = Feed(TRACE, "agent", rows=rows, ranks=4)
        self._rows = np.concatenate(feed.sessions())  # [tokens, 2, WIDTH]
        self._at = 0

    def take(self, tokens: int) -> NDArray[np.int64]:
        assert self._at + tokens <= len(self._rows), "the trace has too few tokens"
        self._at += tokens
        return self._rows[self._at - tokens : self._at]


class Rank:
    """One rank that prefills, from our tables or from the dram tier."""

    def __init__(self, made: Bed, tables: list[Any], *, hinted: bool) -> None:
        self.made, self.tables, self.hinted = made, tables, hinted
        self.out = made.outputs(CHUNK * WIDTH)
        self.sink = torch.zeros(1, dtype=torch.int64, device="cuda")

    def compute(self, microseconds: float) -> None:
        work[(1,)](int(microseconds * 1000), self.sink, num_warps=1)

    def chunk(self, ids: list[torch.Tensor]) -> None:
        """Launch one chunk: ids [tokens * WIDTH] of each lookup layer."""
        whole = len(ids[0]) // WIDTH * TOKEN_US
        for n in range(2):
            self.tables[n].kick(ids[n])
        self.compute(whole * SHARES[0])
        self.tables[0].gather(ids[0], self.out[: len(ids[0])])
        self.compute(whole * (SHARES[1] - SHARES[0]))
        self.tables[1].gather(ids[1], self.out[: len(ids[1])])
        self.compute(whole * (1 - SHARES[1]))

    def prefill(self, prompts: list[NDArray[np.int64]]) -> list[float]:
        """Prefill prompts one after the other; returns each one's time to first token, ms."""
        chunks = [p[at : at + CHUNK] for p in prompts for at in range(0, len(p), CHUNK)]
        host = [[np.ascontiguousarray(c[:, n].ravel()) for n in range(2)] for c in chunks]
        device = [[torch.from_numpy(ids).cuda() for ids in one] for one in host]
        ends = set(np.cumsum([-(-len(p) // CHUNK) for p in prompts]).tolist())
        start = torch.cuda.Event(enable_timing=True)
        over: list[torch.cuda.Event] = []
        torch.cuda.synchronize()
        start.record()
        for at, ids in enumerate(device):
            self.chunk(ids)
            over.append(torch.cuda.Event(enable_timing=True))
            over[-1].record()
            if self.hinted and at + 1 < len(host):
                for n in range(2):
                    self.made.hints[n].give(host[at + 1][n])
            if at >= 1:
                over[at - 1].synchronize()
        torch.cuda.synchronize()
        return [start.elapsed_time(over[end - 1]) for end in sorted(ends)]


def prefill(repeats: int = 3) -> dict[str, Any]:
    """The worst ratio of mean times to first token over sizes and numbers of prompts."""
    found: dict[str, Any] = {}
    options = {
        "pages": PAGES, "sets": SETS, "quotas": (16, 16), "rows_max": ROWS_MAX,
        "arena_pages": 3 * ROWS_MAX, "hint_pages": HINT_PAGES, "keep_stored": False,
    }  # fmt: skip
    with bed(**options, **FOUR.bed()) as made:
        whole = np.memmap(made.file, np.uint8, "r+")
        span = made.pages * 4096
        dram = [
            DramTable(
                whole[n * span : (n + 1) * span],
                TableImage(
                    f"dram/{n}", n, *made.keys[n], made.rows, DIM, ROW_BYTES, RowFormat.E4M3_E8M0
                ),
            )
            for n in range(2)
        ]
        prompts = Prompts(made.rows)
        ranks = {
            "ours": Rank(made, made.tables, hinted=True),
            "dram": Rank(made, dram, hinted=False),
        }
        for rank in ranks.values():  # compiles
            rank.prefill([prompts.take(4096)])
        for tokens in (4096, 16384, 32768):
            for together in (1, 8):
                name = f"{tokens // 1024}K x {together}"
                times = play(
                    made, ranks, prompts, tokens, together, repeats if together == 1 else 1
                )
                found[name] = times
        plain = Rank(made, made.tables, hinted=False)
        unhinted = plain.prefill([prompts.take(16384)])
        found["16K x 1 without hints"] = {"ours_ms": statistics.fmean(unhinted)}
        found["hints"] = {
            "given": [h.given for h in made.hints], "skipped": [h.skipped for h in made.hints]
        }  # fmt: skip
        for table in dram:
            table.close()
    ratios = [one["ratio"] for one in found.values() if "ratio" in one]
    return {**found, "worst": max(ratios), "chunk_tokens": CHUNK}


def play(
    made: Bed, ranks: dict[str, Rank], prompts: Prompts, tokens: int, together: int, repeats: int
) -> dict[str, Any]:
    """Both ranks on the same prompts, in turn."""
    times: dict[str, list[float]] = {name: [] for name in ranks}
    before = [t.stats() for t in made.tables]
    staged = made.pump.stats()["staged"]
    for _ in range(repeats):
        given = [prompts.take(tokens) for _ in range(together)]
        for name, rank in ranks.items():
            times[name].append(statistics.fmean(rank.prefill(given)))
    gained = [
        {k: a[k] - b[k] for k in a}
        for a, b in zip([t.stats() for t in made.tables], before, strict=True)
    ]
    ratios = [a / b for a, b in zip(times["ours"], times["dram"], strict=True)]
    return {
        "ours_ms": statistics.fmean(times["ours"]),
        "dram_ms": statistics.fmean(times["dram"]),
        "ratio": statistics.fmean(ratios),
        "ratios": ratios,
        "stall_ms": [g["stall_ns"] / 1e6 / repeats for g in gained],
        "pages": [(g["misses"] + g["bypasses"]) / repeats for g in gained],
        "staged": (made.pump.stats()["staged"] - staged) / repeats,
        "hit_share": [g["hits"] / g["lookups"] for g in gained],
    }
