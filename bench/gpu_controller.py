"""Equation 1 against an H200: steps on played devices, predicted from measured T and probed W.

    python -m bench.gpu_controller run --out RAW.jsonl      where the GPU is; four minutes
    python -m bench.gpu_controller records RAW.jsonl --commit HASH --machine TEXT ...

Windows are probed at one batch size, by delaying a layer's lookup until the step grows, and scaled
by each batch's own dram step. kappa is set on the early runs; every later run is held out: its
growth is predicted from the mean read times that its own pump measured, and from nothing else.
"""  # fmt: skip

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import record, save
from tierd.controller.exposure import fit_kappa, growth_ms, window_at
from tierd.controller.readtime import ReadFit, ReadTime, reads_ms

# Batch -> step in us: what SlackTier's figure 5 and table 9 suggest for 8 to 256 sessions.
STEPS_US = {8: 11_000, 32: 15_500, 64: 20_500, 128: 29_400, 192: 36_500, 256: 43_000}
PROBED = 128
NOISE_MS = 0.1
EARLY = 14
SPLITS = ((0, 0), (16, 16), (0, 32), (32, 0))
# device, batches, quotas of layers 1 and 14; the first EARLY of them set kappa.
PLAN: tuple[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...], bool], ...] = (
    ("one", (128, 8, 32), SPLITS, False),
    ("one", (128, 8, 32), ((0, 0),), True),
    ("slow", (128, 256), ((0, 0), (32, 0)), False),
    ("four", (8, 64, 128, 256), ((0, 0), (16, 16), (24, 8)), False),
    ("remote", (8, 128, 256), ((0, 0), (16, 16)), False),
    ("one", (64, 192, 256), SPLITS, False),
    ("one", (64, 256), ((0, 0),), True),
)
DELAYS_US = {0: (350.0, 600.0, 1000.0), 1: (9_000.0, 10_500.0, 13_000.0)}


def run(out: Path, steps: int, seconds: float) -> None:
    """Play the plan; a JSON line per run. No run begins after so many seconds."""
    started = time.perf_counter()
    from bench.gpu_rig import bed
    from bench.gpu_step import Played, Shape, Step

    def shape(batch: int) -> Any:
        step = STEPS_US[batch]
        return Shape(float(step), step * 300 / 29_400, step * 9_300 / 29_400, batch)

    devices = {
        "one": Played(), "four": Played(devices=4), "slow": Played(300.0, 12.0),
        "remote": Played(15.0, 4096 / 12_500.0, transport="memory"),
    }  # fmt: skip
    options: dict[str, Any] = {
        "pages": 1 << 17, "sets": 2048, "rows_max": 2048, "keep_stored": False,
    }  # fmt: skip

    def note(**line: Any) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        with out.open("a") as file:
            file.write(text + "\n")

    for layer, delays in DELAYS_US.items():
        for delay in delays:
            played = Played(delay, 0.0, transport="memory")
            with bed(**options, **played.bed(), quotas=(0, 0)) as made:
                step = Step(made, shape(PROBED), layer == 1)
                found = _play(step, _ids(made, shape(PROBED), 20), 2)
                step.close()
            note(kind="probe", layer=layer, delay_us=delay, **found)
    order = 0
    for name, batches, splits, dram1 in PLAN:
        played = devices[name]
        with bed(**options, **played.bed(), quotas=(0, 0)) as made:
            for batch in batches:
                step = Step(made, shape(batch), dram1)
                ids = _ids(made, shape(batch), steps + 2)
                for quotas in splits:
                    began = time.perf_counter()
                    if began - started > seconds:
                        continue
                    _set_quotas(made, quotas)
                    if any(quotas):
                        _warm(made, quotas)
                    found = _play(step, ids, 2)
                    took = time.perf_counter() - began
                    note(kind="run", number=order, device=name, batch=batch, quotas=quotas,
                         dram1=dram1, took_s=round(took, 2), **found)  # fmt: skip
                    order += 1
                step.close()


