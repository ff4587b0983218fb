"""The start of a step's lookups: directory, miss list, doorbell, in two kernels on a side stream.

`look_up` finds what is cached, a few rows per warp, one way of a set per lane. `claim_publish`
claims slots for the rest; its last program does what needs all of them: it retires the lane's
previous gather, copies the miss list to the host and rings the doorbell. All kicks of one cache
run in one stream order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tierd.gpu.kernels_fill import fill_request, set_fault, settle, wait_answer
from tierd.gpu.kernels_sync import (
    mix32,
    now_ns,
    pause,
    release_sys,
    release_sys_u64,
    sample_hash,
)
from tierd.gpu.state import (
    AGE_MAX,
    C_CURSOR,
    C_KICK,
    C_QUOTA,
    C_RETIRED,
    C_SETS,
    DEPTH,
    FAULT_BAD_ID,
    FAULT_ROOM,
    L_FIRST,
    L_KICK,
    L_STATE,
    L_TARGET,
    LANE_GATHERED,
    LANE_IDLE,
    LANE_KICKED,
    LOOK_EVERY,
    R_ARRIVED,
    R_BYPASSES,
    R_COUNT,
    R_D_COUNT,
    R_D_END,
    R_D_FIRST,
    R_DEMANDS,
    R_FILLED,
    R_FOREIGN,
    R_MISSED,
    R_PAGE_HEAD,
    R_PAGE_TAIL,
    R_PUBLISHED,
    R_RETIRED,
    R_SAMPLED,
    R_SHOWN,
    S_BYPASSES,
    S_DEMANDS,
    S_HITS,
    S_LOOKUPS,
    S_MISSES,
    S_PUBLISHED,
    S_QUOTA,
    S_RING_FULL,
    STAMP_MASK,
    STATS_WORDS,
    SWEEP_EVERY,
    SWEEP_WORDS,
    WAYS,
)
from tierd.io import _core

_P = _core.protocol
DOORBELL = tl.constexpr(_P.OFFSET_DOORBELL // 4)
RETIRED = tl.constexpr(_P.OFFSET_RETIRED // 4)
QUOTA = tl.constexpr(_P.OFFSET_QUOTA // 4)
HEADER_WORDS = tl.constexpr(_P.LINE_BYTES // 4)
SLOTS_MASK = tl.constexpr(7)
NO_SLOT = tl.constexpr(-1)  # in a descriptor: the row bypasses the cache
DESC_ZERO = tl.constexpr(-1)  # in a step's descriptors: a row of another rank, served as +0
DESC_PAGE = tl.constexpr(-2)  # -2 - k: row k of the lane's request, read from its page
TRIES = tl.constexpr(64)
COPY_BLOCK = tl.constexpr(256)
SAMPLES_MASK = tl.constexpr(_P.SAMPLE_CAPACITY - 1)
SAMPLE_STAMP = tl.constexpr(_P.SAMPLE_STAMP_SHIFT)
SAMPLE_PHASE = tl.constexpr(_P.SAMPLE_PREFILL.bit_length() - 1)


@triton.jit
def sample_rows(rows, wanted, kick, phase, ring, samples, threshold):
    """Tell the host which of these rows were looked up, for those that the hash picks.

    `phase`: 1 for a prefill, else 0. The entries count once the kick announces them.
    """
    picked = wanted & (sample_hash(rows).to(tl.int64) < threshold)
    found = tl.sum(picked.to(tl.int32), 0)
    if found > 0:
        at = tl.atomic_add(ring + R_SAMPLED, found.to(tl.int64), sem="relaxed")
        rank = tl.cumsum(picked.to(tl.int32), 0) - 1
        entry = rows | (phase.to(tl.int64) << SAMPLE_PHASE) | ((kick & STAMP_MASK) << SAMPLE_STAMP)
        tl.store(samples + ((at + rank) & SAMPLES_MASK), entry, mask=picked)


@triton.jit
def show_samples(sampled, ring, samples_written):
    """Announce to the host what the kernels before this one have sampled."""
    if sampled != tl.load(ring + R_SHOWN):
        tl.store(ring + R_SHOWN, sampled)
        release_sys_u64(samples_written, sampled)


@triton.jit
def set_of(table, row, sets_max, sets):
    """Return the set of a row: rows whose set is not in use share those that are."""
    h = ((table << 58) ^ (row + 1)).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    h = (h ^ (h >> 32)) * 0xBF58476D1CE4E5B9
    h = h ^ (h >> 29)
    wide = ((h >> 32) * sets_max.to(tl.uint64) >> 32).to(tl.int64)
    narrow = ((h & 0xFFFFFFFF) * sets.to(tl.uint64) >> 32).to(tl.int64)
    return tl.where(wide < sets, wide, narrow)


@triton.jit
def find_victim(entries, ways, table, kick, own_retired, cache):
    """Return the way that a miss may claim and its word, or (WAYS, 0): the row bypasses.

    A free way while the table is below its quota; else the oldest word that may go: its last
    request gathered, of a table above its quota, or, failing that, of this table.
    """
    live = entries != 0
    owner = ((entries >> 58) & 63).to(tl.int32)
    mine = live & (owner == table)
    held = tl.sum(mine.to(tl.int32), 0)
    quota = tl.load(cache + C_QUOTA + owner, mask=live, other=0).to(tl.int32)
    own_quota = tl.load(cache + C_QUOTA + table).to(tl.int32)
    same = (owner[:, None] == owner[None, :]) & live[None, :]
    held_by_owner = tl.sum(same.to(tl.int32), 1)
    retired = tl.load(cache + C_RETIRED + owner, mask=live, other=0)
    retired = tl.where(mine, own_retired, retired)
    floor = tl.minimum(kick - retired, AGE_MAX)
    age = (kick - entries) & STAMP_MASK
    may_go = live & (age >= floor)
    below = held < own_quota
    free = (live == 0) & below
    others = may_go & (mine == 0) & below & (held_by_owner > quota)
    own = may_go & mine & (own_quota > 0)
    # Free ways first, then others by age, then own by age; never a word that may not go.
    score = tl.where(own, age + 1, 0)
    score = tl.where(others, age + (1 << 25), score)
    score = tl.where(free, 1 << 26, score)
    best = tl.max(score, 0)
    way = tl.min(tl.where(score == best, ways, WAYS), 0)
    way = tl.where(best > 0, way, WAYS)
    return way, tl.sum(tl.where(ways == way, entries, 0), 0)


@triton.jit
def seen_rows(row, missing, seen, ring):
    """Return which of the missing rows have their bit; the others are counted as not looked up."""
    bits = tl.load(seen + (row >> 3), mask=missing, other=0).to(tl.int64)
    known = missing & (((bits >> (row & 7)) & 1) != 0)
    skipped = tl.sum(missing.to(tl.int32), 0) - tl.sum(known.to(tl.int32), 0)
    if skipped > 0:
        tl.atomic_add(ring + R_FOREIGN, skipped.to(tl.int64), sem="relaxed")
    return known


@triton.jit(do_not_specialize=[
    "cols", "stride0", "stride1", "count", "row_lo", "row_hi", "rows", "table", "sets_max", "phase",
    "threshold",
], do_not_specialize_on_alignment=["ids"])  # fmt: skip
def look_up(
    ids, cols, stride0, stride1, count, row_lo, row_hi, rows, table, words, sets_max, cache, ring,
    lane, desc, missed_at, missed_rows, fault, samples, phase, threshold, seen,
    ROWS: tl.constexpr, DEMAND: tl.constexpr, LOSSY: tl.constexpr,
):  # fmt: skip
    """Find each id's slot and mark it used; list the ids that have none.

    `rows`: of the table, a number outside of which is a fault; 0: no number is. With LOSSY, ids
    without their bit in `seen` (u8, a bit a row) are not listed: they are served as +0.

    Nobody claims or empties words while this runs, so a plain store restamps: programs that meet
    on a word store the same value. That hits are stamped before the first miss claims also means
    that no row of a step is thrown out for another row of it.
    """
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < count
    row = tl.load(
        ids + (index // cols) * stride0 + (index % cols) * stride1, mask=inside, other=-1
    ).to(tl.int64)
    kick = tl.load(cache + C_KICK)
    sets = tl.load(cache + C_SETS)
    owned = inside & (row >= row_lo) & (row < row_hi)
    set_index = set_of(table.to(tl.int64), row, sets_max, sets)
    key = (table.to(tl.int64) << 58) | ((row + 1) << 24)
    ways = tl.arange(0, WAYS)
    entries = tl.load(
        words + (set_index * WAYS)[:, None] + ways[None, :], mask=owned[:, None], other=0
    )
    match = ((entries ^ key[:, None]) >> 24) == 0
    way = tl.min(tl.where(match & owned[:, None], ways[None, :], WAYS), 1)
    hit = way < WAYS
    place = (set_index * WAYS).to(tl.int32) + way
    tl.store(words + place, key | (kick & STAMP_MASK), mask=hit)
    tl.store(desc + index, tl.where(hit, place, DESC_ZERO), mask=inside)
    missing = owned & (way == WAYS)
    if LOSSY:
        missing = seen_rows(row, missing, seen, ring)
    found = tl.sum(missing.to(tl.int32), 0)
    if found > 0:
        at = tl.atomic_add(ring + R_MISSED, found.to(tl.int64), sem="relaxed")
        rank = tl.cumsum(missing.to(tl.int32), 0) - 1
        tl.store(missed_at + at + rank, index, mask=missing)
        tl.store(missed_rows + at + rank, row, mask=missing)
    sample_rows(row, owned, kick, phase, ring, samples, threshold)
    foreign = inside & (owned == 0)
    if tl.sum(foreign.to(tl.int32), 0) > 0:
        tl.atomic_add(ring + R_FOREIGN, tl.sum(foreign.to(tl.int32), 0).to(tl.int64), sem="relaxed")
        wrong = foreign & (rows > 0) & ((row < 0) | (row >= rows))
        if tl.max(wrong.to(tl.int32), 0) > 0:
            named = tl.max(tl.where(wrong, row, -0x7FFFFFFFFFFFFFFF), 0)
            set_fault(ring, fault, FAULT_BAD_ID, tl.load(ring + R_PUBLISHED), named)
    if DEMAND:
        # Not asked for by any kick that is still to be gathered: demanded only now.
        retired = effective_retired(lane, cache, table)
        old = tl.sum(tl.where(match, entries, 0), 1)
        late = hit & (((kick - old) & STAMP_MASK) >= kick - retired)
        demands = tl.sum(late.to(tl.int32), 0) + found
        if demands > 0:
            tl.atomic_add(ring + R_DEMANDS, demands.to(tl.int64), sem="relaxed")


@triton.jit
def effective_retired(lane, cache, table):
    """Return the number of the table's last kick that is over.

    The lane's previous gather is over, if there was one (stream order), though only the kick after
    it gets to record that.
    """
    retired = tl.load(cache + C_RETIRED + table)
    kick = tl.load(lane + L_KICK)
    state = tl.load(lane + L_STATE)
    return tl.where(state == LANE_GATHERED, tl.maximum(retired, kick), retired)


@triton.jit
def claim_slot(row, table, words, sets_max, cache, kick, own_retired):
    """Claim a slot for a missing row; returns (slot or NO_SLOT, whether the row was there).

    It is there if another program, for a duplicate of the id, has been faster.
    """
    ways = tl.arange(0, WAYS)
    set_index = set_of(table.to(tl.int64), row, sets_max, tl.load(cache + C_SETS))
    base = words + set_index * WAYS
    key = (table.to(tl.int64) << 58) | ((row + 1) << 24)
    fresh = key | (kick & STAMP_MASK)
    slot = tl.full((), NO_SLOT, tl.int32)
    there = tl.full((), 0, tl.int32)
    tries = tl.full((), 0, tl.int32)
    while tries < TRIES:
        entries = tl.load(base + ways, volatile=True)
        way = tl.min(tl.where(((entries ^ key) >> 24) == 0, ways, WAYS), 0)
        if way < WAYS:
            slot = (set_index * WAYS).to(tl.int32) + way
            there = tl.full((), 1, tl.int32)
            tries = tl.full((), TRIES, tl.int32)
        else:
            way, old = find_victim(entries, ways, table, kick, own_retired, cache)
            if way < WAYS:
                got = tl.atomic_cas(base + way, old, fresh, sem="relaxed")
                if got == old:
                    slot = (set_index * WAYS).to(tl.int32) + way
                    tries = tl.full((), TRIES, tl.int32)
            else:
                tries = tl.full((), TRIES, tl.int32)
        tries += 1
    return slot, there


@triton.jit
def claim_rows(
    table, words, sets_max, cache, ring, lane, desc, missed_at, missed_rows, missed, list_rows,
    list_slots, rows_max, kick,
):  # fmt: skip
    """Claim slots for this program's share of the missing ids, and list what must be read."""
    own_retired = effective_retired(lane, cache, table)
    lists = ((tl.load(ring + R_PUBLISHED) + 1) & 15) * rows_max
    k = tl.program_id(0).to(tl.int64)
    while k < missed:
        row = tl.load(missed_rows + k)
        at = tl.load(missed_at + k)
        slot, there = claim_slot(row, table, words, sets_max, cache, kick, own_retired)
        place = slot
        if there == 0:
            n = tl.atomic_add(ring + R_COUNT, 1, sem="relaxed")
            tl.store(list_rows + lists + n, row)
            tl.store(list_slots + lists + n, slot)
            if slot < 0:
                place = (-n + DESC_PAGE).to(tl.int32)
                tl.atomic_add(ring + R_BYPASSES, 1, sem="relaxed")
        tl.store(desc + at, place)
        k += tl.num_programs(0)


