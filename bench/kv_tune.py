"""Variants of the kernels on one H200: `python -m bench.kv_tune [attention] [transfer]`.

What bench/kv_gpu.py and tierd/kv/ops.py use is the best of these.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import TYPE_CHECKING, Any

import torch

from bench import kv_decode
from bench.kv_gpu import SMALL_ROWS, SPARSE, copy_tb_s, link_gb_s, settle, step_of, time_us
from tierd.kv.ops import Kernels

if TYPE_CHECKING:
    from collections.abc import Callable

TRANSFERS = [
    {"transfer_heads": heads, "entries": entries, "transfer_warps": warps}
    for entries, warps in ((1, 4), (2, 4), (4, 8), (8, 16))
    for heads in (2, 4, 8, 16)
]


def attention(rows: int, mode: str, queries: int, **tuning: int) -> Callable[[], object]:
    """One layer's attention of a batch, as a graph of several layers' worth of pages."""
    d = kv_decode
    shape, budget = d.qwen(1), d.Budget(blocks=128, cap=1.0)
    engine = d.Engine.__new__(d.Engine)
    engine.shape, engine.rows, engine.budget = shape, rows, budget
    engine.sparse, engine.mode = mode != "dense", mode
    engine.blocks = d.CONTEXT // shape.block + 2
    engine.slots = budget.slots if engine.sparse else engine.blocks
    engine._make_tables()
    state = engine._layer(0, None)
    if engine.sparse:
        state.map[:] = torch.arange(budget.slots, dtype=torch.int32, device="cuda")
    q = torch.randn(rows, queries, 32, 128, device="cuda").bfloat16()

    def make(**tuning: int) -> Callable[[], object]:
        ops = Kernels(shape, budget, **tuning)
        return lambda: ops.attend(state, engine.tables, q, d.SCALE)

    return make(**tuning) if tuning else make


def attentions() -> dict[str, Any]:
    """The attention kernel: dense at 45 requests, sparse at 32 with drafts."""
    found: dict[str, Any] = {"copy_tb_s": copy_tb_s()}
    grids = {
        "dense": (
            (45, "dense", 1),
            [
                {"tile": t, "stages": s, "warps": w, "splits": p}
                for t, s, w, p in (
                    (64, 2, 4, 8), (64, 3, 4, 8), (64, 4, 4, 8), (128, 2, 4, 8), (128, 3, 4, 8),
                    (128, 2, 8, 8), (128, 3, 8, 8), (64, 3, 4, 16), (64, 3, 4, 4), (32, 4, 2, 8),
                    (64, 1, 4, 16), (128, 1, 8, 16),
                )
            ],
        ),
        "sparse": (
            (32, "lookahead", 2),
            [
                {"tile": t, "stages": s, "warps": w, "splits": p}
                for t, s, w, p in (
                    (64, 3, 4, 1), (64, 3, 4, 2), (64, 3, 4, 4), (64, 2, 4, 4), (64, 1, 4, 4),
                    (128, 2, 4, 2), (128, 3, 4, 4), (32, 3, 2, 4), (64, 3, 4, 8),
                )
            ],
        ),
    }  # fmt: skip
    for name, (what, variants) in grids.items():
        make: Any = attention(*what)
        tokens = 16_384 + 32 if name == "dense" else 131 * 16
        size = what[0] * tokens * 8 * 128 * 2 * 2
        for variant in variants:
            try:
                us = time_us(make(**variant))
            except Exception as error:  # noqa: BLE001 - a variant that does not fit is a result
                found[f"{name} {variant}"] = repr(error)[:80]
                continue
            found[f"{name} {variant}"] = [round(us, 1), round(size / us / 1e6, 3)]
        del make
        gc.collect()
        torch.cuda.empty_cache()
    return found


def transfers(engine: Any, variants: list[dict[str, int]]) -> dict[str, float]:
    """GB/s of one step's transfers, all layers, with nothing beside them.

    The queries are drawn anew, so that every head wants more than it may admit.
    """
    tables, last = engine.steps.tables[engine.step % 2], engine.queries - 1
    for state, q in zip(engine.layers, engine.buffers.q, strict=True):
        engine.ops.score(state, tables, torch.randn_like(q), last)
        engine.ops.select(state, tables)
    size = sum(int(state.plan_count.sum()) for state in engine.layers) * engine.shape.entry_bytes
    found: dict[str, float] = {"gb": size / 1e9}
    for variant in variants:
        ops = Kernels(engine.shape, engine.budget, **variant)
        us = time_us(lambda: [ops.transfer(s, tables) for s in engine.layers], 1, 3)  # noqa: B023
        found[str(tuple(variant.values()))] = round(size / us / 1e3, 2)
    return found


def steps(engine: Any, variants: list[dict[str, int]], priority: int) -> dict[str, list[float]]:
    """A step's time at cap 0.05 with each variant: median, best, worst."""
    engine.tables.admit.fill_(kv_decode.Budget(128, 0.05).admitted)
    found = {}
    for variant in variants:
        engine.ops = Kernels(engine.shape, engine.budget, **(SPARSE | variant))
        engine.capture_behind(move_priority=priority)
        ms = kv_decode.timed({"step": step_of(engine)}, 8, 3)["step"]
        found[str(tuple(variant.values()))] = [kv_decode.median(ms), min(ms), max(ms)]
    return found


def transfer(weights: Any, shape: Any, host: Any, rows: int, priority: int) -> dict[str, Any]:
    """Variants of the transfer: alone, and behind whole steps of a batch."""
    engine = kv_decode.Engine(weights, shape, rows, "lookahead", host=host, whole=True, **SPARSE)
    settle(engine, 5)
    engine.tables.admit.fill_(kv_decode.Budget(128, 0.05).admitted)
    found: dict[str, Any] = {"rows": rows, "priority": priority}
    found["alone"] = transfers(engine, TRANSFERS)
    found["steps"] = steps(engine, TRANSFERS, priority)
    times = kv_decode.timed({"off": step_of(engine, background=False)}, 8, 2)["off"]
    found["off_ms"], found["wrong_entries"] = kv_decode.median(times), engine.differing()
    return found


def all_transfers(rows: int = 16) -> dict[str, Any]:
    """A small and a larger batch, the moving stream's priority low and high."""
    shape = kv_decode.qwen()
    weights, host = kv_decode.Weights(shape.layers), kv_decode.Host(shape, rows)
    found: dict[str, Any] = {"link_gb_s": link_gb_s(host)}
    for batch in (SMALL_ROWS, rows):
        for priority in (0, -5):
            found[f"{batch} rows, priority {priority}"] = transfer(
                weights, shape, host, batch, priority
            )
            gc.collect()
            torch.cuda.empty_cache()
    return found


def main() -> None:
    """Print what was asked for as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", default=["attention", "transfer"])
    for which in parser.parse_args().which:
        made = attentions() if which == "attention" else all_transfers()
        print(json.dumps({which: made}))


if __name__ == "__main__":
    main()
