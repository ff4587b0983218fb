"""Kernels that decide: score every block by its summary, and select with capped eviction.

Nothing here leaves the GPU or depends on the host, so both are captured in graphs. Selection needs
no sort: the K-th best score is found bit by bit (32 counts over the row), which costs the same for
any K and keeps a row in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tierd.kv import layer as places

if triton.knobs.runtime.interpret:

    def count(marks: tl.tensor) -> int:
        """Count marks; the interpreter's own sum costs milliseconds, and there are 100 a row."""
        return int(marks.handle.data.sum())

else:

    @triton.jit
    def count(marks):
        """Count marks."""
        return tl.sum(marks.to(tl.int32), 0)


C_WANTED = tl.constexpr(places.C_WANTED)
C_HIT = tl.constexpr(places.C_HIT)


@triton.jit(do_not_specialize=["host_stride", "query_row"])
def score(
    q, summaries, scores, host_table, length, sparse, host_stride, query_row,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Bound q . k over each block's keys: q+ . max + q- . min; the best of a group's heads.

    Grid: tiles x heads x rows. Blocks of the last two places before the context's end are not
    scored: they are in the ring, and attended anyway.
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    last = tl.load(length + row) // BLOCK - 1
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if (tl.load(sparse + row) != 0) & (tl.program_id(0) * TILE < last):
        inside = block < last
        d = tl.arange(0, DIM)
        m = tl.arange(0, ROWS)
        query = ((row * QUERIES + query_row) * HEADS + head) * GROUP + m
        x = tl.load(q + query[:, None] * DIM + d[None, :], mask=(m < GROUP)[:, None], other=0)
        zero = tl.zeros((ROWS, DIM), x.dtype)
        host = tl.load(host_table + row * host_stride + block, mask=inside, other=0).to(tl.int64)
        at = summaries + (host * HEADS + head)[:, None] * 2 * DIM + d[None, :]
        low = tl.load(at, mask=inside[:, None], other=0)
        high = tl.load(at + DIM, mask=inside[:, None], other=0)
        found = tl.dot(tl.where(x > 0, x, zero), tl.trans(high), input_precision=PRECISION)
        found += tl.dot(tl.where(x < 0, x, zero), tl.trans(low), input_precision=PRECISION)
        best = tl.max(tl.where((m < GROUP)[:, None], found, float("-inf")), 0)
        tl.store(scores + (row * HEADS + head) * host_stride + block, best, mask=inside)


@triton.jit
def sortable(x):
    """Map fp32 to int64 so that integers order as the numbers do; all are at least 1."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int64) + 0x80000001


@triton.jit
def largest(key, wanted, BITS: tl.constexpr):
    """Mark the `wanted` largest positive keys, the earlier ones where keys are equal.

    Keys of 0 are never marked; there must be at least `wanted` positive ones.
    """
    threshold = tl.zeros((), tl.int64)
    for n in range(BITS):
        trial = threshold | (tl.full((), 1, tl.int64) << (BITS - 1 - n))
        enough = count(key >= trial) >= wanted
        threshold = tl.where(enough, trial, threshold)
    above = key > threshold
    equal = (key == threshold) & (key > 0)
    spare = wanted - count(above)
    return (above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))) & (wanted > 0)


@triton.jit(do_not_specialize=["host_stride"])
def select(
    scores, map_, slot_of, stamp, plan_block, plan_slot, plan_count, length, sparse, step, admit,
    counters, host_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, K: tl.constexpr,
    SLOTS: tl.constexpr, PLACES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Choose the next step's set and plan how to get nearer to it. Grid: rows x heads.

    The best K blocks are wanted. Those that are resident stay where they are; of the others the
    best few (the cap) are admitted, each in the place of the resident block that was selected
    longest ago (section 4.2.3).
    """
    row = tl.program_id(0)
    item = row * HEADS + tl.program_id(1)
    last = tl.load(length + row) // BLOCK - 1
    if (tl.load(sparse + row) == 0) | (last <= 0):
        tl.store(plan_count + item, 0)
    else:
        now = tl.load(step)
        block = tl.arange(0, BLOCKS)
        inside = block < last
        row_scores = tl.load(scores + item * host_stride + block, mask=inside, other=0)
        key = tl.where(inside, sortable(row_scores), 0)
        wanted = largest(key, tl.minimum(last, K), 33)
        held = tl.load(slot_of + item * host_stride + block, mask=inside, other=-1)
        hit = wanted & (held >= 0) & (held < K)
        tl.store(stamp + item * SLOTS + held, now, mask=hit)
        missing = wanted & (hit == 0)
        moved = tl.minimum(count(missing), tl.minimum(tl.load(admit), CAP))
        admitted = largest(tl.where(missing, key, 0), moved, 33)
        tl.debug_barrier()
        place = tl.arange(0, PLACES)
        stamps = tl.load(stamp + item * SLOTS + place, mask=place < K, other=0)
        empty = tl.load(map_ + item * SLOTS + place, mask=place < K, other=0) < 0
        age = tl.where(empty, now + 1, now - stamps).to(tl.int64)
        victim = largest(tl.where((place < K) & (stamps != now), age, 0), moved, 32)
        at = tl.cumsum(admitted.to(tl.int32), 0) - 1
        tl.store(plan_block + item * CAP + at, block, mask=admitted)
        at = tl.cumsum(victim.to(tl.int32), 0) - 1
        tl.store(plan_slot + item * CAP + at, place, mask=victim)
        tl.debug_barrier()
        tl.store(stamp + item * SLOTS + place, now, mask=victim)
        tl.store(plan_count + item, moved)
        tl.atomic_add(counters + C_WANTED, tl.minimum(last, K).to(tl.int64), sem="relaxed")
        tl.atomic_add(counters + C_HIT, tl.sum(hit.to(tl.int64), 0), sem="relaxed")
