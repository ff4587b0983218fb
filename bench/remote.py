"""`make bench-remote`: the measures of tables in another node's memory.

    python -m bench.remote                       all of it, into bench/results/remote.json
    python -m bench.remote --only flaps soak     parts: soak, flaps, cycles, instructions, nixl

soak, flaps, cycles and instructions run in the machines of tests/lab/rdma (soft-RoCE; needs root),
nixl on this machine (needs nixl-cu12, no RDMA). Times inside the machines say nothing about
hardware; ratios within one run do say whether a flap leaves anything behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.record import record, save
from tests.lab.rdma import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.rdma.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
ROWS = 1_000_000
KILLS = 5
FLAPS = 10
CYCLES = 200
BATCHES = 20
READS_A_BATCH = 64
LIMIT_S = 3600.0
NIXL_PAGES = 256
NIXL_REPEATS = 60

Found = dict[str, Any]


def found(
    name: str, value: float, unit: str, *, repeats: int = 1, spread: str = "", **detail: Any
) -> Found:
    """Return one measure, before it becomes a record."""
    return {
        "id": f"remote.{name}", "value": value, "unit": unit, "repeats": repeats,
        "spread": spread or "one run", "detail": detail or None,
    }  # fmt: skip


# --- in the lab's machines ------------------------------------------------------------------------


def in_tree(words: list[str]) -> str:
    """Return the command that runs Python in this tree, inside a machine."""
    settings = "PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1"
    return f"cd {shlex.quote(str(ROOT))}; {settings} {shlex.join([sys.executable, *words])}"


def last_json(text: str) -> Found:
    """Return the object that a role printed last."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    assert lines, text
    return dict(json.loads(lines[-1]))


@contextlib.contextmanager
def pair() -> Iterator[tuple[Machine, Machine]]:
    """Two machines on one wire."""
    with machine.machines(2) as (there, here):
        there.roce("10.9.0.1/24")
        here.roce("10.9.0.2/24")
        yield there, here


def two_roles(
    there: Machine,
    here: Machine,
    words: list[str],
    *,
    peer: str = "10.9.0.1",
    family: str = "AF_INET",
) -> Found:
    """Export on one machine, read on the other; return what the reading one saw."""
    for name in ("over", "kill", "exporting"):
        (there.lab / name).unlink(missing_ok=True)
    role = ["-m", "tests.lab.rdma.roles"]
    exporting = there.start(in_tree([*role, "export", "--family", family]))
    try:
        # Both start at once; the reading one tries until the other listens.
        reading = here.start(in_tree([*role, "read", "--peer", peer, *words]))
        while not here.has_finished(reading):
            assert not there.has_finished(exporting), there.finish(exporting)
            time.sleep(0.1)
        text = here.finish(reading)
    finally:
        (there.lab / "over").write_text("")
    there.finish(exporting, timeout_s=300)
    return last_json(text)


def measure_soak() -> list[Found]:
    """Two instances read one copy while the peer is killed and the link flaps."""
    with pair() as (there, here):
        words = ["--rows", str(ROWS), "--kills", str(KILLS), "--instances", "2", "--flaps", "2"]
        seen = two_roles(there, here, [*words, "--limit-s", str(LIMIT_S)])
    each = seen["instances"]
    rows = sum(one["rows"] for one in each)
    detail = {"kills": seen["kills"], "instances": each}
    return [
        found("rows_checked", rows, "rows", **detail),
        found("wrong_rows", sum(one["wrong_rows"] for one in each), "rows", rows=rows),
        found("hangs", sum(one["hangs"] for one in each), "requests", rows=rows),
        found("instances_sharing", sum(one["rows"] > 0 for one in each), "instances", **detail),
        found("sharing_wrong_rows", sum(one["wrong_rows"] for one in each), "rows", rows=rows),
    ]


def measure_flaps() -> list[Found]:
    """Throughput 10 s after a flap beside the throughput before it."""
    with pair() as (there, here):
        seen = two_roles(there, here, ["--flaps", str(FLAPS), "--limit-s", str(LIMIT_S)])
    ratios = seen["flap_ratios"]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    value = statistics.median(ratios)
    return [found("after_flap_ratio", value, "ratio", repeats=FLAPS, spread=spread, ratios=ratios)]


