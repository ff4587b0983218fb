"""The pump beside fio on the same file, its CPU per page, and what a CRC costs.

    python -m bench.pump [--quick]

Packs a real image (1 GiB) into a file in $TIERD_BENCH_DIR or /var/tmp and removes it afterwards.
Both sides read random pages of it with O_DIRECT through io_uring, fixed buffers and fixed files.
The pump serves a channel, as in production: a client publishes requests and waits for them, every
page's identity is checked, and one CRC in sixteen. At depth 1 both processes spin and each request
is one page. At 16 and 128 the depth is the pump's queue and the client keeps more pages asked for.
The two take turns, so that a machine that wanders does so under both; the ratio is of medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.record import OPERATORS, bars
from tierd.io import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = 4096
ROW_BYTES = 264
ROWS_PER_PAGE = 15
IMAGE_ID, GENERATION = 0x7E57, 1
EXTENT_PAGES = 512  # as staging lays images out
SPIN_FOR_EVER_US = 10_000_000
# What stands in the way where a bar is missed on a machine with few cores (docs/decisions.md).
LIMITS = {
    "first_light.pump_vs_fio_qd1": "pump, client and the hypervisor's disk emulation share 2 vCPUs:"
    " with both spinning the disk answers later, without it each read pays two wake-ups (both"
    " tried, 0.6 to 0.9 of fio); a core for each side is needed",
    "first_light.pump_vs_fio_qd16": "as at depth 1: fio needs one of the 2 vCPUs, a pump and its"
    " client two, and the disk emulation the rest; at depth 128, where both sides batch, the pump"
    " is ahead",
    "first_light.native_cpu_us_per_page": "cache misses after each return from the kernel on a"
    " machine shared with others: runs range from under the bar to a third above it",
}


def result(
    name: str, value: float, *, unit: str, repeats: int, spread: str, detail: dict[str, Any]
) -> dict[str, Any]:
    """One measure with its bar."""
    sign, number = bars()[name]
    return {
        "limit": LIMITS.get(name),
        "id": name,
        "value": value,
        "unit": unit,
        "bar": [sign, number],
        "met": bool(OPERATORS[sign](value, number)),
        "repeats": repeats,
        "spread": spread,
        "detail": detail,
    }


def span(values: list[float], digits: int = 0) -> str:
    """The smallest and the largest of some values."""
    return f"{min(values):,.{digits}f}-{max(values):,.{digits}f}"


def write_image(path: Path, pages: int) -> None:
    """Pack `pages` full pages of random rows into `path`, on the device and out of the cache."""
    rng = np.random.default_rng(1)
    chunk = min(pages, 16384)
    pool = rng.integers(0, 256, (chunk + 512) * ROWS_PER_PAGE * ROW_BYTES, np.uint8)
    packed = np.zeros(chunk * PAGE, np.uint8)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.posix_fallocate(fd, 0, pages * PAGE)
    for first in range(0, pages, chunk):
        at = first // chunk % 512 * ROWS_PER_PAGE * ROW_BYTES  # no two chunks alike
        rows = pool[at : at + chunk * ROWS_PER_PAGE * ROW_BYTES]
        _core.pack_pages(rows, ROW_BYTES, first, IMAGE_ID, GENERATION, packed)
        os.pwrite(fd, packed.data, first * PAGE)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Served:
    """A pump that serves the image, and one client on it."""

    def __init__(self, path: Path, pages: int, *, batch: int, client_spin_us: int, **options: Any):
        self.pump = _core.Pump(transport="io_uring", **options)
        assert self.pump.transport_reason == "", self.pump.transport_reason
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        device = self.pump.add_device(fd)
        os.close(fd)
        starts = np.arange(0, pages, EXTENT_PAGES, dtype=np.uint64)
        runs = np.minimum(EXTENT_PAGES, pages - starts.astype(np.int64)).astype(np.uint64)
        extents = np.stack([starts, runs, np.full_like(starts, device), starts], axis=1)
        table = self.pump.add_table(
            image_id=IMAGE_ID,
            generation=GENERATION,
            row_bytes=ROW_BYTES,
            rows=pages * ROWS_PER_PAGE,
            window_ns=1_000_000,
            extents=np.ascontiguousarray(extents),
        )
        self.channel = _core.Channel(
            rank=0, world=1, client_id=bytes(16), rings=[(batch, 8 * batch, 0, 0)]
        )
        self.pump.add_ring(self.pump.add_channel(self.channel.fd), 0, table)
        self.pump.start()
        self.client = _core.RingClient(self.channel, 0, self.pump.wake_fd, spin_us=client_spin_us)
        self.batch = batch

    def replay(self, pages: NDArray[np.uint32], depth: int) -> float:
        """Read all pages; returns seconds. The client refuses anything but `ok`."""
        return float(self.client.replay(pages, self.batch, depth))


def random_pages(pages: int, count: int, seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, pages, count, np.uint32)


def fio_iops(path: Path, depth: int, seconds: float) -> float:
    """Random 4 KiB reads per second by fio, set up as the pump is."""
    command = [
        "fio", "--name=beside", f"--filename={path}", "--readonly", "--rw=randread", "--bs=4k",
        "--ioengine=io_uring", "--fixedbufs", "--registerfiles", "--direct=1", "--thread",
        f"--iodepth={depth}", "--norandommap", "--randrepeat=0", "--time_based",
        f"--runtime={seconds:g}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # fio may print notes before the JSON object.
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0]["read"]["iops"])


def beside_fio(path: Path, pages: int, depth: int, *, quick: bool) -> dict[str, Any]:
    """Pump and fio in turns at one queue depth."""
    seconds, rounds = (1, 1) if quick else (3, 7)
    batch, out, spin_us = (1, 1, SPIN_FOR_EVER_US) if depth == 1 else (max(depth // 2, 16), 8, 0)
    served = Served(
        path,
        pages,
        batch=batch,
        client_spin_us=spin_us,
        queue_depth=depth,
        spin_us=SPIN_FOR_EVER_US,
    )
    count = 2000
    first = served.replay(random_pages(pages, count, 0), out)
    count = max(count, int(count / first * seconds))
    served.pump.stop()  # it spins; fio has the machine to itself on its turns
    pump_iops, other_iops = [], []
    for i in range(rounds):
        served = Served(
            path,
            pages,
            batch=batch,
            client_spin_us=spin_us,
            queue_depth=depth,
            spin_us=SPIN_FOR_EVER_US,
        )
        wanted = random_pages(pages, count, i + 1)
        pump_iops.append(count / served.replay(wanted, out))
        served.pump.stop()
        other_iops.append(fio_iops(path, depth, seconds))
    medians = statistics.median(pump_iops), statistics.median(other_iops)
    return result(
        f"first_light.pump_vs_fio_qd{depth}",
        medians[0] / medians[1],
        unit="ratio",
        repeats=rounds,
        spread=f"pump {span(pump_iops)}, fio {span(other_iops)} reads/s",
        detail={
            "pump_reads_per_s": [round(v) for v in pump_iops],
            "fio_reads_per_s": [round(v) for v in other_iops],
            "pages_per_turn": count,
        },
    )


def cpu_per_page(path: Path, pages: int, *, quick: bool) -> dict[str, Any]:
    """User CPU of the pump's own thread, parked in io_uring_enter between batches."""
    count, rounds = (20_000, 1) if quick else (1_000_000, 3)
    user, system, rates, sleeps = [], [], [], []
    for i in range(rounds):
        served = Served(
            path, pages, batch=256, client_spin_us=0, queue_depth=128, spin_us=0, checks=False
        )
        wanted = random_pages(pages, count, i)
        before = served.pump.stats()
        rates.append(count / served.replay(wanted, 8))
        after = served.pump.stats()
        served.pump.stop()
        user.append((after["cpu_user_ns"] - before["cpu_user_ns"]) / 1e3 / count)
        system.append((after["cpu_system_ns"] - before["cpu_system_ns"]) / 1e3 / count)
        sleeps.append((after["beats"] - before["beats"]) / count)
    return result(
        "first_light.native_cpu_us_per_page",
        statistics.median(user),
        unit="us",
        repeats=rounds,
        spread=span(user, 3),
        detail={
            "pages": count,
            "system_us_per_page": round(statistics.median(system), 3),
            "reads_per_s": round(statistics.median(rates)),
            "rounds_of_the_pump_per_page": round(statistics.median(sleeps), 4),
        },
    )


