"""Roots: their bytes, and the order in which they and the extent table reach the device.

Fault model: power or process may go at any instruction; of the writes since the last flush any
subset may have reached the medium, a 4 KiB write in part; bytes may rot afterwards; a read may
fail or bring something else once; a write may be acknowledged and not be there. A root counts only
if its own checksum and that of the table it names are right, and the newest such root wins. A
commit writes to the table area and the root slot that the root in force does not use, the table
first, with a flush after each; so the root in force stays whole until the next one is. What was
written is read back, for a lost write would bring the state before it back without a word; and
what reads wrong is read again, for a passing fault must not do that either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import uuid
from typing import TYPE_CHECKING, Self

import numpy as np

from tierd.errors import (
    DeviceDamagedError,
    DeviceError,
    DeviceFailedError,
    DeviceShrunkError,
    DeviceVersionError,
)
from tierd.io import _core
from tierd.io.device import PAGE_BYTES, Device, aligned_buffer
from tierd.io.extent_table import TABLE_FORMAT, ExtentTable
from tierd.io.layout import ROOT_BYTES, ROOT_OFFSETS, Areas, round_up

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"TIERDVOL"
FORMAT_VERSION = 2  # 1 knew images of one device only
# magic, version, block size, sequence, uuid, root offset, device bytes, table offset, table bytes,
# table area bytes, table CRC. The magic again and the root's CRC32C are its last 12 bytes.
_ROOT = struct.Struct("<8sIIQ16sQQQQQI")
_TAIL = struct.Struct("<8sI")
_TAIL_OFFSET = ROOT_BYTES - _TAIL.size
_NO_ROOT = "no root there"
_READS = 5  # of a root or table that is not right
_LOOKS = 2  # at a root that is right: an old content that a disk returns once is right, too
_WRITES = 3  # of what does not read back


@dataclasses.dataclass(frozen=True, slots=True)
class Root:
    """One root: names the extent table that is in force.

    Attributes:
        sequence: number of the commit, from 1; the newest valid root wins.
        slot: 0 or 1, which of the two places it lies at.
        device_bytes: size of the device when it was formatted.
        table_offset: byte where the table starts, one of the two areas.
        table_bytes: its length.
        area_bytes: length of a table area.
        version: of the format it was written in; :meth:`pack` writes this tierd's.
    """

    sequence: int
    slot: int
    uuid: uuid.UUID
    device_bytes: int
    block_size: int
    table_offset: int
    table_bytes: int
    area_bytes: int
    table_crc: int
    version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        """Return the 4 KiB that go to the device."""
        head = _ROOT.pack(
            MAGIC,
            FORMAT_VERSION,
            self.block_size,
            self.sequence,
            self.uuid.bytes,
            ROOT_OFFSETS[self.slot],
            self.device_bytes,
            self.table_offset,
            self.table_bytes,
            self.area_bytes,
            self.table_crc,
        )
        body = head.ljust(_TAIL_OFFSET, b"\0") + MAGIC
        return body + struct.pack("<I", crc(body))

    @classmethod
    def unpack(cls, data: bytes, slot: int) -> Self | str:
        """Read a root that lies at ``slot``, or return why these bytes are none.

        Raises:
            DeviceVersionError: a whole root of a newer format.
        """
        magic, version, block, sequence, ident, place, size, offset, length, area, table_crc = (
            _ROOT.unpack_from(data)
        )
        tail_magic, stored_crc = _TAIL.unpack_from(data, _TAIL_OFFSET)
        if MAGIC not in (magic, tail_magic):
            return _NO_ROOT
        if crc(data[: ROOT_BYTES - 4]) != stored_crc or magic != MAGIC:
            return "its checksum is wrong"
        if version > FORMAT_VERSION:
            raise DeviceVersionError(
                f"written in format {version}, this tierd knows up to {FORMAT_VERSION}; "
                "install a newer tierd"
            )
        if place != ROOT_OFFSETS[slot]:
            return "it belongs to another place"
        return cls(
            sequence,
            slot,
            uuid.UUID(bytes=ident),
            size,
            block,
            offset,
            length,
            area,
            table_crc,
            version,
        )


def crc(data: bytes) -> int:
    """CRC32C."""
    return int(_core.crc32c(np.frombuffer(data, np.uint8)))


def fields(data: bytes) -> dict[str, int | str]:
    """Everything in a root's fields, whether or not it can be believed; for people."""
    magic, version, block, sequence, ident, place, size, offset, length, area, table_crc = (
        _ROOT.unpack_from(data)
    )
    return {
        "magic": magic.decode("latin-1"),
        "version": version,
        "block_size": block,
        "sequence": sequence,
        "uuid": str(uuid.UUID(bytes=ident)),
        "place": place,
        "device_bytes": size,
        "table_offset": offset,
        "table_bytes": length,
        "area_bytes": area,
        "table_crc": f"{table_crc:08x}",
    }


