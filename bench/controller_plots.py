"""The plots of docs/controller.md, by `tierd` commands on sessions of bench/traces.py.

python -m bench.controller_plots        writes docs/img/*.svg
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench import gpu_controller
from bench.controller import ROWS, tokens
from bench.record import ROOT
from bench.traces import Feed
from tierd.io.tracefile import TracedTable, TraceWriter

IMAGES = ROOT / "docs" / "img"
STEPS = 700
CACHE_ROWS = 1 << 20  # the paper's 1M rows of one rank
RAW = ROOT / "bench" / "results" / "controller_h200.jsonl"


def write_trace(kind: str, path: Path) -> None:
    """One rank's lookups of sessions, prefills and all."""
    found = Feed(tokens(), kind, rows=ROWS, ranks=4).take(128, STEPS)
    names = [
        TracedTable(f"layers.{layer}.engram", layer, ROWS, 264, 25_600_412) for layer in (1, 14)
    ]
    with TraceWriter(path, "sessions", names, made_by=f"bench/traces.py, {kind}") as writer:
        for step in range(STEPS):
            for table in range(2):
                prefill = found.prefill[step]
                if prefill is not None:
                    writer.add(table, prefill[table], prefill=True)
                writer.add(table, found.steps[step, table])


def tierd(*words: object) -> str:
    command = [sys.executable, "-m", "tierd.cli", *map(str, words)]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


def held_out(path: Path) -> None:
    """Measured against predicted growth of the runs on the H200."""
    from matplotlib import pyplot as plt

    found = gpu_controller.judge(RAW)
    figure, axis = plt.subplots(figsize=(3.4, 3.1))
    top = max(run["measured_ms"] for run in found["runs"]) * 1.1
    axis.plot([0, top], [0, top], color="#bcc5c9", lw=1)
    colors = {"one": "#0b6e99", "four": "#0f7b6c", "remote": "#9065b0", "slow": "#e03e3e"}
    names = {"one": "one disk", "four": "four disks", "remote": "remote", "slow": "a slow disk"}
    for device, color in colors.items():
        runs = [run for run in found["runs"] if run["device"] == device]
        axis.plot(
            [run["measured_ms"] for run in runs], [run["predicted_ms"] for run in runs], "o",
            ms=4, color=color, label=names[device],
        )  # fmt: skip
    axis.set_xlabel("measured growth of a step, ms")
    axis.set_ylabel("predicted, ms")
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    windows = ("--window", "layers.1.engram=0.27", "--window", "layers.14.engram=9.35")
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        for kind in ("agent", "chat"):
            trace, out = directory / f"{kind}.trace", directory / kind
            write_trace(kind, trace)
            policies = [
                word for name in ("clock", "s3fifo", "static") for word in ("--policy", name)
            ]
            shown = tierd(
                "trace", "replay", trace, *policies, "--cache-rows", CACHE_ROWS, *windows,
                "--plot", out, "--json",
            )  # fmt: skip
            for name in ("miss_curves", "split", "windows"):
                shutil.copy(out / f"{name}.svg", IMAGES / f"{kind}_{name}.svg")
            split = json.loads(shown)["split"]["splits"]
            growth = {one["share"]: round(one["growth_ms"], 3) for one in split}
            print(kind, {share: growth[share] for share in (0.0, 0.25, 0.5, 0.75, 1.0)}, flush=True)
            print(np.round([one["reads_ms"] for one in split if one["share"] in {0, 0.5, 1}], 3))
    import matplotlib as mpl

    mpl.rcParams.update({"svg.hashsalt": "tierd", "svg.fonttype": "none", "font.size": 9})
    held_out(IMAGES / "held_out.svg")


if __name__ == "__main__":
    main()
