"""The window probe's waits on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from tierd.gpu.kernels_sync import now_ns, pause

START = tl.constexpr(0)  # of `state`: when the step began, ns
LAYER = tl.constexpr(1)  # the layer to delay, or -1
UNTIL = tl.constexpr(2)  # until so many ns after the start


@triton.jit
def begin_step(state):
    """Note when the step began."""
    tl.store(state + START, now_ns())


@triton.jit(do_not_specialize=["layer"])
def delay_layer(state, layer):
    """Wait, if this is the layer to delay. One program of one warp."""
    if tl.load(state + LAYER) == layer:
        until = tl.load(state + START) + tl.load(state + UNTIL)
        while now_ns() < until:
            pause()
