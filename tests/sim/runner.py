"""Runs seeds, in several processes if asked, and reports."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import multiprocessing
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tests.sim import faults, leaks, pool, workload
from tests.sim.model import Violation
from tests.sim.world import new_world

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

EVENTS_SHOWN = 25
FAILURES_SHOWN = 5


@dataclasses.dataclass
class Outcome:
    """What one seed came to.

    Attributes:
        kind: empty, or what was violated; ``crash`` for an exception that nobody expected.
        digest: of all events.
        faults: how often each (kind, zone) was reached, over all devices.
        counters: what was done, and what failed.
    """

    seed: int
    kind: str = ""
    text: str = ""
    digest: str = ""
    events: list[str] = dataclasses.field(default_factory=list)
    faults: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    counters: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What many seeds came to.

    Attributes:
        first: the first seed; ``run`` were run from there.
        failed: seeds that failed, and what was violated.
        shares: of the seeds, per kind of fault, that reached it.
    """

    first: int
    run: int
    failed: dict[int, str]
    shares: dict[str, float]
    seconds: int


_WATCH = leaks.Watch()


@functools.cache
def _begin_clean() -> None:
    """Let go, once a process, of what it held before: other tests' descriptors, not seeds'."""
    gc.collect()


def run_seed(seed: int) -> Outcome:
    """Run one seed from an empty machine to an empty machine."""
    _begin_clean()
    pool.sources()
    outcome = Outcome(seed)
    descriptors = leaks.descriptors()
    _run(seed, outcome)
    if outcome.kind or leaks.descriptors() != descriptors:
        gc.collect()  # an exception and its frames may hold on to the machine
    if not outcome.kind:
        text = _WATCH.after_run()
        left = leaks.descriptors() - descriptors
        if left:
            text = f"{left} descriptors were left open"
        outcome.kind, outcome.text = ("leak", f"leak: {text}") if text else ("", "")
    return outcome


def _run(seed: int, outcome: Outcome) -> None:
    with new_world(seed) as world:
        try:
            workload.run(world)
        except Violation as violation:
            outcome.kind, outcome.text = violation.kind, str(violation)
        except Exception:  # noqa: BLE001 - whatever it is, the seed found it
            outcome.kind, outcome.text = "crash", traceback.format_exc()
        outcome.events = world.events
        outcome.digest = world.digest()
        outcome.counters = world.counters
        for native in world.host.natives:
            for key, number in faults.reached(native).items():
                outcome.faults[key] = outcome.faults.get(key, 0) + number


def run_seeds(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Run seeds, in order."""
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as processes:
        yield from processes.imap(run_seed, seeds, chunksize=8)


def print_failure(outcome: Outcome) -> None:
    for event in outcome.events[-EVENTS_SHOWN:]:
        print(f"    {event}")
    print(f"seed {outcome.seed}: {outcome.text}")
    print(f"replay: make sim SEED={outcome.seed}")


def print_shares(outcomes: Iterable[Outcome], runs: int) -> dict[str, float]:
    """Print how many of the runs reached each fault; return every kind's share."""
    reached: dict[str, set[int]] = {kind: set() for kind in faults.KINDS}
    zones: dict[str, list[int]] = {kind: [0, 0, 0] for kind in faults.KINDS}
    for outcome in outcomes:
        for (kind, zone), number in sorted(outcome.faults.items()):
            if number:
                reached[kind].add(outcome.seed)
                zones[kind][faults.ZONES.index(zone)] += 1
    print(f"{'fault':<20}{'seeds':>8}{'roots':>8}{'tables':>8}{'data':>8}")
    for kind in faults.KINDS:
        shares = [len(reached[kind]), *zones[kind]]
        print(f"{kind:<20}" + "".join(f"{share / runs:>8.1%}" for share in shares))
    return {kind: len(seeds) / runs for kind, seeds in reached.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; the exit status is 1 if any seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one and print what happened")
    parser.add_argument("--seeds", type=int, default=300, help="run so many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--summary", type=Path, help="write what came of it there, as JSON")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return replay(options.seed)
    found = run_many(range(options.first, options.first + options.seeds), options.jobs)
    if options.summary is not None:
        options.summary.write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    return 1 if found.failed else 0


def run_many(seeds: Sequence[int], jobs: int) -> Summary:
    """Run seeds, print the first failures and the table of faults."""
    started = time.monotonic()
    outcomes: list[Outcome] = []
    failed: dict[int, str] = {}
    for outcome in run_seeds(seeds, jobs):
        outcomes.append(outcome)
        if outcome.kind:
            failed[outcome.seed] = outcome.kind
            if len(failed) <= FAILURES_SHOWN:
                print_failure(outcome)
        outcome.events = []
    shares = print_shares(outcomes, len(outcomes))
    seconds = time.monotonic() - started
    print(
        f"{len(outcomes)} seeds in {seconds:.0f} s, {len(failed)} failed; "
        f"the rarest fault was reached in {min(shares.values()):.1%} of them"
    )
    return Summary(seeds[0], len(outcomes), failed, shares, round(seconds))


def replay(seed: int) -> int:
    """Run one seed and print all of its events."""
    outcome = run_seed(seed)
    for event in outcome.events:
        print(f"    {event}")
    print(f"seed {seed}: {outcome.text or 'nothing wrong'} (events {outcome.digest})")
    return 1 if outcome.kind else 0
