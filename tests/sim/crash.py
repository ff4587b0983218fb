"""Stop at every write and every flush of a staging, a deletion and a placement change.

For each operation the device is set back to one starting point, the power goes right before write
or flush number k, for every k, and the unflushed writes meet each of several fates. Then a daemon
starts: the store must be in one of the states that the operation leads through, every image whole;
and the operation, done again, must succeed.

    python -m tests.sim.crash
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import TYPE_CHECKING

import numpy as np

from tests.sim import pool, seams
from tests.sim.model import Known, State, Violation, places, right_pages
from tierd.io import _core, staging
from tierd.io.device import PAGE_BYTES
from tierd.io.layout import Areas
from tierd.io.simulated import PowerCut, SimulatedHost
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOSSES = ("none", "all", "first", "last", "torn", "random")
DRAWS = {"torn": 4, "random": 8}  # different outcomes of the losses that are drawn
UNITS = 40
UNIT_PAGES = seams.UNIT_PAGES


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is cut off.

    Attributes:
        before: brings a fresh store to where it starts; returns the state.
        change: the operation itself.
        states: those it leads through, given the state before; the last is where it ends.
    """

    name: str
    before: Callable[[Store], State]
    change: Callable[[Store], object]
    states: Callable[[State], list[State]]


@dataclasses.dataclass
class Tally:
    """What was tried.

    Attributes:
        stops: writes and flushes before which the power was cut.
        runs: stops times the fates of the unflushed writes.
    """

    name: str
    stops: int = 0
    runs: int = 0


def stage(model: str, variant: int) -> Callable[[Store], object]:
    """Return what stages all tables of a model."""
    source = _source(model, variant)
    return lambda store: staging.stage(
        store, source.checkpoint, source.specs, model=model, sample=2
    )


def _source(model: str, variant: int) -> pool.Source:
    return next(m for m in pool.sources() if m[0].model == model)[variant]


def _staged(state: State, model: str, variant: int) -> list[State]:
    states = []
    source = _source(model, variant)
    for spec in source.specs:
        state = state.with_image(Known(source, spec))
        states.append(state)
    return states


def _with_images(store: Store) -> State:
    state = State()
    for model in ("ple", "engram"):
        stage(model, 0)(store)
        state = _staged(state, model, 0)[-1]
    for image in store.images:
        state.images[image.name].identity = (image.info.image_id, image.info.generation)
    store.set_placement("ple/layers.0.ple", {"tiers": ["disk"], "quota": 8})
    return state.with_placement("ple/layers.0.ple", {"tiers": ["disk"], "quota": 8})


def operations() -> list[Operation]:
    """A first staging, one beside others, a replacement, deletions, placements."""
    name = "ple/layers.0.ple"
    placement = {"tiers": ["dram"], "quota": 3}
    return [
        Operation(
            "stage two tables on an empty device",
            lambda _: State(),
            stage("engram", 0),
            lambda state: _staged(state, "engram", 0),
        ),
        Operation(
            "stage beside other images",
            _with_images,
            stage("wide", 0),
            lambda state: _staged(state, "wide", 0),
        ),
        Operation(
            "replace two tables",
            _with_images,
            stage("engram", 1),
            lambda state: _staged(state, "engram", 1),
        ),
        Operation(
            "delete",
            _with_images,
            lambda store: store.delete_image(name),
            lambda state: [state.without(name)],
        ),
        Operation(
            "delete and wipe",
            _with_images,
            lambda store: store.delete_image(name, wipe=True),
            lambda state: [state.without(name)],
        ),
        Operation(
            "change a placement",
            _with_images,
            lambda store: store.set_placement(name, placement),
            lambda state: [state.with_placement(name, placement)],
        ),
        Operation(
            "drop a placement",
            _with_images,
            lambda store: store.set_placement(name, None),
            lambda state: [state.with_placement(name, None)],
        ),
    ]


class _Bench:
    """A machine of one device that can be set back to where an operation starts."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        start = Areas.of(8 << 20)
        power = _core.SimPower()
        self.native = _core.SimDevice(
            start.data_start + UNITS * seams.UNIT_PAGES * PAGE_BYTES,
            tables_start=seams.SIZES["RESERVED_BYTES"],
            data_start=start.data_start,
            seed=1,
            power=power,
        )
        self.host = SimulatedHost([self.native], power)

    def prepare(self) -> None:
        """Bring the device to the start, once."""
        self.path = self.host.paths[0]
        with Store.format(self.path) as store:
            self.before = self.operation.before(store)
            store.device.flush()
        self.start = self.native.snapshot()

    def count_stops(self) -> int:
        """Writes and flushes of the operation when nothing stops it."""
        with Store.open(self.path) as store:
            first = self.host.power.operations
            self.operation.change(store)
            return int(self.host.power.operations - first)

    def cut(self, stop: int, loss: str) -> None:
        """Cut the operation off before write or flush ``stop``; start again; look; do it again."""
        self.native.restore(self.start)
        with Store.open(self.path) as store:
            self.host.power.cut_after(stop)
            try:
                self.operation.change(store)
            except PowerCut:
                pass
            else:
                raise Violation("crash", f"{self.operation.name} ended before stop {stop}")
        self.host.power_up(_core.SimLoss[loss])
        states = [self.before, *self.operation.states(self.before)]
        with Store.open(self.path) as store:
            found = self._state_of(store, states, f"cut before {stop}, {loss}")
            if found is not states[-1]:
                self.operation.change(store)
        with Store.open(self.path) as store:
            self._state_of(store, states[-1:], f"done again after a cut before {stop}, {loss}")

    def _state_of(self, store: Store, states: list[State], when: str) -> State:
        when = f"{self.operation.name}, {when}"
        found = next((state for state in states if state.fits(store)), None)
        if found is None:
            raise Violation("durability", f"{when}: {[image.name for image in store.images]}")
        used = 0
        for image in store.images:
            known = found.images[image.name]
            known.identity = (image.info.image_id, image.info.generation)
            pages = np.empty((image.info.pages, PAGE_BYTES), np.uint8)
            for page, place in places(image):
                self.native.peek(place * PAGE_BYTES, pages[page])
            if not right_pages(known, pages).all():
                raise Violation("durability", f"{when}: {image.name} is not whole")
            used += sum(-(-e.pages // UNIT_PAGES) * UNIT_PAGES for e in image.extents)
        if store.free_pages != store.capacity_pages - used:
            raise Violation("leak", f"{when}: {store.free_pages} pages are free")
        return found


def crash_everywhere(operation: Operation) -> Tally:
    """Cut one operation off at each of its writes and flushes; Violation at the first fault."""
    pool.sources()
    tally = Tally(operation.name)
    with seams.small_sizes():
        bench = _Bench(operation)
    with seams.simulated_machine(bench.host, random.Random(1)):
        bench.prepare()
        tally.stops = bench.count_stops()
        for stop in range(tally.stops):
            for loss in LOSSES:
                for _ in range(DRAWS.get(loss, 1)):
                    bench.cut(stop, loss)
                    tally.runs += 1
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; the exit status is 1 if anything did not hold."""
    argparse.ArgumentParser(prog="python -m tests.sim.crash").parse_args(arguments)
    total = 0
    for tally in map(crash_everywhere, operations()):
        print(f"{tally.name:<40}{tally.stops:>6} stops{tally.runs:>8} runs", flush=True)
        total += tally.runs
    print(f"{total} power cuts, every one survived")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
