"""What a run does: changes to stores, requests of clients, restarts, and a last look at all."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.sim import incomplete, scrubbing
from tests.sim.machine import NO_SLOT, TURN_NS, Client, Ring
from tests.sim.model import Known, Violation, packed, places, trailer_of
from tests.sim.seams import UNIT_PAGES
from tierd.errors import (
    DeviceBusyError,
    DeviceError,
    DeviceTooSmallError,
)
from tierd.io import _core, layout, staging, walker
from tierd.io.layout import Geometry
from tierd.io.store import Store
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tests.sim.world import World
    from tierd.types import Extent

ACTIONS_RANGE = (12, 40)
CLIENTS_MAX = 3
TURNS_MAX = 20_000  # a request that is not answered by then hangs
# Writes and flushes: of a commit, table and root; of staging a table, two commits and its pages.
COMMIT_OPERATIONS, STAGE_OPERATIONS = 4, 11
DECAY_SHARE = 0.3  # of the restarts find that a bit of a root or table has rotted
INCOMPLETE_SHARE = 0.5  # of the restarts of several devices find one of them away at first
OK = int(_core.protocol.Status.ok)
# What a failed request may say when a page could not be read right, twice.
PAGE_REASONS = ("read_error", "short_read", "wrong_page", "bad_crc")


def run(world: World) -> None:
    """Do as the seed says, then look at everything once more without faults."""
    world.begin()
    for _ in range(world.chance.randint(*ACTIONS_RANGE)):
        world.running()
        actions, weights = zip(*_ACTIONS, strict=True)
        (action,) = world.chance.choices(actions, weights)
        world.count(action.__name__)
        action(world)
    finish(world)


# --- changes to stores ---------------------------------------------------------------------------


def stage(world: World) -> None:
    """Stage a variant of a model, all of its tables or one."""
    number = world.chance.randrange(len(world.models))
    source = world.chance.choice(world.chance.choice(world.sources))
    specs = list(source.specs)
    if world.chance.random() < 0.3:
        specs = [world.chance.choice(specs)]
    state = world.models[number].state
    states = []
    need = 0
    for spec in specs:
        known = Known(source, spec)
        present = state.images.get(known.name)
        if present is not None and present.source is source:
            continue
        state = state.with_image(known)
        states.append(state)
        need += -(-Geometry.of(spec.row_bytes, spec.rows).pages // UNIT_PAGES) * UNIT_PAGES
    stores = world.stores(number)
    free = min(store.free_pages for store in stores.stores)
    operations = len(specs) * (STAGE_OPERATIONS + COMMIT_OPERATIONS * (len(stores.stores) - 1))
    world.log(f"stage {source.model}-{source.variant} {len(specs)} on set {number}")
    with world.change(number, states, operations) as change:
        try:
            results = staging.stage(
                stores,
                source.checkpoint,
                specs,
                model=source.model,
                sample=world.chance.randint(0, 6),
            )
        except DeviceTooSmallError:
            world.log("too small")
            if need <= free:
                raise Violation("leak", f"{need} pages do not fit {free} free ones") from None
            change.states = []
        else:
            written = sum(result.written_bytes for result in results)
            if bool(written) != bool(states):
                raise Violation("durability", f"{written} bytes written for {len(states)} tables")


def delete(world: World) -> None:
    """Delete an image; refused while a client reads it."""
    found = _any_image(world)
    if found is None:
        return
    number, name = found
    stores = world.stores(number)
    leased = any(
        ring.stores == number and ring.image.name == name and world.holds(ring)
        for client in world.clients
        for ring in client.rings
    )
    wipe = world.chance.random() < 0.4
    state = world.models[number].state.without(name)
    held = [(share.path, share.extents) for share in stores.image(name).shares]
    before = world.faults_so_far()
    world.log(f"delete {name} on set {number}{', wiped' if wipe else ''}")
    with world.change(number, [state], COMMIT_OPERATIONS * len(stores.stores)) as change:
        try:
            stores.delete(name, wipe=wipe)
        except DeviceBusyError:
            if not leased:
                raise Violation("leak", f"{name} is busy, but nobody reads it") from None
            world.log("busy")
            change.states = []
        else:
            if leased:
                raise Violation("durability", f"{name} was deleted under a reader")
            if wipe and world.faults_so_far() == before:
                _require_zeroes(world, name, held)


def wipe_on(world: World) -> None:
    """Finish a wipe that a kill or a fault cut off."""
    owed = [
        (number, wipe.name)
        for number in range(len(world.models))
        for _, wipe in world.stores(number).wipes()
    ]
    if owed:
        finish_wipe(world, *world.chance.choice(owed))


def finish_wipe(world: World, number: int, name: str) -> None:
    """Finish a wipe; without faults in between no byte of the image is left on the medium."""
    stores = world.stores(number)
    owed = stores.wipes(name)
    world.log(f"finish the wipe of {name} on set {number}")
    before = world.faults_so_far()
    operations = sum(2 * COMMIT_OPERATIONS + len(wipe.extents) + 1 for _, wipe in owed)
    with world.change(number, [], operations):
        stores.finish_wipes(name)
        if world.faults_so_far() == before:
            _require_zeroes(world, name, [(s.device.path, wipe.extents) for s, wipe in owed])
    world.count("wipes finished")


def _require_zeroes(world: World, name: str, held: list[tuple[str, tuple[Extent, ...]]]) -> None:
    for path, extents in held:
        for start, end in map(layout.occupied, extents):
            found = np.empty(end - start, np.uint8)
            world.host.native_at(path).peek(start, found)
            if found.any():
                raise Violation("silence", f"{path}: rows of {name} are there after its wipe")


def place(world: World) -> None:
    """Change or drop an image's placement."""
    found = _any_image(world)
    if found is None:
        return
    number, name = found
    placement = {"tiers": ["disk"], "quota": world.chance.randint(0, 32)}
    chosen = placement if world.chance.random() < 0.8 else None
    world.log(f"placement of {name} on set {number}: {chosen}")
    state = world.models[number].state.with_placement(name, chosen)
    with world.change(number, [state], COMMIT_OPERATIONS):
        world.stores(number).image(name).home.set_placement(name, chosen)


