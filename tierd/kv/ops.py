"""One call for each piece: the kernel on a GPU (or interpreted), else the reference."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from tierd.kv import reference

if TYPE_CHECKING:
    from tierd.kv.layer import LayerState, Tables
    from tierd.kv.shape import Budget, KvShape

# Programs of the transfer: one for so many KV heads (of all requests), up to what fills the link;
# few requests have little to move and a layer's time for it. Entries that a program has under way,
# and its warps: `python -m bench.kv_tune transfer` compares.
TRANSFER_HEADS = 2
TRANSFER_PROGRAMS_MAX = 96
TRANSFER_ENTRIES = 2
TRANSFER_WARPS = 4
SCORE_TILE = 64


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as 64-bit words: what the copying kernels move."""
    return tensor.view(torch.int64)


class Reference:
    """The pieces in plain torch, for CPU tensors."""

    def __init__(self, shape: KvShape, budget: Budget) -> None:
        self.shape, self.budget = shape, budget

    def append(self, state: LayerState, tables: Tables, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a step's keys and values, [rows, queries, kv_heads, head_dim]."""
        reference.append(state, tables, k, v, self.shape, self.budget)

    def score(self, state: LayerState, tables: Tables, q: torch.Tensor, query_row: int) -> None:
        """Score every block by one of a step's queries."""
        reference.score(state, tables, q, query_row, self.shape)

    def select(self, state: LayerState, tables: Tables) -> None:
        """Choose the next set and plan the transfer."""
        reference.select(state, tables, self.shape, self.budget)

    def transfer(self, state: LayerState, tables: Tables) -> None:
        """Carry the plan out."""
        reference.transfer(state, tables, self.budget)

    def write_back(self, state: LayerState, tables: Tables) -> None:
        """Copy complete blocks to the host pool."""
        reference.write_back(state, tables, self.shape, self.budget)

    def attend(
        self, state: LayerState, tables: Tables, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend over what is resident."""
        return reference.attend(state, tables, q, self.shape, scale)


@dataclasses.dataclass(slots=True)
class _Room:
    """Memory that a launch of `attend` writes its splits to."""

    partial: torch.Tensor
    extremes: torch.Tensor


class Kernels:
    """The pieces as Triton kernels; everything here may be captured in a CUDA graph."""

    def __init__(
        self, shape: KvShape, budget: Budget, *, splits: int = 4, tile: int = 64, stages: int = 2,
        warps: int = 4, transfer_heads: int = TRANSFER_HEADS, entries: int = TRANSFER_ENTRIES,
        transfer_warps: int = TRANSFER_WARPS,
    ) -> None:  # fmt: skip
        self.shape, self.budget = shape, budget
        self.splits, self.tile, self.stages, self.warps = splits, tile, stages, warps
        self.transfer_heads, self.entries = transfer_heads, entries
        self.transfer_warps = transfer_warps
        self.precision = "ieee" if shape.dtype == torch.float32 else "tf32"
        self._rooms: dict[tuple[Any, ...], _Room] = {}

    def append(self, state: LayerState, tables: Tables, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a step's keys and values, [rows, queries, kv_heads, head_dim], contiguous."""
        from tierd.kv.kernels_pages import append

        shape, budget, queries = self.shape, self.budget, k.shape[1]
        append[(tables.rows, shape.kv_heads)](
            k, v, state.pages, tables.pages, tables.host, state.map, state.slot_of, tables.length,
            tables.sparse, tables.slots, state.summaries, tables.pages.shape[1],
            tables.host.shape[1], QUERIES=queries, HEADS=shape.kv_heads, BLOCK=shape.block,
            DIM=shape.head_dim, K=budget.blocks, SLOTS=budget.slots,
            NEW_BLOCKS=(queries + shape.block - 2) // shape.block + 1, num_warps=2,
        )  # fmt: skip

    def score(self, state: LayerState, tables: Tables, q: torch.Tensor, query_row: int) -> None:
        """Score every block by one of a step's queries, [rows, queries, heads, head_dim]."""
        from tierd.kv.kernels_select import score

        shape, blocks = self.shape, tables.host.shape[1]
        score[(-(-blocks // SCORE_TILE), shape.kv_heads, tables.rows)](
            q, state.summaries, state.scores, tables.host, tables.length, tables.sparse, blocks,
            query_row, QUERIES=q.shape[1], HEADS=shape.kv_heads, GROUP=shape.group,
            ROWS=max(16, _power(shape.group)), BLOCK=shape.block, DIM=shape.head_dim,
            TILE=SCORE_TILE, PRECISION=self.precision, num_warps=4,
        )  # fmt: skip

    def select(self, state: LayerState, tables: Tables) -> None:
        """Choose the next set and plan the transfer."""
        from tierd.kv.kernels_select import select

        shape, budget, blocks = self.shape, self.budget, tables.host.shape[1]
        select[(tables.rows, shape.kv_heads)](
            state.scores, state.map, state.slot_of, state.stamp, state.plan_block, state.plan_slot,
            state.plan_count, tables.length, tables.sparse, tables.step, tables.admit,
            state.counters, blocks, HEADS=shape.kv_heads, BLOCK=shape.block, BLOCKS=_power(blocks),
            K=budget.blocks, SLOTS=budget.slots, PLACES=_power(budget.blocks),
            CAP=state.plan_block.shape[-1], num_warps=4,
        )  # fmt: skip

    def transfer(self, state: LayerState, tables: Tables) -> None:
        """Carry the plan out."""
        from tierd.kv.kernels_pages import transfer

        shape, budget = self.shape, self.budget
        items = tables.rows * shape.kv_heads
        programs = max(1, min(items // self.transfer_heads, TRANSFER_PROGRAMS_MAX))
        transfer[(programs,)](
            state.plan_block, state.plan_slot, state.plan_count, tables.admit, _words(state.pages),
            _words(state.host), state.headers, tables.pages, tables.host, tables.owner, state.map,
            state.slot_of, state.counters, tables.pages.shape[1], tables.host.shape[1],
            state.number, items, HEADS=shape.kv_heads, WORDS=shape.entry_bytes // 8,
            K=budget.blocks, SLOTS=budget.slots, CAP=state.plan_block.shape[-1],
            ENTRIES=self.entries, num_warps=self.transfer_warps,
        )  # fmt: skip

    def write_back(self, state: LayerState, tables: Tables) -> None:
        """Copy complete blocks to the host pool."""
        from tierd.kv.kernels_pages import write_back

        shape, budget = self.shape, self.budget
        write_back[(tables.rows, shape.kv_heads)](
            _words(state.pages), _words(state.host), state.headers, tables.pages, tables.host,
            tables.owner, state.landed, tables.length, tables.sparse, tables.slots, state.counters,
            tables.pages.shape[1], tables.host.shape[1], state.number, HEADS=shape.kv_heads,
            BLOCK=shape.block, WORDS=shape.entry_bytes // 8, K=budget.blocks, num_warps=4,
        )  # fmt: skip

    def attend(
        self, state: LayerState, tables: Tables, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend over what is resident, [rows, queries, heads, head_dim] in and out."""
        from tierd.kv.kernels_attend import attend, merge

        shape, queries = self.shape, q.shape[1]
        rows = max(16, _power(queries * shape.group))
        room = self._room(q, rows)
        out = torch.empty_like(q)
        shared = {
            "QUERIES": queries, "HEADS": shape.kv_heads, "GROUP": shape.group, "ROWS": rows,
            "DIM": shape.head_dim, "SPLITS": self.splits,
        }  # fmt: skip
        items = tables.rows * shape.kv_heads
        attend[(items, self.splits)](
            q, state.pages, out, room.partial, room.extremes, tables.pages, state.map,
            tables.length, tables.sparse, tables.slots, tables.pages.shape[1], scale, **shared,
            BLOCK=shape.block, SLOTS=self.budget.slots, TILE=max(self.tile, shape.block),
            STAGES=self.stages, PRECISION=self.precision, num_warps=self.warps,
        )  # fmt: skip
        if self.splits > 1:
            merge[(items,)](room.partial, room.extremes, out, **shared, num_warps=4)
        return out

    def _room(self, q: torch.Tensor, rows: int) -> _Room:
        key = (q.shape[0], q.shape[1], rows, q.device)
        if key not in self._rooms:
            items = q.shape[0] * self.shape.kv_heads * self.splits
            self._rooms[key] = _Room(
                torch.empty(items, rows, self.shape.head_dim, device=q.device),
                torch.empty(items, 2, rows, device=q.device),
            )
        return self._rooms[key]


def ops_for(shape: KvShape, budget: Budget, device: torch.device) -> Reference | Kernels:
    """Return what serves tensors on a device."""
    return Kernels(shape, budget) if device.type == "cuda" else Reference(shape, budget)
