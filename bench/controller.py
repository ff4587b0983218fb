"""`make bench-controller`: the controller's measures, into bench/results/controller.json.

    python -m bench.controller               all parts; --quick is a smoke run that writes nothing
    python -m bench.controller curves        this part only

Parts: curves (sampled against exact, on sessions of bench/traces.py), splits (five scenarios and
what leads climbers astray, in simulated time), decide. What needs a GPU is bench/gpu_controller.py.
"""  # fmt: skip

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import splits
from bench.record import ROOT, record, save
from bench.traces import Feed
from tierd.controller import split as climber
from tierd.controller.curves import RATE, CurveSampler, sampled
from tierd.controller.distances import miss_ratios, stack_distances
from tierd.controller.load import NodeLoad, TableLoad
from tierd.controller.readtime import PAPER_DISK

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TOKENS = ROOT / "build" / "sessions.npz"
ROWS = 384_006_168
SIZES = 16
WARM = 30 * splits.STEPS_PER_S
Found = dict[str, Any]


def tokens() -> Path:
    """Sessions of bench/traces.py, made once."""
    if not TOKENS.exists():
        TOKENS.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "bench.traces", str(TOKENS)], check=True, cwd=ROOT)
    return TOKENS


def curves(quick: bool) -> list[Found]:
    """Sampled curves beside exact ones, at 16 sizes, for both layers of both kinds of sessions."""
    detail, spent, held = {}, [], 0
    for kind in ("agent", "chat"):
        feed = Feed(tokens(), kind, rows=ROWS, ranks=1)
        ids = feed.take(128, 200 if quick else 1600).steps
        for layer in range(ids.shape[1]):
            rows = ids[:, layer]
            sampler = CurveSampler()
            share = 0
            began = time.process_time()
            for step in rows:
                chosen = step[sampled(step)]
                share += len(chosen)
                sampler.add(chosen, lookups=len(step))
            spent.append((time.process_time() - began) / len(rows) * 1e3)
            curve = sampler.curve()
            flat = rows.reshape(-1)
            sizes = np.geomspace(5_000, len(np.unique(flat)), SIZES)
            exact = miss_ratios(stack_distances(flat), sizes.astype(np.int64))
            off = np.abs(curve.at(sizes) - exact)
            held = max(held, sampler.nbytes)
            said = float(np.interp(sizes, curve.rows, curve.error).mean())
            detail[f"{kind}, layer {layer}"] = {
                "mae": float(off.mean()), "worst": float(off.max()), "said_error": said,
                "lookups": int(flat.size), "sampled_share": share / flat.size,
                "exact_miss": [round(float(x), 4) for x in exact],
                "sampled_miss": [round(float(x), 4) for x in curve.at(sizes)],
                "rows": [int(size) for size in sizes],
            }  # fmt: skip
    maes = [one["mae"] for one in detail.values()]
    shares = [one["sampled_share"] for one in detail.values()]
    spread = f"{len(maes)} curves, mean {statistics.fmean(maes):.4f}"
    cost = {"cpu_ms_per_step": statistics.median(spent), "rate": RATE}
    return [
        {"id": "controller.curve_mae", "value": max(maes), "unit": "of lookups",
         "repeats": len(maes), "spread": spread, "detail": {**detail, **cost}},
        {"id": "controller.sampled_share", "value": max(shares), "unit": "of lookups",
         "repeats": len(shares), "spread": f"{min(shares):.4f} to {max(shares):.4f}",
         "limit": "hot rows that the hash picked are more of the lookups than of the rows"},
        {"id": "controller.curve_bytes_per_table", "value": held, "unit": "bytes",
         "repeats": len(maes), "spread": "constant"},
    ]  # fmt: skip


def split(quick: bool) -> list[Found]:
    """From f=0 and f=1 in four scenarios; the paper's on sessions' real rows as well."""
    gaps, moves, detail = [], [], {}
    tail = splits.MINUTE if quick else 5 * splits.MINUTE
    steps = WARM + splits.MINUTE + tail
    scenarios = splits.scenarios(16 if quick else 1)
    for name, scenario in scenarios.items():
        traffic = scenario.draw(0, steps)
        _play(name, scenario, traffic, gaps, moves, detail)
    if not quick:
        _play("the paper's, real rows", *_real(), gaps, moves, detail)
    worst, busy = max(gaps), max(moves)
    spread = f"{len(gaps)} runs, median {statistics.median(gaps):.3f} ms"
    return [
        {"id": "controller.split_gap_ms_max", "value": worst, "unit": "ms", "repeats": len(gaps),
         "spread": spread, "detail": detail},
        {"id": "controller.moves_per_minute_steady", "value": busy, "unit": "moves",
         "repeats": len(moves), "spread": f"{len(moves)} runs, {min(moves):.2f} to {busy:.2f}"},
    ]  # fmt: skip


