"""Kernels that move keys and values: append with summaries, write-back, transfer.

Entries of one block and one KV head are contiguous (keys, then values), in HBM pages and in the
host pool alike, so moving one is a single copy of some KiB. Host memory is read and written at its
own address (UVA); nothing here waits for anything: streams and events order the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tierd.kv import layer as places
from tierd.kv.shape import LOCAL as _LOCAL

LOCAL = tl.constexpr(_LOCAL)
C_ADMITTED = tl.constexpr(places.C_ADMITTED)
C_EVICTED = tl.constexpr(places.C_EVICTED)
C_WRONG_OWNER = tl.constexpr(places.C_WRONG_OWNER)
C_WRITTEN = tl.constexpr(places.C_WRITTEN)


@triton.jit
def slot_for(block, sparse, K: tl.constexpr):
    """GPU logical block of a block at the end of the context: its own, or its ring slot."""
    return tl.where(sparse != 0, K + block % LOCAL, block)


@triton.jit(do_not_specialize=["pages_stride", "host_stride"])
def append(
    k, v, pages, page_table, host_table, map_, slot_of, length, sparse, slots, summaries,
    pages_stride, host_stride,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, NEW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store a step's keys and values, and summarise the blocks they touch. Grid: rows x heads.

    A block's first token opens its ring slot, which until then held the block LOCAL blocks
    earlier. Summaries of touched blocks are made anew from all keys there are: what a rejected
    draft left in one is gone as soon as its place is written again.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    if tl.load(slots + row) > 0:
        start = tl.load(length + row)
        is_sparse = tl.load(sparse + row)
        d = tl.arange(0, DIM)
        for i in tl.static_range(QUERIES):
            block = (start + i) // BLOCK
            slot = slot_for(block, is_sparse, K)
            page = tl.load(page_table + row * pages_stride + slot).to(tl.int64)
            at = pages + (page * HEADS + head) * 2 * BLOCK * DIM + (start + i) % BLOCK * DIM + d
            given = ((row * QUERIES + i) * HEADS + head) * DIM + d
            tl.store(at, tl.load(k + given))
            tl.store(at + BLOCK * DIM, tl.load(v + given))
            if is_sparse != 0:
                where = map_ + (row * HEADS + head) * SLOTS + slot
                inverse = slot_of + (row * HEADS + head) * host_stride
                old = tl.load(where)
                if old != block:
                    if old >= 0:
                        if tl.load(inverse + old) == slot:
                            tl.store(inverse + old, -1)
                    tl.store(where, block)
                    tl.store(inverse + block, slot)
            tl.debug_barrier()
        token = tl.arange(0, BLOCK)
        for n in tl.static_range(NEW_BLOCKS):
            block = start // BLOCK + n
            inside = block * BLOCK + token < start + QUERIES
            host = tl.load(
                host_table + row * host_stride + block, mask=block < host_stride, other=-1
            )
            if (block * BLOCK < start + QUERIES) & (host >= 0):
                slot = slot_for(block, is_sparse, K)
                page = tl.load(page_table + row * pages_stride + slot).to(tl.int64)
                first = pages + (page * HEADS + head) * 2 * BLOCK * DIM
                keys = tl.load(
                    first + token[:, None] * DIM + d[None, :], mask=inside[:, None], other=0
                ).to(tl.float32)
                low = tl.min(tl.where(inside[:, None], keys, float("inf")), 0)
                high = tl.max(tl.where(inside[:, None], keys, float("-inf")), 0)
                out = summaries + (host.to(tl.int64) * HEADS + head) * 2 * DIM + d
                tl.store(out, low.to(summaries.dtype.element_ty))
                tl.store(out + DIM, high.to(summaries.dtype.element_ty))


@triton.jit(do_not_specialize=["pages_stride", "host_stride", "layer"])
def write_back(
    pages, host, headers, page_table, host_table, owner, landed, length, sparse, slots, counters,
    pages_stride, host_stride, layer,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Copy every complete block that has not landed to its host page. Grid: rows x heads.

    Blocks of tokens before this step's are final: a draft is accepted or gone by then. The owner
    header is written by the program of head 0.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    if tl.load(slots + row) > 0:
        is_sparse = tl.load(sparse + row)
        complete = tl.load(length + row) // BLOCK
        first = tl.load(landed + row * HEADS + head)
        tl.debug_barrier()  # all warps have read it before the first that is done moves it on
        word = tl.arange(0, WORDS)
        block = first
        while block < complete:
            to = tl.load(host_table + row * host_stride + block).to(tl.int64)
            if to < 0:  # no host page yet: this block and the later ones wait
                complete = block
            else:
                slot = slot_for(block, is_sparse, K)
                page = tl.load(page_table + row * pages_stride + slot).to(tl.int64)
                entry = tl.load(pages + (page * HEADS + head) * WORDS + word)
                tl.store(host + (to * HEADS + head) * WORDS + word, entry)
                if head == 0:
                    own = owner + (row * host_stride + block) * 2
                    tl.store(headers + to * 4, tl.load(own))
                    tl.store(headers + to * 4 + 1, block)
                    tl.store(headers + to * 4 + 2, layer)
                    tl.store(headers + to * 4 + 3, tl.load(own + 1))
                block += 1
        if complete > first:
            tl.store(landed + row * HEADS + head, complete)
            add(counters + C_WRITTEN, complete - first)


@triton.jit
def is_owned(headers, owner, host, block, layer, use):
    """Whether host pages carry the headers that these requests' blocks must have, where in use."""
    at = headers + host * 4
    request = tl.load(at, mask=use, other=0) == tl.load(owner, mask=use, other=0)
    generation = tl.load(at + 3, mask=use, other=0) == tl.load(owner + 1, mask=use, other=0)
    place = (tl.load(at + 1, mask=use, other=0) == block) & (
        tl.load(at + 2, mask=use, other=0) == layer
    )
    return use & request & generation & place


