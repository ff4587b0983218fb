"""Wait for a server's answer, then bring the rows from their pages into their slots.

`wait_fill` is one kernel: program 0 looks at the channel, the others at a word in device memory
that program 0 releases; each program fills its share. The gather is a kernel of its own behind it.
Why this may be fused, and why the gather may not, stands in docs/gpu.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tierd.gpu.kernels_sync import (
    acquire_sys,
    halt,
    mix32,
    mix_words,
    now_ns,
    pause,
    release_gpu,
    release_sys_u64,
    row_seed,
)
from tierd.gpu.state import (
    ARENA_D,
    ARENA_G,
    ARENA_NONE,
    F_CODE,
    F_DETAIL,
    F_SEQUENCE,
    FAULT_STATUS,
    FAULT_TAG,
    FAULT_TIMEOUT,
    L_TARGET,
    LATE_NS,
    R_D_ARENA,
    R_D_COUNT,
    R_D_FIRST,
    R_FAULT,
    R_FILLED,
    R_READY,
    S_FAILED,
    S_LATE_STEPS,
    S_STALL_NS,
    S_STEPS,
    S_TAG_ERRORS,
)
from tierd.io import _core

_P = _core.protocol
STATUS_D = tl.constexpr(_P.OFFSET_STATUS_D // 8)  # in 64-bit words of the ring's control block
STATUS_G = tl.constexpr(_P.OFFSET_STATUS_G // 8)
STATUS_OK = tl.constexpr(int(_P.Status.ok))
PAGE_WORDS = tl.constexpr(1024)
SLOTS_MASK = tl.constexpr(7)  # descriptors - 1


@triton.jit
def set_fault(ring, fault, code, sequence, detail):
    """Say what went wrong, in device memory for the kernels and in host memory for people."""
    tl.store(ring + R_FAULT, code)
    tl.store(fault + F_SEQUENCE, sequence)
    tl.store(fault + F_DETAIL, detail)
    release_sys_u64(fault + F_CODE, tl.full((), code, tl.int64))


@triton.jit
def names(word, want):
    """Whether a status word answers the request.

    A word that nobody has written names request 0, which comes round every 2^32 requests, with
    status none.
    """
    return ((word >> 32).to(tl.int32) == want) & ((word & 0xFFFFFFFF) != 0)


@triton.jit
def wait_answer(control64, sequence, timeout_ns):
    """Wait until either server has answered `sequence`; returns (ns waited, still missing).

    A server stores a request's status word (release) after its pages and after every earlier
    answer, so the word itself says all; `done` would be a second trip to host memory.
    """
    at = sequence & SLOTS_MASK
    want = sequence.to(tl.int32)
    start = now_ns()
    waited = start - start
    word_d = tl.load(control64 + STATUS_D + at, volatile=True)
    word_g = tl.load(control64 + STATUS_G + at, volatile=True)
    missing = (names(word_d, want) | names(word_g, want)) == 0
    while missing & (waited < timeout_ns):
        pause()
        word_d = tl.load(control64 + STATUS_D + at, volatile=True)
        word_g = tl.load(control64 + STATUS_G + at, volatile=True)
        missing = (names(word_d, want) | names(word_g, want)) == 0
        waited = now_ns() - start
    acquire_sys()
    return waited, missing, word_d, word_g


@triton.jit
def judge(word_d, word_g, sequence):
    """Return (arena, status) of an answered request, from the status word that carries it."""
    want = sequence.to(tl.int32)
    by_daemon = names(word_d, want)
    by_guardian = names(word_g, want)
    status_d = tl.where(by_daemon, word_d & 0xFFFFFFFF, 0)
    status_g = tl.where(by_guardian, word_g & 0xFFFFFFFF, 0)
    ok_d = status_d == STATUS_OK
    ok_g = status_g == STATUS_OK
    arena = tl.where(ok_d, ARENA_D, tl.where(ok_g, ARENA_G, ARENA_NONE))
    status = tl.where(by_daemon, status_d, status_g)
    return arena.to(tl.int64), tl.where(ok_g, status_g, status).to(tl.int64)


@triton.jit
def names_row(word, table, row):
    """Whether a directory word names the row, whatever its stamp."""
    return ((word ^ ((table.to(tl.int64) << 58) | ((row + 1) << 24))) >> 24) == 0


@triton.jit
def fill_row(
    row, slot, table, sequence, page, slots, words, ring, fault, stats, key0, key1, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Copy one row from its page to its slot, its tag recomputed on the way.

    A claim that waited for AGE_MAX kicks may have gone to another row: then nothing is copied.
    """
    in_page = row % ROWS_PER_PAGE
    index = tl.arange(0, BLOCK)
    inside = index < ROW_WORDS
    # All loads are in flight together: the tag is one more read of host memory, not one more trip.
    # Volatile: a kick that fills for itself has claimed in the same kernel.
    word = tl.load(words + slot, volatile=True)
    tag = tl.load(page + ROWS_PER_PAGE * ROW_WORDS + in_page)
    data = tl.load(page + in_page * ROW_WORDS + index, mask=inside, other=0)
    good = True
    if CHECK:
        seed = row_seed(row, key0, key1)
        mixed = mix_words(data.to(tl.uint32, bitcast=True), index, seed)
        mixed = tl.where(inside, mixed, 0).to(tl.int32, bitcast=True)
        folded = tl.xor_sum(mixed, 0).to(tl.uint32, bitcast=True)
        good = mix32(folded ^ seed) == tag.to(tl.uint32, bitcast=True)
    named = names_row(word, table, row)
    if good:
        tl.store(slots + slot * ROW_WORDS + index, data, mask=inside & named)
    elif named:
        tl.store(words + slot, tl.full((), 0, tl.int64))
        tl.store(stats + S_TAG_ERRORS, tl.load(stats + S_TAG_ERRORS) + 1)
        set_fault(ring, fault, FAULT_TAG, sequence, row)
        halt(grace_ns)