def _any_image(world: World) -> tuple[int, str] | None:
    images = [(n, name) for n, m in enumerate(world.models) for name in sorted(m.state.images)]
    return world.chance.choice(images) if images else None


# --- looking at stores ---------------------------------------------------------------------------


def scrub(world: World) -> None:
    """Verify an image in full, perhaps after a bit of it has rotted."""
    found = _any_image(world)
    if found is None:
        return
    number, name = found
    if world.chance.random() < 0.3:
        image = world.stores(number).image(name)
        _, path, place = world.chance.choice(list(places(image)))
        world.host.native_at(path).rot(place)
    verify(world, number, name, world.chance.random() < 0.5)


def verify(world: World, number: int, name: str, compare: bool) -> None:
    """Verify; the report must be right about every page, unless faults came in between."""
    stores = world.stores(number)
    known = world.models[number].state.images[name]
    before = world.faults_so_far()
    checkpoint = known.source.checkpoint if compare else None
    report = walker.verify(stores, name, checkpoint=checkpoint, sample=4, full=True)
    world.log(f"verify {name} on set {number}: {report.pages_bad} bad, digest {report.digest_ok}")
    if world.faults_so_far() != before:
        return
    wrong = world.wrong_pages(stores.image(name), known)
    if bool(wrong) == report.ok or (wrong and report.first_bad_page != wrong[0]):
        raise Violation("silence", f"{name} has bad pages {wrong[:9]}, the report says {report}")


def inspect(world: World) -> None:
    """Look at a set of devices beside the daemon, as a command-line tool does."""
    number = world.chance.randrange(len(world.models))
    before = world.faults_so_far()
    marks = world.marks(number)
    try:
        with StoreSet.open(world.groups[number], write=False) as stores:
            fits = world.models[number].state.fits(stores)
    except DeviceError as error:
        world.log(f"inspect: {error}")
        fits = False
    if not fits and world.faults_so_far() == before and marks == world.models[number].marks:
        raise Violation("durability", f"set {number} looks different to a reader")