@triton.jit(do_not_specialize=["pages_stride", "host_stride", "layer", "items"])
def transfer(
    plan_block, plan_slot, plan_count, admit, pages, host, headers, page_table, host_table, owner,
    map_, slot_of, counters, pages_stride, host_stride, layer, items,
    HEADS: tl.constexpr, WORDS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    CAP: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Carry the plan out: fetch entries into the pages they replace, and turn the map over.

    A block that still stands in its ring slot is copied from there. An entry whose host page
    carries another owner's header is not stored: the slot is left empty and the mismatch counted.
    Entry and header are read together, since each trip over the link takes a microsecond or two;
    only what is stored depends on the header.

    Grid: any number of programs. Each takes ENTRIES of the plan at a time, all under way together,
    and only of those places that a step may admit to: passing over all that a plan may have, 122
    of 128 at a cap of 0.05, took as long as the transfer. An atomic operation for each entry would
    order everything around it, so counts are added once.
    """
    word = tl.arange(0, WORDS)[None, :]
    lane = tl.arange(0, ENTRIES)
    none = tl.zeros((ENTRIES,), tl.int32)
    admitted, evicted, wrong = none, none, none
    planned = items * tl.minimum(tl.load(admit), CAP)
    first = tl.program_id(0) * ENTRIES
    while first < planned:
        # Neighbouring places are different requests': their plans are equally long.
        item = (first + lane) % items
        n = (first + lane) // items
        use = n < tl.load(plan_count + item)
        row = item // HEADS
        head = item % HEADS
        inverse = slot_of + item * host_stride
        block = tl.load(plan_block + item * CAP + n, mask=use, other=0)
        slot = tl.load(plan_slot + item * CAP + n, mask=use, other=0)
        at = row * host_stride + block
        source = tl.load(host_table + at, mask=use, other=-1).to(tl.int64)
        page = tl.load(page_table + row * pages_stride + slot, mask=use, other=0).to(tl.int64)
        held = tl.load(inverse + block, mask=use, other=-1)
        old = tl.load(map_ + item * SLOTS + slot, mask=use, other=-1)
        near = held >= K
        far = use & (held < K) & (source >= 0)
        entry = tl.load(
            host + ((source * HEADS + head) * WORDS)[:, None] + word, mask=far[:, None], other=0
        )
        good = near | is_owned(headers, owner + at * 2, source, block, layer, far)
        beside = tl.load(page_table + row * pages_stride + held, mask=near, other=0).to(tl.int64)
        entry = tl.load(
            pages + ((beside * HEADS + head) * WORDS)[:, None] + word, mask=near[:, None],
            other=entry,
        )  # fmt: skip
        tl.store(pages + ((page * HEADS + head) * WORDS)[:, None] + word, entry, mask=good[:, None])
        tl.debug_barrier()  # all warps have read the map before one of them turns it over
        turn_over(map_ + item * SLOTS, inverse, block, slot, held, old, use, near, good)
        admitted += good.to(tl.int32)
        evicted += (use & (old >= 0)).to(tl.int32)
        wrong += (use & (good == 0)).to(tl.int32)
        first += tl.num_programs(0) * ENTRIES
    count_moves(counters, tl.sum(admitted, 0), tl.sum(evicted, 0), tl.sum(wrong, 0))


@triton.jit
def count_moves(counters, admitted, evicted, wrong):
    """Add up what a program has moved."""
    add(counters + C_ADMITTED, admitted)
    add(counters + C_EVICTED, evicted)
    add(counters + C_WRONG_OWNER, wrong)


@triton.jit
def turn_over(map_, inverse, block, slot, held, old, use, near, good):
    """Let the map and its inverse say what stands in the slots of a plan's places now."""
    tl.store(inverse + old, -1, mask=use & (old >= 0))
    tl.store(map_ + held, -1, mask=near)
    tl.store(map_ + slot, tl.where(good, block, -1), mask=use)
    tl.store(inverse + block, slot, mask=good)


@triton.jit
def add(counter, value):
    """Count, in no order with anything else."""
    if value > 0:
        tl.atomic_add(counter, value.to(tl.int64), sem="relaxed")
