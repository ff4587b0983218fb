"""`python -m bench.kv_gpu`: OasisKV's measures on one H200, as JSON lines for bench/kv_records.py.

python -m bench.kv_gpu --out FILE              all stages, each in a process of its own
python -m bench.kv_gpu --out FILE decode scan  these only
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
HOST_GIB = 100.0
CAPS = (0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
SMALL_ROWS = 8


def copy_tb_s(gib: int = 4) -> float:
    """The card's copy bandwidth: bytes read and written."""
    a = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    best = 0.0
    for _ in range(5):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        b.copy_(a)
        marks[1].record()
        torch.cuda.synchronize()
        best = max(best, 2 * (gib << 30) / marks[0].elapsed_time(marks[1]) / 1e9)
    return best


def link_gb_s(host: Any) -> float:
    """What a GPU kernel reads from the registered pool."""
    source = host.pool.host(0).flatten(1)[:4096]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    into = torch.empty_like(source, device="cuda")
    torch.mul(source, 1, out=into)
    marks[0].record()
    torch.mul(source, 1, out=into)
    marks[1].record()
    torch.cuda.synchronize()
    return into.nbytes / marks[0].elapsed_time(marks[1]) / 1e6


def time_us(fn: Callable[[], object], chain: int = 4, repeats: int = 12) -> float:
    """Median time of one call, in graphs of some."""
    from bench.kv_decode import captured, median

    fn()
    torch.cuda.synchronize()
    graph = captured(lambda: [fn() for _ in range(chain)])
    times = []
    for _ in range(repeats + 3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]) * 1e3 / chain)
    return median(times[3:])


def scan() -> dict[str, Any]:
    """Score and select of one layer: 64 requests x 32K x 8 heads, blocks of 32."""
    from bench import kv_decode as d
    from tierd.kv.layer import LayerState, Tables
    from tierd.kv.ops import Kernels

    shape, budget, rows, blocks = d.qwen(1, 32), d.Budget(blocks=64, cap=0.05), 64, 1024 + 2
    tables = Tables.make(rows, blocks, budget, "cuda")
    tables.sparse.fill_(1)
    tables.length.fill_(32_768 + 5)
    row = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None]
    tables.host.copy_(row * blocks + torch.arange(blocks, device="cuda"))
    host = torch.empty(rows * blocks, 8, 2, 32, 128, dtype=torch.bfloat16, device="meta")
    headers = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    state = LayerState.make(
        0, shape, budget, rows=rows, blocks_max=blocks, gpu_pages=1, host=host, headers=headers,
        device="cuda",
    )  # fmt: skip
    state.summaries.normal_()
    state.map[..., :64] = torch.arange(64, dtype=torch.int32, device="cuda")
    state.slot_of[..., :64] = state.map[..., :64]
    q = torch.randn(rows, 2, 32, 128, device="cuda").bfloat16()
    ops = Kernels(shape, budget)

    def both() -> None:
        ops.score(state, tables, q, 1)
        ops.select(state, tables)

    return {
        "scan_select_us": time_us(both, 8),
        "score_us": time_us(lambda: ops.score(state, tables, q, 1), 8),
        "select_us": time_us(lambda: ops.select(state, tables), 8),
        "summary_bytes": state.summaries.nbytes,
        "copy_tb_s": copy_tb_s(),
    }


def step_of(engine: Any, **options: bool) -> Callable[[], None]:
    return lambda: engine.run(**options)


def decode(sparse_rows: str = "0", layers: str = "36", go: str = "") -> dict[str, Any]:
    """Dense at two cards' largest batches against ours; cap sweep; demand; previous query.

    Args:
        sparse_rows: requests of the sparse batch; 0: as many as the host pool holds.
        layers: fewer, for a first look.
        go: a file to wait for before anything is timed, while the pool is being filled.
    """
    from bench import kv_decode as d

    shape, began = d.qwen(int(layers)), time.perf_counter()
    fits = d.sparse_batch(80, HOST_GIB, d.qwen(), d.Budget(blocks=128, cap=1.0))
    rows = int(sparse_rows) or fits
    found: dict[str, Any] = {
        "dense_rows": {card: d.dense_batch(card, d.qwen()) for card in (80, 141)},
        "sparse_rows": rows, "sparse_rows_fitting": fits, "host_gib": d.host_gib(shape, rows),
        "errors": [],
    }  # fmt: skip

    def attempt(stage: Callable[..., None], *words: Any) -> None:
        """One stage; its failure leaves the others' results."""
        try:
            stage(found, *words)
        except Exception as error:  # noqa: BLE001 - said in the result
            found["errors"].append(f"{stage.__name__}: {error!r}"[:600])
        gc.collect()
        torch.cuda.empty_cache()
        found[f"{stage.__name__}_until_s"] = round(time.perf_counter() - began, 1)

    weights, host = d.Weights(shape.layers), d.Host(shape, rows)
    found["filled_s"] = round(time.perf_counter() - began, 1)
    while go and not Path(go).exists():
        time.sleep(0.05)
    found["copy_tb_s"], found["link_gb_s"] = copy_tb_s(), link_gb_s(host)
    for card in (141, 80):
        attempt(dense, weights, shape, card)
    attempt(lookahead, weights, shape, host)
    for mode in ("previous", "demand"):
        attempt(other, weights, shape, host, mode)
    return found