@triton.jit
def copy_list(descriptor, rows, slots, count, array_words, ROWS_PER_PAGE: tl.constexpr):
    """Copy the miss list into the descriptor in host memory."""
    start = count - count  # a loop over range(count) is more than the interpreter can do
    while start < count:
        k = start + tl.arange(0, COPY_BLOCK)
        inside = k < count
        row = tl.load(rows + k, mask=inside, other=0)
        slot = tl.load(slots + k, mask=inside, other=0)
        page = row // ROWS_PER_PAGE
        arrays = descriptor + HEADER_WORDS + k
        tl.store(arrays, page.to(tl.int32), mask=inside)
        tl.store(arrays + array_words, (row - page * ROWS_PER_PAGE).to(tl.int32), mask=inside)
        tl.store(arrays + 2 * array_words, slot, mask=inside)
        start += COPY_BLOCK


@triton.jit
def sweep(words, cache, kick, capacity):
    """Every few kicks, bring stamps older than AGE_MAX up to it, a few words at a time."""
    if kick % SWEEP_EVERY == 0:
        cursor = tl.load(cache + C_CURSOR)
        at = cursor + tl.arange(0, SWEEP_WORDS)
        inside = at < capacity
        entries = tl.load(words + at, mask=inside, other=0)
        old = (entries != 0) & (((kick - entries) & STAMP_MASK) > AGE_MAX)
        stamp = (kick - AGE_MAX) & STAMP_MASK
        tl.store(words + at, (entries & ~STAMP_MASK) | stamp, mask=inside & old)
        cursor += SWEEP_WORDS
        tl.store(cache + C_CURSOR, tl.where(cursor < capacity, cursor, 0))