@triton.jit
def fill_request(
    sequence, arena_kind, first, step, table, ring, list_rows, list_slots, arena, arena_g_words,
    slots, words, fault, stats, rows_max, arena_pages, key0, key1, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Fill the rows first, first + step, ... of one answered request; empty them if it failed."""
    at = sequence & SLOTS_MASK
    count = tl.load(ring + R_D_COUNT + at)
    first_page = tl.load(ring + R_D_FIRST + at)
    lists = (sequence & 15) * rows_max
    base = arena + tl.where(arena_kind == ARENA_G, arena_g_words, 0)
    k = first
    while k < count:
        slot = tl.load(list_slots + lists + k).to(tl.int64)
        row = tl.load(list_rows + lists + k)
        if slot >= 0:
            if arena_kind == ARENA_NONE:
                if names_row(tl.load(words + slot, volatile=True), table, row):
                    tl.store(words + slot, tl.full((), 0, tl.int64))
            else:
                page = base + ((first_page + k) % arena_pages) * PAGE_WORDS
                fill_row(
                    row, slot, table, sequence, page, slots, words, ring, fault, stats, key0,
                    key1, grace_ns, ROWS_PER_PAGE, ROW_WORDS, BLOCK, CHECK,
                )  # fmt: skip
        k += step


@triton.jit
def settle(sequence, missing, word_d, word_g, ring, fault, stats, timeout_ns):
    """Find one request's arena after the wait; a failed one sets the fault. Returns the arena."""
    arena_kind, status = judge(word_d, word_g, sequence)
    if missing:
        arena_kind = tl.full((), ARENA_NONE, tl.int64)
    if arena_kind == ARENA_NONE:
        tl.store(stats + S_FAILED, tl.load(stats + S_FAILED) + 1)
        if missing:
            set_fault(ring, fault, FAULT_TIMEOUT, sequence, timeout_ns)
        else:
            set_fault(ring, fault, FAULT_STATUS, sequence, status)
    return arena_kind


@triton.jit(do_not_specialize=[
    "table", "arena_g_words", "rows_max", "arena_pages", "key0", "key1", "timeout_ns", "grace_ns",
])  # fmt: skip
def wait_fill(
    lane, table, ring, control64, list_rows, list_slots, arena, arena_g_words, slots, words,
    fault, stats, rows_max, arena_pages, key0, key1, timeout_ns, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Wait for everything the lane needs, and fill it. Nothing was missing: look and leave."""
    program = tl.program_id(0)
    target = tl.load(lane + L_TARGET)
    filled = tl.load(ring + R_FILLED)
    if program == 0:
        faulty = tl.load(ring + R_FAULT) != 0
        tl.store(stats + S_STEPS, tl.load(stats + S_STEPS) + 1)
        if faulty:
            halt(grace_ns)
    if target > filled:
        failed = program < 0
        if program == 0:
            waited, missing, word_d, word_g = wait_answer(control64, target, timeout_ns)
            tl.store(stats + S_STALL_NS, tl.load(stats + S_STALL_NS) + waited)
            if waited > LATE_NS:
                tl.store(stats + S_LATE_STEPS, tl.load(stats + S_LATE_STEPS) + 1)
            s = filled + 1
            while s <= target:
                if s < target:
                    _, _, older_d, older_g = wait_answer(control64, s, timeout_ns)
                    kind = settle(s, missing, older_d, older_g, ring, fault, stats, timeout_ns)
                else:
                    kind = settle(s, missing, word_d, word_g, ring, fault, stats, timeout_ns)
                tl.store(ring + R_D_ARENA + (s & SLOTS_MASK), kind)
                failed = failed | (kind == ARENA_NONE)
                s += 1
            release_gpu(ring + R_READY, target)
        else:
            # Bounded: program 0 starts first and its own wait is bounded.
            while tl.load(ring + R_READY, volatile=True) < target:
                pause()
            acquire_sys()
        s = filled + 1
        while s <= target:
            kind = tl.load(ring + R_D_ARENA + (s & SLOTS_MASK), volatile=True)
            fill_request(
                s, kind, program.to(tl.int64), tl.num_programs(0), table, ring, list_rows,
                list_slots, arena, arena_g_words, slots, words, fault, stats, rows_max, arena_pages,
                key0.to(tl.uint32), key1.to(tl.uint32), grace_ns,
                ROWS_PER_PAGE, ROW_WORDS, BLOCK, CHECK,
            )  # fmt: skip
            s += 1
        if failed:
            halt(grace_ns)