def intrude(world: World) -> None:
    """A second daemon must not get a device."""
    number = world.chance.randrange(len(world.host.paths))
    try:
        Store.open(world.host.paths[number]).close()
    except DeviceBusyError:
        return
    raise Violation("durability", f"device {number} was opened by a second daemon")


def restart(world: World) -> None:
    """Stop in an orderly way and start again; requests may be under way."""
    if world.clients and world.chance.random() < 0.5:
        ask(world)
    if world.chance.random() < 0.5:
        world.stop()
    else:
        world.kill()
    if world.chance.random() < DECAY_SHARE:
        world.decay()
    for number, group in enumerate(world.groups):
        if len(group) > 1:
            world.chance.shuffle(group)  # names are dealt out anew at a boot
            if world.chance.random() < INCOMPLETE_SHARE:
                incomplete.visit(world, number)
    world.start()
    for client in list(world.clients):
        _settle_all(world, client)


def lose_power(world: World) -> None:
    world.power_loss()
    world.start()


# --- clients -------------------------------------------------------------------------------------


def attach(world: World) -> None:
    """A client comes and reads one to three images."""
    if len(world.clients) >= CLIENTS_MAX:
        world.drop(world.chance.choice(world.clients))
    daemon = world.running()
    images = [
        (number, image, world.models[number].state.images[image.name])
        for number, stores in enumerate(daemon.sets)
        for image in stores.images
    ]
    if not images:
        return
    wanted = world.chance.sample(images, min(len(images), world.chance.randint(1, 3)))
    client = Client(daemon, world.host, wanted, world.chance)
    daemon.attach(client)
    world.clients.append(client)
    names = ", ".join(f"{n}:{i.name}{'' if r.twin else ' raw'}" for (n, i, _), r in
                      zip(wanted, client.rings, strict=True))  # fmt: skip
    world.log(f"attach {names}")


def leave(world: World) -> None:
    """A client goes, perhaps with requests under way."""
    if world.clients:
        client = world.chance.choice(world.clients)
        if world.chance.random() < 0.5:
            _publish(world, client)
        world.log("leave")
        world.drop(client)


def ask(world: World) -> None:
    """Publish requests and turn the pump a little; nobody waits for them yet."""
    if world.clients:
        client = world.chance.choice(world.clients)
        _publish(world, client)
        for _ in range(world.chance.randint(0, 6)):
            world.running().pump.turn()


def serve(world: World) -> None:
    """Ask for rows and wait for all of them."""
    if not world.clients:
        attach(world)
    if not world.clients:
        return
    client = world.chance.choice(world.clients)
    _publish(world, client)
    if world.chance.random() < 0.04:
        world.kill()
        if world.chance.random() < 0.3:
            _settle_all(world, client)  # nobody answers
        world.start()
    if client in world.clients:
        _settle_all(world, client)


