"""Decode attention over paged KV: dense requests and working sets in one launch.

The same kernel serves both, so a comparison of the two compares what they read. A token is
visible by its position alone, so the real token's row does not see the draft's key, empty slots
and the unwritten end of a block fall out, and the order of blocks in a working set means nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:

    def bound(x: tl.tensor) -> int:
        """Turn a loop's bound into a number: the interpreter's ranges take no tensors."""
        return int(x.handle.data.item())

else:

    @triton.jit
    def bound(x):
        """Return a loop's bound."""
        return x


@triton.jit(do_not_specialize=["pages_stride"])
def attend(
    q, pages, out, partial, extremes, page_table, map_, length, sparse, slots, pages_stride, scale,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one request's KV head for all its query rows. Grid: rows * heads x splits."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    split = tl.program_id(1)
    start = tl.load(length + row)
    is_sparse = tl.load(sparse + row) != 0
    used = tl.load(slots + row)
    m = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    in_rows = m < QUERIES * GROUP
    query = (row * QUERIES + m // GROUP) * HEADS * GROUP + head * GROUP + m % GROUP
    x = tl.load(q + query[:, None] * DIM + d[None, :], mask=in_rows[:, None], other=0)
    sees = start + tl.where(in_rows, m // GROUP, 0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    tiles = tl.cdiv(tl.cdiv(used * BLOCK, TILE), SPLITS)
    lane = tl.arange(0, TILE)
    for tile in tl.range(bound(split * tiles), bound((split + 1) * tiles), num_stages=STAGES):
        slot = (tile * TILE + lane) // BLOCK
        inside = slot < used
        page = tl.load(page_table + row * pages_stride + slot, mask=inside, other=0).to(tl.int64)
        held = tl.load(
            map_ + (row * HEADS + head) * SLOTS + slot, mask=inside & is_sparse, other=-1
        )
        block = tl.where(is_sparse, held, slot)
        position = block * BLOCK + lane % BLOCK
        live = inside & (block >= 0) & (position < start + QUERIES)
        at = pages + (page * HEADS + head) * 2 * BLOCK * DIM + lane % BLOCK * DIM
        keys = tl.load(at[:, None] + d[None, :], mask=live[:, None], other=0)
        values = tl.load(at[:, None] + BLOCK * DIM + d[None, :], mask=live[:, None], other=0)
        s = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * (scale * 1.4426950408889634)
        s = tl.where(live[None, :] & (position[None, :] <= sees[:, None]), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0, higher)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        top = higher
    if SPLITS == 1:
        result = acc / tl.where(total > 0, total, 1)[:, None]
        tl.store(
            out + query[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty),
            mask=in_rows[:, None],
        )  # fmt: skip
    else:
        at = tl.program_id(0) * SPLITS + split
        tl.store(partial + (at * ROWS + m)[:, None] * DIM + d[None, :], acc)
        tl.store(extremes + at * ROWS * 2 + m, top)
        tl.store(extremes + at * ROWS * 2 + ROWS + m, total)


@triton.jit
def merge(
    partial, extremes, out,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one request's KV head. Grid: rows * heads."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    m = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    first = tl.program_id(0) * SPLITS
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    for n in tl.static_range(SPLITS):
        highest = tl.maximum(highest, tl.load(extremes + (first + n) * ROWS * 2 + m))
    highest = tl.where(highest == float("-inf"), 0, highest)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for n in tl.static_range(SPLITS):
        at = first + n
        weight = tl.exp2(tl.load(extremes + at * ROWS * 2 + m) - highest)
        mass += tl.load(extremes + at * ROWS * 2 + ROWS + m) * weight
        acc += tl.load(partial + (at * ROWS + m)[:, None] * DIM + d[None, :]) * weight[:, None]
    result = acc / tl.where(mass > 0, mass, 1)[:, None]
    query = (row * QUERIES + m // GROUP) * HEADS * GROUP + head * GROUP + m % GROUP
    tl.store(
        out + query[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty),
        mask=(m < QUERIES * GROUP)[:, None],
    )  # fmt: skip
