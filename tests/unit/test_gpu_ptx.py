"""What the kernels become on an H200: the ordering they rely on, in the PTX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierd.io import _core

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, HERE / "gpu_ptx.py"],
        env=environment, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: found["ptx"] for name, found in json.loads(done.stdout).items()}


def instructions(text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        for part in line.strip().split(";"):
            bare = re.sub(r"^@!?%p\d+\s+", "", part.strip())
            if bare and not bare.startswith(("//", ".", "$", "{", "}")):
                found.append(bare)
    return found


def test_they_are_for_hopper(ptx: dict[str, str]) -> None:
    assert all(".target sm_90" in text for text in ptx.values())


def test_the_doorbell_is_a_release_behind_a_fence(ptx: dict[str, str]) -> None:
    code = instructions(ptx["claim"])
    doorbells = [i for i, c in enumerate(code) if c.startswith("st.release.sys.global.u32")]
    assert len(doorbells) >= 2  # the doorbell and the retired word
    for at in doorbells:
        assert code[at - 1] == "fence.acq_rel.sys"
        assert code[at - 2].startswith("bar.sync")  # the other lanes' stores come before


def test_waiting_is_volatile_loads_then_a_fence(ptx: dict[str, str]) -> None:
    code = instructions(ptx["wait_fill"])
    polls = [i for i, c in enumerate(code) if c.startswith("ld.volatile.global.b64")]
    fences = [i for i, c in enumerate(code) if c == "fence.acq_rel.sys"]
    assert len(polls) >= 4
    assert fences
    # Between the first poll and the first row read from a page stands a fence.
    rows = [i for i, c in enumerate(code) if c.startswith("ld.global.b32")]
    assert any(polls[0] < fence < rows[-1] for fence in fences)


def test_nothing_is_atomic_beyond_the_gpu(ptx: dict[str, str]) -> None:
    for name, text in ptx.items():
        for code in instructions(text):
            if code.startswith(("atom", "red.")):
                assert ".sys" not in code, f"{name}: {code}"


def test_the_gather_flushes_nothing(ptx: dict[str, str]) -> None:
    for name in ("gather", "gather_dram"):
        code = instructions(ptx[name])
        assert any(c.startswith("mul.f32") for c in code)
        assert any(c.startswith("cvt.rn.bf16x2.f32") for c in code)
        assert not [c for c in code if ".ftz" in c or ".sat" in c or c.startswith("fma")]


def test_rows_move_in_wide_accesses(ptx: dict[str, str]) -> None:
    code = instructions(ptx["gather"])
    assert any(c.startswith("ld.global.v2.b32") for c in code)
    assert any(c.startswith("st.global.v4.b32") for c in code)


def test_a_fault_stops_the_gpu(ptx: dict[str, str]) -> None:
    for name in ("wait_fill", "gather", "gather_plain", "gather_dram"):
        assert "trap" in instructions(ptx[name])


def test_constants_are_the_protocol_s() -> None:
    """The numbers that kernels cannot take from the core at run time."""
    code = (
        "from tierd.gpu import kernels_fill as f, kernels_kick as k, state as s\n"
        "print(s.DEPTH.value, f.SLOTS_MASK.value, k.SLOTS_MASK.value, k.WAYS.value,"
        " f.PAGE_WORDS.value, s.STATS_WORDS.value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    depth = int(_core.protocol.RING_DEPTH)
    stats = int(_core.protocol.STATS_BYTES) // 8
    assert done.stdout.split() == [
        str(v) for v in (depth, depth - 1, depth - 1, 32, _core.PAGE_BYTES // 4, stats)
    ]