def _publish(world: World, client: Client) -> None:
    for ring in client.rings:
        if world.chance.random() < 0.2:
            continue
        if ring.raw is not None:
            _publish_raw(world, client, ring)
        else:
            for _ in range(world.chance.choice((1, 1, 1, 2))):
                ring.kicked = _draw_ids(world, ring)
                ring.watch(ring.kicked // ring.image.info.rows_per_page)
                with _failing(world, ring):
                    ring.twin.kick(ring.kicked)


def _draw_ids(world: World, ring: Ring) -> NDArray[np.int64]:
    count = world.chance.choice((1, 3, 8, 24, 60))
    rows = ring.known.spec.rows
    ids = [world.chance.randrange(rows) for _ in range(count)]
    shape = (2, -1) if count % 2 == 0 else (-1,)
    return np.array(ids, np.int64).reshape(shape)


def _publish_raw(world: World, client: Client, ring: Ring) -> None:
    for _ in range(world.chance.randint(1, 4)):
        if len(ring.outstanding) >= 2:  # the arena has room for two requests at least
            return
        count = world.chance.randint(1, max(1, client.rows_max // 2))
        pages = [world.chance.randrange(ring.image.info.pages) for _ in range(count)]
        if world.chance.random() < 0.03:
            pages[0] = ring.image.info.pages + world.chance.randrange(3)
        asked = np.array(pages, np.uint32)
        ring.watch(asked[asked < ring.image.info.pages])
        rows = np.zeros(count, np.uint32)
        slots = np.full(count, NO_SLOT, np.uint32)
        ring.outstanding.append((ring.raw.publish(asked, rows, slots), asked))


def _settle_all(world: World, client: Client) -> None:
    """Wait for everything that a client asked for, and check what it got."""
    for ring in client.rings:
        if ring.raw is not None:
            while ring.outstanding:
                if not _settle_raw(world, ring):
                    break
        else:
            _gather(world, ring)
        if ring.idle():
            ring.faulty.clear()


def _gather(world: World, ring: Ring) -> None:
    ids = ring.kicked
    if ids is None or world.chance.random() < 0.15:
        ids = _draw_ids(world, ring)
        ring.watch(ids // ring.image.info.rows_per_page)
    ring.kicked = None
    expected = ring.known.source.decoded[ring.known.spec.name]
    out = np.zeros((*ids.shape, expected.shape[1]), expected.dtype)
    with _failing(world, ring) as result:
        ring.twin.gather(ids, out)
    if result.ok:
        world.count("rows")
        if not np.array_equal(out, expected[ids]):
            bad = ids.reshape(-1)[(out != expected[ids]).any(axis=-1).reshape(-1)]
            raise Violation("wrong_row", f"{ring.image.name}: rows {bad[:5].tolist()}")


@dataclasses.dataclass
class Result:
    ok: bool = True


@contextlib.contextmanager
def _failing(world: World, ring: Ring) -> Any:
    """Allow a twin's call to fail, for a reason that the device or the daemon gave."""
    result = Result()
    try:
        yield result
    except RuntimeError as error:
        result.ok = False
        ring.kicked = None
        reason = str(error).removeprefix("request failed: ").split(",")[0]
        world.log(f"{ring.image.name} failed: {reason}")
        world.count(f"request: {reason}")
        _judge_reason(world, ring, reason)


def _judge_reason(world: World, ring: Ring, reason: str) -> None:
    faults_since = ring.faults_since()
    if reason in PAGE_REASONS:
        if faults_since < 2:
            raise Violation(
                "refusal", f"{ring.image.name}: {reason} after {faults_since} faulty reads"
            )
    elif reason == "row tag does not match":
        if world.crc_sample == 1 or not ring.bits_since():
            raise Violation("refusal", f"{ring.image.name}: {reason}, and no fault explains it")
    elif reason == "timeout":
        if world.daemon is not None and not ring.short_timeout:
            raise Violation("hang", f"{ring.image.name}: no answer in {TURNS_MAX} turns")
    elif reason != "cancelled":
        raise Violation("refusal", f"{ring.image.name}: {reason}")


def _settle_raw(world: World, ring: Ring) -> bool:
    sequence, pages = ring.outstanding[0]
    try:
        status = int(ring.raw.wait(sequence, TURNS_MAX * TURN_NS))
    except TimeoutError:
        if world.daemon is not None:
            raise Violation("hang", f"{ring.image.name}: no answer to {sequence}") from None
        return False
    ring.outstanding.pop(0)
    nonsense = bool((pages >= ring.image.info.pages).any())
    name = _core.protocol.Status(status).name
    if status == OK:
        if nonsense:
            raise Violation("wrong_row", f"{ring.image.name}: pages that do not exist were served")
        _check_raw(world, ring, pages, ring.raw.pages(sequence))
    elif nonsense:
        if name not in ("bad_request", "cancelled"):
            raise Violation("refusal", f"{ring.image.name}: nonsense is called {name}")
    else:
        world.log(f"{ring.image.name} raw failed: {name}")
        world.count(f"request: {name}")
        _judge_reason(world, ring, name)
    ring.raw.retire(sequence)
    return True


def _check_raw(world: World, ring: Ring, asked: NDArray[np.uint32], pages: Any) -> None:
    """What a server answers for: identity and number of every page, and its checksum as asked.

    The tags must show what is wrong beyond that.
    """
    info = ring.image.info
    per_page, row_bytes = info.rows_per_page, info.table.row_bytes
    stride = Geometry.of(row_bytes, info.table.rows).stride
    fault = np.zeros(1, np.uint8)
    for number, page in zip(asked.tolist(), pages, strict=True):
        rows = ring.known.rows[number * per_page : (number + 1) * per_page]
        if page[-32:-4].tobytes() != trailer_of(ring.known, number):
            raise Violation("wrong_row", f"{ring.image.name}: another page was served as {number}")
        if world.crc_sample == 1 and not np.array_equal(page, packed(ring.known)[number]):
            raise Violation("wrong_row", f"{ring.image.name}: page {number} has a wrong checksum")
        found = page[: len(rows) * stride].reshape(len(rows), stride)[:, :row_bytes]
        if np.array_equal(found, rows):
            continue
        _core.check_pages(
            page, row_bytes, info.table.rows, number, info.image_id, info.generation,
            False, True, fault,
        )  # fmt: skip
        if not fault[0]:
            raise Violation("wrong_row", f"{ring.image.name}: page {number}, tags and all")
        world.count("request: tag")
        _judge_reason(world, ring, "row tag does not match")


# --- the last look -------------------------------------------------------------------------------


def finish(world: World) -> None:
    """Without faults: everything is answered, every image whole, everything can be freed."""
    world.log("finish")
    for native in world.host.natives:
        native.clear_faults()
    world.running()
    for client in list(world.clients):
        _settle_all(world, client)
    world.drop_clients()
    world.stop()
    world.start()
    for number, model in enumerate(world.models):
        for name in sorted(model.state.images):
            verify(world, number, name, compare=True)
            _read_all(world, number, name)
        scrubbing.whole_pass(world, number)
    for number, model in enumerate(world.models):
        for name in sorted(model.state.images):
            _delete_at_last(world, number, name)
        owed = world.stores(number).wipes()
        for name in sorted({wipe.name for _, wipe in owed}):
            world.stores(number).finish_wipes(name)
        for store, wipe in owed:
            _require_zeroes(world, wipe.name, [(store.device.path, wipe.extents)])
        for store in world.stores(number).stores:
            if store.free_pages != store.capacity_pages:
                raise Violation("leak", f"set {number}: {store.free_pages} pages free when empty")
    world.stop()


def _delete_at_last(world: World, number: int, name: str) -> None:
    """Delete, or wipe: most wipes of images on several devices are these."""
    stores, wipe = world.stores(number), world.chance.random() < 0.5
    held = [(share.path, share.extents) for share in stores.image(name).shares]
    stores.delete(name, wipe=wipe)
    if wipe:
        _require_zeroes(world, name, held)


def _read_all(world: World, number: int, name: str) -> None:
    """Every row of every sound page reaches a client; the others fail."""
    daemon = world.running()
    image = world.stores(number).image(name)
    known = world.models[number].state.images[name]
    client = Client(daemon, world.host, [(number, image, known)], world.chance, raw_share=1)
    ring = client.rings[0]
    daemon.attach(client)
    world.clients.append(client)
    for first in range(0, image.info.pages, client.rows_max):
        asked = np.arange(first, min(first + client.rows_max, image.info.pages), dtype=np.uint32)
        ring.watch(asked)
        slots = np.full(asked.size, NO_SLOT, np.uint32)
        ring.outstanding.append((ring.raw.publish(asked, asked * 0, slots), asked))
        _settle_raw(world, ring)
        ring.faulty.clear()
    world.drop(client)


_ACTIONS: tuple[tuple[Callable[[World], None], int], ...] = (
    (serve, 40),
    (ask, 6),
    (attach, 8),
    (leave, 4),
    (stage, 22),
    (delete, 8),
    (wipe_on, 4),
    (place, 12),
    (scrub, 6),
    (scrubbing.scrub_on, 6),
    (inspect, 3),
    (intrude, 1),
    (restart, 7),
    (lose_power, 4),
)
