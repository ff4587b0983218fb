"""The end of a step's lookups: rows from slots, pages or the dram image, in the model's dtype.

One warp serves a few rows. A slot is used only if its directory word still names the row; a row
read from a page or from the dram image is used only if its tag matches. So whatever an engine does
between kick and gather, it gets the right row or a stop, never another row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tierd.gpu.kernels_fill import PAGE_WORDS, SLOTS_MASK, set_fault
from tierd.gpu.kernels_kick import DESC_ZERO
from tierd.gpu.kernels_sync import halt, mix32, mix_words, row_seed, to_bf16
from tierd.gpu.state import (
    ARENA_G,
    FAULT_BAD_ID,
    FAULT_CHANGED,
    FAULT_TAG,
    L_FIRST,
    L_STATE,
    L_TARGET,
    LANE_GATHERED,
    R_D_ARENA,
    R_FILLED,
    S_STEPS,
    S_TAG_ERRORS,
)

# How a row becomes values; the order is that of FORMATS in table.py.
E4M3_E8M0 = tl.constexpr(0)
E4M3 = tl.constexpr(1)
BF16 = tl.constexpr(2)
RAW = tl.constexpr(3)


@triton.jit
def e8m0_scale(exponent, ZERO: tl.constexpr):
    """Return 2^(exponent - 127) as fp32; an exponent of 0 is the fp32 with the bits ZERO.

    These are the subnormal 2^-127's by the format, and 0 in engines that only shift the exponent.
    """
    bits = tl.where(exponent == 0, ZERO, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def finish_value(value, CANONICAL: tl.constexpr):
    """Round fp32 to bf16; with CANONICAL, -0 becomes +0 as a sharded engine's all-reduce does."""
    rounded = to_bf16(value)
    if CANONICAL:
        bits = rounded.to(tl.int16, bitcast=True)
        rounded = tl.where(bits == -32768, 0, bits).to(tl.bfloat16, bitcast=True)
    return rounded


@triton.jit
def plain_value(data, FORMAT: tl.constexpr, CANONICAL: tl.constexpr):
    """Turn an element of an unscaled format into what the output holds."""
    value = data
    if FORMAT == E4M3:
        value = finish_value(data.to(tl.float8e4nv, bitcast=True).to(tl.float32), CANONICAL)
    if FORMAT == BF16:
        if CANONICAL:
            value = tl.where(data == -32768, 0, data)
    return value