def aligned_bytes(count: int) -> NDArray[np.uint8]:
    """Random bytes that begin on a page, as an arena's do (else a CRC takes half as long again)."""
    raw = np.zeros((count + 1) * PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    found = raw[start : start + count * PAGE]
    found[:] = np.random.default_rng(2).integers(0, 256, found.size, np.uint8)
    return found


def crc_seconds(pages: NDArray[np.uint8], rounds: int) -> list[float]:
    """Seconds per page of CRC32C over all pages, per round."""
    count = len(pages) // PAGE
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        _core.crc32c(pages)
        took.append((time.perf_counter() - start) / count)
    return took


def crc_per_page(*, quick: bool) -> dict[str, Any]:
    """The CRC32C of a page in cache, and of pages that come from memory."""
    repeats = 500 if quick else 5000
    warm = [
        t * 1e6 for t in crc_seconds(aligned_bytes(32), repeats)
    ]  # 128 KiB stay in the second level
    cold = [t * 1e6 for t in crc_seconds(aligned_bytes(16384 if quick else 65536), 3)]
    return result(
        "first_light.crc_us_per_page_warm",
        statistics.median(warm),
        unit="us",
        repeats=repeats,
        spread=f"deciles {np.quantile(warm, 0.1):.3f}-{np.quantile(warm, 0.9):.3f}",
        detail={
            "cold_us_per_page": round(statistics.median(cold), 3),
            "engine": _core.crc32c_engine(),
        },
    )


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure everything of the pump; `quick` only shows that it works."""
    pages = 16384 if quick else 262144
    directory = os.environ.get("TIERD_BENCH_DIR", "/var/tmp")
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=directory) as work:
        path = Path(work, "image")
        write_image(path, pages)
        found = [beside_fio(path, pages, depth, quick=quick) for depth in (1, 16, 128)]
        found.append(cpu_per_page(path, pages, quick=quick))
    found.append(crc_per_page(quick=quick))
    return found


if __name__ == "__main__":
    print(json.dumps(run("--quick" in sys.argv[1:]), indent=1))