@triton.jit
def follow_quota(kick, control, cache, table, stats):
    """Now and then take over the daemon's wish for the table's ways; nonsense is nobody's wish.

    When is decided by chance: tables that share a cache share its kicks, and each must have its
    turn. Returns whether it was now. The wishes of a cache's tables are followed one by one: until
    all are, quotas may add up to more or less than there are ways, which costs hits, no more.
    """
    looks = (mix32(kick.to(tl.uint32)) & (LOOK_EVERY - 1)) == 0
    if looks:
        wish = tl.load(control + QUOTA, volatile=True).to(tl.int64)
        if (wish > 0) & (wish <= WAYS + 1):
            tl.store(cache + C_QUOTA + table, wish - 1)
            tl.store(stats + S_QUOTA, wish)
    return looks


@triton.jit
def add_stats(stats, host_stats, ids, count, bypasses, demands, published, waits, show):
    """Count the kick; now and then show the counters to the host."""
    index = tl.arange(0, STATS_WORDS)
    old = tl.load(stats + index)
    add = tl.where(index == S_LOOKUPS, ids, 0)
    add = tl.where(index == S_HITS, ids - count, add)
    add = tl.where(index == S_MISSES, count - bypasses, add)
    add = tl.where(index == S_BYPASSES, bypasses, add)
    add = tl.where(index == S_DEMANDS, demands, add)
    add = tl.where(index == S_RING_FULL, waits, add)
    new = tl.where(index == S_PUBLISHED, published, old + add)
    # Wait and fill own the other counters and may run at the same time: leave those alone.
    ours = (index <= S_DEMANDS) | (index == S_RING_FULL) | (index == S_PUBLISHED)
    tl.store(stats + index, new, mask=ours)
    if show:
        tl.store(host_stats + index, new)