def dense(found: dict[str, Any], weights: Any, shape: Any, card: int) -> None:
    from bench.kv_decode import Engine, median, timed

    engine = Engine(weights, shape, found["dense_rows"][card], "dense", **DENSE)
    times = timed({"step": step_of(engine)}, 12, 3)["step"]
    found[f"dense_{card}_ms"] = median(times)
    found[f"dense_{card}_spread"] = [min(times), max(times)]
    if card == 141:
        found |= dense_share(engine, found["copy_tb_s"])


def lookahead(found: dict[str, Any], weights: Any, shape: Any, host: Any) -> None:
    """A step in one graph over all caps; in pieces, with its stalls, at the cap of the record."""
    from bench.kv_decode import Engine, median, timed

    rows = found["sparse_rows"]
    engine = Engine(weights, shape, rows, "lookahead", host=host, whole=True, **SPARSE)
    settle(engine)
    caps = found["caps"] = {}
    for cap in (0.05, *(cap for cap in CAPS if cap != 0.05)):
        caps[str(cap)] = capped(engine, cap)
    found["wrong_entries"] = engine.differing()
    times = timed({"off": step_of(engine, background=False)}, 8, 2)["off"]
    found["off_ms"] = median(times)
    del engine
    gc.collect()
    engine = Engine(weights, shape, rows, "lookahead", host=host, **SPARSE)
    settle(engine)
    found["pieces"] = capped(engine, 0.05)


def other(found: dict[str, Any], weights: Any, shape: Any, host: Any, mode: str) -> None:
    """Previous-query prefetch at our cap, or retrieval on demand of all that is missing."""
    from bench.kv_decode import Engine

    rows = found["sparse_rows"]
    engine = Engine(weights, shape, rows, mode, host=host, whole=True, **SPARSE)
    settle(engine, 6)
    found[mode] = capped(engine, 0.05 if mode == "previous" else 1.0)
    found[mode]["wrong_entries"] = engine.differing()


# The best of `python -m bench.kv_tune` for each.
DENSE = {"tile": 32, "stages": 4, "warps": 2, "splits": 8}
SPARSE = {"tile": 64, "stages": 2, "warps": 4, "splits": 4}


def dense_share(engine: Any, copy: float) -> dict[str, Any]:
    """What attention alone reads of KV a second, all layers, as a share of the copy bandwidth."""
    from bench.kv_decode import SCALE

    tables = engine.steps.tables[0]
    count = range(engine.shape.layers)
    us = time_us(
        lambda: [
            engine.ops.attend(engine.layers[n], tables, engine.buffers.q[n], SCALE) for n in count
        ],
        1, 6,
    )  # fmt: skip
    size = int(tables.length.sum()) * engine.shape.layers * 8 * 128 * 2 * 2
    return {
        "dense_attention_us": us,
        "dense_kv_bytes": size,
        "dense_hbm_share": size / us / 1e6 / copy,
    }


def settle(engine: Any, steps: int = 10) -> None:
    """Uncapped steps until the working set is what the queries want."""
    from bench.kv_decode import timed

    engine.tables.admit.fill_(engine.budget.admitted)
    timed({"settle": step_of(engine)}, steps, 0)


def capped(engine: Any, cap: float) -> dict[str, Any]:
    """Steps at one cap: time, bytes, and what was counted."""
    from bench.kv_decode import Budget, cap_excess, median, timed

    engine.tables.admit.fill_(Budget(engine.budget.blocks, cap).admitted)
    timed({"warm": step_of(engine)}, 4, 0)
    before, steps = engine.counters(), 14
    times = timed({"step": step_of(engine)}, steps, 0)["step"]
    after = engine.counters()
    stall = None
    if not engine.one_graph:
        engine.background.measure(on=True)
        timed({"stall": step_of(engine)}, 4, 0)
        stall = engine.background.stall_ms() / 4
        engine.background.measure(on=False)
    entries = (after["admitted"] - before["admitted"]) / steps
    ms = median(times)
    wanted = after["wanted"] - before["wanted"]
    return {
        "ms": ms,
        "spread": [min(times), max(times)],
        "tokens_s": engine.rows / ms * 1e3,
        "gb_step": entries * engine.shape.entry_bytes / 1e9,
        "link_gb_s": entries * engine.shape.entry_bytes / ms / 1e6,
        "resident_share": (after["hit"] - before["hit"]) / wanted,
        "bytes_over_cap": cap_excess(engine, before, after, steps),
        "wrong_owner": after["wrong_owner"],
        "written": after["written"] - before["written"],
        "stall_ms": stall,
    }


