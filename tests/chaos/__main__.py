"""Runs the matrix of faults and phases, one case, or a soak; prints how to replay what failed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos import faults
from tests.chaos.engine import PHASES
from tests.chaos.world import ChaosError, World
from tierd.errors import TierdError
from tierd.io.checkpoint import Checkpoint
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables
from tierd.tools import demo_models

if TYPE_CHECKING:
    from collections.abc import Iterator

SOAK_WEIGHTS = {
    "sigkill": 78, "slow_kill": 12, "slow_stop": 2, "sigstop": 2, "restart": 2, "sigterm": 1,
    "engine_killed": 1, "engine_stopped": 1, "both_killed": 1, "memory": 1,
}  # fmt: skip
SOAK_PHASES = {"idle": 30, "mid-step": 45, "attach": 13, "prefill": 8, "staging": 4}


class Stager:
    """Stages a checkpoint on a device of its own, over and over, while the phase asks for it."""

    def __init__(self, world: World) -> None:
        self._path = world.directory / "staged.img"
        self._source = world.tiny.path
        self._stop = threading.Event()
        self.busy = threading.Event()
        self.times = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self.busy.wait(0.05):
                continue
            self._path.unlink(missing_ok=True)
            with Store.format(self._path, size=24 << 20) as store:
                source = Checkpoint.open(self._source)
                stage(store, source, find_tables(source), model="other")
            self.times += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def matrix() -> Iterator[tuple[str, str]]:
    """Yield every fault in every phase."""
    for name in faults.EVERY:
        for phase in PHASES:
            yield name, phase


def run_case(world: World, stager: Stager, name: str, phase: str) -> None:
    """Inject one fault in one phase, and see that everything goes on."""
    world.phase(phase)
    if phase == "staging":
        stager.busy.set()
    failed = world.board.get("failed")
    board = world.board
    world.goes_on(2)
    # Not always right after a step.
    time.sleep(world.chance.random() * 0.01)
    faults.EVERY[name](world)
    world.goes_on(3)
    stager.busy.clear()
    world.counts.cases += 1
    if board is world.board and not world.tolerated and world.failed_since(failed):
        raise ChaosError("the engine got an error although a server could have read its rows")
    world.tolerated = False
    world.check()


def run(
    world: World, stager: Stager, asked: argparse.Namespace, cases: Iterator[tuple[str, str]]
) -> None:
    for number, (name, phase) in enumerate(cases):
        if faults.EVERY[name] in faults.NEED_SLOW_DEVICE and world.slow is None:
            print(f"skipped {name}: {world.why_not_slow}", flush=True)
            continue
        began = time.monotonic()
        try:
            run_case(world, stager, name, phase)
        except (ChaosError, TierdError) as error:
            print(f"case {number} ({name} while {phase}): {error}")
            print(f"replay: python -m tests.chaos --seed {asked.seed} --case {name}:{phase}")
            raise
        print(f"{name:15} {phase:9} {time.monotonic() - began:6.2f} s", flush=True)
        report(world, asked)


def report(world: World, asked: argparse.Namespace) -> dict[str, float]:
    """Write the counts so far where they were asked for."""
    counts: dict[str, float] = dataclasses.asdict(world.counts)
    counts["seconds"] = round(time.monotonic() - world.began, 1)
    counts["seed"] = asked.seed
    if asked.report:
        asked.report.write_text(json.dumps(counts) + "\n")
    return counts


def soak(world: World, kills: int, until: float) -> Iterator[tuple[str, str]]:
    """Yield random cases until enough daemons have been killed or the time is over."""
    names, weights = list(SOAK_WEIGHTS), list(SOAK_WEIGHTS.values())
    while world.counts.kills < kills and time.monotonic() < until:
        name = world.chance.choices(names, weights)[0]
        yield name, world.chance.choices(list(SOAK_PHASES), list(SOAK_PHASES.values()))[0]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", metavar="FAULT:PHASE", help="this one alone")
    parser.add_argument("--kills", type=int, default=0, help="a soak until so many kills")
    parser.add_argument("--minutes", type=float, default=600, help="the longest soak")
    parser.add_argument("--slow", action="store_true", help="stop processes for 5 s")
    parser.add_argument("--tokens", action="store_true", help="with a model that generates")
    parser.add_argument("--keep", action="store_true", help="leave the directory")
    parser.add_argument("--report", type=Path, help="write the counts here as JSON")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    # So that a soak that is told to end cleans up as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = Path(tempfile.mkdtemp(prefix="tierd-chaos-"))
    ok = False
    try:
        with World(directory, asked.seed) as world:
            if asked.slow:
                world.stop_s = 5.0
            stager = Stager(world)
            try:
                prepare(world, tokens=asked.tokens)
                if asked.case:
                    cases = iter([tuple(asked.case.split(":"))])
                elif asked.kills:
                    cases = soak(world, asked.kills, world.began + asked.minutes * 60)
                else:
                    shuffled = list(matrix())
                    random.Random(asked.seed).shuffle(shuffled)
                    cases = iter(shuffled)
                run(world, stager, asked, cases)
                ok = True
            except (ChaosError, TierdError):
                pass
            finally:
                stager.close()
                print(json.dumps(report(world, asked)))
    finally:
        if asked.keep or not ok:
            print(f"logs are in {directory}")
        else:
            shutil.rmtree(directory)
    return 0 if ok else 1


def prepare(world: World, *, tokens: bool) -> None:
    """Start a daemon and an engine, and one with a model if wanted."""
    if tokens:
        checkpoint = world.directory / "qwen4_exp"
        demo_models.write_qwen4_exp(checkpoint)
        world.stage_model(checkpoint, "qwen")
    world.start_daemon()
    if tokens:
        world.start_tokens(world.directory / "qwen4_exp", "qwen")
    world.start_engine()
    world.goes_on()


if __name__ == "__main__":
    sys.exit(main())