@triton.jit(do_not_specialize=[
    "ids", "table", "sets_max", "arena_g_words", "rows_max", "arena_pages", "array_words",
    "priority", "key0", "key1", "timeout_ns", "grace_ns",
])  # fmt: skip
def claim_publish(
    ids, table, words, sets_max, cache, ring, lane, desc, missed_at, missed_rows, list_rows,
    list_slots, control, control64, descriptors, arena, arena_g_words, slots, fault, stats,
    host_stats, samples_written, rows_max, arena_pages, array_words, priority, key0, key1,
    timeout_ns, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    DRAIN: tl.constexpr,
):  # fmt: skip
    """Claim slots for what the lookup before it missed; the last program rings the doorbell.

    Nothing missed: program 0 closes the kick alone. `ids` is how many were looked up.
    """
    missed = tl.load(ring + R_MISSED)
    kick = tl.load(cache + C_KICK)
    last = tl.program_id(0) == 0
    if missed > 0:
        claim_rows(
            table, words, sets_max, cache, ring, lane, desc, missed_at, missed_rows, missed,
            list_rows, list_slots, rows_max, kick,
        )  # fmt: skip
        before = tl.atomic_add(ring + R_ARRIVED, 1, sem="acq_rel")
        last = before == tl.num_programs(0) - 1
    if last:
        close_kick(
            ids, kick, table, words, sets_max, cache, ring, lane, list_rows, list_slots,
            control, control64, descriptors, arena, arena_g_words, slots, fault, stats,
            host_stats, samples_written, rows_max, arena_pages, array_words, priority,
            key0.to(tl.uint32), key1.to(tl.uint32), timeout_ns, grace_ns,
            ROWS_PER_PAGE, ROW_WORDS, BLOCK, DRAIN,
        )  # fmt: skip


