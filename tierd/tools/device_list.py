"""What ``tierd devices`` says: each device's state, room and contents, without a daemon."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tierd.errors import TierdError
from tierd.io import find_devices, holders
from tierd.io.device import PAGE_BYTES, Device
from tierd.io.inspect import Finding
from tierd.io.inspect import inspect as look

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def devices(names: Iterable[str]) -> list[dict[str, Any]]:
    """One line's worth of each device; one that cannot be looked at says why."""
    return [_line(name) for name in names]


def formatted(*, but: Sequence[str]) -> list[str]:
    """Block devices that bear a root, except those named already."""
    known = {os.path.realpath(name) for name in but} | set(but)
    return [
        device.path
        for device in find_devices.scan()
        if device.path not in known and f"{find_devices.PREFIX}{device.uuid}" not in known
    ]


def inspect(name: str) -> dict[str, Any]:
    """Everything about one device, JSON-ready.

    Raises:
        DeviceError: it is not there or may not be opened.
    """
    with Device.open(find_devices.resolve(name), write=False) as device:
        found = look(device)
        return {
            **_facts(device, found),
            "block_size": device.block_size,
            "is_block": device.is_block,
            "holder": _holder(device),
            "leased": device.leased_ranges(0, device.size),
            "roots": found.roots,
            "images": _images(found),
            "parts": _parts(found),
            "wipes": _wipes(found),
            "placements": {} if found.table is None else found.table.placements,
            "identities": 0 if found.table is None else len(found.table.identities),
            "free_runs": [
                {"offset": start, "bytes": end - start} for start, end in found.free_runs()
            ],
            "salvaged": found.salvaged,
        }


def _line(name: str) -> dict[str, Any]:
    try:
        with Device.open(find_devices.resolve(name), write=False) as device:
            return _facts(device, look(device))
    except TierdError as error:
        return {"path": name, "state": "missing", "problem": str(error)}


def _facts(device: Device, found: Finding) -> dict[str, Any]:
    runs = found.free_runs()
    table = found.table
    return {
        "path": device.path,
        "uuid": None if found.root is None else str(found.root.uuid),
        "state": found.state,
        "problem": found.problem,
        "size_bytes": device.size,
        "free_bytes": sum(end - start for start, end in runs),
        "largest_free_bytes": max((end - start for start, end in runs), default=0),
        "direct": device.direct,
        "direct_reason": device.direct_reason,
        "images": 0 if table is None else len(table.images),
        "parts": 0 if table is None else len(table.parts),
    }


def _images(found: Finding) -> list[dict[str, Any]]:
    if found.table is None:
        return []
    return [
        {
            "name": image.name,
            "image_id": f"{image.info.image_id:016x}",
            "generation": image.info.generation,
            "state": image.state,
            "pages": image.info.pages,
            "devices": list(image.devices),
            "extents": _extents(image.extents),
        }
        for image in found.table.images.values()
    ]


def _parts(found: Finding) -> list[dict[str, Any]]:
    if found.table is None:
        return []
    return [
        {
            "name": part.name,
            "image_id": f"{part.image_id:016x}",
            "generation": part.generation,
            "home": part.home,
            "extents": _extents(part.extents),
        }
        for part in found.table.parts
    ]


def _wipes(found: Finding) -> list[dict[str, Any]]:
    if found.table is None:
        return []
    return [
        {
            "name": wipe.name,
            "image_id": f"{wipe.image_id:016x}",
            "generation": wipe.generation,
            "home": wipe.devices[0],
            "extents": _extents(wipe.extents),
        }
        for wipe in found.table.wipes
    ]


def _extents(extents: Iterable[Any]) -> list[dict[str, int]]:
    return [{"offset": e.device_page * PAGE_BYTES, "bytes": e.pages * PAGE_BYTES} for e in extents]


def _holder(device: Device) -> str:
    """Who has it open for writing; empty if nobody."""
    try:
        info = os.stat(device.path)
    except OSError:
        return ""
    if holders.flock_holder(info) is None and holders.open_holder(info) is None:
        return ""
    return holders.describe(info)
