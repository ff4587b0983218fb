"""What is on a device already, told by the marks that other software leaves there."""

from __future__ import annotations

import dataclasses

from tierd.errors import DeviceError
from tierd.io import superblock
from tierd.io.device import PAGE_BYTES, Device
from tierd.io.layout import RESERVED_BYTES

TAIL_BYTES = 1 << 20  # looked at, and cleared by a forced format, at the device's end


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    """Bytes at a place; a negative offset counts from the device's end."""

    name: str
    offset: int
    magic: bytes


# The order matters where one thing contains another: a partition table is named after what may
# share the first sector with it, MBR last since boot sectors of FAT and NTFS carry its mark.
_MARKS = (
    _Mark("an ext2/3/4 file system", 0x438, b"\x53\xef"),
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
    _Mark("an MBR partition table", 510, b"\x55\xaa"),
)


def find_content(device: Device) -> str | None:
    """Say what the device holds; None if its first MiB is zero and its end bears no known mark.

    A whole or damaged store of tierd's own is named as one. What cannot be read counts as
    content: only the device's name with --force overwrites it.
    """
    head_bytes = min(RESERVED_BYTES, device.size // PAGE_BYTES * PAGE_BYTES)
    tail_start = tail_offset(device)
    try:
        head = device.read(0, head_bytes) if head_bytes else b""
        tail = device.read(tail_start, device.size // PAGE_BYTES * PAGE_BYTES - tail_start)
    except DeviceError as error:
        return f"something that cannot be read ({error})"
    own = _own_store(device)
    if own is not None:
        return own
    for mark in _MARKS:
        if _matches(mark, head, tail, device.size):
            return mark.name
    return "data of an unknown kind in its first MiB" if head.count(0) != len(head) else None


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
