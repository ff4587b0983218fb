"""What the audit adds to a step: now and then, some ids and their rows, copied to the host."""

from __future__ import annotations

import triton
import triton.language as tl

from tierd.gpu.kernels_sync import release_sys_u64

TURN = tl.constexpr(0)  # of `state`: gathers so far
SENT = tl.constexpr(1)  # of `state`: audits given to the host
WRITTEN = tl.constexpr(0)  # of `block`: the last audit that is whole
TAKEN = tl.constexpr(1)  # of `block`, written by the host: the last audit that it is done with
COUNT = tl.constexpr(2)  # of `block`: rows of the last audit
IDS = tl.constexpr(8)  # of `block`: their numbers


@triton.jit(do_not_specialize=["cols", "stride0", "stride1", "count", "every"])
def audit_rows(
    ids, cols, stride0, stride1, count, out, block, rows, state, every,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy up to ROWS rows of a gather, if it is one to be audited and the host has time.

    `out` and `rows` hold integers as wide as a value. One program of one warp.
    """
    turn = tl.load(state + TURN) + 1
    tl.store(state + TURN, turn)
    if turn % every == 0:
        sent = tl.load(state + SENT)
        if tl.load(block + TAKEN, volatile=True) == sent:
            column = tl.arange(0, WIDTH)
            step = tl.maximum(count // ROWS, 1)
            wanted = tl.minimum(count, ROWS)
            k = count - count  # a loop over range(wanted) is more than the interpreter can do
            while k < wanted:
                index = ((k * step + turn * 7) % count).to(tl.int64)
                row = tl.load(ids + (index // cols) * stride0 + (index % cols) * stride1)
                data = tl.load(out + index * DIM + column, mask=column < DIM, other=0)
                tl.store(block + IDS + k, row.to(tl.int64))
                tl.store(rows + k * DIM + column, data, mask=column < DIM)
                k += 1
            tl.store(block + COUNT, wanted.to(tl.int64))
            tl.store(state + SENT, sent + 1)
            release_sys_u64(block + WRITTEN, sent + 1)
