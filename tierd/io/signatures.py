"""What is on a device already, told by the marks that other software leaves there."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from typing import TYPE_CHECKING

from tierd.errors import DeviceError
from tierd.io import superblock
from tierd.io.device import PAGE_BYTES, Device
from tierd.io.layout import RESERVED_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

TAIL_BYTES = 1 << 20  # looked at, and cleared by a forced format, at the device's end


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    """Bytes at a place; a negative offset counts from the device's end."""

    name: str
    offset: int
    magic: bytes
    plausible: Callable[[bytes], bool] = lambda _: True


def _like_ext(head: bytes) -> bool:
    """Block size and revision of an ext superblock; its own mark has two bytes only."""
    (block_log,), (revision,) = (struct.unpack_from("<I", head, at) for at in (0x418, 0x44C))
    return bool(block_log <= 6 and revision <= 1)


def _like_mbr(head: bytes) -> bool:
    """Partitions that may be; boot sectors of file systems without a mark pass, too."""
    return all(head[446 + 16 * number] in (0, 0x80) for number in range(4))


# The order matters where one thing contains another: a partition table is named after what may
# share the first sector with it, MBR last since boot sectors of FAT and NTFS carry its mark.
_MARKS = (
    _Mark("an ext2/3/4 file system", 0x438, b"\x53\xef", _like_ext),
    _Mark("an XFS file system", 0, b"XFSB"),
    _Mark("a btrfs file system", 0x10040, b"_BHRfS_M"),
    _Mark("an F2FS file system", 0x400, b"\x10\x20\xf5\xf2"),
    _Mark("a bcachefs file system", 0x1018, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
    _Mark("an NTFS file system", 3, b"NTFS    "),
    _Mark("an exFAT file system", 3, b"EXFAT   "),
    _Mark("a FAT file system", 54, b"FAT1"),
    _Mark("a FAT file system", 82, b"FAT32"),
    _Mark("a SquashFS file system", 0, b"hsqs"),
    _Mark("an ISO 9660 file system", 0x8001, b"CD001"),
    _Mark("an encrypted LUKS volume", 0, b"LUKS\xba\xbe"),
    _Mark("an LVM physical volume", 0x200, b"LABELONE"),
    _Mark("an LVM physical volume", 0, b"LABELONE"),
    _Mark("a RAID member", 0, b"\xfc\x4e\x2b\xa9"),
    _Mark("a RAID member", 0x1000, b"\xfc\x4e\x2b\xa9"),
    _Mark("a RAID member", -0x2000, b"\xfc\x4e\x2b\xa9"),
    _Mark("swap space", 0xFF6, b"SWAPSPACE2"),
    _Mark("a ZFS member", 0x20000, bytes.fromhex("0cb1ba0000000000")),
    _Mark("a GPT partition table", 0x200, b"EFI PART"),
    _Mark("a GPT partition table", 0x1000, b"EFI PART"),
    _Mark("a GPT partition table's backup", -0x200, b"EFI PART"),
    _Mark("a GPT partition table's backup", -0x1000, b"EFI PART"),
    _Mark("an MBR partition table", 510, b"\x55\xaa", _like_mbr),
)


def find_content(device: Device) -> str | None:
    """Say what the device holds; None if its first MiB is zero and its end bears no known mark.

    A whole or damaged store of tierd's own is named as one, unless others have left their mark
    on it since. What cannot be read counts as content: only the device's name with --force
    overwrites it.
    """
    if 0 < device.size < PAGE_BYTES:
        return f"{device.size} bytes of something"
    try:
        head, tail = _ends(device)
    except DeviceError as error:
        return f"something that cannot be read ({error})"
    foreign, own = _mark_in(head, tail, device.size), _own_store(device)
    if foreign is not None and own is not None:
        return f"{foreign}, written over {own}"
    if foreign is not None or own is not None:
        return foreign or own
    return "data of an unknown kind in its first MiB" if head.count(0) != len(head) else None


def find_foreign(device: Device) -> str | None:
    """Say what other software has left on a device that was a store; None if nothing.

    Asked where a root or table is not what it was: a partition table spoils one root and spares
    the other, and what is written by way of that one may fall into somebody's file system.
    """
    with contextlib.suppress(DeviceError):
        return _mark_in(*_ends(device), device.size)
    return None


def _ends(device: Device) -> tuple[bytes, bytes]:
    """The first and the last MiB, as far as they are whole pages."""
    head_bytes = min(RESERVED_BYTES, device.size // PAGE_BYTES * PAGE_BYTES)
    tail_start = tail_offset(device)
    head = device.read(0, head_bytes) if head_bytes else b""
    return head, device.read(tail_start, device.size // PAGE_BYTES * PAGE_BYTES - tail_start)


def _mark_in(head: bytes, tail: bytes, size: int) -> str | None:
    for mark in _MARKS:
        if _matches(mark, head, tail, size) and mark.plausible(head):
            return mark.name
    return None


def tail_offset(device: Device) -> int:
    """Page-aligned start of the last MiB."""
    return max(0, device.size // PAGE_BYTES * PAGE_BYTES - TAIL_BYTES)


def _matches(mark: _Mark, head: bytes, tail: bytes, size: int) -> bool:
    if mark.offset >= 0:
        return head[mark.offset : mark.offset + len(mark.magic)] == mark.magic
    if len(tail) < -mark.offset or size % PAGE_BYTES:
        return False
    start = len(tail) + mark.offset
    return tail[start : start + len(mark.magic)] == mark.magic


def _own_store(device: Device) -> str | None:
    try:
        loaded = superblock.load(device)
    except DeviceError:
        return "a tierd store that is damaged, newer or cut off"
    if loaded is None:
        return None
    count = len(loaded.table.images)
    return f"a tierd store with {count} image{'' if count == 1 else 's'} ({loaded.root.uuid})"