def small(layers: str = "36") -> dict[str, Any]:
    """Batch 8: the same steps with the background on and off, in turn, in either form."""
    from bench import kv_decode as d

    shape = d.qwen(int(layers))
    weights, host = d.Weights(shape.layers), d.Host(shape, SMALL_ROWS)
    return small_batch(weights, shape, host)


def small_batch(weights: Any, shape: Any, host: Any) -> dict[str, Any]:
    """Both forms; then one graph with only some parts of the background, to see what each costs."""
    from bench.kv_decode import Budget, Engine

    found: dict[str, Any] = {}
    for name, whole in (("pieces", False), ("one_graph", True)):
        engine = Engine(weights, shape, SMALL_ROWS, "lookahead", host=host, whole=whole, **SPARSE)
        settle(engine)
        engine.tables.admit.fill_(Budget(128, 0.05).admitted)
        before = engine.counters()
        found[name] = on_and_off(engine, 4)
        moved = engine.counters()["admitted"] - before["admitted"]
        found[name]["gb_step"] = moved * shape.entry_bytes / found[name]["steps"] / 1e9
        found[name]["wrong_entries"] = engine.differing()
    for parts in range(4):
        engine.capture_behind(parts=parts)
        found[f"{parts} of 4 parts"] = on_and_off(engine, 1)
    return found


def on_and_off(engine: Any, turns: int) -> dict[str, Any]:
    """Medians of steps with the background and without, in turn."""
    from bench.kv_decode import median, timed

    on: list[float] = []
    off: list[float] = []
    for _ in range(turns):
        on += timed({"on": step_of(engine)}, 10, 2)["on"]
        off += timed({"off": step_of(engine, background=False)}, 10, 2)["off"]
    return {
        "rows": engine.rows, "on_ms": median(on), "off_ms": median(off),
        "cost_pct": 100 * (median(on) / median(off) - 1), "steps": 12 * turns,
    }  # fmt: skip


def model(seconds: str = "60", medium: str = "125") -> dict[str, Any]:
    """Train both models on the spot (0 s: neither) and play them: recall, loss, agreement."""
    from bench.kv_agreement import agreement
    from bench.kv_model import WEIGHTS, Model, source_text

    into = {"small": WEIGHTS, "medium": ROOT / "build" / "kv_medium.safetensors"}
    for size, limit in (("small", seconds), ("medium", medium)):
        if float(limit):
            into[size].parent.mkdir(exist_ok=True)
            words = [size, "--seconds", limit, "--text-mb", "60", "--out", str(into[size])]
            subprocess.run(
                [sys.executable, "-m", "bench.kv_train", *words], check=True, stdout=sys.stderr
            )
    text = source_text(60_000_000).cuda()
    found: dict[str, Any] = {}
    for size, path in into.items():
        if path.exists():
            made = Model.load(path, "cuda")
            rows = agreement(made, text, (1 / 16,), sequences=24)
            rows += agreement(made, text, (1 / 8, 1 / 4), sequences=4)
            found[f"{size} records"] = rows
            shares = (1 / 16, 1 / 8, 1 / 4)
            found[f"{size} text"] = agreement(made, text, shares, sequences=6, records=False)
    return found


STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "model": model, "scan": scan, "decode": decode, "small": small,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="*", default=list(STAGES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one")
    parser.add_argument("--timeout", type=float, default=400)
    options = parser.parse_args()
    if options.one:
        name, *words = options.one.split(":")
        print(json.dumps(STAGES[name](*words)))
        return
    for stage in options.stages:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "bench.kv_gpu", "--one", stage],
            capture_output=True, text=True, timeout=options.timeout, check=False,
        )  # fmt: skip
        tail = done.stdout.strip().splitlines()
        ok = done.returncode == 0 and bool(tail)
        result = json.loads(tail[-1]) if ok else {"failed": done.stderr[-3000:]}
        line = json.dumps(
            {"stage": stage, "took_s": round(time.perf_counter() - began, 1), **result}
        )
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
