"""What the KV kernels become on an H200: wide copies, tensor cores, no spills to local memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(
        [sys.executable, HERE / "ptx.py"],
        env=environment, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_entries_move_in_16_byte_accesses(compiled: dict[str, Any]) -> None:
    for name in ("transfer", "write_back"):
        ptx = compiled[name]["ptx"]
        assert "ld.global.v2.b64" in ptx or "ld.global.v4.b32" in ptx
        assert "st.global.v2.b64" in ptx or "st.global.v4.b32" in ptx


def test_attention_uses_tensor_cores_and_asynchronous_copies(compiled: dict[str, Any]) -> None:
    for name in ("attend", "score"):
        assert "mma" in compiled[name]["ptx"]
    assert "cp.async" in compiled["attend"]["ptx"]
    # Two programs share a multiprocessor's 227 KiB.
    assert compiled["attend"]["shared"] <= 113 * 1024


def test_nothing_reaches_host_memory_by_atomics(compiled: dict[str, Any]) -> None:
    for name, one in compiled.items():
        assert ".sys" not in one["ptx"], name


def test_entry_and_header_are_under_way_together(compiled: dict[str, Any]) -> None:
    """The first 16-byte load of an entry is issued before the header's comparison."""
    lines = compiled["transfer"]["ptx"].splitlines()
    loads = [n for n, line in enumerate(lines) if "ld.global.v2.b64" in line]
    stores = [n for n, line in enumerate(lines) if "st.global.v2.b64" in line]
    last = max(n for n in loads if n < stores[-1])
    between = [line for line in lines[last : stores[-1]] if "ld.global.b32" in line]
    assert len(between) >= 4  # the header's words and its owner's
