"""Compiles the GPU path's kernels for sm_90, without a GPU, and prints their PTX as JSON.

A process of its own, because a process either interprets Triton's kernels or compiles them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tierd.gpu import kernels_fill, kernels_gather, kernels_kick

POINTERS = {
    "ids": "*i64", "words": "*i64", "cache": "*i64", "ring": "*i64", "lane": "*i64",
    "desc": "*i32", "list_rows": "*i64", "list_slots": "*i32", "control": "*i32",
    "control64": "*i64", "missed_at": "*i32", "missed_rows": "*i64",
    "descriptors": "*i32", "arena": "*i32", "slots": "*i32", "fault": "*i64",
    "stats": "*i64", "host_stats": "*i64", "out": "*bf16", "arena_bytes": "*u8", "image": "*i32",
    "samples": "*i64", "samples_written": "*i64", "arena_elements": "*i16", "seen": "*u8",
    "image_elements": "*i16",
}  # fmt: skip
WIDE = {"arena_g_words", "key0", "key1", "timeout_ns", "grace_ns", "rows", "row_hi", "table_rows"}
GEOMETRY = {"ROWS_PER_PAGE": 15, "ROW_WORDS": 66, "BLOCK": 128}
# One warp each: Triton does not predicate inline assembly.
WARPS = 1


def compile_kernel(kernel: Any, constants: dict[str, Any], **types: str) -> Any:
    """Compile for an H200; returns Triton's compiled kernel (`.asm`, `.n_regs`)."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        else:
            scalar = "i64" if name in WIDE else "i32"
            signature[name] = types.get(name) or POINTERS.get(name, scalar)
    # Torch allocates at multiples of 16 bytes and more; the JIT sees that and so must we.
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})


def kernels() -> dict[str, Any]:
    """Every kernel that ships in a graph, in V4.1's shapes."""
    gather = {**GEOMETRY, "DIM": 256, "ROWS": 2, "CANONICAL": False, "LOSSY": False}
    dram = {"ROWS_PER_PAGE": 15, "ROW_WORDS": 66, "DIM": 256, "GROUPS": 8, "ROWS": 2}
    kick = {**GEOMETRY, "DRAIN": True}
    look = {"ROWS": 4, "LOSSY": False}
    plain = {**gather, "WIDTH": 256, "FORMAT": 2, "PER_WORD": 2}
    return {
        "look_up": compile_kernel(kernels_kick.look_up, {**look, "DEMAND": False}),
        "demand": compile_kernel(kernels_kick.look_up, {**look, "DEMAND": True}),
        "lossy": compile_kernel(kernels_kick.look_up, {"ROWS": 4, "DEMAND": False, "LOSSY": True}),
        "claim": compile_kernel(kernels_kick.claim_publish, kick, ids="i32"),
        "finish": compile_kernel(kernels_kick.finish_lane, {}),
        "wait_fill": compile_kernel(kernels_fill.wait_fill, {**GEOMETRY, "CHECK": True}),
        "gather": compile_kernel(
            kernels_gather.gather_scaled, {**gather, "GROUPS": 8, "ZERO": 1 << 22}, slots="*u8"
        ),
        "gather_plain": compile_kernel(
            kernels_gather.gather_plain, plain, slots="*i16", out="*i16"
        ),
        "gather_dram": compile_kernel(
            kernels_gather.gather_dram_scaled, {**dram, "CANONICAL": False, "ZERO": 1 << 22}
        ),
    }


if __name__ == "__main__":
    compiled = kernels()
    json.dump(
        {name: {"ptx": k.asm["ptx"], "shared": k.metadata.shared} for name, k in compiled.items()},
        sys.stdout,
    )