@triton.jit
def make_room(
    sequence, count, head, retired, tail, kick, table, cache, ring, control, control64, list_rows,
    list_slots, arena, arena_g_words, slots, words, fault, stats, rows_max, arena_pages, key0,
    key1, timeout_ns, grace_ns,
    ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    DRAIN: tl.constexpr,
):  # fmt: skip
    """Wait until the ring has room for a request; returns how often it had to.

    With DRAIN nobody else works on the ring now, and what stands in the way are kicks whose gather
    never came: their rows are filled here and their pages given back. Without it, another stream
    gathers and retires.
    """
    waits = tl.full((), 0, tl.int64)
    start = now_ns()
    filled = tl.load(ring + R_FILLED, volatile=True)
    while (sequence - retired > DEPTH) | (head + count - tail > arena_pages):
        waits = tl.full((), 1, tl.int64)
        if DRAIN:
            if filled < sequence - 1:
                filled += 1
                _, missing, word_d, word_g = wait_answer(control64, filled, timeout_ns)
                kind = settle(filled, missing, word_d, word_g, ring, fault, stats, timeout_ns)
                fill_request(
                    filled, kind, filled - filled, 1, table, ring, list_rows, list_slots, arena,
                    arena_g_words, slots, words, fault, stats, rows_max, arena_pages, key0, key1,
                    grace_ns, ROWS_PER_PAGE, ROW_WORDS, BLOCK, True,
                )  # fmt: skip
                retired = filled
                tail = tl.load(ring + R_D_END + (filled & SLOTS_MASK))
                tl.store(ring + R_FILLED, filled)
            else:
                # Filled and gathered, by a lane that has not kicked since: all of it is over.
                retired = sequence - 1
                tail = head
            tl.store(ring + R_RETIRED, retired)
            tl.store(ring + R_PAGE_TAIL, tail)
            release_sys(control + RETIRED, retired.to(tl.int32))
        else:
            pause()
            retired = tl.load(ring + R_RETIRED, volatile=True)
            tail = tl.load(ring + R_PAGE_TAIL, volatile=True)
            if now_ns() - start > timeout_ns:
                set_fault(ring, fault, FAULT_ROOM, sequence, timeout_ns)
                retired = sequence
                tail = head + count
    if DRAIN:
        if (waits > 0) & (filled == sequence - 1):
            tl.store(cache + C_RETIRED + table, kick - 1)
    return waits


