"""SGLang's own kernels beside ours, in captured graphs on one GPU. Needs torch, triton, the core.

    TIERD_SGLANG_KERNELS=DIR python -m bench.gpu_sglang [--out FILE]

DIR holds ``engram_hash.py`` and ``engram_gather.py`` of a release of SGLang (they lie in its wheel
under sglang/kernels/ops/embeddings). Prints one JSON line; ``python -m bench.gpu_sglang_records``
makes records of it where the repository is. Under TRITON_INTERPRET=1 the same code runs on a CPU,
with tiny tables and no graphs: a rehearsal, which times nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierd.gpu.dram import DramTable
from tierd.gpu.engram import EngramLayout, multipliers
from tierd.gpu.table import TableImage
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

REHEARSAL = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")
LAYERS, DIM, ROW_BYTES, PER_PAGE, COLUMNS = (1, 14), 256, 264, 15, 24
DISTINCT, TOKENS = 99_092, 129_280  # entries of the compressed token map, and of the vocabulary
BATCH = 4 if REHEARSAL else 128
CHAIN = 2 if REHEARSAL else 20
# Rows in the host tables of the timed steps, both layers together 8 GiB; and on the pump's device.
HOST_VOCAB = 101 if REHEARSAL else 650_000
DISK_VOCAB = 40_300
ROUNDS = 3 if REHEARSAL else 60
COMPARED = 2 if REHEARSAL else 12  # replays of CHAIN steps of 2 x 3,072 rows


def stock(name: str) -> ModuleType:
    """One of SGLang's kernel modules, loaded from its file."""
    path = Path(os.environ.get("TIERD_SGLANG_KERNELS", ".")) / f"{name}.py"
    if not path.exists():
        raise SystemExit(f"{path} is missing: copy it out of SGLang's wheel")
    spec = importlib.util.spec_from_file_location(f"stock_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hasher:
    """SGLang's hash kernel for one decode batch after another, history included."""

    def __init__(self, layout: EngramLayout, steps: int) -> None:
        self.kernels = stock("engram_hash")
        self.tokens = torch.zeros(steps, BATCH, dtype=torch.int64, device=DEVICE)
        self.positions = torch.arange(10, 10 + steps, device=DEVICE).repeat(BATCH, 1).T.contiguous()
        self.history = torch.zeros(BATCH + 1, 3, dtype=torch.int32, device=DEVICE)
        self.slots = torch.arange(BATCH, device=DEVICE)
        self.locations = torch.ones(BATCH, dtype=torch.int64, device=DEVICE)
        # Any map of the right size hashes alike; the true one needs the tokenizer.
        self.token_map = (torch.arange(TOKENS, device=DEVICE) * 7919) % DISTINCT
        mult = np.stack([multipliers(i, 4, DISTINCT) for i in LAYERS])
        self.multipliers = torch.from_numpy(mult).to(DEVICE)
        self.primes = torch.from_numpy(layout.primes.reshape(2, 3, 8)).to(DEVICE)
        self.offsets = torch.from_numpy(layout.offsets).to(DEVICE)

    def refresh(self) -> None:
        """New tokens for every step: one in eight again, as text has it."""
        self.tokens.random_(0, TOKENS)
        self.tokens[:, : BATCH // 8] %= 50

    def ids(self, step: int) -> torch.Tensor:
        """Row numbers [BATCH, 2, 24] of a step, its history committed."""
        found: torch.Tensor = self.kernels.engram_hash_ids_and_commit(
            self.tokens[step], self.positions[step], history=self.history, req_slots=self.slots,
            out_cache_loc=self.locations, token_map=self.token_map, multipliers=self.multipliers,
            primes=self.primes, offsets=self.offsets, pad_id=2,
        )  # fmt: skip
        return found


class Stock:
    """SGLang's lookup in two host tables: payloads, then scales, as it lays them out."""

    def __init__(self, addresses: list[tuple[int, int]]) -> None:
        self.module = stock("engram_gather")
        self.addresses = addresses

    def gather(self, layer: int, ids: torch.Tensor, out: torch.Tensor, *, sort: bool) -> None:
        """Rows of strided ids, as ``EngramEmbedding._owned_rows`` gathers them."""
        flat = ids.reshape(-1)
        if not REHEARSAL:
            payload, scale = self.addresses[layer]
            self.module.engram_gather(payload, scale, flat, out, DIM, 32, sort_ids=sort)
            return
        self.module._engram_gather_kernel[(flat.numel(),)](
            *self.addresses[layer], flat, flat, out, 0, 2**62, DIM=DIM, BLK=32,
            E8M0_ZERO=2.0**-127, HAS_DST=False,
        )  # fmt: skip


def random_rows(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Rows as staged, uint8 [count, 264]: no NaN payload; scales of everyday size.

    The interpreter rounds bf16 subnormals wrongly, and the torch of a GPU is compared elsewhere.
    """
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    data = torch.randint(
        0, 256, (count, ROW_BYTES), dtype=torch.uint8, device=DEVICE, generator=generator
    )
    data[:, :DIM][(data[:, :DIM] & 0x7F) == 0x7F] = 0x40
    data[:, DIM:] = data[:, DIM:] % 100 + 60
    return data.cpu().numpy()


def host_tables(layout: EngramLayout, stack: contextlib.ExitStack) -> tuple[list[Any], Stock]:
    """Both layers in host memory, once as pages for us and once as SGLang has them."""
    from bench.gpu_dram import host_memory
    from tierd.gpu.shared import HostBlock
    from tierd.io import _core

    tables, addresses = [], []
    for number, rows in enumerate(layout.rows):
        pages = -(-rows // PER_PAGE)
        image, _ = host_memory(pages * 4096, huge=not REHEARSAL)
        memory, _ = host_memory(rows * ROW_BYTES, huge=False)
        weights = memory[: rows * DIM].reshape(rows, DIM)
        scales = memory[rows * DIM :].reshape(rows, 8)
        step = (1 << 16) * PER_PAGE

        def pack(
            at: int, stored: np.ndarray[Any, Any], image: Any, weights: Any, scales: Any, key: int
        ) -> None:
            first, count = at // PER_PAGE, -(-len(stored) // PER_PAGE)
            _core.pack_pages(
                stored.reshape(-1), row_bytes=ROW_BYTES, first_page=first, image_id=key,
                generation=1, pages=image[first * 4096 : (first + count) * 4096],
            )  # fmt: skip
            weights[at : at + len(stored)] = stored[:, :DIM]
            scales[at : at + len(stored)] = stored[:, DIM:]

        pool = stack.enter_context(ThreadPool())
        for at in range(0, rows, step):
            stored = random_rows(min(step, rows - at), at + number)
            pool.submit(pack, at, stored, image, weights, scales, 5 + number)
        pool.finish()
        block = HostBlock(memory, torch.device("cuda", 0) if not REHEARSAL else DEVICE)
        stack.callback(lambda block=block: block)  # alive as long as its address is used
        base = block.view(0, 16, torch.uint8).data_ptr()
        addresses.append((base, base + rows * DIM))
        view = TableImage(
            f"bench/{number}", number, 5 + number, 1, rows, DIM, ROW_BYTES, RowFormat.E4M3_E8M0
        )
        table = DramTable(image, view, DEVICE)
        stack.callback(table.close)
        tables.append(table)
    return tables, Stock(addresses)


class ThreadPool(contextlib.AbstractContextManager["ThreadPool"]):
    """Packs with many threads and never holds more than a few chunks."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(12)
        self._jobs: list[Any] = []

    def submit(self, *job: Any) -> None:
        self._jobs.append(self._pool.submit(*job))
        if len(self._jobs) >= 16:
            self._jobs.pop(0).result()

    def finish(self) -> None:
        while self._jobs:
            self._jobs.pop(0).result()

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def graph_of(fn: Callable[[], object]) -> Any:
    """What replays ``fn``: a captured graph, or, on a CPU, the function itself."""
    if REHEARSAL:
        return _Eager(fn)
    from bench.gpu_rig import graph_of as capture

    return capture(fn)


class _Eager:
    def __init__(self, fn: Callable[[], object]) -> None:
        self.replay = fn


def timed(graph: Any) -> float:
    """One replay in us."""
    if REHEARSAL:
        graph.replay()
        return 0.0
    from bench.gpu_rig import replays

    return replays({"one": graph}, 1, warm=0)["one"][0]


def outputs() -> list[torch.Tensor]:
    """One output a layer: bf16 [BATCH, 24, 256]."""
    shape = (BATCH, COLUMNS, DIM)
    return [torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for _ in LAYERS]


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.view(torch.int16) != b.view(torch.int16)).flatten(0, 1).any(dim=-1).sum()


def compare(
    hasher: Hasher, tables: list[Any], theirs: Stock, steps: int
) -> tuple[int, torch.Tensor, Any]:
    """A graph of several steps in which each row of ours is held against SGLang's."""
    mine, other = outputs(), outputs()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def run() -> None:
        for step in range(steps):
            ids = hasher.ids(step)
            for layer, table in enumerate(tables):
                table.kick(ids[:, layer])
            for layer, table in enumerate(tables):
                table.gather(ids[:, layer], mine[layer])
                theirs.gather(layer, ids[:, layer], other[layer].view(-1, DIM), sort=False)
                wrong.add_(differing(mine[layer], other[layer]))

    return steps * BATCH * COLUMNS * len(LAYERS), wrong, graph_of(run)


def dram() -> dict[str, Any]:
    """The timed step, B=128, both layers on the dram tier: ours against the stock one."""
    layout = EngramLayout.make(LAYERS, vocab_size=HOST_VOCAB)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        tables, theirs = host_tables(layout, stack)
        built = time.perf_counter() - began
        hasher = Hasher(layout, CHAIN)
        mine, other = outputs(), outputs()

        def ours_step() -> None:
            for step in range(CHAIN):
                ids = hasher.ids(step)
                for layer, table in enumerate(tables):
                    table.kick(ids[:, layer])
                for layer, table in enumerate(tables):
                    table.gather(ids[:, layer], mine[layer])

        def stock_step(sort: bool = True) -> None:
            for step in range(CHAIN):
                ids = hasher.ids(step)
                for layer in range(len(LAYERS)):
                    theirs.gather(layer, ids[:, layer], other[layer].view(-1, DIM), sort=sort)

        graphs = {
            "ours": graph_of(ours_step),
            "stock": graph_of(stock_step),
            "unsorted": graph_of(lambda: stock_step(sort=False)),
            "hash": graph_of(lambda: [hasher.ids(step) for step in range(CHAIN)]),
        }
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                hasher.refresh()
                times[name].append(timed(graph) / CHAIN)
        extra = sorted(a - b for a, b in zip(times["ours"], times["stock"], strict=True))
        rows, wrong, checking = compare(hasher, tables, theirs, CHAIN)
        checked = replay(hasher, checking, rows)
        return {
            **{f"{name}_us": statistics.median(t) for name, t in times.items()},
            "extra_us": statistics.median(extra),
            "extra_spread": [extra[len(extra) // 10], extra[-1 - len(extra) // 10]],
            "rows": checked, "differing": int(wrong), "gib": sum(layout.rows) * 264 / 2**30,
            "built_s": round(built, 1),
        }  # fmt: skip


def replay(hasher: Hasher, graph: Any, rows: int) -> int:
    for _ in range(COMPARED):
        hasher.refresh()
        graph.replay()
    if not REHEARSAL:
        torch.cuda.synchronize()
    return rows * (COMPARED + (0 if REHEARSAL else 1))  # the warm-up before a capture compares too


def served() -> dict[str, Any]:
    """Kick at the hash, wait, fill and gather at the layer, rows from a pump; every row compared.

    Stock reads the same rows from memory. The cache is far smaller than the tables.
    """
    from bench.gpu_rig import bed

    layout = EngramLayout.make(LAYERS, vocab_size=DISK_VOCAB)
    with bed(sets=512) as made:
        assert max(layout.rows) <= made.rows
        parts = [(s[:, :DIM].contiguous(), s[:, DIM:].contiguous()) for s in made.stored]
        theirs = Stock([(w.data_ptr(), s.data_ptr()) for w, s in parts])
        hasher = Hasher(layout, CHAIN)
        rows, wrong, graph = compare(hasher, made.tables, theirs, CHAIN)
        checked = replay(hasher, graph, rows)
        stats = [table.stats() for table in made.tables]
        return {"rows": checked, "differing": int(wrong), "stats": stats}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    found: dict[str, Any] = {"batch": BATCH, "rehearsal": REHEARSAL, "dram": dram()}
    if not REHEARSAL:  # a bed generates its tables on the GPU
        found["served"] = served()
        found["gpu"] = torch.cuda.get_device_name()
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(found))
    if options.out:
        options.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