def _play(
    name: str, scenario: splits.Scenario, traffic: Any, gaps: list[float], moves: list[float],
    detail: dict[str, Any],
) -> None:  # fmt: skip
    steps, tables = len(traffic[0]), len(traffic)
    minute = WARM + splits.MINUTE
    late = slice(minute, min(minute + splits.MINUTE, steps))
    fixed = splits.fixed(scenario, traffic, step=2 if tables == 2 else 4)
    means = {ways: float(growth[late].mean()) for ways, growth in fixed.items()}
    best = min(means, key=lambda ways: means[ways])
    found: dict[str, Any] = {
        "best": list(best), "best_ms": means[best], "even_ms": means[splits.even(tables)],
    }  # fmt: skip
    for start in ((0,) * (tables - 1) + (32,), (32,) + (0,) * (tables - 1)):
        run = splits.play(scenario, traffic, start, follow=True, hold_until=WARM)
        gap = run.mean_ms(late.start, late.stop) - means[best]
        after = [at for at, _ in run.moves if at >= minute]
        minutes = (steps - minute) / splits.MINUTE
        gaps.append(gap)
        moves.append(len(after) / minutes)
        label = "f=0" if start[0] == 0 else "f=1"
        found[label] = {
            "stay_ms": means[start], "ms": run.mean_ms(late.start, late.stop), "gap_ms": gap,
            "ended": list(run.ways),
            "moves": [f"{(at - WARM) / splits.STEPS_PER_S:.0f} s: {why}" for at, why in run.moves],
            "decide_ms_median": statistics.median(run.decide_ms),
        }  # fmt: skip
    detail[name] = found
    shown = [f"{label} gap {found[label]['gap_ms']:.3f} ms" for label in ("f=0", "f=1")]
    print(name, "best", best, f"{means[best]:.3f}", *shown, flush=True)


def _real() -> tuple[splits.Scenario, list[list[NDArray[np.int64]]]]:
    """Agent sessions, prefills too, through the paper's 1M rows of one rank."""
    steps = WARM + splits.MINUTE + splits.MINUTE // 2
    # Half the places, twice the columns: as many lookups a step, and sessions last twice as long.
    found = Feed(tokens(), "agent", rows=ROWS, ranks=2).take(64, steps)
    traffic, prefill = [], []
    for layer in range(2):
        parts = [np.unique(step) for step in found.steps[:, layer]]
        brought = [None if rows is None else np.unique(rows[layer]) for rows in found.prefill]
        every = np.unique(np.concatenate([*parts, *(rows for rows in brought if rows is not None)]))
        traffic.append([np.searchsorted(every, rows) for rows in parts])
        prefill.append([None if rows is None else np.searchsorted(every, rows) for rows in brought])
    scenario = splits.Scenario(
        "real", (0.27, 9.35), lambda *_: traffic, sets=32768, prefill=prefill
    )
    return scenario, traffic


def adversarial(quick: bool) -> list[Found]:
    """What scans, hot rows and phases cost against the even split."""
    losses = {}
    for name, scenario in splits.adversaries(16 if quick else 2).items():
        traffic = scenario.draw(0, (2 if quick else 4) * splits.MINUTE)
        start = splits.even(len(traffic))
        even = splits.play(scenario, traffic, start, follow=False).mean_ms(0)
        run = splits.play(scenario, traffic, start, follow=True)
        naive = splits.play(scenario, traffic, start, follow=True, decide=splits.Naive().decide)
        losses[name] = {
            "loss_ms": run.mean_ms(0) - even, "even_ms": even, "moves": len(run.moves),
            "naive_loss_ms": naive.mean_ms(0) - even, "naive_moves": len(naive.moves),
        }  # fmt: skip
        print(name, losses[name], flush=True)
    worst = max(one["loss_ms"] for one in losses.values())
    values = [one["loss_ms"] for one in losses.values()]
    return [
        {"id": "controller.adversarial_loss_ms_max", "value": worst, "unit": "ms",
         "repeats": len(losses), "spread": f"{min(values):.3f} to {worst:.3f} ms",
         "detail": losses},
    ]  # fmt: skip


def decide(quick: bool) -> list[Found]:
    """One decision over eight tables, all moves weighed."""
    rng = np.random.default_rng(0)
    loads = []
    for number in range(8):
        sampler = CurveSampler()
        ids = (200_000 * rng.random(40_000) ** 3).astype(np.int64)
        sampler.add(ids, lookups=len(ids) * 128)
        loads.append(TableLoad(f"t{number}", 0.3 + number, 768, sampler.curve()))
    load = NodeLoad(tuple(loads), (PAPER_DISK,))
    seen = climber.Observation(load, 32768, 30, 1.0)
    # CPU time of the thread: the machine has other work, which is not the decision's.
    repeats = 50 if quick else 500
    times = [_cost(seen, (4,) * 8) for _ in range(repeats)]
    two = climber.Observation(NodeLoad(load.tables[:2], (PAPER_DISK,)), 32768, 30, 1.0)
    pairs = [_cost(two, (0, 32)) for _ in range(repeats)]
    spread = (
        f"least {min(times):.2f}, p90 {np.percentile(times, 90):.2f} ms; two tables: median "
        f"{statistics.median(pairs):.2f}, least {min(pairs):.2f} ms"
    )
    return [
        {"id": "controller.decide_ms", "value": statistics.median(times), "unit": "ms",
         "repeats": len(times), "spread": spread, "detail": {"tables": 8},
         "limit": "the machine's two cores were shared with twenty other processes"},
    ]  # fmt: skip


def _cost(seen: climber.Observation, ways: tuple[int, ...]) -> float:
    state = climber.SplitState.start(ways)
    began = time.thread_time()
    climber.decide(seen, state)
    return (time.thread_time() - began) * 1e3


PARTS = {"curves": curves, "splits": split, "adversarial": adversarial, "decide": decide}


def main() -> int:
    """Run the parts and save their records; 1 if a bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    missed = 0
    for part in options.parts:
        print(f"--- {part}", flush=True)
        made = []
        for found in PARTS[part](options.quick):
            made.append(
                record(
                    found.pop("id"), float(found.pop("value")),
                    command=f"python -m bench.controller {part}", packages=("numpy",), **found,
                )
            )  # fmt: skip
            one = made[-1]
            verdict = "met" if one["met"] else "MISSED"
            print(f"{one['id']:40} {one['value']:>12.5g} {one['bar']} {verdict}", flush=True)
            missed += not one["met"]
        if not options.quick:
            save("controller", made)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
