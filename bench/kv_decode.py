"""Decode steps with Qwen3-8B's shape on one GPU: dense paged attention against OasisKV.

36 layers, 32 query and 8 KV heads of 128, real matrix products on weights of the real sizes, blocks
of 16. Dense steps are one CUDA graph. Sparse steps compute a draft's row beside each real one,
score, select, fetch and write back behind the forward pass, in one graph or in graphs of a layer's
half (tierd/kv/pipeline.py); the draft is always rejected, as in the paper. Keys are random; queries
wander around a base so that about as many blocks change in a step as bench/kv_agreement.py finds
on trained models.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import statistics
import threading
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tierd.io.pool import PoolView
from tierd.kv.layer import LayerState, Tables
from tierd.kv.ops import Kernels
from tierd.kv.pipeline import MOVE_PRIORITY, Background, Steps, stages
from tierd.kv.pool import KvPool
from tierd.kv.shape import LOCAL, Budget, KvShape

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, FFN, VOCAB, HEADS = 4096, 12288, 151_936, 32
WEIGHT_GB = 16.4
CONTEXT = 16_384
STEPS_MAX = 256  # of one engine, before its tables are full
WANDER = 0.97  # of a query that stays; 0.3 of K changes in a step
SCALE = 128**-0.5


def qwen(layers: int = 36, block: int = 16) -> KvShape:
    return KvShape(layers=layers, kv_heads=8, group=4, head_dim=128, block=block)


def dense_batch(card_gb: float, shape: KvShape, context: int = CONTEXT) -> int:
    """The largest batch whose full KV fits a card beside the weights, 10 % left to the rest."""
    room = card_gb * 0.9 - WEIGHT_GB
    return int(room * 1e9 // shape.full_bytes(context))


def sparse_batch(card_gb: float, host_gib: float, shape: KvShape, budget: Budget) -> int:
    """The largest batch whose working sets fit the card and whose full KV fits the host pool."""
    room = card_gb * 0.9 - WEIGHT_GB
    by_card = int(room * 1e9 // shape.resident_bytes(CONTEXT, budget))
    blocks = CONTEXT // shape.block + STEPS_MAX // shape.block + 2
    by_host = int(host_gib * 2**30 // (blocks * shape.layers * (shape.block_bytes + 16)))
    return min(by_card, by_host)


@triton.jit
def prepare(
    qkv, base, q, k, v, keep, move,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Split a projection into normalised queries, keys and values; queries stay near a base."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    x = tl.load(qkv + (token * (HEADS + 2 * KV) + head) * DIM + d).to(tl.float32)
    if head < HEADS:
        x = x * tl.rsqrt(tl.sum(x * x) / DIM + 1e-6)
        b = tl.load(base + (token // QUERIES * HEADS + head) * DIM + d).to(tl.float32)
        tl.store(q + (token * HEADS + head) * DIM + d, (keep * b + move * x).to(tl.bfloat16))
    elif head < HEADS + KV:
        x = x * tl.rsqrt(tl.sum(x * x) / DIM + 1e-6)
        tl.store(k + (token * KV + head - HEADS) * DIM + d, x.to(tl.bfloat16))
    else:
        tl.store(v + (token * KV + head - HEADS - KV) * DIM + d, x.to(tl.bfloat16))


@triton.jit
def gated(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """SiLU of the first half times the second."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * WIDTH + at).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + at).to(tl.float32)
    tl.store(out + row * WIDTH + at, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16))


