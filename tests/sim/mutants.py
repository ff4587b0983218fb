"""Planted bugs, and how many seeds the simulator needs to find each.

    python -m tests.sim.mutants                  all of them, each in a process of its own
    python -m tests.sim.mutants --run NAME       one, and print what found it

Those of the storage code are in storage_mutants.py; those of the core are in a build of their own
(native_mutants.py). None of them is in what ships.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.sim.native_mutants import NATIVE_MUTANTS, ROOT, build, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SEEDS_MAX = 200
TIMEOUT_S = 900


def _storage_mutants() -> dict[str, Callable[[], Any]]:
    """By name. Imported late: a native mutant must be loaded before the core is."""
    planted = importlib.import_module("tests.sim.storage_mutants").STORAGE_MUTANTS
    return {mutant.__name__.replace("_", " "): mutant for mutant in planted}


def names() -> list[str]:
    """Every mutant."""
    return [*_storage_mutants(), *(mutant.name for mutant in NATIVE_MUTANTS)]


def run_one(name: str, seeds: int) -> dict[str, Any]:
    """Plant one bug in this process and run seeds until one fails."""
    planted: Any = contextlib.nullcontext()
    native = [mutant.name for mutant in NATIVE_MUTANTS]
    if name in native:
        load(native.index(name) + 1)
    else:
        planted = _storage_mutants()[name]()
    runner = importlib.import_module("tests.sim.runner")
    with planted:
        for seed in range(seeds):
            outcome = runner.run_seed(seed)
            if outcome.kind:
                return {"name": name, "seeds": seed + 1, "text": outcome.text[-300:]}
    return {"name": name, "seeds": None, "text": "not found"}


def run_all(chosen: Sequence[str], *, seeds: int = SEEDS_MAX, jobs: int = 2) -> Iterator[Any]:
    """Run each mutant in a process of its own; yields what :func:`run_one` returned, in order."""
    build()

    def run(name: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.sim.mutants", "--run", name, "--seeds", str(seeds)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "seeds": None, "text": f"no answer in {TIMEOUT_S} s"}
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            return {"name": name, "seeds": None, "text": done.stderr[-300:]}
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(run, chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; the exit status is 1 if a mutant lives."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants")
    parser.add_argument("--run", metavar="NAME", help="this one, in this process; prints JSON")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="at most so many for each")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    if options.run:
        print(json.dumps(run_one(options.run, options.seeds)))
        return 0
    started = time.monotonic()
    alive = 0
    for answer in run_all(names(), seeds=options.seeds, jobs=options.jobs):
        found = answer["seeds"]
        alive += found is None
        what = answer["text"].strip().splitlines()[-1][:70] if answer["text"].strip() else ""
        print(f"{answer['name']:<44}{found or 'LIVES':>6}  {what}", flush=True)
    print(f"{len(names())} mutants, {alive} live, {time.monotonic() - started:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