@triton.jit
def publish(
    sequence, count, head, descriptors, list_rows, list_slots, lane, ring, control, rows_max,
    arena_pages, array_words, priority, ROWS_PER_PAGE: tl.constexpr,
):  # fmt: skip
    """Write the request's descriptor and ring the doorbell. The ring has room."""
    at = sequence & SLOTS_MASK
    lists = (sequence & 15) * rows_max
    descriptor = descriptors + at * (HEADER_WORDS + 3 * array_words)
    copy_list(descriptor, list_rows + lists, list_slots + lists, count, array_words, ROWS_PER_PAGE)
    first = head % arena_pages
    tl.store(descriptor, sequence.to(tl.int32))
    tl.store(descriptor + 1, count.to(tl.int32))
    tl.store(descriptor + 2, first.to(tl.int32))
    tl.store(descriptor + 3, priority)
    tl.store(ring + R_D_COUNT + at, count)
    tl.store(ring + R_D_FIRST + at, first)
    tl.store(ring + R_D_END + at, head + count)
    tl.store(ring + R_PAGE_HEAD, head + count)
    tl.store(ring + R_PUBLISHED, sequence)
    tl.store(lane + L_FIRST, first)
    release_sys(control + DOORBELL, sequence.to(tl.int32))


@triton.jit
def close_kick(
    ids, kick, table, words, sets_max, cache, ring, lane, list_rows, list_slots, control,
    control64, descriptors, arena, arena_g_words, slots, fault, stats, host_stats,
    samples_written, rows_max, arena_pages, array_words, priority, key0, key1, timeout_ns,
    grace_ns, ROWS_PER_PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    DRAIN: tl.constexpr,
):  # fmt: skip
    """Do what needs all programs of a kick: retire, publish, count, make ready for the next."""
    # Every word that may be wanted is asked for at once: one trip to memory, not one per question.
    count = tl.load(ring + R_COUNT, volatile=True)
    bypasses = tl.load(ring + R_BYPASSES, volatile=True)
    demands = tl.load(ring + R_DEMANDS)
    foreign = tl.load(ring + R_FOREIGN)
    sampled = tl.load(ring + R_SAMPLED, volatile=True)
    published = tl.load(ring + R_PUBLISHED)
    head = tl.load(ring + R_PAGE_HEAD)
    retired = tl.load(ring + R_RETIRED, volatile=True)
    tail = tl.load(ring + R_PAGE_TAIL, volatile=True)
    state = tl.load(lane + L_STATE)
    target = tl.load(lane + L_TARGET)
    lane_kick = tl.load(lane + L_KICK)
    known = tl.load(cache + C_RETIRED + table)
    ends = tl.load(ring + R_D_END + tl.arange(0, DEPTH))

    # The lane's last gather is over: give back what it used.
    over = state == LANE_GATHERED
    if over & (lane_kick > known):
        tl.store(cache + C_RETIRED + table, lane_kick)
    if over & (target > retired):
        retired = target
        tail = tl.sum(tl.where(tl.arange(0, DEPTH) == (target & SLOTS_MASK), ends, 0), 0)
        tl.store(ring + R_RETIRED, retired)
        tl.store(ring + R_PAGE_TAIL, tail)
        release_sys(control + RETIRED, retired.to(tl.int32))
    waits = tl.full((), 0, tl.int64)
    if count > 0:
        waits = make_room(
            published + 1, count, head, retired, tail, kick, table, cache, ring, control,
            control64, list_rows, list_slots, arena, arena_g_words, slots, words, fault, stats,
            rows_max, arena_pages, key0, key1, timeout_ns, grace_ns,
            ROWS_PER_PAGE, ROW_WORDS, BLOCK, DRAIN,
        )  # fmt: skip
        published += 1
        publish(
            published, count, head, descriptors, list_rows, list_slots, lane, ring, control,
            rows_max, arena_pages, array_words, priority, ROWS_PER_PAGE,
        )  # fmt: skip
    tl.store(lane + L_TARGET, published)
    tl.store(lane + L_KICK, kick)
    tl.store(lane + L_STATE, tl.full((), LANE_KICKED, tl.int64))
    # The counters of one kick, side by side: R_MISSED to R_COUNT, and R_ARRIVED.
    tl.store(ring + R_MISSED + tl.arange(0, 16), tl.zeros((16,), tl.int64))
    tl.store(ring + R_ARRIVED, tl.full((), 0, tl.int64))
    tl.store(cache + C_KICK, kick + 1)
    show_samples(sampled, ring, samples_written)
    sweep(words, cache, kick, sets_max.to(tl.int64) * WAYS)
    show = (count > 0) | follow_quota(kick, control, cache, table, stats)
    add_stats(
        stats, host_stats, ids - foreign, count, bypasses, demands, published, waits, show
    )  # fmt: skip