class Weights:
    """Random weights of the real sizes, every layer its own memory."""

    def __init__(self, layers: int) -> None:
        def normal(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
            return made.normal_(std=columns**-0.5)

        self.qkv = [normal((HEADS + 16) * 128, HIDDEN) for _ in range(layers)]
        self.out = [normal(HIDDEN, HEADS * 128) for _ in range(layers)]
        self.up = [normal(2 * FFN, HIDDEN) for _ in range(layers)]
        self.down = [normal(HIDDEN, FFN) for _ in range(layers)]
        self.head = normal(VOCAB, HIDDEN)
        self.embedding = normal(VOCAB, HIDDEN).mul_(HIDDEN**0.5)
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")


def touch(view: PoolView, threads: int = 8) -> None:
    """Bring the pool's memory in with all cores; registering it alone would use one."""
    memory, size = view.memory, len(view.memory) // threads

    def run(n: int) -> None:
        memory[max(n * size, mmap.PAGESIZE) : (n + 1) * size : mmap.PAGESIZE] = 0

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


class Host:
    """The host pool, filled once with random entries; every engine's rows are its first ones.

    Attributes:
        summaries: of every host page, by layer.
        blocks: host pages of a row.
    """

    def __init__(self, shape: KvShape, rows: int) -> None:
        self.shape, self.rows = shape, rows
        self.blocks = CONTEXT // shape.block + STEPS_MAX // shape.block + 2
        view = PoolView.private(
            rows * self.blocks, layers=shape.layers, block_bytes=shape.block_bytes
        )
        touch(view)
        self.pool = KvPool(view, shape, "cuda")
        pages = rows * self.blocks
        self.summaries = []
        block = torch.arange(pages, dtype=torch.int32, device="cuda")
        for layer in range(shape.layers):
            entries = torch.empty(
                pages, shape.kv_heads, 2, shape.block, shape.head_dim, dtype=shape.dtype,
                device="cuda",
            ).normal_()  # fmt: skip
            torch.mul(entries, 1, out=self.pool.host(layer))
            keys = entries[:, :, 0]
            self.summaries.append(torch.stack([keys.amin(2), keys.amax(2)], 2))
            row = block // self.blocks + 1
            headers = torch.stack([row, block % self.blocks, torch.full_like(row, layer), row], -1)
            torch.mul(headers, 1, out=self.pool.headers(layer))
        torch.cuda.synchronize()


@dataclasses.dataclass(slots=True)
class Buffers:
    """A step's activations that graphs hand to one another."""

    x: torch.Tensor
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    tokens: torch.Tensor


_streams: dict[str, torch.cuda.Stream] = {}


def stream(name: str) -> torch.cuda.Stream:
    """The foreground's stream goes first where predict or select want a multiprocessor too."""
    if name not in _streams:
        _streams[name] = torch.cuda.Stream(priority=-5 if name == "front" else 0)
    return _streams[name]


def captured(fn: Callable[[], object], pool: Any = None, on: str = "front") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream(on)):
        fn()
    return graph


