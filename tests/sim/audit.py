"""What lies in the roots and tables of a device, read by this test's own code."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np

from tierd.io import _core
from tierd.io.device import PAGE_BYTES

ROOTS = (0, 64 << 10)
MAGIC = b"TIERDVOL"
# Bytes before: magic, version, block size. After: UUID, root's place, device's size.
_SEQUENCE, _TABLE = struct.Struct("<16xQ"), struct.Struct("<56xQQ8xI")


@dataclasses.dataclass(frozen=True)
class Slot:
    """One root's place.

    Attributes:
        place: its byte on the device.
        written: something of tierd's lies there.
        whole: it can be read and its checksum is right.
        sequence: number of its commit, if it is whole.
        table_place: byte of the table that it names.
        table_whole: the checksum of the table that it names is right.
    """

    place: int
    written: bool
    whole: bool
    sequence: int = 0
    table_place: int = 0
    table_whole: bool = False


def slots(native: Any) -> list[Slot]:
    """Look at both roots of a device, past every fault of reading."""
    return [_slot(native, place) for place in ROOTS]


def _slot(native: Any, place: int) -> Slot:
    page = _bytes(native, place, PAGE_BYTES)
    written = MAGIC in (page[:8], page[-12:-4])
    whole = (
        not native.dead(place // PAGE_BYTES)
        and page[:8] == MAGIC
        and _crc(page[:-4]) == int.from_bytes(page[-4:], "little")
    )
    if not whole:
        return Slot(place, written, whole)
    (sequence,) = _SEQUENCE.unpack_from(page)
    start, length, crc = _TABLE.unpack_from(page)
    sound = _crc(_bytes(native, start, length)) == crc
    return Slot(place, written, whole, sequence, start, sound)


def _bytes(native: Any, start: int, length: int) -> bytes:
    found = np.empty(length, np.uint8)
    native.peek(start, found)
    return found.tobytes()


def _crc(data: bytes) -> int:
    return int(_core.crc32c(np.frombuffer(data, np.uint8)))