@contextlib.contextmanager
def alone() -> Iterator[Machine]:
    """One machine whose port talks to itself."""
    with machine.machines(1) as (one,):
        one.run("modprobe dummy; ip link add d0 type dummy")
        one.roce("10.9.0.1/24", netdev="d0")
        yield one


def measure_cycles() -> list[Found]:
    """What is left of an exporting process that started and ended many times."""
    with alone() as one:
        words = ["-m", "tests.lab.rdma.cycles", str(CYCLES)]
        seen = last_json(one.run(in_tree(words), timeout_s=LIMIT_S))
    assert seen["right"] == seen["cycles"], seen
    return [
        found("leaked_rdma_objects", seen["leaked"], "objects", repeats=CYCLES, left=seen["left"]),
        found("restart_cycles", seen["cycles"], "cycles"),
    ]


def measure_instructions() -> list[Found]:
    """User instructions of the core for one read: pushed to the reader, and reaped."""
    build = ROOT / "build/native"
    options = ["-DTIERD_PYTHON=OFF", "-DTIERD_NATIVE_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    cmake = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *options]
    subprocess.run(cmake, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build), "--target", "verbs_test"], check=True)
    counts = {}
    with alone() as one:
        for function in ("push", "reap"):
            toggle = f"--toggle-collect=tierd::RemoteReader::{function}*"
            words = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", toggle]
            words += [str(build / "verbs_test"), str(BATCHES)]
            said = one.run(shlex.join(words), timeout_s=LIMIT_S)
            reads = int(re.findall(r"^reads (\d+)", said, re.MULTILINE)[0])
            collected = int(re.findall(r"Collected : (\d+)", said)[0])
            counts[function] = collected / reads
    total = sum(counts.values())
    return [
        found(
            "instructions_per_read", round(total, 1), "instructions", posting=counts["push"],
            completing=counts["reap"], reads=READS_A_BATCH * BATCHES,
        )
    ]  # fmt: skip


# --- NIXL -----------------------------------------------------------------------------------------


def measure_nixl() -> list[Found]:
    """Our adapter beside bare NIXL with the same pages, in turns, over TCP on this machine."""
    from bench.remote_nixl import compare

    seen = compare(pages=NIXL_PAGES, repeats=NIXL_REPEATS)
    bare, ours = (float(np.percentile(times, 10)) for times in (seen.bare_us, seen.ours_us))
    beside, work = (ours - bare) / NIXL_PAGES, statistics.median(seen.work_us) / NIXL_PAGES
    spread = (
        f"own work {min(seen.work_us) / NIXL_PAGES:.3f} to {max(seen.work_us) / NIXL_PAGES:.3f}"
    )
    return [
        found(
            "nixl_adapter_overhead_us_per_page", round(max(beside, work), 3), "us",
            repeats=NIXL_REPEATS, spread=spread, beside_bare_us=round(beside, 3),
            own_work_us=round(work, 3), bare_batch_us=round(bare, 1), ours_batch_us=round(ours, 1),
            pages=NIXL_PAGES,
            note="the larger of two: a batch through the adapter less the same batch by bare NIXL "
            "(10th percentiles), and the CPU time of all that the adapter adds",
        )
    ]  # fmt: skip


PARTS = {
    "soak": measure_soak,
    "flaps": measure_flaps,
    "cycles": measure_cycles,
    "instructions": measure_instructions,
    "nixl": measure_nixl,
}


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    asked = parser.parse_args()
    if set(asked.only) - {"nixl"} and (why := machine.why_not()):
        sys.exit(why)
    for part in asked.only:
        seen = PARTS[part]()
        for one in seen:
            print(f"{one['id']:45} {one['value']:>12} {one['unit']}", flush=True)
        save(
            "remote",
            [
                record(
                    one["id"], one["value"], unit=one["unit"], repeats=one["repeats"],
                    spread=one["spread"], detail=one["detail"],
                    command=f"python -m bench.remote --only {part}",
                )
                for one in seen
            ],
        )  # fmt: skip
    if "nixl" in asked.only:
        sys.stdout.flush()
        os._exit(0)  # NIXL's library crashes when the interpreter takes itself apart


if __name__ == "__main__":
    main()