@triton.jit
def check_tags(
    rows, pages, from_page, ring, fault, stats, sequence, key0, key1, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stop unless every row that is about to be read from its page carries its tag.

    `pages` points, per row, at the page's 32-bit words.
    """
    index = tl.arange(0, BLOCK)
    in_page = rows % ROWS_PER_PAGE
    tags = tl.load(pages + ROWS_PER_PAGE * ROW_WORDS + in_page, mask=from_page, other=0)
    inside = (index < ROW_WORDS)[None, :] & from_page[:, None]
    words = tl.load(
        pages[:, None] + (in_page * ROW_WORDS)[:, None] + index[None, :], mask=inside, other=0
    )
    judge_tags(
        rows, words, index, inside, tags, from_page, ring, fault, stats, sequence, key0, key1,
        grace_ns,
    )  # fmt: skip


@triton.jit
def judge_tags(
    rows, words, index, inside, tags, from_page, ring, fault, stats, sequence, key0, key1, grace_ns
):
    """Stop unless the words [rows, words of a row] carry the tags."""
    seed = row_seed(rows, key0, key1)
    mixed = mix_words(words.to(tl.uint32, bitcast=True), index[None, :], seed[:, None])
    folded = tl.xor_sum(tl.where(inside, mixed, 0).to(tl.int32, bitcast=True), 1)
    found = mix32(folded.to(tl.uint32, bitcast=True) ^ seed)
    wrong = from_page & (found != tags.to(tl.uint32, bitcast=True))
    stop_if(wrong, rows, FAULT_TAG, ring, fault, stats, sequence, grace_ns)


@triton.jit
def stop_if(wrong, rows, code, ring, fault, stats, sequence, grace_ns):
    """Set the fault and stop the GPU if any row is wrong; names the largest of them."""
    if tl.max(wrong.to(tl.int32), 0) > 0:
        tl.store(stats + S_TAG_ERRORS, tl.load(stats + S_TAG_ERRORS) + (code == FAULT_TAG))
        set_fault(ring, fault, code, sequence, tl.max(tl.where(wrong, rows, -1), 0))
        halt(grace_ns)


@triton.jit
def locate(
    ids, cols, stride0, stride1, count, row_lo, row_hi, desc, words, table, ROWS: tl.constexpr,
    LOSSY: tl.constexpr,
):  # fmt: skip
    """Return (index, inside, rows, places, hit, changed) of this program's rows.

    With LOSSY a row of this rank may have no place; otherwise one without was not kicked.
    """
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < count
    rows = tl.load(
        ids + (index // cols) * stride0 + (index % cols) * stride1, mask=inside, other=0
    ).to(tl.int64)
    places = tl.load(desc + index, mask=inside, other=-1)
    hit = places >= 0
    found = tl.load(words + places, mask=hit, other=0)
    key = (table.to(tl.int64) << 58) | ((rows + 1) << 24)
    changed = hit & (((found ^ key) >> 24) != 0)
    if not LOSSY:
        changed |= inside & (places == DESC_ZERO) & (rows >= row_lo) & (rows < row_hi)
    return index, inside, rows, places, hit, changed


@triton.jit
def page_numbers(places, lane, ring, arena_pages):
    """Return (arena page of each row that bypasses the cache, whether arena G holds it)."""
    first = tl.load(lane + L_FIRST)
    target = tl.load(lane + L_TARGET)
    kind = tl.load(ring + R_D_ARENA + (target & SLOTS_MASK))
    return (first - 2 - places) % arena_pages, kind == ARENA_G


@triton.jit
def mark_gathered(lane, ring):
    """Record, once, that everything this lane needed was filled and is being gathered."""
    if tl.program_id(0) == 0:
        target = tl.load(lane + L_TARGET)
        tl.store(ring + R_FILLED, tl.maximum(target, tl.load(ring + R_FILLED)))
        tl.store(lane + L_STATE, tl.full((), LANE_GATHERED, tl.int64))


_STEADY = [
    "cols", "stride0", "stride1", "count", "row_lo", "row_hi", "table", "arena_g_words",
    "arena_pages", "key0", "key1", "grace_ns",
]  # fmt: skip


@triton.jit(do_not_specialize=_STEADY, do_not_specialize_on_alignment=["ids"])
def gather_scaled(
    ids, cols, stride0, stride1, count, row_lo, row_hi, desc, words, slots, out, table, lane, ring,
    arena, arena_bytes, arena_g_words, arena_pages, fault, stats, key0, key1, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, CANONICAL: tl.constexpr,
    ZERO: tl.constexpr, LOSSY: tl.constexpr,
):  # fmt: skip
    """Gather rows of e4m3 payloads with one e8m0 scale per 32; `out` is bf16 [count, DIM].

    GROUPS is DIM / 32 rounded up to a power of two. `slots`, `arena_bytes`: the same memory as
    the caller's slots and arena, as bytes.
    """
    index, inside, rows, places, hit, changed = locate(
        ids, cols, stride0, stride1, count, row_lo, row_hi, desc, words, table, ROWS, LOSSY
    )
    group = tl.arange(0, GROUPS)
    column = group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    group_used = (group < DIM // 32)[None, :]
    base = places.to(tl.int64) * (ROW_WORDS * 4)
    from_slot = hit[:, None] & group_used
    payload = tl.load(slots + base[:, None, None] + column, mask=from_slot[:, :, None], other=0)
    scale = tl.load(slots + (base + DIM)[:, None] + group[None, :], mask=from_slot, other=0)
    stop_if(changed, rows, FAULT_CHANGED, ring, fault, stats, 0, grace_ns)
    from_page = places <= -2
    if tl.max(from_page.to(tl.int32), 0) > 0:
        page, in_g = page_numbers(places, lane, ring, arena_pages)
        at = page * PAGE_WORDS + tl.where(in_g, arena_g_words, 0)
        check_tags(
            rows, arena + at, from_page, ring, fault, stats, tl.load(lane + L_TARGET),
            key0.to(tl.uint32), key1.to(tl.uint32), grace_ns, ROWS_PER_PAGE, ROW_WORDS, BLOCK,
        )  # fmt: skip
        start = at * 4 + (rows % ROWS_PER_PAGE) * (ROW_WORDS * 4)
        wanted = from_page[:, None] & group_used
        payload |= tl.load(
            arena_bytes + start[:, None, None] + column, mask=wanted[:, :, None], other=0
        )
        scale |= tl.load(
            arena_bytes + (start + DIM)[:, None] + group[None, :], mask=wanted, other=0
        )
    value = payload.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    value = value * e8m0_scale(scale.to(tl.int32), ZERO)[:, :, None]
    used = inside[:, None] & group_used
    tl.store(
        out + index.to(tl.int64)[:, None, None] * DIM + column,
        finish_value(value, CANONICAL),
        mask=used[:, :, None],
    )
    mark_gathered(lane, ring)


@triton.jit(do_not_specialize=_STEADY, do_not_specialize_on_alignment=["ids"])
def gather_plain(
    ids, cols, stride0, stride1, count, row_lo, row_hi, desc, words, slots, out, table, lane, ring,
    arena, arena_elements, arena_g_words, arena_pages, fault, stats, key0, key1, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CANONICAL: tl.constexpr,
    FORMAT: tl.constexpr, PER_WORD: tl.constexpr, LOSSY: tl.constexpr,
):  # fmt: skip
    """Gather rows whose elements stand for themselves: e4m3, bf16 (as int16) or bytes.

    PER_WORD elements make 32 bits; WIDTH is DIM rounded up to a power of two.
    """
    index, inside, rows, places, hit, changed = locate(
        ids, cols, stride0, stride1, count, row_lo, row_hi, desc, words, table, ROWS, LOSSY
    )
    column = tl.arange(0, WIDTH)[None, :]
    base = places.to(tl.int64) * (ROW_WORDS * PER_WORD)
    used = column < DIM
    data = tl.load(slots + base[:, None] + column, mask=hit[:, None] & used, other=0)
    stop_if(changed, rows, FAULT_CHANGED, ring, fault, stats, 0, grace_ns)
    from_page = places <= -2
    if tl.max(from_page.to(tl.int32), 0) > 0:
        page, in_g = page_numbers(places, lane, ring, arena_pages)
        at = page * PAGE_WORDS + tl.where(in_g, arena_g_words, 0)
        check_tags(
            rows, arena + at, from_page, ring, fault, stats, tl.load(lane + L_TARGET),
            key0.to(tl.uint32), key1.to(tl.uint32), grace_ns, ROWS_PER_PAGE, ROW_WORDS, BLOCK,
        )  # fmt: skip
        start = (at + (rows % ROWS_PER_PAGE) * ROW_WORDS) * PER_WORD
        data |= tl.load(
            arena_elements + start[:, None] + column, mask=from_page[:, None] & used, other=0
        )
    tl.store(
        out + index.to(tl.int64)[:, None] * DIM + column,
        plain_value(data, FORMAT, CANONICAL),
        mask=inside[:, None] & used,
    )
    mark_gathered(lane, ring)


_STEADY_DRAM = [
    "cols", "stride0", "stride1", "count", "row_lo", "row_hi", "table_rows", "key0", "key1",
    "grace_ns",
]  # fmt: skip


@triton.jit
def locate_dram(
    ids, cols, stride0, stride1, count, row_lo, row_hi, table_rows, ring, fault, stats, grace_ns,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return (index, inside, rows, owned) for the dram image; a number outside the table stops.

    With ``table_rows`` 0 any number goes.
    """
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < count
    rows = tl.load(
        ids + (index // cols) * stride0 + (index % cols) * stride1, mask=inside, other=0
    ).to(tl.int64)
    owned = inside & (rows >= row_lo) & (rows < row_hi)
    outside = inside & (table_rows > 0) & ((rows < 0) | (rows >= table_rows))
    stop_if(outside, rows, FAULT_BAD_ID, ring, fault, stats, 0, grace_ns)
    if tl.program_id(0) == 0:
        tl.store(stats + S_STEPS, tl.load(stats + S_STEPS) + 1)
    return index, inside, rows, owned


@triton.jit(do_not_specialize=_STEADY_DRAM, do_not_specialize_on_alignment=["ids"])
def gather_dram_scaled(
    ids, cols, stride0, stride1, count, row_lo, row_hi, table_rows, image, out, ring, fault, stats,
    key0, key1, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, DIM: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, CANONICAL: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Gather rows straight from the pinned image; each word crosses the link once.

    The row's words are loaded once and serve both the tag and the values.
    """
    index, inside, rows, owned = locate_dram(
        ids, cols, stride0, stride1, count, row_lo, row_hi, table_rows, ring, fault, stats,
        grace_ns, ROWS,
    )  # fmt: skip
    page = rows // ROWS_PER_PAGE
    in_page = rows - page * ROWS_PER_PAGE
    pages = image + page * PAGE_WORDS
    start = pages + in_page * ROW_WORDS
    PAYLOAD: tl.constexpr = DIM // 4
    SCALES: tl.constexpr = GROUPS // 4
    word = tl.arange(0, GROUPS * 8)
    scale_word = tl.arange(0, SCALES)
    tags = tl.load(pages + ROWS_PER_PAGE * ROW_WORDS + in_page, mask=owned, other=0)
    used = owned[:, None] & (word < PAYLOAD)[None, :]
    payload = tl.load(start[:, None] + word[None, :], mask=used, other=0)
    scale_used = owned[:, None] & (scale_word < ROW_WORDS - PAYLOAD)[None, :]
    scales = tl.load(start[:, None] + PAYLOAD + scale_word[None, :], mask=scale_used, other=0)
    seed = row_seed(rows, key0.to(tl.uint32), key1.to(tl.uint32))
    mixed = mix_words(payload.to(tl.uint32, bitcast=True), word[None, :], seed[:, None])
    folded = tl.xor_sum(tl.where(used, mixed, 0).to(tl.int32, bitcast=True), 1)
    mixed = mix_words(
        scales.to(tl.uint32, bitcast=True), scale_word[None, :] + PAYLOAD, seed[:, None]
    )
    folded ^= tl.xor_sum(tl.where(scale_used, mixed, 0).to(tl.int32, bitcast=True), 1)
    found = mix32(folded.to(tl.uint32, bitcast=True) ^ seed)
    wrong = owned & (found != tags.to(tl.uint32, bitcast=True))
    stop_if(wrong, rows, FAULT_TAG, ring, fault, stats, 0, grace_ns)

    byte = tl.arange(0, 4)
    payload_bytes = (payload[:, :, None] >> (byte * 8)[None, None, :]) & 0xFF
    value = payload_bytes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scale_bytes = (scales[:, :, None] >> (byte * 8)[None, None, :]) & 0xFF
    scale = e8m0_scale(tl.reshape(scale_bytes, (ROWS, GROUPS)), ZERO)
    value = tl.reshape(value, (ROWS, GROUPS, 32)) * scale[:, :, None]
    group = tl.arange(0, GROUPS)
    column = group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    keep = inside[:, None] & (group < DIM // 32)[None, :]
    tl.store(
        out + index.to(tl.int64)[:, None, None] * DIM + column,
        finish_value(value, CANONICAL),
        mask=keep[:, :, None],
    )


@triton.jit(do_not_specialize=_STEADY_DRAM, do_not_specialize_on_alignment=["ids"])
def gather_dram_plain(
    ids, cols, stride0, stride1, count, row_lo, row_hi, table_rows, image, image_elements, out,
    ring, fault, stats, key0, key1, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CANONICAL: tl.constexpr,
    FORMAT: tl.constexpr, PER_WORD: tl.constexpr,
):  # fmt: skip
    """Gather rows of an unscaled format straight from the pinned image."""
    index, inside, rows, owned = locate_dram(
        ids, cols, stride0, stride1, count, row_lo, row_hi, table_rows, ring, fault, stats,
        grace_ns, ROWS,
    )  # fmt: skip
    page = rows // ROWS_PER_PAGE
    check_tags(
        rows, image + page * PAGE_WORDS, owned, ring, fault, stats, 0,
        key0.to(tl.uint32), key1.to(tl.uint32), grace_ns, ROWS_PER_PAGE, ROW_WORDS, BLOCK,
    )  # fmt: skip
    start = (page * PAGE_WORDS + (rows - page * ROWS_PER_PAGE) * ROW_WORDS) * PER_WORD
    column = tl.arange(0, WIDTH)[None, :]
    used = column < DIM
    data = tl.load(image_elements + start[:, None] + column, mask=owned[:, None] & used, other=0)
    tl.store(
        out + index.to(tl.int64)[:, None] * DIM + column,
        plain_value(data, FORMAT, CANONICAL),
        mask=inside[:, None] & used,
    )
