"""What verification costs: on the hot path, and of a whole device.

``checks`` reads random pages of an image on a loop device with direct I/O over a file in memory,
which answers faster than the checks could hide behind: the same pump with the default checks and
without any, in turns. ``verify`` runs ``tierd verify --full`` beside large direct reads of the same
extents of the same device, in turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import staging as staging_bench
from bench.pump import Served, random_pages, span, write_image
from bench.record import ROOT
from tierd.io.checkpoint import Checkpoint
from tierd.io.device import PAGE_BYTES, aligned_buffer
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

QUEUE_DEPTH = 64
IOPS_WANTED = 200_000
READ_BYTES = 4 << 20
READ_THREADS = 4
MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def loop_device(file: Path) -> Iterator[Path]:
    """Set a loop device with direct I/O up over a file."""
    command = ["losetup", "--show", "-f", "--direct-io=on", str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    device = Path(done.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "-d", str(device)], check=True)


def verified_vs_unverified(*, quick: bool) -> list[dict[str, Any]]:
    """Read rate with the default checks, over that without."""
    pages, rounds, seconds = (16384, 2, 0.3) if quick else (131072, 15, 1.0)
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=MEMORY) as work:
        file = Path(work, "image")
        write_image(file, pages)
        with loop_device(file) as device:
            count = int(_rate(device, pages, 20_000, 0, checks=False) * seconds)
            rates: dict[bool, list[float]] = {True: [], False: []}
            for index in range(rounds):
                for checks in (True, False) if index % 2 else (False, True):
                    rates[checks].append(_rate(device, pages, count, index, checks=checks))
    ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
    iops = statistics.median(rates[False])
    found = {
        "name": "verified_vs_unverified",
        "value": round(statistics.median(rates[True]) / iops, 4),
        "unit": "ratio",
        "repeats": rounds,
        "spread": f"{span(ratios, 3)} by turns; {iops:,.0f} reads/s without checks",
        "detail": {
            "reads_per_s_verified": [round(rate) for rate in rates[True]],
            "reads_per_s_unverified": [round(rate) for rate in rates[False]],
            "device": "loop, direct I/O, over tmpfs",
            "device_reaches_200k": iops >= IOPS_WANTED,
        },
        "limit": "one pump, its client and the loop device's kernel threads share the machine's "
        "cores, so that what the checks cost is taken from the device as well; with a core for "
        "each the device is what limits both",
    }
    if iops < IOPS_WANTED:
        print(f"the device reaches {iops:,.0f} reads/s only, {IOPS_WANTED:,} are wanted")
    return [found]


def _rate(device: Path, pages: int, count: int, seed: int, *, checks: bool) -> float:
    served = Served(
        device,
        pages,
        batch=QUEUE_DEPTH,
        client_spin_us=0,
        queue_depth=QUEUE_DEPTH,
        spin_us=200,
        checks=checks,
    )
    try:
        return count / served.replay(random_pages(pages, count, seed), 8)
    finally:
        served.pump.stop()


# --- a whole device ------------------------------------------------------------------------------


def full_verify_vs_device(*, quick: bool) -> list[dict[str, Any]]:
    """Rate of a full verification, over the sequential read rate of its device."""
    size, rounds = (256 << 20, 1) if quick else (4 << 30, 5)
    place = os.environ.get("TIERD_BENCH_DIR", "/var/tmp")
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=place) as name:
        work = Path(name)
        device, extents = _stage(work, size)
        reads, verifications = [], []
        for _ in range(rounds):
            reads.append(sequential_rate(device, extents))
            verifications.append(_verify_rate(device))
    ratios = [a / b for a, b in zip(verifications, reads, strict=True)]
    return [
        {
            "name": "full_verify_vs_device",
            "value": round(statistics.median(ratios), 4),
            "unit": "ratio",
            "repeats": rounds,
            "spread": f"{span(ratios, 3)}; the device gives {span(reads)} MiB/s",
            "detail": {
                "verify_mib_per_s": [round(rate) for rate in verifications],
                "device_mib_per_s": [round(rate) for rate in reads],
                "gib": size / 2**30,
                "device_reads": f"{READ_BYTES >> 20} MiB, O_DIRECT, {READ_THREADS} at a time",
            },
            "limit": "sha256 of all rows, a checksum of every page and a tag of every row take "
            "processor time that the machine's cores share with the device's emulation",
        }
    ]


def _stage(work: Path, size: int) -> tuple[Path, list[tuple[int, int]]]:
    """Stage two tables of `size` bytes; returns the device and its byte ranges in use."""
    checkpoint, device = work / "checkpoint", work / "device"
    checkpoint.mkdir()
    staging_bench.write_checkpoint(checkpoint, size)
    with (
        Store.format(device, size=size + (64 << 20)) as store,
        Checkpoint.open(checkpoint) as source,
    ):
        stage(store, source, find_tables(source), model="bench")
        extents = [
            (extent.device_page * PAGE_BYTES, extent.pages * PAGE_BYTES)
            for image in store.images
            for extent in image.extents
        ]
    for shard in checkpoint.iterdir():
        shard.unlink()
    return device, extents


def sequential_rate(device: Path, extents: list[tuple[int, int]]) -> float:
    """MiB/s of large direct reads of byte ranges, a few at a time, in the device's order."""
    blocks = [
        (at, min(READ_BYTES, start + length - at))
        for start, length in extents
        for at in range(start, start + length, READ_BYTES)
    ]
    fd = os.open(device, os.O_RDONLY | os.O_DIRECT)
    buffers = [aligned_buffer(READ_BYTES).data for _ in range(READ_THREADS)]

    def read(thread: int) -> None:
        for at, length in blocks[thread::READ_THREADS]:
            assert os.preadv(fd, [buffers[thread][:length]], at) == length

    try:
        started = time.monotonic()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(read, range(READ_THREADS)))
        seconds = time.monotonic() - started
    finally:
        os.close(fd)
    return sum(length for _, length in blocks) / 2**20 / seconds


def _verify_rate(device: Path) -> float:
    """MiB/s that ``tierd verify --full`` reports, over its images."""
    command = [sys.executable, "-m", "tierd.cli", "verify", "--device", str(device), "--full"]
    done = subprocess.run(
        [*command, "--json"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    images = json.loads(done.stdout)["images"]
    assert all(image["ok"] for image in images), images
    return float(
        sum(image["bytes_read"] for image in images)
        / 2**20
        / sum(image["seconds"] for image in images)
    )
