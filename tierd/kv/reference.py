"""Every kernel of this room in plain torch, on the same tensors: what the kernels are held to.

It runs on any device and is what the CPU uses. Each function's counterpart has the same name in
`kernels_pages`, `kernels_select` or `kernels_attend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierd.kv import layer as places
from tierd.kv.layer import EMPTY
from tierd.kv.shape import LOCAL

if TYPE_CHECKING:
    from tierd.kv.layer import LayerState, Tables
    from tierd.kv.shape import Budget, KvShape


def slot_for(block: torch.Tensor, sparse: torch.Tensor, budget: Budget) -> torch.Tensor:
    """GPU logical block of a block at the end of the context: its own, or its ring slot."""
    return torch.where(sparse != 0, budget.blocks + block % LOCAL, block)


def append(
    state: LayerState, tables: Tables, k: torch.Tensor, v: torch.Tensor, shape: KvShape,
    budget: Budget,
) -> None:  # fmt: skip
    """Store a step's keys and values, [rows, queries, kv_heads, head_dim], and summarise."""
    rows = torch.nonzero(tables.slots > 0)[:, 0]
    if not len(rows):
        return
    queries = k.shape[1]
    position = tables.length[rows, None] + torch.arange(queries, device=rows.device)
    block = (position // shape.block).long()
    sparse = tables.sparse[rows, None].expand_as(block)
    slot = slot_for(block, sparse, budget).long()
    page = tables.pages[rows[:, None], slot].long()
    at = (position % shape.block).long()
    state.pages[page, :, 0, at] = k[rows].to(state.pages.dtype)
    state.pages[page, :, 1, at] = v[rows].to(state.pages.dtype)
    stale = sparse.bool() & (state.map[rows[:, None], 0, slot.clamp(max=budget.slots - 1)] != block)
    for n, i in torch.nonzero(stale).tolist():
        _open_ring_slot(state, int(rows[n]), int(block[n, i]), int(slot[n, i]))
    _summarise_touched(state, tables, rows, block, queries, shape, budget)


def _summarise_touched(
    state: LayerState, tables: Tables, rows: torch.Tensor, block: torch.Tensor, queries: int,
    shape: KvShape, budget: Budget,
) -> None:  # fmt: skip
    """Make the summaries of the blocks that a step wrote to anew, from all keys there are."""
    last = int((block[:, -1] - block[:, 0]).max())
    width = tables.host.shape[1]
    for n in range(last + 1):
        touched = block[:, 0] + n
        host = tables.host[rows, touched.clamp(max=width - 1)].long()
        use = (touched <= block[:, -1]) & (touched < width) & (host >= 0)
        some, which = rows[use], touched[use]
        if not len(some):
            continue
        slot = slot_for(which, tables.sparse[some], budget).long()
        keys = state.pages[tables.pages[some, slot].long(), :, 0].float()
        token = which[:, None] * shape.block + torch.arange(shape.block, device=rows.device)
        unwritten = (token >= tables.length[some, None] + queries)[:, None, :, None]
        low = keys.masked_fill(unwritten, torch.inf).amin(2)
        high = keys.masked_fill(unwritten, -torch.inf).amax(2)
        state.summaries[host[use]] = torch.stack([low, high], 2).to(state.summaries.dtype)


def _open_ring_slot(state: LayerState, row: int, block: int, slot: int) -> None:
    """Give a ring slot to a block that begins; the block it held is no longer there."""
    for head in range(state.map.shape[1]):
        old = int(state.map[row, head, slot])
        if old == block:
            continue
        if old != EMPTY and int(state.slot_of[row, head, old]) == slot:
            state.slot_of[row, head, old] = EMPTY
        state.map[row, head, slot] = block
        state.slot_of[row, head, block] = slot


def score(
    state: LayerState, tables: Tables, q: torch.Tensor, query_row: int, shape: KvShape
) -> None:
    """Bound q . k over every block: q+ . max + q- . min; the maximum over a group's heads.

    Args:
        state: the layer; its scores are written.
        tables: which rows are sparse, and where their blocks' summaries are.
        q: [rows, queries, heads, head_dim].
        query_row: which of the queries predicts: the draft's, or the last real one.
        shape: of the cache.
    """
    rows = torch.nonzero(tables.sparse > 0)[:, 0]
    if not len(rows):
        return
    found = state.summaries[tables.host[rows].clamp(min=0).long()].float()  # [R, NB, H, 2, D]
    x = q[rows, query_row].float().unflatten(1, (shape.kv_heads, shape.group))
    low, high = found[:, :, :, 0], found[:, :, :, 1]
    bound = torch.einsum("rhgd,rbhd->rhgb", x.clamp(min=0), high)
    bound += torch.einsum("rhgd,rbhd->rhgb", x.clamp(max=0), low)
    state.scores[rows] = bound.amax(2).masked_fill(
        ~candidates(tables, shape)[rows, None], -torch.inf
    )


def candidates(tables: Tables, shape: KvShape) -> torch.Tensor:
    """Blocks that may be selected, bool [rows, blocks_max]: all but the ring's."""
    last = tables.length // shape.block - 1
    return torch.arange(tables.host.shape[1], device=last.device)[None] < last[:, None]


def best(keys: torch.Tensor, allowed: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Mark the `count` [...] largest keys among the allowed; earlier places win ties."""
    keys = keys.masked_fill(~allowed, -torch.inf)
    order = torch.sort(keys, dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(keys.shape[-1], device=keys.device).expand_as(order)
    )
    return (rank < count[..., None]) & allowed


def select(state: LayerState, tables: Tables, shape: KvShape, budget: Budget) -> None:
    """Choose the next step's set and plan how to get nearer to it (section 4.2.3)."""
    k, heads = budget.blocks, shape.kv_heads
    now = int(tables.step[0])
    allowed = candidates(tables, shape) & (tables.sparse[:, None] > 0)
    allowed = allowed[:, None].expand(-1, heads, -1)
    size = allowed.sum(-1).clamp(max=k)
    wanted = best(state.scores, allowed, size)
    hit = wanted & (state.slot_of >= 0) & (state.slot_of < k)
    missing = wanted & ~hit
    cap = min(int(tables.admit[0]), state.plan_block.shape[-1])
    count = missing.sum(-1).clamp(max=cap)
    admitted = best(state.scores, missing, count)
    row, head, block = torch.nonzero(hit, as_tuple=True)
    state.stamp[row, head, state.slot_of[row, head, block].long()] = now
    stamps = state.stamp[..., :k]
    age = torch.where(state.map[..., :k] < 0, now + 1, now - stamps).float()
    victim = best(age, stamps != now, count)
    row, head, block = torch.nonzero(admitted, as_tuple=True)
    at = (admitted.cumsum(-1) - 1)[row, head, block]
    state.plan_block[row, head, at] = block.int()
    row, head, slot = torch.nonzero(victim, as_tuple=True)
    at = (victim.cumsum(-1) - 1)[row, head, slot]
    state.plan_slot[row, head, at] = slot.int()
    state.stamp[row, head, slot] = now
    state.plan_count.copy_(count.int())
    state.counters[places.C_WANTED] += int(wanted.sum())
    state.counters[places.C_HIT] += int(hit.sum())


def owned(
    state: LayerState, tables: Tables, rows: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """Whether the host pages of requests' blocks carry those requests' headers, bool [n]."""
    host = tables.host[rows, blocks].long()
    owner = tables.owner[rows, blocks]
    number = torch.full_like(blocks, state.number)
    want = torch.stack([owner[:, 0], blocks, number, owner[:, 1]], -1).int()
    have = state.headers[host.clamp(min=0)].to(want.device)
    return (have == want).all(-1) & (host >= 0)


def transfer(state: LayerState, tables: Tables, budget: Budget) -> None:
    """Carry the plan out and turn the map over."""
    planned = torch.arange(state.plan_block.shape[-1], device=state.plan_count.device)
    planned = planned < state.plan_count[..., None]
    row, head, _ = torch.nonzero(planned, as_tuple=True)
    if not len(row):
        return
    block, slot = state.plan_block[planned].long(), state.plan_slot[planned].long()
    page = tables.pages[row, slot].long()
    held = state.slot_of[row, head, block].long()
    old = state.map[row, head, slot].long()
    near = held >= budget.blocks
    good = near | owned(state, tables, row, block)
    for use, pages, pool in (
        (near, tables.pages[row, held.clamp(min=0)], state.pages),
        (good & ~near, tables.host[row, block], state.host),
    ):
        entries = pool[pages[use].long(), head[use]]
        state.pages[page[use], head[use]] = entries.to(state.pages.device)
    gone = old >= 0
    state.slot_of[row[gone], head[gone], old[gone]] = EMPTY
    state.map[row[near], head[near], held[near]] = EMPTY
    state.map[row, head, slot] = torch.where(good, block, EMPTY).int()
    state.slot_of[row[good], head[good], block[good]] = slot[good].int()
    state.counters[places.C_EVICTED] += int(gone.sum())
    state.counters[places.C_ADMITTED] += int(good.sum())
    state.counters[places.C_WRONG_OWNER] += int((~good).sum())


def write_back(state: LayerState, tables: Tables, shape: KvShape, budget: Budget) -> None:
    """Copy every complete block that has not landed to its host page."""
    complete = tables.length // shape.block
    due = (tables.slots > 0) & (complete > state.landed[:, 0])
    for row in torch.nonzero(due)[:, 0].tolist():
        block = int(state.landed[row, 0])
        while block < int(complete[row]) and int(tables.host[row, block]) != EMPTY:
            host = int(tables.host[row, block])
            slot = budget.blocks + block % LOCAL if tables.sparse[row] else block
            state.host[host] = state.pages[int(tables.pages[row, slot])].to(state.host.device)
            header = places.header_of(tables.owner[row, block], block, state.number)
            state.headers[host] = header.to(state.headers.device)
            block += 1
        state.counters[places.C_WRITTEN] += (block - int(state.landed[row, 0])) * shape.kv_heads
        state.landed[row] = block


def attend(
    state: LayerState, tables: Tables, q: torch.Tensor, shape: KvShape, scale: float
) -> torch.Tensor:
    """Attention of [rows, queries, heads, head_dim] over what is resident; same shape out."""
    rows, queries = q.shape[:2]
    device = q.device
    slots = max(int(tables.slots.max()), 1)
    slot = torch.arange(slots, device=device)
    block = slot.expand(rows, shape.kv_heads, slots)
    in_map = torch.full_like(block, EMPTY)
    width = min(slots, state.map.shape[-1])
    in_map[..., :width] = state.map[..., :width].long()
    block = torch.where((tables.sparse > 0)[:, None, None], in_map, block)
    position = block[..., None] * shape.block + torch.arange(shape.block, device=device)
    live = (block >= 0) & (slot < tables.slots[:, None])[:, None]
    last = tables.length[:, None] + torch.arange(queries, device=device)
    seen = (position[:, :, None] <= last[:, None, :, None, None]) & live[:, :, None, :, None]
    pages = tables.pages[:, :slots].clamp(min=0).long()
    entries = state.pages[pages].transpose(1, 2)  # [R, H, slots, 2, block, D]
    keys, values = (entries[:, :, :, n].flatten(2, 3) for n in range(2))
    x = q.unflatten(2, (shape.kv_heads, shape.group)).float()
    weights = torch.einsum("rqhgd,rhtd->rhgqt", x, keys.float()) * scale
    weights = weights.masked_fill(~seen.flatten(3)[:, :, None], -torch.inf).softmax(-1)
    weights = weights.nan_to_num(0.0)  # rows of no request
    out = torch.einsum("rhgqt,rhtd->rqhgd", weights, values.float())
    return out.flatten(2, 3).to(q.dtype)
