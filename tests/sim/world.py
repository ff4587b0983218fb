"""One run: a machine with simulated devices, its processes, and the model of what must hold."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.sim import faults, seams
from tests.sim.machine import Client, Daemon
from tests.sim.model import (
    State,
    StoreModel,
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.model import Known
    from tierd.io.extent_table import StoredImage

DEVICES_MAX = 3
UNITS = (24, 64)  # data units of a device, low and high
OPEN_ATTEMPTS = 4  # with faults on; then the operator mends what can be mended
CUT_SHARE = 0.25  # of the changes to a store are cut off
POWER_SHARE = 0.6  # of the cuts take the whole machine down, others the daemon alone
LOSSES = ("random", "random", "random", "torn", "torn", "torn", "all", "none", "first", "last")


@dataclasses.dataclass
class Change:
    """A change in the making; who makes it may find that it leads nowhere (no states)."""

    states: list[State]


class World:
    """A machine under test.

    Attributes:
        chance: every decision of this run.
        crc_sample: one page in so many has its checksum looked at by the pump; 0 for none.
        events: what happened, in order; the same for the same seed.
        daemon: the running one, or None between a kill and a restart.
    """

    def __init__(self, seed: int, host: SimulatedHost, chance: random.Random) -> None:
        self.seed = seed
        self.chance = chance
        self.host = host
        self.models = [StoreModel() for _ in host.natives]
        self.events: list[str] = []
        self.daemon: Daemon | None = None
        self.crc_sample = chance.choice((0, 1, 4, 16))
        self.clients: list[Client] = []
        self.counters: dict[str, int] = {}
        for path in host.paths:
            Store.format(path).close()
        for model in self.models:
            model.settle(State())
        for native in host.natives:
            faults.arm(native, chance)
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

    # --- daemons ---------------------------------------------------------------------------------

    def running(self) -> Daemon:
        """Return the daemon, started if there is none."""
        if self.daemon is None:
            self.start()
        assert self.daemon is not None
        return self.daemon

    def start(self) -> None:
        """Start a daemon, whatever it takes, and check what it finds."""
        for attempt in range(100):
            if attempt == OPEN_ATTEMPTS:
                self._mend()
            before = self.faults_so_far()
            try:
                self.daemon = Daemon(self.host, self.chance, self.crc_sample)
            except DeviceError as error:
                self.log(f"start failed: {error}")
                self.count("start failed")
                self._judge_refusal(error, before, mended=attempt >= OPEN_ATTEMPTS)
                continue
            break
        else:
            raise Violation("durability", "the daemon does not start although nothing is wrong")
        for number in range(len(self.models)):
            self.resolve(number)
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
        number = next(i for i, path in enumerate(self.host.paths) if path in str(error))
        if number not in scarred:
            raise Violation("durability", f"a sound device was called damaged: {error}")
        self.format_anew(number)

    def format_anew(self, number: int) -> None:
        """What an operator does with a device that is beyond help."""
        self.drop_clients()
        path = self.host.paths[number]
        Store.format(path, force=path).close()
        self.models[number] = StoreModel(marks=faults.marks(self.host.natives[number]))
        self.models[number].settle(State())
        self.log(f"device {number} formatted anew")
        self.count("formatted anew")

    def stop(self) -> None:
        """Stop the daemon in an orderly way."""
        if self.daemon is not None:
            self.log("stop")
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
            if all(daemon.stores[r.store].find(r.image.name) == r.image for r in client.rings):
                daemon.attach(client)
            else:  # what it reads is no longer in the roots: the daemon refuses it
                self.log("client refused")
                self.clients.remove(client)
                client.die()

    # --- changes ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def change(self, number: int, states: list[State]) -> Iterator[Change]:
        """Make a change that leads through ``states``; the model follows what came of it.

        A change that succeeds ends in the last state. One that fails or is cut off ends in any of
        them, or where it began.
        """
        model, native = self.models[number], self.host.natives[number]
        change = Change(states)
        before, marks = self.faults_so_far(), faults.marks(native)
        if self.chance.random() < CUT_SHARE:
            if self.chance.random() < 0.5:
                self.host.power.cut_after(self.chance.randint(0, 14))
            else:
                self.host.power.cut_after_flushes(self.chance.randint(0, 7))
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
            if self.running().stores[number]._broken:
                self.log("broken, restart")
                self.stop()
            else:
                self.resolve(number)
        else:
            if change.states:
                model.state = change.states[-1]
                model.history += change.states[:-1]
                if faults.marks(native) == marks:
                    model.marks = marks
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

    def resolve(self, number: int) -> None:
        """Find the state that the store is in among those it may be in, and check it."""
        model, store = self.models[number], self.running().stores[number]
        native = self.host.natives[number]
        scarred = faults.marks(native) > model.marks
        found = next((state for state in model.candidates() if state.fits(store)), None)
        if found is None:
            found = self._older_state(number, scarred)
        self._learn(model, found, store)
        model.settle(found)
        for image in store.images:
            self.check_pages(number, image, found.images[image.name])
        self._check_room(number)

    def _older_state(self, number: int, scarred: bool) -> State:
        model, store = self.models[number], self.running().stores[number]
        names = sorted(image.name for image in store.images)
        older = next((s for s in reversed(model.history) if s.fits(store)), None)
        if not scarred or older is None:
            expected = " or ".join(str(sorted(state.images)) for state in model.candidates())
            raise Violation("durability", f"device {number} holds {names}, not {expected}")
        if not store.note:
            raise Violation("silence", f"device {number} went back to {names} and says nothing")
        self.log(f"device {number} went back: {store.note}")
        self.count("went back")
        model.used.clear()
        for image in store.images:  # its extents may have been given up in the meantime
            right = right_pages(older.images[image.name], self.peek(number, image))
            for page, where in places(image):
                if not right[page]:
                    self.host.natives[number].condemn(where)
        return older

    def _learn(self, model: StoreModel, state: State, store: Store) -> None:
        """Take in identities that the store chose, and see that it chose new ones."""
        for image in store.images:
            known = state.images[image.name]
            identity = (image.info.image_id, image.info.generation)
            if known.identity is None:
                if identity in model.used.get(image.name, ()):
                    raise Violation("durability", f"{image.name}: {identity} was used before")
                known.identity = identity
            model.used.setdefault(image.name, set()).add(identity)
        for name, given in store.identities.items():
            model.used.setdefault(name, set()).add((given.image_id, given.generation))

    def check_pages(self, number: int, image: StoredImage, known: Known) -> None:
        """A committed image is complete: every page is right, or known to be damaged."""
        native = self.host.natives[number]
        right = right_pages(known, self.peek(number, image))
        for page, place in places(image):
            if not right[page] and not native.damaged(place):
                raise Violation(
                    "durability",
                    f"device {number}, {image.name}: page {page} is not what was staged",
                )

    def peek(self, number: int, image: StoredImage) -> Any:
        """All pages of an image as they lie on the device, uint8 [pages, 4096]."""
        pages = np.empty((image.info.pages, PAGE_BYTES), np.uint8)
        for extent in image.extents:
            part = pages[extent.first_page : extent.first_page + extent.pages]
            self.host.natives[number].peek(extent.device_page * PAGE_BYTES, part.reshape(-1))
        return pages

    def wrong_pages(self, number: int, image: StoredImage, known: Known) -> list[int]:
        """Pages that a full verification must find."""
        native = self.host.natives[number]
        same = (self.peek(number, image) == packed(known)).all(axis=1)
        return [page for page, place in places(image) if not same[page] or native.dead(place)]

    def _check_room(self, number: int) -> None:
        """Extents do not overlap, and what is neither used nor leased is free."""
        store = self.running().stores[number]
        areas = Areas.of(store.device.size)
        used = [occupied(e) for image in store.images for e in image.extents]
        position = areas.data_start
        for start, end in sorted(used):
            if start < position or end > areas.data_end:
                raise Violation("leak", f"device {number}: extents overlap at byte {start}")
            position = end
        for client in self.clients:
            used += client.leased(number)
        free = areas.data_end - areas.data_start - _covered(used)
        if store.free_pages * PAGE_BYTES != free:
            raise Violation(
                "leak", f"device {number}: {store.free_pages} pages are free, not {free // 4096}"
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
    with seams.simulated_machine(host, chance):
        world = World(seed, host, chance)
        try:
            yield world
        finally:
            power.restore()
            if world.daemon is not None:
                world.daemon.kill()
            for client in world.clients:
                client.die()
