"""System calls that the standard library does not wrap, each with one plain function.

Everything here is Linux. A call that the kernel or the file system does not know answers with
None or False, never with an exception: callers decide what that means to them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path

import numpy as np

_BLKDISCARD = 0x1277
_BLKGETSIZE64 = 0x80081272
_BLKSSZGET = 0x1268
_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_ZERO_RANGE = 0x10
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MADV_POPULATE_WRITE = 23
# struct flock on 64-bit Linux: l_type, l_whence, (padding), l_start, l_len, l_pid, (padding).
_FLOCK = struct.Struct("hhqqi4x")

_libc = ctypes.CDLL(None, use_errno=True)


def memory_spare() -> int:
    """Bytes that are left to the node when memory is taken for images: 1 GiB, or an eighth."""
    return min(1 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8)


def memory_available() -> int:
    """Bytes of memory that this node could give away without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def populate(memory: np.ndarray, *, piece_bytes: int = 64 << 20) -> int:
    """Have the kernel back writable memory with pages now; 0 or an errno.

    Other threads run meanwhile: backing 100 GiB takes half a minute. A kernel before 5.14 answers
    EINVAL.

    Args:
        memory: uint8, page aligned.
        piece_bytes: done in one call.
    """
    address, size = memory.ctypes.data, memory.nbytes
    for at in range(0, size, piece_bytes):
        piece = ctypes.c_size_t(min(piece_bytes, size - at))
        ctypes.set_errno(0)
        if _libc.madvise(ctypes.c_void_p(address + at), piece, _MADV_POPULATE_WRITE) != 0:
            return ctypes.get_errno()
    return 0


def block_device_bytes(fd: int) -> int:
    """Size of the block device behind ``fd``, in bytes."""
    answer = fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8))
    return int.from_bytes(answer, "little")


def logical_block_bytes(fd: int) -> int:
    """Logical block size of the block device behind ``fd``, in bytes."""
    answer = fcntl.ioctl(fd, _BLKSSZGET, bytes(4))
    return int.from_bytes(answer, "little")


def is_readonly_block(path: str) -> bool:
    """Whether ``path`` is a block device that takes no writes, whoever asks."""
    try:
        info = os.stat(path)
        if not stat.S_ISBLK(info.st_mode):
            return False
        number = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
        return Path(f"/sys/dev/block/{number}/ro").read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False


def direct_alignment(fd: int) -> int | None:
    """Offset alignment that O_DIRECT needs on ``fd``; 0 if refused, None if unknown."""
    if not hasattr(_libc, "statx"):
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = struct.unpack_from("<I", buffer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    (offset_align,) = struct.unpack_from("<I", buffer, 156)
    return int(offset_align)


def discard_range(fd: int, offset: int, length: int, *, is_block: bool) -> bool:
    """Tell the device that a range's content is no longer needed; False if it cannot be told.

    A file keeps the space: its blocks become unwritten ones, so a later write cannot fail for
    want of room.
    """
    if is_block:
        try:
            fcntl.ioctl(fd, _BLKDISCARD, struct.pack("=QQ", offset, length))
        except OSError:
            return False
        return True
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_ZERO_RANGE
    result = _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))
    return int(result) == 0


def is_resident(fd: int, offset: int) -> bool | None:
    """Whether the page at ``offset`` (page aligned) is in the page cache; None if unknown."""
    try:
        window = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
    except (OSError, ValueError):
        return None
    try:
        address = np.frombuffer(window, np.uint8).ctypes.data
        vector = ctypes.c_ubyte(0)
        size = ctypes.c_size_t(mmap.PAGESIZE)
        if _libc.mincore(ctypes.c_void_p(address), size, ctypes.byref(vector)) != 0:
            return None
        return bool(vector.value & 1)
    finally:
        window.close()


def set_direct(fd: int, *, on: bool) -> bool:
    """Set or clear O_DIRECT on an open file; False if the file system refuses."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def lease_range(fd: int, offset: int, length: int) -> bool:
    """Take a shared lock on a byte range; it lives as long as any copy of this open file does."""
    request = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, offset, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES, errno.EINVAL, errno.ENOLCK}:
            return False
        raise
    return True


def leased_ranges(fd: int, offset: int, end: int) -> list[tuple[int, int]]:
    """Byte ranges of [offset, end) that other open files hold leases on, sorted and disjoint.

    The kernel names one conflicting lock per question and not always the lowest, so what lies
    left and right of the answer is asked about again.
    """
    found: list[tuple[int, int]] = []
    open_ranges = [(offset, end)]
    while open_ranges:
        start, stop = open_ranges.pop()
        if start >= stop:
            continue
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
        try:
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request)
        except OSError as error:
            if error.errno == errno.EINVAL:  # the file system knows no such locks
                return []
            raise
        kind, _, lock_start, lock_length, _ = _FLOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            continue
        lock_end = stop if lock_length == 0 else lock_start + lock_length
        low, high = max(start, lock_start), min(stop, lock_end)
        found.append((low, high))
        open_ranges += [(start, low), (high, stop)]
    return sorted(found)


def file_system_of(path: str) -> str | None:
    """Type of the file system that holds ``path``, such as ``ext4``; None if unknown."""
    try:
        device = os.stat(path).st_dev
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in text.splitlines():
        fields = line.split()
        if len(fields) > 6 and fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return None


def mount_point_of(device: int) -> str | None:
    """Where the block device with this device number is mounted; None if it is not."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        fields = line.split()
        if len(fields) > 4 and fields[2] == wanted:
            return fields[4]
    return None
