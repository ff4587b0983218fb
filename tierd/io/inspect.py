"""What a device says of itself, whatever state it is in: for people who have to decide.

Nothing here believes anything that it should not: a root or a table that fails its checks is shown
with what is wrong with it, and what can be read in it all the same is marked as unchecked.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from typing import TYPE_CHECKING, Any

from tierd.errors import DeviceError
from tierd.io import _core, signatures, superblock
from tierd.io.device import PAGE_BYTES
from tierd.io.extent_table import TABLE_FORMAT, ExtentTable
from tierd.io.layout import ROOT_BYTES, ROOT_OFFSETS, UNIT_BYTES, Areas, free_ranges, occupied
from tierd.io.superblock import Root

if TYPE_CHECKING:
    from tierd.io.device import Device

UNITS_LOOKED_AT = 4096  # of the data area, spread evenly, when there is no table to believe
# magic, version, rows, image id, page number, generation, CRC (docs/format.md, "Page").
_TRAILER = struct.Struct("<IHHQQII")
# How a manifest in a table begins.
_MANIFEST = re.compile(r'"model":"([^"]{1,300})","table":\{"name":"([^"]{1,300})"')


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What was found.

    Attributes:
        state: ``ok``, ``degraded`` (one root cannot be used), ``damaged``, ``newer``, ``shrunk``,
            ``foreign`` or ``empty``.
        problem: what is wrong, in one line; empty if nothing is.
        roots: for each of the two places what lies there.
        root: the root in force, or None.
        table: its extent table, or None.
        salvaged: where there is no table: names of images that an unchecked table mentions, and
            how many of the units looked at hold pages of which image.
    """

    state: str
    problem: str
    roots: list[dict[str, Any]]
    root: Root | None
    table: ExtentTable | None
    salvaged: dict[str, Any]

    def free_runs(self) -> list[tuple[int, int]]:
        """Byte ranges of the data area that no extent covers; leases are not looked at."""
        if self.root is None or self.table is None:
            return []
        used = [occupied(extent) for extent in self.table.all_extents()]
        return free_ranges(Areas.of(self.root.device_bytes), used)


def inspect(device: Device) -> Finding:
    """Look at everything; errors of the device become part of what was found."""
    roots = [_root(device, slot) for slot in (0, 1)]
    try:
        loaded = superblock.load(device)
    except DeviceError as error:
        state, problem = _state_of(error), str(error)
        foreign = signatures.find_foreign(device) if state == "damaged" else None
        if foreign is not None:
            state, problem = "foreign", f"{_over(foreign)}; {problem.partition('; the tables')[0]}"
        return Finding(state, problem, roots, None, None, _salvage(device))
    if loaded is None:
        content = signatures.find_content(device)
        state = "foreign" if content else "empty"
        problem = f"it holds {content}" if content else "it was never formatted, or cleared"
        found = _pages_of(device, Areas.of(device.size))
        salvaged = {"images_named": [], "pages_of": found} if found else {}
        return Finding(state, problem, roots, None, None, salvaged)
    foreign = signatures.find_foreign(device) if loaded.note else None
    if foreign is not None:
        problem = f"{_over(foreign)}; {loaded.note}"
        return Finding("foreign", problem, roots, loaded.root, loaded.table, {})
    state = "degraded" if loaded.note else "ok"
    return Finding(state, loaded.note, roots, loaded.root, loaded.table, {})


def _over(foreign: str) -> str:
    return f"{foreign} was written over a part of the store"


def _state_of(error: DeviceError) -> str:
    kinds = {"DeviceVersionError": "newer", "DeviceShrunkError": "shrunk"}
    return kinds.get(type(error).__name__, "damaged")


def _root(device: Device, slot: int) -> dict[str, Any]:
    """Everything in a root's fields, and whether they can be believed."""
    shown: dict[str, Any] = {"slot": "AB"[slot], "offset": ROOT_OFFSETS[slot]}
    try:
        data = device.read(ROOT_OFFSETS[slot], ROOT_BYTES)
    except DeviceError as error:
        return {**shown, "fault": str(error)}
    try:
        found = Root.unpack(data, slot)
    except DeviceError as error:
        found = str(error)
    if isinstance(found, Root):
        shown["fault"] = ""
    else:
        shown["fault"] = found
        if superblock.MAGIC not in data:
            return shown
    return {**shown, **superblock.fields(data)}


def _salvage(device: Device) -> dict[str, Any]:
    """What tables that fail their checks mention, and whose pages lie in the data area."""
    areas = Areas.of(device.size)
    names: set[str] = set()
    for number in (0, 1):
        names |= _names_in(device, areas.table_offset(number), areas.table_bytes)
    return {"images_named": sorted(names), "pages_of": _pages_of(device, areas)}


def _names_in(device: Device, offset: int, size: int) -> set[str]:
    try:
        text = device.read(offset, min(size, device.size - offset)).decode(errors="replace")
    except DeviceError:
        return set()
    try:
        document = json.JSONDecoder().raw_decode(text)[0]
        if document.get("format") != TABLE_FORMAT:
            return set()
        return {
            f"{entry['info']['model']}/{entry['info']['table']['name']}"
            for entry in document["images"]
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not whole: what still looks like the beginning of a manifest.
        return {"/".join(found.groups()) for found in _MANIFEST.finditer(text)}


def _pages_of(device: Device, areas: Areas) -> list[dict[str, Any]]:
    """Count the units looked at by the image whose page stands first in each."""
    counts: dict[tuple[int, int], int] = {}
    units = (areas.data_end - areas.data_start) // UNIT_BYTES
    step = max(1, units // UNITS_LOOKED_AT)
    for unit in range(0, units, step):
        try:
            page = device.read(areas.data_start + unit * UNIT_BYTES, PAGE_BYTES)
        except DeviceError:
            continue
        magic, _, _, image_id, _, generation, _ = _TRAILER.unpack_from(
            page, PAGE_BYTES - _TRAILER.size
        )
        if magic == _core.PAGE_MAGIC:
            key = (image_id, generation)
            counts[key] = counts.get(key, 0) + step
    return [
        {"image_id": f"{image_id:016x}", "generation": generation, "units": units}
        for (image_id, generation), units in sorted(counts.items())
    ]
