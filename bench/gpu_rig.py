"""A bed for the GPU measures: tables generated on the machine, a pump, one rank, an oracle.

The tables' file lies in shared memory by default; loop devices over it, or the file itself, are
what the pump reads. It can hold bursts back to play slower devices (`play_base_us`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from bench.loops import Loops
from tierd.gpu.cache import GpuCache
from tierd.gpu.hints import HintRing, hint_rows
from tierd.gpu.shared import ChannelMap
from tierd.gpu.table import GpuTable, TableImage
from tierd.io import _core
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROW_BYTES, DIM = 264, 256
PER_PAGE = 15
FILE = Path(os.environ.get("TIERD_BENCH_DIR", "/dev/shm")) / "tierd_bench_table"
EXTENT_PAGES = 512  # an image is striped over its devices in extents of 2 MiB
QUEUE_DEPTH = 4096  # a played burst goes out whole
CHAIN = 20  # a single replay has a floor of 16 us; chains show what lies below


def stored_rows(rows: int, seed: int) -> torch.Tensor:
    """Random rows as staged, uint8 [rows, 264] on the GPU: no NaN payload, no scale of 255."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    data = torch.randint(
        0, 256, (rows, ROW_BYTES), dtype=torch.uint8, device="cuda", generator=generator
    )
    payload, scale = data[:, :DIM], data[:, DIM:]
    payload[(payload & 0x7F) == 0x7F] = 0x40
    scale[scale == 255] = 127
    return data


def expected(stored: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The engines' arithmetic in plain torch: int16 bits of bf16 [*ids.shape, 256]."""
    rows = stored[ids]
    value = rows[..., :DIM].view(torch.float8_e4m3fn).float().unflatten(-1, (8, 32))
    exponent = rows[..., DIM:].int()
    scale = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)
    return (value * scale[..., None]).flatten(-2).bfloat16().view(torch.int16)