def _ids(made: Any, shape: Any, steps: int) -> Any:
    """Rows [steps, 2, count]: mostly from 60,000 hot ones, the hotter the more often; some new."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(shape.batch)
    size = (steps, 2, shape.count)
    draw = torch.rand(size, device="cuda", generator=generator)
    hot = (draw**2.5 * 60_000).long()
    fresh = torch.randint(60_000, made.rows, size, device="cuda", generator=generator)
    chosen = torch.rand(size, device="cuda", generator=generator) < 0.9
    return torch.where(chosen, hot, fresh)


def _set_quotas(made: Any, quotas: tuple[int, int]) -> None:
    for table in made.tables:
        table.set_quota(0)
    for table, ways in zip(made.tables, quotas, strict=True):
        table.set_quota(ways)


def _warm(made: Any, quotas: tuple[int, int]) -> None:
    """Fill what the quotas allow, the hottest rows last."""
    import torch

    for table, ways in zip(made.tables, quotas, strict=True):
        rows = min(60_000, int(ways * 2048 * 1.1))
        for part in torch.arange(rows - 1, -1, -1, device="cuda").split(2048) if ways else ():
            table.warm(part)
    torch.cuda.synchronize()


def _play(step: Any, ids: Any, warm: int) -> dict[str, Any]:
    """Replay our step and the dram step in turn; means over the steps after `warm`."""
    import torch

    from bench.gpu_step import once

    made, times = step.made, {"ours": [], "dram": []}
    before, reads = [], []
    for at in range(len(ids)):
        for n in range(2):
            step.ids[n].copy_(ids[at, n])
        torch.cuda.synchronize()
        if at == warm:
            before, reads = [table.stats() for table in made.tables], made.read_times()
        for name, graph in step.graphs.items():
            took = once(graph)
            if at >= warm:
                times[name].append(took)
    count = len(ids) - warm
    after, now = [table.stats() for table in made.tables], made.read_times()
    gained = [{k: a[k] - b[k] for k in a} for a, b in zip(after, before, strict=True)]
    asked = [a[1] - b[1] for a, b in zip(now, reads, strict=True)]
    spent = [a[0] - b[0] for a, b in zip(now, reads, strict=True)]
    grown = [a - b for a, b in zip(times["ours"], times["dram"], strict=True)]
    return {
        "steps": count,
        "base_ms": statistics.fmean(times["dram"]) / 1e3,
        "growth_ms": statistics.fmean(grown) / 1e3,
        "growth_sd_ms": statistics.stdev(grown) / 1e3,
        "read_ms": [s / max(1, n) / 1e6 for s, n in zip(spent, asked, strict=True)],
        "asked": [n / count for n in asked],
        "pages": [(g["misses"] + g["bypasses"]) / count for g in gained],
        "stall_ms": [g["stall_ns"] / 1e6 / count for g in gained],
    }


# --- offline -------------------------------------------------------------------------------------


def load(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The probes and the runs of a raw file."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    probes = [line for line in lines if line["kind"] == "probe"]
    return probes, [line for line in lines if line["kind"] == "run"]


def probed_windows(probes: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Each layer's window (X - growth at the first X that is noticed), and the step, in ms."""
    windows = []
    for layer in range(2):
        noticed = [p for p in probes if p["layer"] == layer and p["growth_ms"] > NOISE_MS]
        first = min(noticed, key=lambda p: p["delay_us"])
        windows.append(first["read_ms"][layer] - first["growth_ms"])
    return windows, statistics.fmean(p["base_ms"] for p in probes)


def predict(one: dict[str, Any], windows: list[float], probed_ms: float, kappa: float) -> float:
    """Growth of a run from its read times; a layer that asked for nothing waited for nothing."""
    reads = [r * min(1.0, n) for r, n in zip(one["read_ms"], one["asked"], strict=True)]
    if one["dram1"]:
        reads[0] = 0.0
    scaled = [window_at(w, measured_step_ms=probed_ms, step_ms=one["base_ms"]) for w in windows]
    return float(growth_ms(reads, scaled, kappa_ms=kappa))


