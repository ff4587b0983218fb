"""A machine that starts without one of the devices that share images, and what must hold then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.machine import Daemon
from tests.sim.model import Violation
from tierd.errors import DeviceBusyError, DeviceError, ImageIncompleteError

if TYPE_CHECKING:
    from tests.sim.world import World
    from tierd.io.store_set import StoreSet

DELETE_SHARE = 0.4  # of the visits delete an image, part of which is away


def visit(world: World, number: int) -> None:
    """Start without one device of a set, look, perhaps delete an image, and stop."""
    group = world.groups[number]
    absent = world.chance.choice(group)
    groups = [[path for path in paths if path != absent] for paths in world.groups]
    world.log(f"start without {absent}")
    before = world.faults_so_far()
    try:
        daemon = Daemon(groups, world.chance, world.crc_sample)
    except DeviceError as error:
        world.log(f"start failed: {error}")
        if world.faults_so_far() == before:
            raise Violation("durability", f"devices were refused without one: {error}") from None
        return
    world.count("incomplete")
    try:
        stores = daemon.sets[number]
        _check(world, number, stores)
        if stores.images and world.chance.random() < DELETE_SHARE:
            _delete(world, number, stores, world.chance.choice(stores.images).name)
    finally:
        daemon.stop()


def _check(world: World, number: int, stores: StoreSet) -> None:
    """What is there is whole, what is not says so, and nothing was given up."""
    model = world.models[number]
    here = {store.uuid for store in stores.stores}
    found = {image.name: image for image in stores.images}
    for name, devices in model.devices.items():
        if (name in found) != (devices[0] in here):
            raise Violation("durability", f"{name}: found {sorted(found)} without a device")
        for uuid in set(devices[1:]) & here:
            store = next(store for store in stores.stores if store.uuid == uuid)
            if not any(
                (part.image_id, part.generation) == model.state.images[name].identity
                for part in store.parts
            ):
                raise Violation("durability", f"{name}: its part was given up, a device is away")
        if name in found:
            image, whole = found[name], set(devices) <= here
            if bool(image.fault) == whole:
                raise Violation("silence", f"{name}: {image.fault or 'no fault'}")
            if whole:
                world.check_pages(number, image, model.state.images[name])
            else:
                _must_refuse(name, image.require_whole)
    for store in stores.stores:
        world.check_room(store)


def _must_refuse(name: str, require: object) -> None:
    assert callable(require)
    try:
        require()
    except ImageIncompleteError:
        return
    raise Violation("silence", f"{name} lacks a device and was called whole")


def _delete(world: World, number: int, stores: StoreSet, name: str) -> None:
    model = world.models[number]
    after = model.state.without(name)
    before = world.faults_so_far()
    leased = any(
        r.image.name == name and r.stores == number for c in world.clients for r in c.rings
    )
    world.log(f"delete {name} without a device")
    try:
        stores.delete(name)
    except DeviceBusyError:
        if not leased:
            raise Violation("leak", f"{name} is busy, but nobody reads it") from None
    except DeviceError as error:
        world.log(f"failed: {error}")
        if world.faults_so_far() == before:
            raise Violation("durability", f"a deletion failed without a fault: {error}") from None
        model.doubt = [after]
    else:
        model.state = after