# --- on the device -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """What :func:`load` found.

    Attributes:
        highest_sequence: of any whole root, valid or not; the next commit goes beyond it.
        note: what was wrong with a root or table, even if it was right at another look; empty if
            nothing was.
    """

    root: Root
    table: ExtentTable
    highest_sequence: int
    note: str


def load(device: Device) -> Loaded | None:
    """Find the newest valid root and its table; None if the device was never formatted.

    Raises:
        DeviceDamagedError: it was, and neither root can be used.
        DeviceVersionError: by a newer tierd.
        DeviceShrunkError: the device is smaller than it was then.
    """
    candidates: list[Root] = []
    faults: list[str] = []
    for slot in (0, 1):
        found, fault = _find_root(device, slot)
        if found is not None:
            candidates.append(found)
        if fault:
            faults.append(f"root {'AB'[slot]}: {fault}")
    highest = max((root.sequence for root in candidates), default=0)
    for root in sorted(candidates, key=lambda root: -root.sequence):
        if root.device_bytes > device.size:
            raise DeviceShrunkError(
                f"{device.path} has {device.size} bytes, but had {root.device_bytes} when it was "
                "formatted: it shrank, or was copied in part; restore its size or format it anew; "
                f"run: lsblk -b {device.path}"
            )
        table, fault = _find_table(device, root)
        if fault:
            faults.append(f"extent table of root {'AB'[root.slot]}: {fault}")
        if table is not None:
            odd = [fault for fault in faults if not fault.endswith(_NO_ROOT)]
            note = "; ".join(odd if root.sequence == 1 else faults)
            return Loaded(root, table, highest, note)
    if not candidates and not _was_formatted(device, faults):
        return None
    raise DeviceDamagedError(
        f"{device.path}: neither root can be used ({'; '.join(faults)}); the tables on it must be "
        f"staged again; run: tierd format {device.path} --force {device.path}"
    )


def peek_uuid(device: Device) -> str | None:
    """UUID in the newest whole root, with a single look at each; None if there is none."""
    roots = [_read_root(device, slot) for slot in (0, 1)]
    whole = [root for root in roots if isinstance(root, Root)]
    newest = max(whole, key=lambda root: root.sequence, default=None)
    return None if newest is None else str(newest.uuid)


def store(device: Device, root: Root, data: bytes) -> None:
    """Write a table and then the root that names it, each followed by a flush.

    Raises:
        DeviceError: a write or flush failed; which of the two roots is in force is then unknown.
    """
    assert (crc(data), len(data)) == (root.table_crc, root.table_bytes), "another table's root"
    buffer = aligned_buffer(round_up(len(data), PAGE_BYTES))
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    _write_surely(device, root.table_offset, buffer)
    _write_surely(device, ROOT_OFFSETS[root.slot], np.frombuffer(root.pack(), np.uint8))


def _write_surely(device: Device, offset: int, data: NDArray[np.uint8]) -> None:
    """Write, flush and read back; again if it is not there."""
    back = aligned_buffer(data.size)
    for _ in range(_WRITES):
        device.write(offset, data)
        device.flush()
        with contextlib.suppress(DeviceError):
            device.read_into(offset, back)
            if np.array_equal(back, data):
                return
    raise DeviceFailedError(
        f"{device.path}: what was written at byte {offset} does not read back; the device does not "
        "store what it is told; run: dmesg"
    )


def _find_root(device: Device, slot: int) -> tuple[Root | None, str]:
    """Return the newest whole root that a few looks at a slot find, and what was wrong if any."""
    whole: list[Root] = []
    fault = ""
    for _ in range(_READS):
        found = _read_root(device, slot)
        if isinstance(found, str):
            # A look that finds nothing at all says less than an earlier one that found half a root.
            fault = fault if fault and found == _NO_ROOT else found
            continue
        whole.append(found)
        if len(whole) == _LOOKS:
            break
    return max(whole, key=lambda root: root.sequence, default=None), fault


def _read_root(device: Device, slot: int) -> Root | str:
    if device.size < ROOT_OFFSETS[slot] + ROOT_BYTES:
        return _NO_ROOT
    try:
        return Root.unpack(device.read(ROOT_OFFSETS[slot], ROOT_BYTES), slot)
    except DeviceVersionError as error:
        raise DeviceVersionError(f"{device.path}: {error}") from None
    except DeviceError as error:
        return f"unreadable ({error})"


def _find_table(device: Device, root: Root) -> tuple[ExtentTable | None, str]:
    """Return a root's table if one of a few looks finds it, and what was wrong if any."""
    fault = ""
    for _ in range(_READS):
        found = _read_table(device, root)
        if isinstance(found, ExtentTable):
            return found, fault
        fault = found
    return None, fault


def _read_table(device: Device, root: Root) -> ExtentTable | str:
    areas = Areas.of(root.device_bytes)
    if root.area_bytes != areas.table_bytes or not 0 < root.table_bytes <= root.area_bytes:
        return "its length makes no sense"
    if root.table_offset not in (areas.table_offset(0), areas.table_offset(1)):
        return "its place makes no sense"
    try:
        data = device.read(root.table_offset, root.table_bytes)
    except DeviceError as error:
        return f"unreadable ({error})"
    if crc(data) != root.table_crc:
        return "its checksum is wrong"
    try:
        return ExtentTable.unpack(data, root)
    except (ValueError, KeyError, TypeError) as error:
        return f"it makes no sense ({error})"


def _was_formatted(device: Device, faults: list[str]) -> bool:
    """Whether anything says that tierd wrote here: half a root, or a table in the first area."""
    if any(not fault.endswith(_NO_ROOT) for fault in faults):
        return True
    start = Areas.of(device.size).table_offset(0)
    if device.size < start + PAGE_BYTES:
        return False
    return TABLE_FORMAT.encode() in device.read(start, PAGE_BYTES)[:64]
