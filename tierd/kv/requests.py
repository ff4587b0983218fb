"""Requests and their pages: admit, grow, turn sparse, fork, preempt, resume, free.

The host's side of the tables. It runs between steps, never inside one, and everything it refuses
it refuses before it has changed anything: a request that finds no page waits or is preempted, and
what is resident stays what it was.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import torch

from tierd.errors import KvPoolFullError, KvUnsupportedError
from tierd.kv.layer import EMPTY, header_of
from tierd.kv.shape import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierd.kv.layer import LayerState, Tables
    from tierd.kv.shape import Budget, KvShape


class Pages:
    """Page numbers with reference counts; `what` and `hint` name them in the refusal."""

    def __init__(self, numbers: Iterable[int], what: str, hint: str) -> None:
        self._free = collections.deque(numbers)
        self._held: dict[int, int] = {}
        self._what, self._hint = what, hint

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take pages.

        Raises:
            KvPoolFullError: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise KvPoolFullError(
                f"{count} {self._what} wanted, {len(self._free)} free: {self._hint}"
            )
        taken = [self._free.popleft() for _ in range(count)]
        self._held.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages once more."""
        for page in pages:
            self._held[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Let go of pages; those that nobody holds any more are free."""
        for page in pages:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
                self._free.append(page)


@dataclasses.dataclass(slots=True)
class Request:
    """One request in a row of the tables.

    Attributes:
        number: what its owner headers carry.
        length: tokens in the cache.
        gpu: GPU pages by logical block.
        host: host pages by block of the context.
        owner: (request, generation) by block: a forked request keeps its parent's.
    """

    number: int
    generation: int
    length: int = 0
    sparse: bool = False
    gpu: list[int] = dataclasses.field(default_factory=list)
    host: list[int] = dataclasses.field(default_factory=list)
    owner: list[tuple[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Parked:
    """A preempted request: its KV is in the host pool, its HBM is free.

    Attributes:
        map: what each layer's working set was, int32 [kv_heads, slots].
    """

    request: Request
    map: list[torch.Tensor]


class Requests:
    """Keeps tables, maps and both pools in step with the requests.

    Attributes:
        rows: requests by row.
        waits: times that a request found no page and had to wait.
        preemptions: requests that gave their HBM up.
    """

    def __init__(
        self, shape: KvShape, budget: Budget, tables: Tables, layers: list[LayerState],
        host_pages: Iterable[int],
    ) -> None:  # fmt: skip
        self.shape, self.budget = shape, budget
        self.tables, self.layers = tables, layers
        self.rows: dict[int, Request] = {}
        self.gpu = Pages(
            range(layers[0].pages.shape[0]), "GPU pages", "the request waits or is preempted"
        )
        self.host = Pages(
            host_pages, "host pages", "the request waits; kv.pool_bytes or its lease is too small"
        )
        self._numbers = 0
        self.waits = 0
        self.preemptions = 0

    def admit(self) -> int:
        """Give a new request a row.

        Raises:
            KvPoolFullError: all rows are taken.
        """
        row = self._free_row()
        self._numbers += 1
        self.rows[row] = Request(self._numbers, generation=self._numbers)
        self._reset(row)
        return row

    def grow(self, row: int, tokens: int) -> None:
        """Make room for so many new tokens, before the step that writes them.

        Raises:
            KvPoolFullError: a pool has no page; nothing has changed.
            KvUnsupportedError: more tokens than the tables have room for; nothing has changed.
        """
        request = self.rows[row]
        blocks = self.shape.blocks(request.length + tokens)
        room = self.tables.host.shape[1]
        if blocks > room:
            raise KvUnsupportedError(
                f"{request.length + tokens} tokens; a request has room for {room} blocks of "
                f"{self.shape.block} here: make the session for a longer context"
            )
        more_gpu = 0 if request.sparse else max(0, blocks - len(request.gpu))
        more_host = max(0, blocks - len(request.host))
        gpu: list[int] = []
        try:
            gpu = self.gpu.take(more_gpu)
            host = self.host.take(more_host)
        except KvPoolFullError:
            self.gpu.drop(gpu)
            self.waits += 1
            raise
        request.gpu += gpu
        request.host += host
        request.owner += [(request.number, request.generation)] * more_host
        if gpu or host:
            self._show(row)

    def advance(self, row: int, tokens: int) -> None:
        """Count so many of a step's tokens as accepted; the rest are gone."""
        self.rows[row].length += tokens
        self.tables.length[row] = self.rows[row].length

    def can_turn_sparse(self, row: int) -> bool:
        """Whether every complete block has landed in the host pool, in every layer."""
        request = self.rows[row]
        complete = request.length // self.shape.block
        landed = min(int(layer.landed[row].min()) for layer in self.layers)
        return not request.sparse and complete > 0 and landed >= complete

    def turn_sparse(self, row: int) -> None:
        """Keep a working set only: the first blocks and the ring; selection does the rest.

        No data moves. Main slots keep the pages of the first K blocks, ring slots take those of
        the last ones, and every other page is free.

        Raises:
            KvPoolFullError: the working set needs more pages than the request has.
        """
        request, k = self.rows[row], self.budget.blocks
        assert self.can_turn_sparse(row), "its full copy has not landed"
        own = request.length // self.shape.block
        kept = min(k, own - 1) if own else 0
        # A crop may have left pages beyond the block that is being written: they are free.
        last = min(own + 1, len(request.gpu))
        ring = {k + b % LOCAL: b for b in range(max(kept, own - LOCAL + 1), last)}
        fresh = self.gpu.take(self.budget.slots - kept - len(ring))
        held = [*range(kept), *ring.values()]
        freed = sorted(set(range(len(request.gpu))) - set(held))
        pages = request.gpu[:kept] + [EMPTY] * (self.budget.slots - kept)
        for slot, block in ring.items():
            pages[slot] = request.gpu[block]
        for slot, page in enumerate(pages):
            if page == EMPTY:
                pages[slot] = fresh.pop()
        self.gpu.drop([request.gpu[block] for block in freed])
        request.gpu, request.sparse = pages, True
        self._clear(row)
        for layer in self.layers:
            for slot, block in [(b, b) for b in range(kept)] + list(ring.items()):
                layer.map[row, :, slot] = block
                layer.slot_of[row, :, block] = slot
        self._show(row)

    def fork(self, parent_row: int) -> int:
        """Start a request that shares a parent's past; what either writes is its own.

        Complete blocks that have landed are shared in the host pool, under the parent's header;
        GPU pages are copied.

        Raises:
            KvPoolFullError: no row or page; nothing has changed.
        """
        parent = self.rows[parent_row]
        row = self._free_row()
        shared = min(int(layer.landed[parent_row].min()) for layer in self.layers)
        gpu = self.gpu.take(len(parent.gpu))
        try:
            host = self.host.take(len(parent.host) - shared)
        except KvPoolFullError:
            self.gpu.drop(gpu)
            raise
        self._numbers += 1
        number = self._numbers
        self.host.share(parent.host[:shared])
        own = [(number, number)] * len(host)
        child = Request(
            number, number, parent.length, parent.sparse, gpu,
            parent.host[:shared] + host, parent.owner[:shared] + own,
        )  # fmt: skip
        self.rows[row] = child
        for layer in self.layers:
            layer.pages[gpu] = layer.pages[parent.gpu]
            layer.summaries[host] = layer.summaries[parent.host[shared:]]
            for tensor in (layer.map, layer.slot_of, layer.stamp, layer.scores):
                tensor[row] = tensor[parent_row]
            layer.landed[row] = shared
            layer.plan_count[row] = 0
        self._show(row)
        return row

    def free(self, row: int) -> None:
        """End a request, whatever state it is in; its pages may serve others at once."""
        request = self.rows.pop(row)
        self.gpu.drop(request.gpu)
        self.host.drop(request.host)
        self._reset(row)

    def preempt(self, row: int) -> Parked:
        """Give a request's HBM to others; its KV stays in the host pool.

        The incomplete last blocks are copied out too, under the same headers.
        """
        request = self.rows.pop(row)
        self.preemptions += 1
        for layer in self.layers:
            first = int(layer.landed[row].min())
            for block in range(first, self.shape.blocks(request.length)):
                page = request.gpu[self._slot(request, block)]
                layer.host[request.host[block]] = layer.pages[page].to(layer.host.device)
                owner = torch.tensor(request.owner[block], dtype=torch.int32)
                header = header_of(owner, block, layer.number)
                layer.headers[request.host[block]] = header.to(layer.headers.device)
        parked = Parked(request, [layer.map[row].clone() for layer in self.layers])
        self.gpu.drop(request.gpu)
        self._reset(row)
        return parked

    def resume(self, parked: Parked) -> int:
        """Bring a preempted request back, with the working set it had.

        Raises:
            KvPoolFullError: no row or GPU page; the request stays parked.
        """
        request = parked.request
        row = self._free_row()
        pages = self.gpu.take(len(request.gpu))
        self.rows[row] = dataclasses.replace(request, gpu=pages)
        self._reset(row)
        for layer, map_ in zip(self.layers, parked.map, strict=True):
            self._load(row, layer, map_)
            layer.landed[row] = request.length // self.shape.block
        self._show(row)
        return row

    def _load(self, row: int, layer: LayerState, map_: torch.Tensor) -> None:
        """Fill a row's pages from the host pool and set its map."""
        request = self.rows[row]
        for head in range(self.shape.kv_heads):
            blocks = map_[head].tolist() if request.sparse else range(len(request.gpu))
            filled = [
                (slot, block)
                for slot, block in enumerate(blocks)
                if block != EMPTY and block < self.shape.blocks(request.length)
            ]
            for _, block in filled:
                owner = torch.tensor(request.owner[block], dtype=torch.int32)
                want = header_of(owner, block, layer.number)
                have = layer.headers[request.host[block]].cpu()
                assert torch.equal(have, want), f"host block {block} has the header {have}"
            to = [request.gpu[slot] for slot, _ in filled]
            source = [request.host[block] for _, block in filled]
            layer.pages[to, head] = layer.host[source, head].to(layer.pages.device)
            if request.sparse:
                for slot, block in filled:
                    layer.map[row, head, slot] = block
                    layer.slot_of[row, head, block] = slot

    def _slot(self, request: Request, block: int) -> int:
        return self.budget.blocks + block % LOCAL if request.sparse else block

    def _free_row(self) -> int:
        for row in range(self.tables.rows):
            if row not in self.rows:
                return row
        raise KvPoolFullError(f"all {self.tables.rows} rows of the batch are taken: it waits")

    def _clear(self, row: int) -> None:
        for layer in self.layers:
            layer.map[row] = EMPTY
            layer.slot_of[row] = EMPTY
            layer.stamp[row] = 0
            layer.plan_count[row] = 0

    def _reset(self, row: int) -> None:
        """Empty a row."""
        self._clear(row)
        for layer in self.layers:
            layer.landed[row] = 0
        tables = self.tables
        tables.pages[row], tables.host[row], tables.owner[row] = EMPTY, EMPTY, 0
        tables.length[row] = tables.sparse[row] = tables.slots[row] = 0

    def _show(self, row: int) -> None:
        """Bring a row of the tables up to date with its request."""
        request, tables = self.rows[row], self.tables

        def put(into: torch.Tensor, values: list[int] | list[tuple[int, int]]) -> None:
            if values:
                into[: len(values)] = torch.tensor(values, dtype=torch.int32, device=into.device)

        put(tables.pages[row], request.gpu)
        put(tables.host[row], request.host)
        put(tables.owner[row], request.owner)
        tables.length[row] = request.length
        tables.sparse[row] = int(request.sparse)
        tables.slots[row] = len(request.gpu)
