"""Compiles the KV kernels for sm_90, without a GPU, and prints what became of them as JSON.

A process of its own, because a process either interprets Triton's kernels or compiles them. The
shapes are Qwen3-8B's, as bench/kv_gpu.py runs them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tierd.kv import kernels_attend, kernels_pages, kernels_select

FLOATS = {"q", "k", "v", "summaries", "out"}
FP32 = {"scores", "partial", "extremes"}
COUNTERS = {"counters"}
SCALARS = {
    "pages_stride", "host_stride", "layer", "items", "query_row",
}  # fmt: skip


def compile_kernel(kernel: Any, constants: dict[str, Any], *, words: bool, warps: int) -> Any:
    """Compile for an H200; `words`: pages and host are 64-bit words here."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in SCALARS:
            signature[name] = "i32"
        elif name in {"pages", "host"}:
            signature[name] = "*i64" if words else "*bf16"
        elif name in FLOATS:
            signature[name] = "*bf16"
        elif name in FP32:
            signature[name] = "*fp32"
        else:
            signature[name] = "*i64" if name in COUNTERS else "*i32"
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def kernels() -> dict[str, Any]:
    """Every kernel of the room."""
    shape = {"HEADS": 8, "BLOCK": 16}
    attend = {"QUERIES": 2, "HEADS": 8, "GROUP": 4, "ROWS": 16, "DIM": 128, "SPLITS": 2}
    return {
        "append": compile_kernel(
            kernels_pages.append,
            {**shape, "QUERIES": 2, "DIM": 128, "K": 128, "SLOTS": 131, "NEW_BLOCKS": 2},
            words=False, warps=2,
        ),
        "write_back": compile_kernel(
            kernels_pages.write_back, {**shape, "WORDS": 1024, "K": 128}, words=True, warps=4
        ),
        "transfer": compile_kernel(
            kernels_pages.transfer,
            {"HEADS": 8, "WORDS": 1024, "K": 128, "SLOTS": 131, "CAP": 6, "ENTRIES": 2},
            words=True, warps=4,
        ),
        "score": compile_kernel(
            kernels_select.score,
            {
                **shape, "QUERIES": 2, "GROUP": 4, "ROWS": 16, "DIM": 128, "TILE": 64,
                "PRECISION": "tf32",
            },
            words=False, warps=4,
        ),
        "select": compile_kernel(
            kernels_select.select,
            {**shape, "BLOCKS": 1024, "K": 128, "SLOTS": 131, "PLACES": 128, "CAP": 6},
            words=False, warps=4,
        ),
        "attend": compile_kernel(
            kernels_attend.attend,
            {**attend, "BLOCK": 16, "SLOTS": 131, "TILE": 64, "STAGES": 3, "PRECISION": "tf32"},
            words=False, warps=4,
        ),
        "merge": compile_kernel(kernels_attend.merge, attend, words=False, warps=4),
    }  # fmt: skip


if __name__ == "__main__":
    compiled = kernels()
    json.dump(
        {name: {"ptx": k.asm["ptx"], "shared": k.metadata.shared} for name, k in compiled.items()},
        sys.stdout,
    )
