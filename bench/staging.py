"""Staging beside dd, its memory, and staging the same again.

What is set beside dd is the writing, flush included. Then every page is read back, which dd does
not do; the rate with that is in the record's detail.

    python -m bench.staging [--quick]

Writes a checkpoint with V4.1's layout (two tables, 264-byte rows; 4 GiB of pages) into
$TIERD_BENCH_DIR or /var/tmp, stages it into a file device there while it is in the page cache,
and sets `dd oflag=direct` of as many bytes into a file of the same kind beside it. The two take
turns. Everything is removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import OPERATORS, ROOT, bars
from tests.checkpoints import random_e4m3
from tierd.io import staging, tables
from tierd.io.checkpoint import Checkpoint
from tierd.io.store import Store

DIM = 256
ROWS_PER_PAGE = 15
LAYERS = (1, 14)
PAGE = 4096
CHUNK_ROWS = 1 << 17


def write_checkpoint(path: Path, page_bytes: int) -> None:
    """One shard per table, so that the pages of both tables together have `page_bytes` bytes."""
    rng = np.random.default_rng(20)
    rows = page_bytes // PAGE // len(LAYERS) * ROWS_PER_PAGE
    weight = random_e4m3(rng, CHUNK_ROWS + 4096, DIM)
    scale = rng.integers(0, 255, (CHUNK_ROWS + 4096, DIM // 32), np.uint8)
    weight_map = {}
    for layer in LAYERS:
        stem, shard = f"layers.{layer}.engram.embed", f"model-{layer:05d}.safetensors"
        sizes = {"weight": ("F8_E4M3", DIM), "scale": ("F8_E8M0", DIM // 32)}
        header, position = {}, 0
        for part, (dtype, width) in sizes.items():
            header[f"{stem}.{part}"] = {
                "dtype": dtype,
                "shape": [rows, width],
                "data_offsets": [position, position + rows * width],
            }
            position += rows * width
            weight_map[f"{stem}.{part}"] = shard
        text = json.dumps(header).encode()
        with (path / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for data in (weight, scale):
                for first in range(0, rows, CHUNK_ROWS):
                    # Each chunk starts elsewhere in the pool, so that no two are the same.
                    at = (first // CHUNK_ROWS * 61 + layer) % 4096
                    file.write(data[at : at + min(CHUNK_ROWS, rows - first)].data)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def warm(path: Path) -> None:
    """Bring the checkpoint into the page cache, and what is dirty onto the disk."""
    os.sync()
    buffer = bytearray(8 << 20)
    for shard in path.glob("*.safetensors"):
        with shard.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run_dd(path: Path, size: int) -> float:
    """Seconds that dd takes for `size` bytes into a fresh file whose room is reserved."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.posix_fallocate(fd, 0, size)
    os.close(fd)
    blocks = size // (4 << 20)
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={blocks}", "oflag=direct"]
    started = time.monotonic()
    subprocess.run([*command, "conv=notrunc,fsync"], check=True, capture_output=True)
    seconds = time.monotonic() - started
    path.unlink()
    return seconds


def run_child(device: Path, checkpoint: Path) -> dict[str, Any]:
    """Stage in a process of its own; what it says of itself, and its whole life in seconds."""
    command = [sys.executable, "-m", "bench.staging", "--child", str(device), str(checkpoint)]
    started = time.monotonic()
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    answer: dict[str, Any] = json.loads(done.stdout)
    return {**answer, "process_seconds": time.monotonic() - started}


def child(device: str, checkpoint: str) -> None:
    """The staging process: opens both, stages, and prints what it took."""
    started = time.monotonic()
    with Checkpoint.open(checkpoint) as source, Store.open(device) as store:
        before = store.sequence
        results = staging.stage(store, source, tables.find_tables(source), model="bench")
        seconds = time.monotonic() - started
        commits = store.sequence - before
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    answer = {
        "seconds": seconds,
        "write_seconds": sum(result.write_seconds for result in results),
        "written": sum(result.written_bytes for result in results),
        "commits": commits,
        "peak_rss_mib": int(peak.split()[1]) / 1024,
    }
    print(json.dumps(answer))


def measure(work: Path, size: int, repeats: int) -> dict[str, Any]:
    """Dd and staging in turns; then the last store once more."""
    checkpoint, device = work / "checkpoint", work / "device"
    checkpoint.mkdir()
    write_checkpoint(checkpoint, size)
    dd, staged, again = [], [], []
    for _ in range(repeats):
        warm(checkpoint)
        dd.append(run_dd(work / "dd", size))
        Store.format(device, size=size + (64 << 20)).close()
        os.sync()
        staged.append(run_child(device, checkpoint))
        assert staged[-1]["written"] == size, "every page was written"
        again.append(run_child(device, checkpoint))
        assert (again[-1]["written"], again[-1]["commits"]) == (0, 0), "nothing was written"
        device.unlink()
    return {"dd": dd, "staged": staged, "again": again}


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure; `quick` stages 256 MiB once and proves only that it runs."""
    size = (256 << 20) if quick else (4 << 30)
    repeats = 1 if quick else 5
    place = os.environ.get("TIERD_BENCH_DIR", "/var/tmp")
    work = Path(tempfile.mkdtemp(prefix="tierd-bench-staging-", dir=place))
    try:
        found = measure(work, size, repeats)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    rates = [size / 2**20 / one["write_seconds"] for one in found["staged"]]
    whole_rates = [size / 2**20 / one["seconds"] for one in found["staged"]]
    dd_rates = [size / 2**20 / seconds for seconds in found["dd"]]
    ratios = [rate / dd for rate, dd in zip(rates, dd_rates, strict=True)]
    peaks = [one["peak_rss_mib"] for one in found["staged"]]
    again = [one["process_seconds"] for one in found["again"]]
    speeds = {
        "gib": size / 2**30,
        "staging_mib_per_s": [round(rate) for rate in rates],
        "with_read_back_mib_per_s": [round(rate) for rate in whole_rates],
        "dd_mib_per_s": [round(rate) for rate in dd_rates],
    }
    whole = {"gib": size / 2**30, "of": "the whole process, interpreter start included"}
    return [
        result("staging_vs_dd", statistics.median(ratios), ratios, "ratio", speeds),
        result("staging_rss_mib", max(peaks), peaks, "MiB", {"gib": size / 2**30}),
        result("restage_same_seconds", max(again), again, "s", whole),
    ]


def result(
    name: str, value: float, values: list[float], unit: str, detail: dict[str, Any]
) -> dict[str, Any]:
    """One measure with its bar and verdict."""
    measure_id = f"first_light.{name}"
    sign, bar = bars()[measure_id]
    return {
        "id": measure_id,
        "value": round(value, 3),
        "unit": unit,
        "bar": [sign, bar],
        "met": bool(OPERATORS[sign](value, bar)),
        "repeats": len(values),
        "spread": f"{min(values):.3g} to {max(values):.3g}",
        "detail": detail,
    }


def main() -> None:
    """Print the records as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 MiB, once")
    parser.add_argument("--child", nargs=2, metavar=("DEVICE", "CHECKPOINT"))
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    print(json.dumps(run(arguments.quick), indent=1))


if __name__ == "__main__":
    main()
