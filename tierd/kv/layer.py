"""What the kernels work on: tables that all layers share, and one layer's pages and maps.

    Tables      per request: GPU pages, host pages with their owners, length, sparse or dense
    LayerState  per layer: GPU pages, summaries, the head-wise map, stamps, the transfer plan

The page tables are the engine's and change only when a request comes, grows or goes. What a GPU
page holds for each KV head stands in the head-wise map above them (section 4.3).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from tierd.kv.shape import HEADER_WORDS, LOCAL

if TYPE_CHECKING:
    from tierd.kv.shape import Budget, KvShape

EMPTY = -1


@dataclasses.dataclass(slots=True)
class Tables:
    """What every layer shares, for `rows` requests at most.

    Attributes:
        pages: int32 [rows, blocks_max]: GPU page of each GPU logical block, EMPTY beyond.
        host: int32 [rows, blocks_max]: host page of each block of the context.
        owner: int32 [rows, blocks_max, 2]: request and generation that the host page must carry.
        length: int32 [rows]: tokens in the cache, the step's first new one not included.
        sparse: int32 [rows]: 1 where only a working set is resident.
        slots: int32 [rows]: GPU logical blocks in use.
        step: int32 [1]: counts steps; stamps are taken from it.
        admit: int32 [1]: blocks that a head may admit in this step, at most the budget's C.
    """

    pages: torch.Tensor
    host: torch.Tensor
    owner: torch.Tensor
    length: torch.Tensor
    sparse: torch.Tensor
    slots: torch.Tensor
    step: torch.Tensor
    admit: torch.Tensor

    @classmethod
    def make(cls, rows: int, blocks_max: int, budget: Budget, device: torch.device | str) -> Tables:
        """Allocate empty tables."""

        def full(*size: int, value: int = 0) -> torch.Tensor:
            return torch.full(size, value, dtype=torch.int32, device=device)

        return cls(
            pages=full(rows, max(blocks_max + LOCAL, budget.slots), value=EMPTY),
            host=full(rows, blocks_max, value=EMPTY),
            owner=full(rows, blocks_max, 2),
            length=full(rows),
            sparse=full(rows),
            slots=full(rows),
            step=full(1, value=1),
            admit=full(1, value=budget.admitted),
        )

    @property
    def rows(self) -> int:
        """Requests at most."""
        return int(self.pages.shape[0])

    def only(self, row: int) -> Tables:
        """One row's tables: views of the same memory, for work on one request."""
        cut = slice(row, row + 1)
        return dataclasses.replace(
            self, pages=self.pages[cut], host=self.host[cut], owner=self.owner[cut],
            length=self.length[cut], sparse=self.sparse[cut], slots=self.slots[cut],
        )  # fmt: skip


@dataclasses.dataclass(slots=True)
class LayerState:
    """One layer.

    Attributes:
        number: which layer; part of every owner header.
        pages: [gpu_pages, kv_heads, 2, block, head_dim]: keys, then values.
        summaries: [host_pages, kv_heads, 2, head_dim]: minima and maxima of the keys, by host page.
        map: int32 [rows, kv_heads, slots]: host block in each GPU logical block, EMPTY if none.
        slot_of: int32 [rows, kv_heads, blocks_max]: its inverse.
        stamp: int32 [rows, kv_heads, slots]: the step that last selected what is there.
        scores: fp32 [rows, kv_heads, blocks_max].
        plan_block, plan_slot: int32 [rows, kv_heads, C]: what to fetch, and where to.
        plan_count: int32 [rows, kv_heads].
        landed: int32 [rows, kv_heads]: complete blocks whose copies are in the host pool.
        host: [host_pages, kv_heads, 2, block, head_dim] in the pool.
        headers: int32 [host_pages, 4] in the pool: request, block, layer, generation.
        counters: int64 [COUNTERS].
    """

    number: int
    pages: torch.Tensor
    summaries: torch.Tensor
    map: torch.Tensor
    slot_of: torch.Tensor
    stamp: torch.Tensor
    scores: torch.Tensor
    plan_block: torch.Tensor
    plan_slot: torch.Tensor
    plan_count: torch.Tensor
    landed: torch.Tensor
    host: torch.Tensor
    headers: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def make(
        cls, number: int, shape: KvShape, budget: Budget, *, rows: int, blocks_max: int,
        gpu_pages: int, host: torch.Tensor, headers: torch.Tensor, device: torch.device | str,
    ) -> LayerState:  # fmt: skip
        """Allocate one layer's state; `host` and `headers` are views of the pool."""
        heads, dim = shape.kv_heads, shape.head_dim
        cap = max(1, budget.admitted)

        def words(*size: int, value: int = 0) -> torch.Tensor:
            return torch.full(size, value, dtype=torch.int32, device=device)

        return cls(
            number=number,
            pages=torch.zeros(
                gpu_pages, heads, 2, shape.block, dim, dtype=shape.dtype, device=device
            ),
            summaries=torch.zeros(
                host.shape[0], heads, 2, dim, dtype=shape.dtype, device=device
            ),
            map=words(rows, heads, budget.slots, value=EMPTY),
            slot_of=words(rows, heads, blocks_max, value=EMPTY),
            stamp=words(rows, heads, budget.slots),
            scores=torch.full(
                (rows, heads, blocks_max), -torch.inf, dtype=torch.float32, device=device
            ),
            plan_block=words(rows, heads, cap),
            plan_slot=words(rows, heads, cap),
            plan_count=words(rows, heads),
            landed=words(rows, heads),
            host=host,
            headers=headers,
            counters=torch.zeros(COUNTERS, dtype=torch.int64, device=device),
        )  # fmt: skip

    def only(self, row: int) -> LayerState:
        """One row's state: views of the same memory, for work on one request."""
        cut = slice(row, row + 1)
        names = (
            "map", "slot_of", "stamp", "scores", "plan_block", "plan_slot", "plan_count", "landed"
        )  # fmt: skip
        return dataclasses.replace(self, **{name: getattr(self, name)[cut] for name in names})


# Places in LayerState.counters.
C_ADMITTED = 0  # block-head entries fetched
C_EVICTED = 1  # of them, those that replaced another
C_WRONG_OWNER = 2  # entries whose header was not the expected one; not fetched
C_WANTED = 3  # selected block-head entries
C_HIT = 4  # of them, resident when selected
C_WRITTEN = 5  # block-head entries written back
C_LATE = 6  # ring slots that were needed again before their block had landed: must stay 0
COUNTERS = 8


def header_of(owner: torch.Tensor, block: int, layer: int) -> torch.Tensor:
    """The 16 bytes that a host block must carry: request, block, layer, generation."""
    request, generation = owner.tolist()
    found = torch.tensor([request, block, layer, generation], dtype=torch.int32)
    assert found.numel() == HEADER_WORDS
    return found