class Engine:
    """One batch: dense, or sparse over a host pool.

    Args:
        mode: "dense", "lookahead" (ours), "previous" (the real query predicts, no draft's row) or
            "demand" (Quest-style: select and fetch before each attention, uncapped).
    """

    def __init__(
        self, weights: Weights, shape: KvShape, rows: int, mode: str, *, host: Host | None = None,
        budget: Budget | None = None, whole: bool = False, **tuning: int,
    ) -> None:  # fmt: skip
        self.weights, self.shape, self.rows, self.mode = weights, shape, rows, mode
        self.budget = budget or Budget(blocks=128, cap=1.0)
        self.queries = 2 if mode == "lookahead" else 1
        self.ops = Kernels(shape, self.budget, **tuning)
        self.sparse = mode != "dense"
        self.one_graph = whole or mode in {"dense", "demand"}
        self.blocks = CONTEXT // shape.block + STEPS_MAX // shape.block + 2
        self.slots = self.budget.slots if self.sparse else self.blocks
        self._make_tables()
        self.steps = Steps(self.tables)
        self.layers = [self._layer(n, host) for n in range(shape.layers)]
        self._make_buffers()
        self.step = 0
        self.kept: list[Any] = []  # what graphs refer to
        self._warm_up()
        self._capture()

    def _make_tables(self) -> None:
        """Tables as after a prefill: random fill of the last block, every page a row's own."""
        rows, device = self.rows, "cuda"
        self.tables = t = Tables.make(rows, self.blocks, self.budget, device)
        row = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
        slot = torch.arange(self.slots, dtype=torch.int32, device=device)
        t.pages[:, : self.slots] = row * self.slots + slot
        t.host.copy_(row * self.blocks + torch.arange(self.blocks, device=device))
        t.owner.copy_((row[..., None] + 1).expand_as(t.owner))
        t.length.copy_(CONTEXT + torch.arange(rows, device=device) % self.shape.block)
        t.sparse.fill_(int(self.sparse))
        t.slots.fill_(self.slots)

    def _layer(self, number: int, host: Host | None) -> LayerState:
        shape, device = self.shape, "cuda"
        empty = torch.empty(1, shape.kv_heads, 2, shape.block, shape.head_dim, dtype=shape.dtype)
        state = LayerState.make(
            number, shape, self.budget, rows=self.rows, blocks_max=self.blocks,
            gpu_pages=self.rows * self.slots, device=device,
            host=empty.to(device) if host is None else host.pool.host(number),
            headers=torch.zeros(1, 4, dtype=torch.int32, device=device)
            if host is None
            else host.pool.headers(number),
        )  # fmt: skip
        if host is None:
            state.pages.normal_()
            self.tables.host.fill_(-1)
            return state
        state.summaries = host.summaries[number]
        own = CONTEXT // shape.block
        k = self.budget.blocks
        state.map[..., :k] = torch.arange(k, dtype=torch.int32, device=device)
        state.slot_of[..., :k] = state.map[..., :k]
        ring = torch.arange(own - LOCAL + 1, own + 1, dtype=torch.int32, device=device)
        state.map[..., (k + ring % LOCAL).long()] = ring
        state.slot_of[..., ring.long()] = (k + ring % LOCAL).to(torch.int32)
        source = self.tables.host[:, state.map[0, 0].long()].flatten().long()
        state.pages[self.tables.pages[:, : self.slots].flatten().long()] = state.host[source]
        state.landed.fill_(own)
        return state

    def _make_buffers(self) -> None:
        tokens, shape = self.rows * self.queries, self.shape

        def empty(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=torch.bfloat16, device="cuda")

        count = range(shape.layers)
        self.buffers = Buffers(
            x=empty(tokens, HIDDEN),
            q=[empty(self.rows, self.queries, HEADS, 128) for _ in count],
            k=[empty(self.rows, self.queries, shape.kv_heads, 128) for _ in count],
            v=[empty(self.rows, self.queries, shape.kv_heads, 128) for _ in count],
            tokens=torch.randint(0, VOCAB, (tokens,), device="cuda"),
        )
        generator = torch.Generator("cuda").manual_seed(5)
        self.base = [
            torch.randn(self.rows, HEADS, 128, device="cuda", generator=generator).bfloat16()
            for _ in count
        ]

    # The forward pass, in the pieces that graphs are made of.

    def begin(self) -> None:
        torch.index_select(self.weights.embedding, 0, self.buffers.tokens, out=self.buffers.x)
        self.project(0)

    def project(self, layer: int) -> None:
        b, w = self.buffers, self.weights
        h = functional.rms_norm(b.x, (HIDDEN,), w.norm, 1e-6)
        qkv = functional.linear(h, w.qkv[layer])
        prepare[(len(qkv), HEADS + 16)](
            qkv, self.base[layer], b.q[layer], b.k[layer], b.v[layer], WANDER,
            (1 - WANDER**2) ** 0.5, QUERIES=self.queries, HEADS=HEADS, KV=8, DIM=128, num_warps=1,
        )  # fmt: skip
        self.kept.append((h, qkv))

    def attend(self, layer: int, tables: Tables) -> torch.Tensor:
        b, state = self.buffers, self.layers[layer]
        if self.mode == "demand":
            self.ops.score(state, tables, b.q[layer], 0)
            self.ops.select(state, tables)
            self.ops.write_back(state, tables)
            self.ops.transfer(state, tables)
        self.ops.append(state, tables, b.k[layer], b.v[layer])
        out = self.ops.attend(state, tables, b.q[layer], SCALE)
        self.kept.append(out)
        return out

    def mix(self, layer: int, attended: torch.Tensor, parity: int) -> None:
        b, w = self.buffers, self.weights
        flat = attended.view(len(b.x), HEADS * 128)
        torch.addmm(b.x, flat, w.out[layer].T, out=b.x)
        h = functional.rms_norm(b.x, (HIDDEN,), w.norm, 1e-6)
        wide = functional.linear(h, w.up[layer])
        act = torch.empty(len(h), FFN, dtype=h.dtype, device=h.device)
        gated[(len(h), FFN // 1024)](wide, act, WIDTH=FFN, BLOCK=1024, num_warps=4)
        torch.addmm(b.x, act, w.down[layer].T, out=b.x)
        self.kept.append((flat, h, wide, act))
        if layer + 1 < self.shape.layers:
            self.project(layer + 1)
        else:
            self.finish(parity)

    def finish(self, parity: int) -> None:
        """Logits of every row, the next tokens, and the next step's tables: one accepted."""
        b, w = self.buffers, self.weights
        logits = functional.linear(functional.rms_norm(b.x, (HIDDEN,), w.norm, 1e-6), w.head)
        b.tokens.copy_(logits.argmax(-1))
        self.kept.append(logits)
        self.steps.advance(parity)

    def _warm_up(self) -> None:
        """Compile and tune everything on a first layer, eagerly; then undo what it did."""
        tables = self.tables
        length = tables.length.clone()
        self.begin()
        self.mix(0, self.attend(0, tables), 0)
        if self.mode in {"lookahead", "previous"}:
            for stage in stages(self.ops, self.layers[0], tables, self.buffers.q[0], 0):
                stage()
        self.finish(0)
        torch.cuda.synchronize()
        tables.length.copy_(length)
        self.kept.clear()

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        count = range(self.shape.layers)
        if self.one_graph:
            self.whole = [captured(lambda p=p: self._forward(p), pool) for p in (0, 1)]
            if self.mode not in {"dense", "demand"}:
                self.capture_behind()
            return
        self.first = captured(self.begin, pool)
        self.attends: list[list[torch.cuda.CUDAGraph]] = [[], []]
        self.mixes: list[list[torch.cuda.CUDAGraph]] = [[], []]
        work: list[list[Any]] = [[], []]
        for parity in (0, 1):
            tables = self.steps.tables[parity]
            for layer in count:
                made: list[torch.Tensor] = []
                self.attends[parity].append(
                    captured(lambda: made.append(self.attend(layer, tables)), pool)  # noqa: B023
                )
                self.mixes[parity].append(
                    captured(lambda: self.mix(layer, made[0], parity), pool)  # noqa: B023
                )
                plain = stages(
                    self.ops, self.layers[layer], tables, self.buffers.q[layer], self.queries - 1
                )
                work[parity].append(tuple(captured(stage, on="back").replay for stage in plain))
        self.work = work
        self.background = Background(torch.device("cuda"), work[0])

    def capture_behind(self, *, parts: int = 4, move_priority: int = MOVE_PRIORITY) -> None:
        """Capture steps with their background, or with only the first so many of its parts."""
        self.behind = [captured(lambda p=p: self._both(p, parts, move_priority)) for p in (0, 1)]

    def _forward(self, parity: int) -> None:
        self.begin()
        for layer in range(self.shape.layers):
            self.mix(layer, self.attend(layer, self.steps.tables[parity]), parity)

    def _parts(self, layer: int, tables: Tables, parts: int) -> tuple[Any, Any, Any]:
        """The first so many of score, select, write-back and transfer."""
        plain = stages(
            self.ops, self.layers[layer], tables, self.buffers.q[layer], self.queries - 1
        )
        kept = [stage if parts > n else lambda: None for n, stage in enumerate(plain)]
        if parts == 3:
            kept[2] = lambda: self.ops.write_back(self.layers[layer], tables)
        return kept[0], kept[1], kept[2]

    def _both(self, parity: int, parts: int, move_priority: int) -> None:
        """A step and its background, for one graph."""
        tables = self.steps.tables[parity]
        work = [self._parts(n, tables, parts) for n in range(self.shape.layers)]
        behind = Background(torch.device("cuda"), work, one_graph=True, move_priority=move_priority)
        self.kept.append(behind)
        front = torch.cuda.current_stream()
        self.begin()
        for layer in range(self.shape.layers):
            behind.ready(layer, front)
            attended = self.attend(layer, tables)
            behind.attended(layer, front)
            self.mix(layer, attended, parity)
        behind.join(front)

    def run(self, *, background: bool = True) -> None:
        """One step."""
        parity, self.step = self.step % 2, self.step + 1
        assert self.step <= STEPS_MAX
        if self.one_graph:
            plain = not background or self.mode in {"dense", "demand"}
            graphs = self.whole if plain else self.behind
            graphs[parity].replay()
            return
        front, behind = torch.cuda.current_stream(), self.background
        behind.work = self.work[parity]
        self.first.replay()
        for layer in range(self.shape.layers):
            if background:
                behind.ready(layer, front)
                behind.await_moved(layer, front)
            self.attends[parity][layer].replay()
            if background:
                behind.attended(layer, front)
            self.mixes[parity][layer].replay()

    def counters(self) -> dict[str, int]:
        torch.cuda.synchronize()
        total = torch.stack([state.counters for state in self.layers]).sum(0).tolist()
        names = {"admitted": 0, "evicted": 1, "wrong_owner": 2, "wanted": 3, "hit": 4, "written": 5}
        return {name: total[at] for name, at in names.items()}

    def differing(self) -> int:
        """Resident entries that are not what the host pool holds, or not where the map has them."""
        wrong, k, t = 0, self.budget.blocks, self.tables
        pages = t.pages[:, None, :k].expand(-1, self.shape.kv_heads, -1).long()
        head = torch.arange(self.shape.kv_heads, device="cuda")[None, :, None].expand_as(pages)
        for state in self.layers:
            block = state.map[..., :k].long()
            row = torch.arange(self.rows, device="cuda")[:, None, None].expand_as(block)
            host = t.host.long()[row, block.clamp(min=0)]
            places = state.slot_of.gather(-1, block.clamp(min=0))
            slot = torch.arange(k, dtype=torch.int32, device="cuda").expand_as(places)
            wrong += int(((places != slot) & (block >= 0)).sum())
            for part in range(0, self.rows, 4):
                cut = slice(part, part + 4)
                have = state.pages[pages[cut], head[cut]].view(torch.int16)
                want = state.host[host[cut], head[cut]].view(torch.int16)
                bad = (have != want).flatten(3).any(-1) & (block[cut] >= 0)
                wrong += int(bad.sum())
        return wrong


def timed(
    engines: dict[str, Callable[[], None]], repeats: int, warm: int
) -> dict[str, list[float]]:
    """Every step's time in ms, of each engine in turn."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for name, step in engines.items():
        torch.cuda.synchronize()
        with torch.cuda.stream(stream("front")):
            for _ in range(warm):
                step()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            marks[0].record()
            for n in range(repeats):
                step()
                marks[n + 1].record()
        torch.cuda.synchronize()
        times[name] += [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return times


def median(values: list[float]) -> float:
    return statistics.median(values)


def cap_excess(engine: Engine, before: dict[str, int], after: dict[str, int], steps: int) -> int:
    """Bytes moved beyond cap x K blocks for each head, layer, request and step."""
    allowed = engine.rows * engine.shape.kv_heads * engine.shape.layers * steps
    allowed *= int(engine.tables.admit[0])
    over = max(0, after["admitted"] - before["admitted"] - allowed)
    worst = max(int(state.plan_count.max()) for state in engine.layers)
    over += max(0, worst - int(engine.tables.admit[0]))
    return over * engine.shape.entry_bytes


def host_gib(shape: KvShape, rows: int) -> float:
    blocks = CONTEXT // shape.block + STEPS_MAX // shape.block + 2
    return rows * blocks * shape.layers * (shape.block_bytes + 16) / 2**30
