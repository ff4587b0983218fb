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
            tl.atomic_add(counters + C_WRITTEN, (complete - first).to(tl.int64))


@triton.jit
def is_owned(headers, owner, host, block, layer):
    """Whether a host page carries the header that this request's block must have."""
    request = tl.load(headers + host * 4) == tl.load(owner)
    generation = tl.load(headers + host * 4 + 3) == tl.load(owner + 1)
    place = (tl.load(headers + host * 4 + 1) == block) & (tl.load(headers + host * 4 + 2) == layer)
    return request & generation & place


@triton.jit(do_not_specialize=["pages_stride", "host_stride", "layer", "items"])
def transfer(
    plan_block, plan_slot, plan_count, pages, host, headers, page_table, host_table, owner, map_,
    slot_of, counters, pages_stride, host_stride, layer, items,
    HEADS: tl.constexpr, WORDS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Carry the plan out: fetch entries into the pages they replace, and turn the map over.

    A block that still stands in its ring slot is copied from there. An entry whose host page
    carries another owner's header is not stored: the slot is left empty and the mismatch counted.
    Entry and header are read together, since each trip over the link takes a microsecond or two;
    only what is stored depends on the header.

    Grid: any number of programs; each takes every so many-th entry of the plan, so that few
    multiprocessors suffice to fill the link.
    """
    at = tl.program_id(0)
    word = tl.arange(0, WORDS)
    while at < items * CAP:
        # Neighbouring programs take different requests: their plans are equally long.
        item = at % items
        n = at // items
        if n < tl.load(plan_count + item):
            row = item // HEADS
            head = item % HEADS
            inverse = slot_of + item * host_stride
            block = tl.load(plan_block + item * CAP + n)
            slot = tl.load(plan_slot + item * CAP + n)
            source = tl.load(host_table + row * host_stride + block).to(tl.int64)
            page = tl.load(page_table + row * pages_stride + slot).to(tl.int64)
            held = tl.load(inverse + block)
            old = tl.load(map_ + item * SLOTS + slot)
            to = pages + (page * HEADS + head) * WORDS + word
            good = held >= K
            if good:
                near = tl.load(page_table + row * pages_stride + held).to(tl.int64)
                tl.store(to, tl.load(pages + (near * HEADS + head) * WORDS + word))
            else:
                known = tl.maximum(source, 0)
                entry = tl.load(host + (known * HEADS + head) * WORDS + word)
                own = owner + (row * host_stride + block) * 2
                good = is_owned(headers, own, known, block, layer) & (source >= 0)
                if good:
                    tl.store(to, entry)
            if old >= 0:
                tl.store(inverse + old, -1)
                tl.atomic_add(counters + C_EVICTED, tl.full((), 1, tl.int64))
            if good:
                if held >= K:
                    tl.store(map_ + item * SLOTS + held, -1)
                tl.store(map_ + item * SLOTS + slot, block)
                tl.store(inverse + block, slot)
                tl.atomic_add(counters + C_ADMITTED, tl.full((), 1, tl.int64))
            else:
                tl.store(map_ + item * SLOTS + slot, -1)
                tl.atomic_add(counters + C_WRONG_OWNER, tl.full((), 1, tl.int64))
        at += tl.num_programs(0)
