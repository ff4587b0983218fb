"""One run: a machine with simulated devices, its processes, and the model of what must hold."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.sim import audit, faults, pool, scrubbing, seams
from tests.sim.machine import Client, Daemon
from tests.sim.model import (
    SetModel,
    State,
    Violation,
    packed,
    places,
    right_pages,
)
from tierd.errors import DeviceDamagedError, DeviceError, DeviceForeignError, VerifyError
from tierd.io import _core
from tierd.io.device import PAGE_BYTES
from tierd.io.layout import Areas, occupied
from tierd.io.simulated import PowerCut, SimulatedHost
from tierd.io.store import Store
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.machine import Ring
    from tests.sim.model import Known
    from tierd.io.scrub import Scrub
    from tierd.io.store_set import StripedImage

DEVICES_MAX = 3
UNITS = (24, 64)  # data units of a device, low and high
OPEN_ATTEMPTS = 4  # with faults on; then the operator mends what can be mended
CUT_SHARE = 0.35  # of the changes to a store are cut off
TOGETHER_SHARE = 0.5  # of the machines stripe images over all their devices
POWER_SHARE = 0.6  # of the cuts take the whole machine down, others the daemon alone
LOSSES = ("random", "random", "random", "torn", "torn", "torn", "all", "none", "first", "last")


@dataclasses.dataclass
class Change:
    """A change in the making; who makes it may find that it leads nowhere (no states)."""

    states: list[State]
    misdirected: int  # writes of the set's devices before it


class World:
    """A machine under test.

    Attributes:
        chance: every decision of this run.
        crc_sample: one page in so many has its checksum looked at by the pump; 0 for none.
        events: what happened, in order; the same for the same seed.
        groups: paths of the devices that share images, a set each; their order may change.
        models: what each set may hold.
        scrubs: of each set, the running daemon's.
        sources: models of which this run stages tables.
        daemon: the running one, or None between a kill and a restart.
    """

    def __init__(
        self,
        seed: int,
        host: SimulatedHost,
        groups: list[list[str]],
        chance: random.Random,
        folder: Path,
    ) -> None:
        self.seed = seed
        self.chance = chance
        self.host = host
        self.groups = groups
        self.models = [SetModel() for _ in groups]
        self.events: list[str] = []
        self.daemon: Daemon | None = None
        self.crc_sample = chance.choice((0, 1, 4, 16))
        self.clients: list[Client] = []
        self.counters: dict[str, int] = {}
        self.sources: list[tuple[pool.Source, ...]] = []
        self.decayed: set[int] = set()
        self.folder = folder
        self.scrubs: list[Scrub] = []

    def begin(self) -> None:
        """Format the devices, switch their faults on and start a daemon."""
        for path in self.host.paths:
            Store.format(path).close()
        for model in self.models:
            model.settle(State())
        models = pool.sources()
        self.sources = self.chance.sample(models, self.chance.randint(1, len(models)))
        for group in self.groups:
            for path in group:
                faults.arm(self.host.native_at(path), self.chance, alone=len(group) == 1)
        self.start()

    # --- the book --------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        """Add an event; paths are named by their device's number."""
        for number, path in enumerate(self.host.paths):
            text = text.replace(path, f"device {number}")
        self.events.append(text)

    def count(self, what: str) -> None:
        self.counters[what] = self.counters.get(what, 0) + 1

    def digest(self) -> str:
        """Of all events: two runs of one seed have the same."""
        return hashlib.sha256("\n".join(self.events).encode()).hexdigest()[:16]

    def faults_so_far(self) -> int:
        return faults.total(self.host.natives)

    def natives(self, number: int) -> list[Any]:
        """The native devices of a set."""
        return [self.host.native_at(path) for path in self.groups[number]]

    def marks(self, number: int) -> int:
        """Scars in roots and tables of a set's devices."""
        return sum(map(faults.marks, self.natives(number)))

    def stores(self, number: int) -> StoreSet:
        """The open stores of a set."""
        return self.running().sets[number]

    # --- daemons ---------------------------------------------------------------------------------

    def running(self) -> Daemon:
        """Return the daemon, started if there is none."""
        if self.daemon is None:
            self.start()
        assert self.daemon is not None
        return self.daemon

    def start(self) -> None:
        """Start a daemon, whatever it takes, and check what it finds."""
        for group in self.groups:
            if len(group) > 1:
                self._check_order(group)
        for attempt in range(100):
            if attempt == OPEN_ATTEMPTS:
                self._mend()
            before = self.faults_so_far()
            try:
                self.daemon = Daemon(self.groups, self.chance, self.crc_sample)
            except DeviceError as error:
                self.log(f"start failed: {error}")
                self.count("start failed")
                self._judge_refusal(error, before, mended=attempt >= OPEN_ATTEMPTS)
                continue
            break
        else:
            raise Violation("durability", "the daemon does not start although nothing is wrong")
        for number in range(len(self.models)):
            for store in self.stores(number).stores:
                self._check_roots(store)
            self.resolve(number)
        self.scrubs = scrubbing.begin(self.folder, len(self.models))
        self._welcome_back()

    def _mend(self) -> None:
        for native in self.host.natives:
            native.clear_faults()

    def _judge_refusal(self, error: DeviceError, before: int, *, mended: bool) -> None:
        scarred = [i for i, n in enumerate(self.host.natives) if faults.marks(n)]
        if not scarred and self.faults_so_far() == before:
            raise Violation("durability", f"a sound device was refused: {error}")
        if not mended:
            return
        if not isinstance(error, DeviceDamagedError | DeviceForeignError):
            raise Violation("refusal", f"a damaged device was not called one: {error}")
        device = next(i for i, path in enumerate(self.host.paths) if path in str(error))
        if device not in scarred:
            raise Violation("durability", f"a sound device was called damaged: {error}")
        number = next(i for i, g in enumerate(self.groups) if self.host.paths[device] in g)
        if len(self.groups[number]) > 1:
            raise Violation("durability", f"nothing hurts roots of several devices: {error}")
        self.format_anew(number)

    def format_anew(self, number: int) -> None:
        """What an operator does with a device that is beyond help."""
        self.drop_clients()
        (path,) = self.groups[number]
        Store.format(path, force=path).close()
        self.models[number] = SetModel(marks=self.marks(number))
        self.models[number].settle(State())
        self.log(f"set {number} formatted anew")
        self.count("formatted anew")

    def stop(self) -> None:
        """Stop the daemon in an orderly way."""
        if self.daemon is not None:
            self.log("stop")
            for scrub in self.scrubs:
                scrub.save()
            self.daemon.stop()
            self.daemon = None

    def kill(self) -> None:
        """Kill the daemon; the machine and its clients stay."""
        self.log("kill")
        self.count("kill")
        self.host.power.restore()
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon = None

    def power_loss(self) -> None:
        """Cut the power: every process dies, unflushed writes are at the device's mercy."""
        loss = self.chance.choice(LOSSES)
        self.log(f"power loss, {loss}")
        self.count("power loss")
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon = None
        self.drop_clients()
        self.host.power_up(_core.SimLoss[loss])

    def decay(self) -> None:
        """A bit of the newest root of a device, or of its table, rots; once in a run."""
        number = self.chance.randrange(len(self.models))
        native = self.natives(number)[0]
        whole = [slot for slot in audit.slots(native) if slot.whole]
        if number in self.decayed or not whole or len(self.groups[number]) > 1:
            return
        self.decayed.add(number)
        newest = max(whole, key=lambda slot: slot.sequence)
        place = self.chance.choice((newest.place, newest.table_place))
        self.log(f"a bit rots at byte {place} of set {number}")
        native.rot(place // PAGE_BYTES)

    # --- clients ---------------------------------------------------------------------------------

    def drop_clients(self) -> None:
        for client in list(self.clients):
            self.drop(client)

    def drop(self, client: Client) -> None:
        """A client dies."""
        self.clients.remove(client)
        if self.daemon is not None:
            self.daemon.detach(client)
        client.die()

    def _welcome_back(self) -> None:
        daemon = self.running()
        for client in list(self.clients):
            if all(self.holds(ring) for ring in client.rings):
                daemon.attach(client)
            else:  # what it reads is no longer in the roots: the daemon refuses it
                self.log("client refused")
                self.clients.remove(client)
                client.die()

    def holds(self, ring: Ring) -> bool:
        """Whether what a ring reads is still in the roots."""
        found = self.stores(ring.stores).find(ring.image.name)
        return found is not None and found.stored == ring.image.stored

    # --- changes ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def change(self, number: int, states: list[State], operations: int) -> Iterator[Change]:
        """Make a change that leads through ``states``; the model follows what came of it.

        A change that succeeds ends in the last state. One that fails or is cut off ends in any of
        them, or where it began. ``operations`` is about how many writes and flushes it makes.
        """
        model = self.models[number]
        change = Change(states, self._misdirected(number))
        before, marks = self.faults_so_far(), self.marks(number)
        if self.chance.random() < CUT_SHARE:
            if self.chance.random() < 0.5:
                self.host.power.cut_after(self.chance.randint(0, operations))
            else:
                self.host.power.cut_after_flushes(self.chance.randint(0, operations // 2))
        try:
            yield change
        except PowerCut:
            model.doubt = list(states)
            self.log("cut off")
            if self.chance.random() < POWER_SHARE:
                self.power_loss()
            else:
                self.kill()
        except (DeviceError, VerifyError) as error:
            self._judge_failure(error, before)
            model.doubt = list(states)
            if any(store._broken for store in self.stores(number).stores):
                self.log("broken, restart")
                self.stop()
            else:
                self.resolve(number)
        else:
            if change.states:
                model.state = change.states[-1]
                model.history += change.states[:-1]
                if self.marks(number) == marks:
                    model.marks = marks
                self._check_written(number, change.misdirected)
            self.resolve(number)
        finally:
            self.host.power.cut_never()
        if self.daemon is None:
            self.start()

    def _judge_failure(self, error: Exception, before: int) -> None:
        self.log(f"failed: {error}")
        self.count(f"failed: {type(error).__name__}")
        if self.faults_so_far() == before:
            raise Violation("durability", f"a change failed without a fault: {error}")

    # --- what must hold of a store ---------------------------------------------------------------

    def _check_roots(self, store: Store) -> None:
        """A store that was just opened believed nothing damaged, and says what it found."""
        path, native = store.device.path, self.host.native_at(store.device.path)
        # A read of a table that brings what lay there before is as good as any, once; and what is
        # read in two goes may rot in between.
        counts = native.counts()
        roots, tables = faults.ZONES.index("roots"), faults.ZONES.index("tables")
        in_two = counts["short_read"]
        stale = counts["stale_read"][tables] + in_two[tables]
        found = audit.slots(native)
        for slot in found:
            if slot.written and not slot.whole and not store.note and not in_two[roots]:
                raise Violation("silence", f"{path}: a damaged root, and not a word")
        newest = max((s for s in found if s.whole), key=lambda slot: slot.sequence, default=None)
        if newest and not newest.table_whole and faults.marks(native) == 0:
            raise Violation("durability", f"{path}: a root came before its table")
        for slot in found:
            believed = slot.whole and slot.sequence == store.sequence and not stale
            if believed and not slot.table_whole:
                raise Violation("silence", f"{path}: a damaged table was believed")

    def _check_written(self, number: int, misdirected: int) -> None:
        """A change that succeeded is on the devices, unless another write went astray to there."""
        if self._misdirected(number) != misdirected:
            return
        for store in self.stores(number).stores:
            found = [s for s in audit.slots(self.host.native_at(store.device.path)) if s.whole]
            if max((slot.sequence for slot in found), default=0) != store.sequence:
                raise Violation("durability", f"{store.device.path}: a commit is not there")

    def _misdirected(self, number: int) -> int:
        return sum(sum(native.counts()["misdirected_write"]) for native in self.natives(number))

    def resolve(self, number: int) -> None:
        """Find the state that a set is in among those it may be in, and check it."""
        model, stores = self.models[number], self.stores(number)
        scarred = self.marks(number) > model.marks
        found = next((state for state in model.candidates() if state.fits(stores)), None)
        if found is None:
            found = self._older_state(number, scarred)
        self._learn(model, found, stores)
        model.settle(found)
        model.devices = {image.name: image.stored.devices for image in stores.images}
        for image in stores.images:
            self.check_pages(number, image, found.images[image.name])
        for store in stores.stores:
            self._check_parts(store, stores)
            self.check_room(store)

    def _check_parts(self, store: Store, stores: StoreSet) -> None:
        """Every part belongs to an image: what a staging left behind was given up."""
        named = {(image.stored.identity, image.stored.devices[0]) for image in stores.images}
        for part in store.parts:
            if ((part.image_id, part.generation), part.home) not in named:
                raise Violation("leak", f"{store.device.path} keeps a part of {part.name}")

    def _check_order(self, group: list[str]) -> None:
        """Before anything is mended: a home names no part that is not reserved on its device."""
        before = self.faults_so_far()
        try:
            with StoreSet.open(group, write=False) as stores:
                faults_found = [image.fault for image in stores.images if image.fault]
        except DeviceError as error:
            self.log(f"a look before the start: {error}")
            return
        if faults_found and self.faults_so_far() == before:
            raise Violation("durability", f"a home came before its members: {faults_found[0]}")

    def _older_state(self, number: int, scarred: bool) -> State:
        model, stores = self.models[number], self.stores(number)
        names = sorted(image.name for image in stores.images)
        older = next((s for s in reversed(model.history) if s.fits(stores)), None)
        if not scarred or older is None:
            expected = " or ".join(str(sorted(state.images)) for state in model.candidates())
            raise Violation("durability", f"set {number} holds {names}, not {expected}")
        if not stores.notes:
            raise Violation("silence", f"set {number} went back to {names} and says nothing")
        self.log(f"set {number} went back: {stores.notes}")
        self.count("went back")
        model.used.clear()
        for image in stores.images:  # its extents may have been given up in the meantime
            right = right_pages(older.images[image.name], self.peek(image))
            for page, path, place in places(image):
                if not right[page]:
                    self.host.native_at(path).condemn(place)
        return older

    def _learn(self, model: SetModel, state: State, stores: StoreSet) -> None:
        """Take in identities that the stores chose, and see that they chose new ones."""
        for image in stores.images:
            known = state.images[image.name]
            identity = image.stored.identity
            if known.identity is None:
                if identity in model.used.get(image.name, ()):
                    raise Violation("durability", f"{image.name}: {identity} was used before")
                known.identity = identity
            model.used.setdefault(image.name, set()).add(identity)
        for store in stores.stores:
            for name, given in store.identities.items():
                model.used.setdefault(name, set()).add((given.image_id, given.generation))

    def check_pages(self, number: int, image: StripedImage, known: Known) -> None:
        """A committed image is complete: every page is right, or known to be damaged."""
        right = right_pages(known, self.peek(image))
        for page, path, place in places(image):
            if not right[page] and not self.host.native_at(path).damaged(place):
                raise Violation(
                    "durability", f"set {number}, {image.name}: page {page} is not what was staged"
                )

    def peek(self, image: StripedImage) -> Any:
        """All pages of an image as they lie on the devices, uint8 [pages, 4096]."""
        pages = np.empty((image.info.pages, PAGE_BYTES), np.uint8)
        for page, path, place in places(image):
            self.host.native_at(path).peek(place * PAGE_BYTES, pages[page])
        return pages

    def wrong_pages(self, image: StripedImage, known: Known) -> list[int]:
        """Pages that a full verification must find."""
        same = (self.peek(image) == packed(known)).all(axis=1)
        return sorted(
            page
            for page, path, place in places(image)
            if not same[page] or self.host.native_at(path).dead(place)
        )

    def check_room(self, store: Store) -> None:
        """Extents do not overlap, and what is neither used nor leased is free."""
        path, areas = store.device.path, Areas.of(store.device.size)
        holdings = (*store.images, *store.parts, *store.wipes)
        used = [occupied(extent) for holding in holdings for extent in holding.extents]
        position = areas.data_start
        for start, end in sorted(used):
            if start < position or end > areas.data_end:
                raise Violation("leak", f"{path}: extents overlap at byte {start}")
            position = end
        for client in self.clients:
            used += client.leased(store.uuid)
        free = areas.data_end - areas.data_start - _covered(used)
        if store.free_pages * PAGE_BYTES != free:
            raise Violation(
                "leak", f"{path}: {store.free_pages} pages are free, not {free // 4096}"
            )


def _covered(ranges: list[tuple[int, int]]) -> int:
    total, position = 0, 0
    for start, end in sorted(ranges):
        total += max(0, end - max(start, position))
        position = max(position, end)
    return total


@contextlib.contextmanager
def new_world(seed: int) -> Iterator[World]:
    """Make the machine of a seed; everything is gone afterwards."""
    chance = random.Random(seed)
    power = _core.SimPower()
    with seams.small_sizes():
        start = Areas.of(8 << 20)
        natives = []
        for _ in range(chance.randint(1, DEVICES_MAX)):
            size = start.data_start + chance.randint(*UNITS) * seams.UNIT_PAGES * PAGE_BYTES
            assert Areas.of(size) == Areas(start.table_bytes, start.data_start, size)
            natives.append(
                _core.SimDevice(
                    size,
                    tables_start=seams.SIZES["RESERVED_BYTES"],
                    data_start=start.data_start,
                    seed=chance.getrandbits(64),
                    power=power,
                )
            )
    host = SimulatedHost(natives, power, block_size=chance.choice((512, 4096)))
    together = chance.random() < TOGETHER_SHARE
    groups = [list(host.paths)] if together else [[path] for path in host.paths]
    with (
        seams.simulated_machine(host, chance),
        tempfile.TemporaryDirectory(prefix="tierd-sim-") as folder,
    ):
        world = World(seed, host, groups, chance, Path(folder))
        try:
            yield world
        finally:
            power.restore()
            if world.daemon is not None:
                world.daemon.kill()
            for client in world.clients:
                client.die()