def judge(path: Path) -> dict[str, Any]:
    """Set kappa on the early runs and predict the rest."""
    probes, runs = load(path)
    windows, probed_ms = probed_windows(probes)
    early, late = runs[:EARLY], runs[EARLY:]
    bare = [predict(one, windows, probed_ms, 0.0) for one in early]
    kappa = fit_kappa([one["growth_ms"] for one in early], bare)
    off, rows = [], []
    for one in late:
        said = predict(one, windows, probed_ms, kappa)
        off.append(said - one["growth_ms"])
        rows.append(
            {
                "device": one["device"], "batch": one["batch"], "quotas": one["quotas"],
                "dram1": one["dram1"], "read_ms": [round(r, 3) for r in one["read_ms"]],
                "measured_ms": round(one["growth_ms"], 3), "predicted_ms": round(said, 3),
            }
        )  # fmt: skip
    measured = np.array([one["growth_ms"] for one in late])
    rmse = float(np.sqrt(np.mean(np.square(off))))
    return {
        "windows_ms": windows, "kappa_ms": kappa, "rmse_ms": rmse, "heldout": len(late),
        "worst_ms": float(np.abs(off).max()),
        "r2": float(1 - np.mean(np.square(off)) / measured.var()),
        "growth_range_ms": [float(measured.min()), float(measured.max())],
        "pages_rmse_ms": _from_pages(early, late, windows, probed_ms, kappa),
        "runs": rows,
    }  # fmt: skip


def _from_pages(
    early: list[dict[str, Any]], late: list[dict[str, Any]], windows: list[float],
    probed_ms: float, kappa: float,
) -> float:  # fmt: skip
    """One step further: T not measured either, but from pages and a device fitted on early runs."""
    fit = ReadFit.start(ReadTime(0.1, 5.0, 0.0))
    for one in early * 3:
        pages = [0.0 if n == 0 and one["dram1"] else p for n, p in enumerate(one["pages"])]
        for n, read in enumerate(one["read_ms"]):
            if pages[n] > 0:
                fit = fit.observed(
                    own=pages[n], before=sum(pages[:n]), later=sum(pages[n + 1 :]), read_ms=read
                )
    off = []
    for one in late:
        if one["device"] not in {"one", "four"}:
            continue
        count = 1 if one["device"] == "one" else 4
        pages = [0.0 if n == 0 and one["dram1"] else p for n, p in enumerate(one["pages"])]
        times = reads_ms(pages, (fit.model,) * count, np.full((2, count), 1 / count))
        said = predict(
            {**one, "read_ms": times.tolist(), "asked": [1, 1]}, windows, probed_ms, kappa
        )
        off.append(said - one["growth_ms"])
    return float(np.sqrt(np.mean(np.square(off)))) if off else float("nan")


def records(path: Path, options: argparse.Namespace) -> None:
    found = judge(path)
    spread = (
        f"growths of {found['growth_range_ms'][0]:.2f} to {found['growth_range_ms'][1]:.2f} ms, "
        f"worst miss {found['worst_ms']:.3f} ms, R2 {found['r2']:.4f}"
    )
    made = [
        record(
            "controller.predicted_rmse_ms", found["rmse_ms"], unit="ms", repeats=found["heldout"],
            command="python -m bench.gpu_controller run", spread=spread, detail=found,
            machine_name=options.machine,
            limit="read times are means of a run; a step's own time scatters about them",
        ),
        record(
            "controller.heldout_runs", found["heldout"], unit="runs", repeats=1, spread="exact",
            command="python -m bench.gpu_controller run", machine_name=options.machine,
            limit="the machine's time did not suffice",
        ),
    ]  # fmt: skip
    for one in made:
        one["versions"] |= {
            "commit": options.commit,
            "torch": options.torch,
            "triton": options.triton,
        }
        one["versions"]["python"] = "3.12"
        one["date"] = options.date
        print(one["id"], one["value"], one["bar"], "met" if one["met"] else "MISSED")
    print(save("controller", made))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "judge", "records"))
    parser.add_argument("raw", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("controller_raw.jsonl"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=600)
    for name in ("commit", "machine", "torch", "triton", "date"):
        parser.add_argument(f"--{name}", default="unknown")
    options = parser.parse_args()
    match options.what:
        case "run":
            run(options.out, options.steps, options.seconds)
        case "judge":
            print(json.dumps(judge(options.raw), indent=1))
        case _:
            records(options.raw, options)


if __name__ == "__main__":
    main()