@triton.jit(do_not_specialize=["table"])
def finish_lane(lane, ring, cache, control, table):
    """Give back at once what a lane used, filled or gathered by the kernels before this one.

    For lanes whose next kick is far away, and for kicks that no gather follows.
    """
    target = tl.load(lane + L_TARGET)
    kick = tl.load(lane + L_KICK)
    tl.store(ring + R_FILLED, tl.maximum(target, tl.load(ring + R_FILLED)))
    if tl.load(lane + L_STATE) != LANE_IDLE:
        if target > tl.load(ring + R_RETIRED):
            tl.store(ring + R_RETIRED, target)
            tl.store(ring + R_PAGE_TAIL, tl.load(ring + R_D_END + (target & SLOTS_MASK)))
            release_sys(control + RETIRED, target.to(tl.int32))
        if kick > tl.load(cache + C_RETIRED + table):
            tl.store(cache + C_RETIRED + table, kick)
        tl.store(lane + L_STATE, tl.full((), LANE_IDLE, tl.int64))


@triton.jit(do_not_specialize=["sets", "capacity"])
def resize_cache(words, cache, sets, capacity, BLOCK: tl.constexpr):
    """Set the sets in use, and clear the words of the others, except those in flight."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < capacity) & (at >= sets * WAYS)
    entries = tl.load(words + at, mask=inside, other=0)
    kick = tl.load(cache + C_KICK)
    owner = (entries >> 58) & 63
    retired = tl.load(cache + C_RETIRED + owner, mask=inside & (entries != 0), other=0)
    floor = tl.minimum(kick - retired, AGE_MAX)
    clear = inside & (((kick - entries) & STAMP_MASK) >= floor)
    tl.store(words + at, tl.zeros((BLOCK,), tl.int64), mask=clear)
    if tl.program_id(0) == 0:
        tl.store(cache + C_SETS, sets.to(tl.int64))
