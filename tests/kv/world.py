"""An engine of nothing but KV: requests with known keys and values, and a check of every owner."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from tierd.errors import KvPoolFullError
from tierd.io.pool import PoolView
from tierd.kv import layer as places
from tierd.kv.layer import EMPTY, LayerState, Tables, header_of
from tierd.kv.ops import Kernels, Reference
from tierd.kv.pool import KvPool
from tierd.kv.requests import Parked, Requests

if TYPE_CHECKING:
    from tierd.kv.shape import Budget, KvShape


class World:
    """Layers over one pool; `truth` holds every request's keys and values, [layers, 2, T, H, D]."""

    def __init__(
        self, shape: KvShape, budget: Budget, *, rows: int = 3, blocks: int = 16,
        gpu_pages: int = 64, host_pages: int = 96, kernels: bool = False, seed: int = 0,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self.shape, self.budget, self.device = shape, budget, device
        self.generator = torch.Generator().manual_seed(seed)
        self.ops: Reference | Kernels = (
            Kernels(shape, budget, splits=2, tile=64, transfer_heads=2, entries=2)
            if kernels
            else Reference(shape, budget)
        )
        self.plain = Reference(shape, budget)  # prompts: the interpreter would take seconds
        self.tables = Tables.make(rows, blocks, budget, device)
        view = PoolView.private(host_pages, layers=shape.layers, block_bytes=shape.block_bytes)
        self.pool = KvPool(view, shape, device)
        self.layers = [
            LayerState.make(
                n, shape, budget, rows=rows, blocks_max=blocks, gpu_pages=gpu_pages,
                host=self.pool.host(n), headers=self.pool.headers(n), device=device,
            )
            for n in range(shape.layers)
        ]  # fmt: skip
        for layer in self.layers:  # what was never written must not pass for anything
            layer.host.fill_(torch.nan)
            layer.headers.fill_(-7)
        self.requests = Requests(shape, budget, self.tables, self.layers, range(host_pages))
        self.truth: dict[int, torch.Tensor] = {}
        self.waited: list[int] = []

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device, self.shape.dtype)

    def past(self, row: int) -> torch.Tensor:
        return self.truth[self.requests.rows[row].number]

    def begin(self, tokens: int, *, sparse: bool = False) -> int:
        """Admit a request and write its prompt, as a prefill would."""
        shape = self.shape
        row = self.requests.admit()
        number = self.requests.rows[row].number
        self.truth[number] = self.random(shape.layers, 2, 0, shape.kv_heads, shape.head_dim)
        while tokens:
            count = min(tokens, shape.block)
            self._append([row], count, count)
            tokens -= count
        if sparse:
            self.land(row)
            self.requests.turn_sparse(row)
        return row

    def land(self, row: int) -> None:
        for layer in self.layers:
            self.plain.write_back(layer.only(row), self.tables.only(row))

    def _append(self, rows: list[int], queries: int, accepted: int) -> None:
        shape = self.shape
        for row in rows:
            self.requests.grow(row, queries)
        given = self.random(
            self.tables.rows, shape.layers, 2, queries, shape.kv_heads, shape.head_dim
        )
        for layer in self.layers:
            for row in rows:
                k, v = (given[row : row + 1, layer.number, n].contiguous() for n in range(2))
                self.plain.append(layer.only(row), self.tables.only(row), k, v)
        for row in rows:
            number = self.requests.rows[row].number
            new = given[row, :, :, :accepted]
            self.truth[number] = torch.cat([self.truth[number], new], 2)
            self.requests.advance(row, accepted)

    def step(self, *, queries: int = 2, accepted: int = 1) -> list[torch.Tensor]:
        """One decode step of all requests; returns each layer's attention output."""
        shape = self.shape
        going = []
        for row in sorted(self.requests.rows):
            try:
                self.requests.grow(row, queries)
                going.append(row)
            except KvPoolFullError:
                self.waited.append(row)
        rows, heads, dim = self.tables.rows, shape.kv_heads, shape.head_dim
        given = self.random(rows, shape.layers, 2, queries, heads, dim)
        q = self.random(shape.layers, rows, queries, heads * shape.group, dim)
        out = []
        paused = [r for r in self.requests.rows if r not in going]
        with self._without(paused):
            for layer in self.layers:
                k, v = (given[:, layer.number, n].contiguous() for n in range(2))
                self.ops.append(layer, self.tables, k, v)
                out.append(self.ops.attend(layer, self.tables, q[layer.number], dim**-0.5))
                self.ops.score(layer, self.tables, q[layer.number], queries - 1)
                self.ops.select(layer, self.tables)
                self.ops.write_back(layer, self.tables)
                self.ops.transfer(layer, self.tables)
        for row in going:
            number = self.requests.rows[row].number
            self.truth[number] = torch.cat([self.truth[number], given[row, :, :, :accepted]], 2)
            self.requests.advance(row, accepted)
        self.tables.step += 1
        self.queries = q
        return out

    @contextlib.contextmanager
    def _without(self, rows: list[int]) -> Any:
        """Hide rows from a step: what an engine does with requests that wait."""
        kept = self.tables.slots.clone(), self.tables.sparse.clone()
        for row in rows:
            self.tables.slots[row] = self.tables.sparse[row] = 0
        yield
        self.tables.slots.copy_(kept[0])
        self.tables.sparse.copy_(kept[1])

    def fork(self, row: int) -> int:
        child = self.requests.fork(row)
        self.truth[self.requests.rows[child].number] = self.past(row).clone()
        return child

    def preempt(self, row: int) -> Parked:
        return self.requests.preempt(row)

    def check(self) -> int:
        """Every block anywhere is its owner's; returns how many entries were compared."""
        compared = 0
        for row in self.requests.rows:
            for layer in self.layers:
                compared += self._check_resident(row, layer)
                compared += self._check_host(row, layer)
        held = [p for r in self.requests.rows.values() for p in r.gpu]
        assert len(held) == len(set(held)), "a GPU page has two holders"
        for layer in self.layers:
            assert int(layer.counters[places.C_WRONG_OWNER]) == 0
        return compared

    def _entry(self, row: int, layer: int, head: int, block: int) -> torch.Tensor:
        size = self.shape.block
        return self.past(row)[layer, :, block * size : (block + 1) * size, head]

    def _check_resident(self, row: int, layer: LayerState) -> int:
        request, compared = self.requests.rows[row], 0
        for head in range(self.shape.kv_heads):
            blocks = layer.map[row, head].tolist() if request.sparse else range(len(request.gpu))
            seen = [b for b in blocks if b != EMPTY]
            assert len(seen) == len(set(seen)), "a block is resident twice"
            for slot, block in enumerate(blocks):
                if block == EMPTY or block * self.shape.block >= request.length:
                    continue
                want = self._entry(row, layer.number, head, block)
                have = layer.pages[request.gpu[slot], head, :, : want.shape[1]]
                assert torch.equal(have, want), (row, layer.number, head, slot, block)
                if request.sparse:
                    assert int(layer.slot_of[row, head, block]) == slot
                compared += 1
            if request.sparse:
                own = request.length // self.shape.block
                local = set(range(max(0, own - 1), own + 1))
                local = {b for b in local if b * self.shape.block < request.length}
                assert local <= set(seen), "the local blocks are always there"
        return compared

    def _check_host(self, row: int, layer: LayerState) -> int:
        request = self.requests.rows[row]
        for block in range(int(layer.landed[row].min())):
            host = request.host[block]
            owner = torch.tensor(request.owner[block], dtype=torch.int32)
            want = header_of(owner, block, layer.number)
            assert torch.equal(layer.headers[host].cpu(), want)
            for head in range(self.shape.kv_heads):
                entry = self._entry(row, layer.number, head, block)
                assert torch.equal(layer.host[host, head], entry)
        return int(layer.landed[row].min())
