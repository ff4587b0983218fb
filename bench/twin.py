"""first_light.twin_hit_vs_numpy: a step of hits through the twin, beside numpy and torch.

All three turn the same 3,072 rows of 264 bytes into bf16, on one thread. The twin looks the ids up
in its directory, waits for nothing, and decodes; numpy and torch are given the rows' places in one
contiguous array and preallocated buffers, each in the fastest of several ways tried first.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierd.io import _core

Way = Callable[[NDArray[np.int64]], NDArray[np.uint16]]

ROWS = 1 << 16
DIM = 256
ROW_BYTES = DIM + DIM // 32
STEP = 3072
IMAGE_ID, GENERATION = 0x7777, 1


def random_rows(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Rows as a checkpoint has them: no NaN, scales around 2^-7."""
    rows = rng.integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)
    payload = rows[:, :DIM]
    payload[(payload & 0x7F) == 0x7F] = 0
    rows[:, DIM:] = rng.integers(112, 128, (ROWS, DIM // 32))
    return rows


class Twin:
    """A twin whose cache holds every row, filled through a real pump."""

    def __init__(self, rows: NDArray[np.uint8], directory: Path) -> None:
        fit = _core.rows_per_page(ROW_BYTES)
        page_count = -(-ROWS // fit)
        pages = np.zeros(page_count * 4096, np.uint8)
        _core.pack_pages(rows.ravel(), ROW_BYTES, 0, IMAGE_ID, GENERATION, pages)
        path = directory / "image"
        path.write_bytes(pages.tobytes())
        self.pump = _core.Pump(spin_us=0)
        fd = os.open(path, os.O_RDONLY)
        extents = np.array([[0, page_count, self.pump.add_device(fd), 0]], np.uint64)
        os.close(fd)
        served = self.pump.add_table(
            image_id=IMAGE_ID, generation=GENERATION, row_bytes=ROW_BYTES, rows=ROWS,
            window_ns=0, extents=extents,
        )  # fmt: skip
        channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(1024, 4096, 0, 0)])
        self.pump.add_ring(self.pump.add_channel(channel.fd), 0, served)
        self.pump.start()
        # Eight rows a set on average, so that no set has to turn a row away.
        cache = _core.RowCache(sets=ROWS // 8, row_bytes=ROW_BYTES)
        self.table = _core.TwinTable(
            cache, channel, 0, self.pump.wake_fd, table=0, image_id=IMAGE_ID,
            generation=GENERATION, rows=ROWS, dim=DIM, row_format="e4m3_e8m0", quota=32,
        )  # fmt: skip
        self.out = np.zeros((STEP, DIM), np.uint16)
        for first in range(0, ROWS, STEP):
            ids = np.arange(first, min(first + STEP, ROWS))
            self.table.gather(ids, self.out[: len(ids)])

    def step(self, ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        self.table.kick(ids)
        self.table.gather(ids, self.out)
        return self.out


def numpy_ways(rows: NDArray[np.uint8]) -> dict[str, Way]:
    """Two ways in numpy: one look-up of the whole product, and fp32 arithmetic."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    scales = (np.arange(256, dtype=np.uint32) << 23).view(np.float32)
    scales[0] = 2.0**-127
    with np.errstate(invalid="ignore", over="ignore"):
        products = torch.from_numpy(values[None, :] * scales[:, None]).bfloat16()
    bits = products.view(torch.int16).numpy().view(np.uint16).ravel()
    picked = np.zeros((STEP, ROW_BYTES), np.uint8)
    index = np.zeros((STEP, DIM // 32, 32), np.uint16)
    number = np.zeros((STEP, DIM // 32, 32), np.float32)
    out = np.zeros((STEP, DIM), np.uint16)

    def by_product(ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        rows.take(ids, axis=0, out=picked, mode="clip")
        np.left_shift(picked[:, DIM:, None].astype(np.uint16), 8, out=index)
        np.bitwise_or(index, picked[:, :DIM].reshape(index.shape), out=index)
        bits.take(index.reshape(out.shape), out=out, mode="clip")
        return out

    def by_float(ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        rows.take(ids, axis=0, out=picked, mode="clip")
        values.take(picked[:, :DIM].reshape(number.shape), out=number, mode="clip")
        np.multiply(number, scales.take(picked[:, DIM:])[:, :, None], out=number)
        # The upper half is all there is: these scales round nothing.
        out[:] = number.view(np.uint16).reshape(STEP, DIM, 2)[:, :, 1]
        return out

    return {"product table": by_product, "fp32": by_float}


def torch_ways(rows: NDArray[np.uint8]) -> dict[str, Way]:
    """Two ways in torch: its own fp8 conversion, and a look-up of the 256 values."""
    table = torch.from_numpy(rows)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    picked = torch.zeros((STEP, ROW_BYTES), dtype=torch.uint8)
    number = torch.zeros((STEP, DIM // 32, 32))
    out = torch.zeros((STEP, DIM // 32, 32), dtype=torch.bfloat16)
    bits = out.view(torch.int16).numpy().view(np.uint16).reshape(STEP, DIM)

    def finish() -> NDArray[np.uint16]:
        scale = (picked[:, DIM:].int() << 23).view(torch.float32)
        number.mul_(scale[:, :, None])
        out.copy_(number)
        return bits

    def by_conversion(ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        torch.index_select(table, 0, torch.from_numpy(ids), out=picked)
        number.copy_(picked[:, :DIM].view(torch.float8_e4m3fn).view(number.shape))
        return finish()

    def by_value(ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        torch.index_select(table, 0, torch.from_numpy(ids), out=picked)
        index = picked[:, :DIM].int()
        torch.index_select(values, 0, index.view(-1), out=number.view(-1))
        return finish()

    return {"fp8 conversion": by_conversion, "value table": by_value}


def seconds(way: Way, ids: NDArray[np.int64]) -> float:
    start = time.perf_counter()
    way(ids)
    return time.perf_counter() - start


def fastest(ways: dict[str, Way], draws: list[NDArray[np.int64]]) -> str:
    """The name of the way with the least median."""
    medians = {n: statistics.median(seconds(w, ids) for ids in draws) for n, w in ways.items()}
    return min(medians, key=lambda name: medians[name])


def spread_of(times: list[float]) -> str:
    low, _, high = statistics.quantiles(times, n=4)
    return f"{low * 1e6:.0f}-{high * 1e6:.0f} us"


def measure(twin: Twin, rows: NDArray[np.uint8], repeats: int) -> dict[str, Any]:
    """Interleave the three, repeat by repeat, each with fresh ids."""
    rng = np.random.default_rng(2)
    draws = [rng.integers(0, ROWS, STEP) for _ in range(9)]
    named = {"numpy": numpy_ways(rows), "torch": torch_ways(rows)}
    for ways in named.values():
        for way in ways.values():
            np.testing.assert_array_equal(way(draws[0]), twin.step(draws[0]))
    chosen = {name: fastest(ways, draws) for name, ways in named.items()}
    runners: dict[str, Way] = {"twin": twin.step}
    runners.update({name: named[name][chosen[name]] for name in named})
    times: dict[str, list[float]] = {name: [] for name in runners}
    before = twin.table.stats()
    for _ in range(repeats):
        ids = rng.integers(0, ROWS, STEP)
        for name, way in runners.items():
            times[name].append(seconds(way, ids))
    after = twin.table.stats()
    hits, lookups = (after[k] - before[k] for k in ("hits", "lookups"))
    if hits != lookups:
        raise RuntimeError(f"only {hits} of {lookups} lookups were hits")
    medians = {name: statistics.median(t) for name, t in times.items()}
    value = medians["twin"] / min(medians["numpy"], medians["torch"])
    return {
        "id": "first_light.twin_hit_vs_numpy",
        "value": value,
        "unit": "ratio",
        "bar": ["<=", 2.0],
        "met": value <= 2.0,
        "repeats": repeats,
        "spread": ", ".join(f"{name} {spread_of(t)}" for name, t in times.items()),
        "detail": {
            "rows": STEP,
            **{f"{name}_us": round(median * 1e6, 1) for name, median in medians.items()},
            **{f"{name}_way": way for name, way in chosen.items()},
        },
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure; `quick` repeats little and proves only that it runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = random_rows(np.random.default_rng(1))
        with tempfile.TemporaryDirectory() as directory:
            twin = Twin(rows, Path(directory))
            try:
                return [measure(twin, rows, 9 if quick else 301)]
            finally:
                twin.pump.stop()
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    print(run(quick=False))
