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
    """Nothing waits between an entry's first load from the host and its header's last one."""
    lines = compiled["transfer"]["ptx"].splitlines()
    loads = [n for n, line in enumerate(lines) if "ld.global.v2.b64" in line]
    near = len(loads) // 2  # the second half: copies from the ring
    between = [line for line in lines[loads[near - 1] : loads[near]] if "ld.global.b32" in line]
    assert len(between) >= 6 * 2  # of two entries each: four words of the header, two of its owner
    last = max(n for n in range(loads[near]) if lines[n] in between)
    for word in ("bar.sync", "st.global", "bra", "atom"):
        assert not any(word in line for line in lines[loads[0] : last]), word


def test_counting_orders_nothing(compiled: dict[str, Any]) -> None:
    """Counters are added to relaxed: anything stricter waits for all stores before it."""
    for name in ("transfer", "write_back", "select"):
        atomics = [line for line in compiled[name]["ptx"].splitlines() if "atom" in line]
        assert atomics
        assert all(".relaxed." in line for line in atomics), name
