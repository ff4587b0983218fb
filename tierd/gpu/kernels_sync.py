"""The only code that touches words shared with the host or between programs of one kernel.

Two patterns (docs/gpu.md): a word is published by `fence.acq_rel.sys` and `st.release.sys`; it is
awaited by a loop of volatile loads followed by `fence.acq_rel.sys`. Triton does not predicate
inline assembly, so kernels that use these helpers have one warp, all of whose lanes store the
same value. Triton's interpreter runs no assembly: there, each helper has a twin in Python (the
host's memory is ordered by the interpreter's own locks and by x86).
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

INTERPRET = bool(triton.knobs.runtime.interpret)

if INTERPRET:

    def acquire_sys() -> None:
        """Order what follows after the word just read."""

    def release_sys(pointer: tl.tensor, value: tl.tensor) -> None:
        """Publish a 32-bit word to the host."""
        tl.store(pointer, value)

    def release_sys_u64(pointer: tl.tensor, value: tl.tensor) -> None:
        """Publish a 64-bit word to the host."""
        tl.store(pointer, value)

    def release_gpu(pointer: tl.tensor, value: tl.tensor) -> None:
        """Publish a 64-bit word to the other programs."""
        tl.store(pointer, value)

    def now_ns() -> int:
        """Read a clock that all programs share."""
        return time.monotonic_ns()

    def pause() -> None:
        """Give way for a moment inside a waiting loop."""
        time.sleep(5e-6)

    def halt(grace_ns: int) -> None:
        """Stop the GPU after a fault; in the interpreter the host looks at the fault instead."""

    def to_bf16(x: tl.tensor) -> tl.tensor:
        """Round fp32 to bf16 bits, nearest even; the interpreter's cast is wrong for subnormals."""
        u = x.to(tl.uint32, bitcast=True)
        u = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        return u.to(tl.uint16).to(tl.bfloat16, bitcast=True)

else:

    @triton.jit
    def acquire_sys():
        """Order what follows after the word just read."""
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def release_sys(pointer, value):
        """Publish a 32-bit word to the host."""
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;",
            "=r,l,r",
            [pointer, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def release_sys_u64(pointer, value):
        """Publish a 64-bit word to the host."""
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0;",
            "=r,l,l",
            [pointer, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def release_gpu(pointer, value):
        """Publish a 64-bit word to the other programs."""
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.gpu.global.u64 [$1], $2; mov.u32 $0, 0;",
            "=r,l,l",
            [pointer, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def now_ns():
        """Read a clock that all programs share."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def pause():
        """Give way for a moment inside a waiting loop."""
        tl.inline_asm_elementwise(
            "nanosleep.u32 64; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def halt(grace_ns):
        """Stop the GPU after a fault: the host has `grace_ns` to say why and end the process."""
        start = now_ns()
        while now_ns() - start < grace_ns:
            pause()
        tl.inline_asm_elementwise(
            "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def to_bf16(x):
        """Round fp32 to bf16, nearest even."""
        return x.to(tl.bfloat16)


@triton.jit
def mix32(x):
    """Scramble a 32-bit word (page.cc's mix32)."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def sample_hash(row):
    """Return the hash that decides whether a row is sampled (protocol.h); row int64."""
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    return mix32(low ^ (high * 0x9E3779B1 + 0x51AB5EED))


@triton.jit
def row_seed(row, key0, key1):
    """Return the seed of a row's tag (page.cc's seed_of); row int64, keys uint32."""
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    return mix32(low ^ key0) + mix32(high ^ key1)


@triton.jit
def mix_words(words, index, seed):
    """Return what each 32-bit word of a row adds to the row's tag before the xor over the row."""
    x = (words ^ (index.to(tl.uint32) * 0x9E3779B1 + seed)) * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)
