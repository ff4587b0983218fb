"""/v1/devices: what tables lie on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.api import schemas
from tierd.api.routing import Call, Routes

if TYPE_CHECKING:
    from tierd.io.store import Store

PAGE_BYTES = 4096

routes = Routes("devices", "Devices that the daemon holds.")


@routes.get("/v1/devices", schemas.Devices)
async def get_devices(call: Call) -> schemas.Devices:
    """Every device, in the order of devices.paths."""
    return schemas.Devices(devices=[device_answer(store) for store in call.daemon.plane.stores])


@routes.get("/v1/devices/{uuid}", schemas.Device)
async def get_device(call: Call) -> schemas.Device:
    """One device, by its UUID."""
    return device_answer(call.daemon.plane.store_of(call.part("uuid")))


def device_answer(store: Store) -> schemas.Device:
    """Return what REST says of a device."""
    device = store.device
    return schemas.Device(
        path=device.path,
        uuid=store.uuid,
        size_bytes=device.size,
        free_bytes=store.free_pages * PAGE_BYTES,
        block_bytes=device.block_size,
        direct=device.direct,
        direct_reason=device.direct_reason,
        images=len(store.images),
        note=store.note,
    )
