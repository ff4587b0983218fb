"""Where the GPU path keeps its words: indices into small int64 tensors in device memory.

A table of a cache has a ``ring`` block (its channel ring as the GPU sees it) and one ``lane`` per
step that may be in flight at once; all tables of a cache share a ``cache`` block. Sequences, page
counts and kick numbers are 64-bit and never wrap here; the channel gets their low 32 bits, a
directory word the low 24 bits of a kick number (its stamp).

Who writes: the last program of a kick writes ``ring``, ``lane`` and ``cache``; wait and fill write
READY and D_ARENA; the gather (the kernel after them in stream order) writes FILLED and the lane's
STATE. Everything else only reads, so no word needs an atomic but the counters of one kick.
"""

from __future__ import annotations

import triton.language as tl

WAYS = tl.constexpr(32)
DEPTH = tl.constexpr(8)  # tierd.io._core.protocol.RING_DEPTH; a test compares them
STAMP_MASK = tl.constexpr((1 << 24) - 1)
# The sweep leaves no word older than this many kicks; a pass of the sweep takes slots / 32 kicks,
# and both together stay below the 2^24 at which a stamp would look young again.
AGE_MAX = tl.constexpr(1 << 22)
SLOTS_LIMIT = 1 << 27
SWEEP_EVERY = tl.constexpr(8)  # kicks
LOOK_EVERY = tl.constexpr(64)  # kicks: a power of two
SWEEP_WORDS = tl.constexpr(256)  # words looked at each time
ROWS_LIMIT = (1 << 34) - 2  # row + 1 fits the 34 bits of a directory word

# --- ring ----------------------------------------------------------------------------------------
R_PUBLISHED = tl.constexpr(0)  # last published sequence
R_FILLED = tl.constexpr(1)  # last sequence whose rows are in their slots
R_RETIRED = tl.constexpr(2)  # last sequence whose pages are no longer needed
R_READY = tl.constexpr(3)  # last sequence that program 0 of wait_fill has seen answered
R_PAGE_HEAD = tl.constexpr(4)  # arena pages ever allotted
R_PAGE_TAIL = tl.constexpr(5)  # of them given back
R_FAULT = tl.constexpr(6)  # a FAULT_* code; nothing is served after it
R_SAMPLED = tl.constexpr(8)  # samples ever written
R_SHOWN = tl.constexpr(9)  # of them announced to the host
R_MISSED = tl.constexpr(16)  # this kick: ids that the lookup did not find
R_BYPASSES = tl.constexpr(17)  # of these, rows that no slot could be claimed for
R_DEMANDS = tl.constexpr(18)  # this kick: ids that no kick before it had asked for
R_FOREIGN = tl.constexpr(19)  # this kick: ids of other ranks' rows
R_COUNT = tl.constexpr(24)  # rows on the miss list of this kick
R_ARRIVED = tl.constexpr(32)  # claiming programs that are done
R_D_COUNT = tl.constexpr(40)  # per descriptor: rows listed
R_D_FIRST = tl.constexpr(48)  # per descriptor: first arena page
R_D_END = tl.constexpr(56)  # per descriptor: R_PAGE_HEAD after it
R_D_ARENA = tl.constexpr(64)  # per descriptor: ARENA_*
RING_WORDS = 80

ARENA_D = tl.constexpr(0)
ARENA_G = tl.constexpr(1)
ARENA_NONE = tl.constexpr(2)  # the request failed

# --- lane ----------------------------------------------------------------------------------------
L_TARGET = tl.constexpr(0)  # what must be filled before this lane's gather
L_KICK = tl.constexpr(1)  # number of the lane's kick
L_STATE = tl.constexpr(2)
L_FIRST = tl.constexpr(3)  # first arena page of the lane's own request
LANE_WORDS = 8

LANE_IDLE = tl.constexpr(0)
LANE_KICKED = tl.constexpr(1)
LANE_GATHERED = tl.constexpr(2)

# --- cache ---------------------------------------------------------------------------------------
C_KICK = tl.constexpr(0)  # number of the next kick
C_SETS = tl.constexpr(1)  # sets in use
C_CURSOR = tl.constexpr(2)  # where the sweep goes on
C_RETIRED = tl.constexpr(16)  # per table: number of the last kick that has been gathered
C_QUOTA = tl.constexpr(80)  # per table: ways per set
CACHE_WORDS = 144

# --- stats: RingStats of the channel, in its order -----------------------------------------------
S_LOOKUPS = tl.constexpr(0)
S_HITS = tl.constexpr(1)
S_MISSES = tl.constexpr(2)
S_BYPASSES = tl.constexpr(3)
S_DEMANDS = tl.constexpr(4)
S_STEPS = tl.constexpr(5)
S_LATE_STEPS = tl.constexpr(6)
S_STALL_NS = tl.constexpr(7)
S_TAG_ERRORS = tl.constexpr(8)
S_RING_FULL = tl.constexpr(9)
S_FAILED = tl.constexpr(10)
S_PUBLISHED = tl.constexpr(11)
S_QUOTA = tl.constexpr(12)  # 1 + the ways per set in force
STATS_WORDS = tl.constexpr(16)
STAT_NAMES = (
    "lookups", "hits", "misses", "bypasses", "demands", "steps", "late_steps", "stall_ns",
    "tag_errors", "ring_full", "failed", "published", "quota",
)  # fmt: skip
LATE_NS = tl.constexpr(20_000)

# --- fault block: pinned host memory, read by fault.py -------------------------------------------
F_CODE = tl.constexpr(0)  # written last; 0 = none
F_SEQUENCE = tl.constexpr(1)
F_DETAIL = tl.constexpr(2)  # a row number, a status, or nanoseconds
FAULT_WORDS = 8

FAULT_BAD_ID = tl.constexpr(1)  # a row number outside the table
FAULT_STATUS = tl.constexpr(2)  # a request was answered with a status other than ok
FAULT_TIMEOUT = tl.constexpr(3)  # nobody answered in time
FAULT_TAG = tl.constexpr(4)  # a row's bytes do not carry its tag
FAULT_CHANGED = tl.constexpr(5)  # ids changed between kick and gather
FAULT_ROOM = tl.constexpr(6)  # the ring stayed full
