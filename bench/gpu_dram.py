"""The dram tier against SGLang's own gather, both from pinned host tables of at least 32 GiB."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.gpu_rig import CHAIN, DIM, PER_PAGE, ROW_BYTES, graph_of, replays, stored_rows
from bench.gpu_rows import stock_gather
from tierd.gpu.dram import DramTable
from tierd.gpu.shared import HostBlock
from tierd.gpu.table import TableImage
from tierd.io import _core
from tierd.types import RowFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_PAGES = 1 << 16
HUGE = 2 << 20


def host_memory(size: int, *, huge: bool) -> tuple[NDArray[np.uint8], str]:
    """Shared memory as the daemon would export it (huge pages where the system gives them)."""
    if huge:
        with contextlib.suppress(OSError):
            pool = Path("/proc/sys/vm/nr_hugepages")
            pool.write_text(str(int(pool.read_text()) + -(-size // HUGE)))
            fd = os.memfd_create("tierd-image", os.MFD_HUGETLB)
            whole = -(-size // HUGE) * HUGE
            os.ftruncate(fd, whole)
            memory = mmap.mmap(fd, whole)
            return np.frombuffer(memory, np.uint8)[:size], "2 MiB pages"
    fd = os.memfd_create("tierd-image")
    os.ftruncate(fd, size)
    return np.frombuffer(mmap.mmap(fd, size), np.uint8), "4 KiB pages"


def fill(image: NDArray[np.uint8], weights: NDArray[Any], scales: NDArray[Any], pages: int) -> None:
    """Random rows, as pages for us and as two arrays for the stock gather."""

    def pack(first: int, rows: NDArray[np.uint8]) -> None:
        count = len(rows)
        _core.pack_pages(
            rows.reshape(-1), row_bytes=ROW_BYTES, first_page=first, image_id=5, generation=1,
            pages=image[first * 4096 : (first + count // PER_PAGE) * 4096],
        )  # fmt: skip
        at = first * PER_PAGE
        weights[at : at + count] = rows[:, :DIM]
        scales[at : at + count] = rows[:, DIM:]

    with ThreadPoolExecutor(12) as pool:
        jobs = []
        for first in range(0, pages, CHUNK_PAGES):
            rows = stored_rows(min(CHUNK_PAGES, pages - first) * PER_PAGE, first).cpu().numpy()
            jobs.append(pool.submit(pack, first, rows))
            if len(jobs) >= 24:
                jobs.pop(0).result()
        for job in jobs:
            job.result()


def dram_vs_stock(gib: float = 32.0, repeats: int = 60) -> dict[str, Any]:
    """Our step minus the stock step for four batch sizes, on ids never seen before."""
    stock = stock_gather()
    assert stock is not None, "TIERD_SGLANG_GATHER must name SGLang's engram_gather.py"
    pages = int(gib * 2**30) // 4096
    rows = pages * PER_PAGE
    image, kind = host_memory(pages * 4096, huge=True)
    stock_memory, stock_kind = host_memory(rows * ROW_BYTES, huge=False)
    weights = stock_memory[: rows * DIM].reshape(rows, DIM)
    scales = stock_memory[rows * DIM :].reshape(rows, 8)
    fill(image, weights, scales, pages)
    device = torch.device("cuda", 0)
    block = HostBlock(stock_memory, device)
    payload_at = block.view(0, 16, torch.uint8).data_ptr()
    table = DramTable(
        image, TableImage("bench", 0, 5, 1, rows, DIM, ROW_BYTES, RowFormat.E4M3_E8M0)
    )
    found: dict[str, Any] = {"gib": gib, "pages": kind, "stock_pages": stock_kind}
    worst = -1e9
    for batch in (8, 64, 128, 256):
        count = batch * 24
        ids = torch.zeros(CHAIN, count, dtype=torch.int64, device=device)
        out = torch.empty(count, DIM, dtype=torch.bfloat16, device=device)
        other = torch.empty_like(out)

        def ours(k: int, ids: torch.Tensor = ids, out: torch.Tensor = out) -> None:
            table.gather(ids[k], out)

        def theirs(k: int, sort: bool, ids: torch.Tensor = ids, out: torch.Tensor = other) -> None:
            stock.engram_gather(
                payload_at, payload_at + rows * DIM, ids[k], out, DIM, 32, sort_ids=sort
            )

        graphs = {
            "ours": graph_of(lambda f=ours: [f(k) for k in range(CHAIN)]),
            "stock": graph_of(lambda f=theirs: [f(k, True) for k in range(CHAIN)]),
            "unsorted": graph_of(lambda f=theirs: [f(k, False) for k in range(CHAIN)]),
        }
        times: dict[str, list[float]] = {name: [] for name in graphs}
        differing = 0
        for _ in range(repeats):
            for name, graph in graphs.items():
                ids.random_(0, rows)
                torch.cuda.synchronize()
                times[name] += replays({name: graph}, 1, warm=0)[name]
            ids.random_(0, rows)
            graphs["ours"].replay()
            graphs["unsorted"].replay()
            differing += int((out.view(torch.int16) != other.view(torch.int16)).any(-1).sum())
        medians = {name: statistics.median(v) / CHAIN for name, v in times.items()}
        extra = medians["ours"] - medians["stock"]
        worst = max(worst, extra)
        found[f"b{batch}"] = {**medians, "extra": extra, "differing": differing}
    return {**found, "worst_extra": worst}
