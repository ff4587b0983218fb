"""Stop at every write and every flush of a staging, a deletion and a placement change.

For each operation the devices are set back to one starting point, the power goes right before write
or flush number k of any of them, for every k, and the unflushed writes meet each of several fates.
Then a daemon starts: the stores must be in one of the states that the operation leads through,
every image whole; and the operation, done again, must succeed.

    python -m tests.sim.crash
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
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
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOSSES = ("none", "all", "first", "last", "torn", "random")
# Different outcomes of the losses that are drawn; several devices make more stops.
DRAWS, DRAWS_STRIPED = {"torn": 4, "random": 8}, {"torn": 2, "random": 4}
UNITS = 40
UNIT_PAGES = seams.UNIT_PAGES


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is cut off.

    Attributes:
        before: brings fresh stores to where it starts; returns the state.
        change: the operation itself.
        states: those it leads through, given the state before; the last is where it ends.
        devices: how many share the images.
    """

    name: str
    before: Callable[[StoreSet], State]
    change: Callable[[StoreSet], object]
    states: Callable[[State], list[State]]
    devices: int = 1


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


def stage(model: str, variant: int) -> Callable[[Store | StoreSet], object]:
    """Return what stages all tables of a model."""
    source = _source(model, variant)
    return lambda stores: staging.stage(
        stores, source.checkpoint, source.specs, model=model, sample=2
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


def _with_images(stores: StoreSet) -> State:
    state = State()
    for model in ("ple", "engram"):
        stage(model, 0)(stores)
        state = _staged(state, model, 0)[-1]
    for image in stores.images:
        state.images[image.name].identity = image.stored.identity
    stores.image("ple/layers.0.ple").home.set_placement(
        "ple/layers.0.ple", {"tiers": ["disk"], "quota": 8}
    )
    return state.with_placement("ple/layers.0.ple", {"tiers": ["disk"], "quota": 8})


def operations() -> list[Operation]:
    """A first staging, one beside others, a replacement, deletions, placements; on several devices.

    An Engram table lies on two devices, the wide table on all of three.
    """
    name, striped = "ple/layers.0.ple", "engram/layers.1.engram"
    placement = {"tiers": ["dram"], "quota": 3}
    empty = "stage two tables on an empty device"

    def place(chosen: dict[str, object] | None) -> Callable[[StoreSet], object]:
        return lambda stores: stores.image(name).home.set_placement(name, chosen)

    def delete(which: str, *, wipe: bool = False) -> Callable[[StoreSet], object]:
        return lambda stores: stores.delete(which, wipe=wipe)

    def staged(model: str, variant: int) -> Callable[[State], list[State]]:
        return lambda state: _staged(state, model, variant)

    def without(which: str) -> Callable[[State], list[State]]:
        return lambda state: [state.without(which)]

    def placed(chosen: dict[str, object] | None) -> Callable[[State], list[State]]:
        return lambda state: [state.with_placement(name, chosen)]

    return [
        Operation(empty, lambda _: State(), stage("engram", 0), staged("engram", 0)),
        Operation("stage beside other images", _with_images, stage("wide", 0), staged("wide", 0)),
        Operation("replace two tables", _with_images, stage("engram", 1), staged("engram", 1)),
        Operation("delete", _with_images, delete(name), without(name)),
        Operation("delete and wipe", _with_images, delete(name, wipe=True), without(name)),
        Operation("change a placement", _with_images, place(placement), placed(placement)),
        Operation("drop a placement", _with_images, place(None), placed(None)),
        Operation(
            "stage on three devices", _with_images, stage("wide", 0), staged("wide", 0), devices=3
        ),
        Operation(
            "replace on two devices", _with_images, stage("engram", 1), staged("engram", 1), 2
        ),
        Operation("delete on two devices", _with_images, delete(striped), without(striped), 2),
        Operation(
            "delete and wipe on two devices",
            _with_images,
            delete(striped, wipe=True),
            without(striped),
            devices=2,
        ),
    ]


class _Bench:
    """A machine whose devices can be set back to where an operation starts."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        start = Areas.of(8 << 20)
        power = _core.SimPower()
        natives = [
            _core.SimDevice(
                start.data_start + UNITS * seams.UNIT_PAGES * PAGE_BYTES,
                tables_start=seams.SIZES["RESERVED_BYTES"],
                data_start=start.data_start,
                seed=1 + number,
                power=power,
            )
            for number in range(operation.devices)
        ]
        self.host = SimulatedHost(natives, power)

    def _open(self) -> StoreSet:
        return StoreSet.open(self.host.paths)

    def prepare(self) -> None:
        """Bring the devices to the start, once."""
        for path in self.host.paths:
            Store.format(path).close()
        with self._open() as stores:
            self.before = self.operation.before(stores)
            for store in stores.stores:
                store.device.flush()
        self.start = [native.snapshot() for native in self.host.natives]

    def count_stops(self) -> int:
        """Writes and flushes of the operation when nothing stops it."""
        with self._open() as stores:
            first = self.host.power.operations
            self.operation.change(stores)
            return int(self.host.power.operations - first)

    def cut(self, stop: int, loss: str) -> None:
        """Cut the operation off before write or flush ``stop``; start again; look; do it again."""
        for native, start in zip(self.host.natives, self.start, strict=True):
            native.restore(start)
        with self._open() as stores:
            self.host.power.cut_after(stop)
            try:
                self.operation.change(stores)
            except PowerCut:
                pass
            else:
                raise Violation("crash", f"{self.operation.name} ended before stop {stop}")
        self.host.power_up(_core.SimLoss[loss])
        states = [self.before, *self.operation.states(self.before)]
        with self._open() as stores:
            found = self._state_of(stores, states, f"cut before {stop}, {loss}")
            if found is not states[-1]:
                self.operation.change(stores)
            for name in sorted({wipe.name for _, wipe in stores.wipes()}):
                stores.finish_wipes(name)
        with self._open() as stores:
            self._state_of(stores, states[-1:], f"done again after a cut before {stop}, {loss}")

    def _state_of(self, stores: StoreSet, states: list[State], when: str) -> State:
        when = f"{self.operation.name}, {when}"
        found = next((state for state in states if state.fits(stores)), None)
        if found is None:
            raise Violation("durability", f"{when}: {[image.name for image in stores.images]}")
        used = dict.fromkeys((store.uuid for store in stores.stores), 0)
        for image in stores.images:
            known = found.images[image.name]
            known.identity = image.stored.identity
            pages = np.empty((image.info.pages, PAGE_BYTES), np.uint8)
            for page, path, place in places(image):
                self.host.native_at(path).peek(place * PAGE_BYTES, pages[page])
            if not right_pages(known, pages).all():
                raise Violation("durability", f"{when}: {image.name} is not whole")
            for share in image.shares:
                used[share.uuid] += sum(-(-e.pages // UNIT_PAGES) for e in share.extents)
        for store, wipe in stores.wipes():
            used[store.uuid] += sum(-(-e.pages // UNIT_PAGES) for e in wipe.extents)
        for store in stores.stores:
            if store.free_pages != store.capacity_pages - used[store.uuid] * UNIT_PAGES:
                raise Violation("leak", f"{when}: {store.free_pages} pages are free")
        return found


def crash_everywhere(operation: Operation) -> Tally:
    """Cut one operation off at each of its writes and flushes; Violation at the first fault."""
    pool.sources()
    tally = Tally(operation.name)
    draws = DRAWS if operation.devices == 1 else DRAWS_STRIPED
    with seams.small_sizes():
        bench = _Bench(operation)
    with seams.simulated_machine(bench.host, random.Random(1)):
        bench.prepare()
        tally.stops = bench.count_stops()
        for stop in range(tally.stops):
            for loss in LOSSES:
                for _ in range(draws.get(loss, 1)):
                    bench.cut(stop, loss)
                    tally.runs += 1
    return tally


def _crash_number(number: int) -> Tally:
    return crash_everywhere(operations()[number])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; the exit status is 1 if anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.crash")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    total, numbers = 0, range(len(operations()))
    with multiprocessing.get_context("spawn").Pool(options.jobs) as processes:
        for tally in processes.imap(_crash_number, numbers):
            print(f"{tally.name:<40}{tally.stops:>6} stops{tally.runs:>8} runs", flush=True)
            total += tally.runs
    print(f"{total} power cuts, every one survived")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