class Bed:
    """Two images of `pages` pages each, served by one pump, and one rank's cache and tables."""

    def __init__(
        self,
        *,
        pages: int = 65536,
        sets: int = 8192,
        rows_max: int = 4096,
        quotas: tuple[int, ...] = (16, 16),
        first_kick: int = 0,
        first_sequence: int = 0,
        pump: dict[str, Any] | None = None,
        devices: int = 1,
        loops: bool = False,
        arena_pages: int = 0,
        hint_pages: int = 0,
        keep_stored: bool = True,
    ) -> None:
        """Make everything.

        `devices`, `loops`: over how many devices an image is striped, and whether these are loop
        devices or the file. Without `keep_stored` the rows are not kept on the GPU, and a file of
        the same shape is reused.
        """
        self.pages, self.file, self.quotas = pages, FILE, quotas
        self.rows = pages * PER_PAGE
        self.keys = [(0x1234 + n, 1 + n) for n in range(len(quotas))]
        mark = FILE.with_suffix(f".{pages}x{len(quotas)}")
        if keep_stored or not mark.exists():
            for old in FILE.parent.glob(f"{FILE.name}.*"):
                old.unlink()
            self.stored = [stored_rows(self.rows, n) for n in range(len(quotas))]
            self._write(pages)
            mark.touch()
        if not keep_stored:
            self.stored = []
        options = {"spin_us": 1_000_000, "queue_depth": QUEUE_DEPTH, **(pump or {})}
        self.pump = _core.Pump(**options)
        self.loops = Loops(FILE, devices) if loops else None
        self.fd = os.open(FILE, os.O_RDONLY)
        fds = self.loops.fds if self.loops else [self.fd] * devices
        numbers = [self.pump.add_device(fd) for fd in fds]
        flag = int(_core.protocol.RING_FLAG_GPU)
        arena_pages = arena_pages or 2 * rows_max
        rings = [(rows_max, arena_pages, n, flag) for n in range(len(quotas))]
        if hint_pages:
            listed, flag = hint_rows(hint_pages), int(_core.protocol.RING_FLAG_HINT)
            rings += [(listed, hint_pages, n, flag) for n in range(len(quotas))]
        self.channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=rings)
        if first_sequence:
            for ring in range(len(quotas)):
                _core.RingClient(self.channel, ring, -1, first_sequence=first_sequence)
        attached = self.pump.add_channel(self.channel.fd)
        self.cache = GpuCache(sets=sets, row_bytes=ROW_BYTES, first_kick=first_kick)
        channel = self.map = ChannelMap(self.channel, self.cache.device)
        self.tables = []
        for n, quota in enumerate(quotas):
            image_id, generation = self.keys[n]
            extents = np.array(
                [
                    [first, min(EXTENT_PAGES, pages - first), device, n * pages + first]
                    for first, device in zip(
                        range(0, pages, EXTENT_PAGES), itertools.cycle(numbers), strict=False
                    )
                ],
                np.uint64,
            )
            number = self.pump.add_table(
                image_id=image_id, generation=generation, row_bytes=ROW_BYTES, rows=self.rows,
                window_ns=n * 1_000_000, extents=extents,
            )  # fmt: skip
            self.pump.add_ring(attached, n, number)
            image = TableImage(
                f"bench/{n}",
                n,
                image_id,
                generation,
                self.rows,
                DIM,
                ROW_BYTES,
                RowFormat.E4M3_E8M0,
            )
            self.tables.append(
                GpuTable(
                    self.cache, channel, ring=n, image=image, quota=quota,
                    first_sequence=first_sequence,
                )
            )  # fmt: skip
        self.pump.start()
        self.hints = []
        for n in range(len(quotas) if hint_pages else 0):
            self.pump.add_ring(attached, len(quotas) + n, n)
            hints = HintRing(
                self.channel, len(quotas) + n, self.pump.wake_fd, rows=self.rows,
                per_page=PER_PAGE, pages=hint_pages,
            )  # fmt: skip
            self.hints.append(hints)

    def _write(self, pages: int) -> None:
        """Pack every image into the file, with all cores."""
        with FILE.open("wb") as file:
            file.truncate(len(self.stored) * pages * 4096)
        whole = np.memmap(FILE, np.uint8, "r+")

        def pack(number: int, first: int, rows: np.ndarray[Any, Any]) -> None:
            image_id, generation = self.keys[number]
            start = (number * pages + first) * 4096
            _core.pack_pages(
                rows.reshape(-1),
                row_bytes=ROW_BYTES,
                first_page=first,
                image_id=image_id,
                generation=generation,
                pages=whole[start : start + len(rows) // PER_PAGE * 4096],
            )

        step = 16384
        with ThreadPoolExecutor(12) as pool:
            jobs = []
            for number, stored in enumerate(self.stored):
                for first in range(0, pages, step):
                    rows = stored[first * PER_PAGE : (first + step) * PER_PAGE].cpu().numpy()
                    jobs.append(pool.submit(pack, number, first, rows))
            for job in jobs:
                job.result()

    def wish(self, *ways: int) -> None:
        """Say, as a daemon does, how many ways each table is to have."""
        at = int(_core.protocol.OFFSET_QUOTA)
        for ring, wanted in enumerate(ways):
            self.channel.control(ring)[at : at + 4].view(np.uint32)[0] = 1 + wanted

    def outputs(self, count: int) -> torch.Tensor:
        return torch.empty(count, DIM, dtype=torch.bfloat16, device="cuda")

    def differing(self, table: int, ids: torch.Tensor, out: torch.Tensor) -> int:
        want = expected(self.stored[table], ids)
        return int((out.view(torch.int16) != want).any(dim=-1).sum())

    def close(self) -> None:
        torch.cuda.synchronize()
        for table in self.tables:
            table.close()
        self.pump.stop()
        os.close(self.fd)
        if self.loops:
            self.loops.close()

    def read_times(self) -> list[tuple[int, int]]:
        """(ns, requests) of every ring so far, from doorbell seen to answer."""
        rings = sorted(self.pump.stats()["rings"], key=lambda ring: ring["ring"])
        return [(ring["read_ns"], ring["requests"]) for ring in rings]


def graph_of(fn: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run `fn` once eagerly, then capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph


def chain(fn: Callable[[], object]) -> torch.cuda.CUDAGraph:
    return graph_of(lambda: [fn() for _ in range(CHAIN)])


def compare(
    graphs: dict[str, torch.cuda.CUDAGraph], repeats: int = 200, per: int = CHAIN
) -> dict[str, float]:
    """Median us per element of each graph, replayed in turn so that clocks wander alike."""
    return {name: statistics.median(v) / per for name, v in replays(graphs, repeats).items()}


def replays(
    graphs: dict[str, torch.cuda.CUDAGraph], repeats: int, warm: int = 10
) -> dict[str, list[float]]:
    """Every replay's time in us, in turn, after `warm` that do not count."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for repeat in range(repeats + warm):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if repeat >= warm:
                times[name].append(start.elapsed_time(end) * 1e3)
    return times


@contextlib.contextmanager
def bed(**options: Any) -> Iterator[Bed]:
    made = Bed(**options)
    try:
        yield made
    finally:
        made.close()


@triton.jit
def bare_gather(
    desc, slots, out, count, ROWS: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr
):
    """What any cache in HBM must do: rows from known slots, decoded. No check of any kind."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < count
    place = tl.load(desc + index, mask=inside, other=0).to(tl.int64) * STRIDE
    group = tl.arange(0, 8)
    column = group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    payload = tl.load(slots + place[:, None, None] + column, mask=inside[:, None, None], other=0)
    scale = tl.load(
        slots + (place + DIM)[:, None] + group[None, :], mask=inside[:, None], other=0
    ).to(tl.int32)
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    value = payload.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    value = value * bits.to(tl.float32, bitcast=True)[:, :, None]
    tl.store(
        out + index[:, None, None] * DIM + column,
        value.to(tl.bfloat16),
        mask=inside[:, None, None],
    )


@triton.jit
def busy(cycles, sink):
    """Keep one multiprocessor's warp busy for so many cycles: compute of a fixed time."""
    start = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    now = start
    while now - start < cycles:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    if now == 0:
        tl.store(sink, now)
