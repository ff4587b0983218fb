"""What a device is: a block device or a file that one process writes and many may read.

Fault model: any call may return fewer bytes than asked, or an errno; the device may vanish; a
killed predecessor's reads may still be in flight (the exclusive open succeeds only once they have
drained, so the open is retried for a short while). Every failure is a DeviceError with the path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
from typing import TYPE_CHECKING, Self

import numpy as np

from tierd.errors import (
    DeviceBusyError,
    DeviceError,
    DeviceFailedError,
    DeviceMissingError,
    DeviceReadOnlyError,
)
from tierd.io import holders, linux

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

PAGE_BYTES = 4096
LOCK_RETRY_S = 2.5  # longer than a killed daemon's last reads need to drain from a slow disk
_LOCK_PAUSE_S = 0.02
_TRANSFER_MAX = 64 << 20  # bytes of one system call; the kernel's own limit is just below 2 GiB
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

# Why an errno is likely, for the user's line. The rest is named by os.strerror alone.
_LIKELY = {
    errno.EIO: "the medium or its cable fails; see dmesg",
    errno.ENODATA: "the medium reports an unreadable block; see dmesg",
    errno.ENXIO: "the device has gone away",
    errno.ENODEV: "the device has gone away",
    errno.ENOSPC: "the file system below the device file is full",
    errno.EINVAL: "the device wants another alignment",
    errno.EROFS: "the file system is mounted read-only",
}


def aligned_buffer(size: int) -> NDArray[np.uint8]:
    """Return a zeroed uint8 array of ``size`` bytes that starts on a page boundary.

    O_DIRECT needs the alignment, and some drivers write outside a buffer that lacks it. The
    array owns its anonymous mapping.
    """
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


class Device:
    """An open device.

    Attributes:
        path: as the user gave it.
        size: bytes when it was opened.
        block_size: bytes; every write is a multiple of it, 4,096 at most.
        direct: whether reads and writes go past the page cache, as far as can be told.
        direct_reason: why not, or why that is not certain; empty otherwise.
        is_block: a block device rather than a file.
        writable: opened for writing, and so exclusively.
    """

    def __init__(self, path: str, fd: int, *, write: bool) -> None:
        """Take over ``fd``; use :meth:`open`."""
        self.path = path
        self.writable = write
        self._fd = fd
        self._o_direct = False
        info = os.fstat(fd)
        self.is_block = stat.S_ISBLK(info.st_mode)
        self.size = linux.block_device_bytes(fd) if self.is_block else info.st_size
        self.block_size = self._probe_block_size()
        self.direct, self.direct_reason = self._probe_direct()

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, write: bool, retry_s: float | None = None
    ) -> Self:
        """Open a device.

        Args:
            path: a block device or a regular file.
            write: take it exclusively (O_EXCL on a block device, and an advisory lock). A device
                opened for reading is neither locked nor kept from others.
            retry_s: seconds to wait for a holder that is about to go; LOCK_RETRY_S if None.

        Raises:
            DeviceBusyError: somebody else holds it; the message says who.
            DeviceError: it does not exist, is neither of the two kinds, or cannot be opened.
        """
        path = os.fspath(path)
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            raise _open_error(path, error) from None
        if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
            raise DeviceError(
                f"{path} is neither a block device nor a file, so tables cannot be kept on it; "
                "run: lsblk"
            )
        if write and linux.is_readonly_block(path):
            # The kernel lets a write-protected disk be opened for writing, and then refuses writes.
            raise _open_error(path, OSError(errno.EROFS, ""))
        fd = open_exclusive(path, mode, retry_s) if write else _open_plain(path, os.O_RDONLY)
        try:
            return cls(path, fd, write=write)
        except OSError as error:
            os.close(fd)
            raise _open_error(path, error) from None
        except BaseException:
            os.close(fd)
            raise

    def fileno(self) -> int:
        """Return the descriptor that reads and writes go through."""
        return self._fd

    def close(self) -> None:
        """Close the device and give up its lock; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- bytes ---------------------------------------------------------------------------------

    def read(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset``; any alignment.

        Raises:
            DeviceError: they could not be read in full.
        """
        start = offset // PAGE_BYTES * PAGE_BYTES
        end = -(-(offset + size) // PAGE_BYTES) * PAGE_BYTES
        buffer = aligned_buffer(end - start)
        self._read_exact(start, buffer.data)
        return buffer[offset - start : offset - start + size].tobytes()

    def read_into(self, offset: int, buffer: NDArray[np.uint8]) -> None:
        """Fill a contiguous uint8 array from ``offset``.

        Page-aligned offsets, sizes and addresses go straight to the device; others by a copy.

        Raises:
            DeviceError: it could not be filled.
        """
        flat = buffer.reshape(-1)
        if _is_aligned(flat, offset):
            self._read_exact(offset, flat.data)
        else:
            flat[:] = np.frombuffer(self.read(offset, flat.size), np.uint8)

    def write(self, offset: int, data: NDArray[np.uint8] | bytes) -> None:
        """Write whole blocks at ``offset``; durable only after :meth:`flush`.

        Raises:
            DeviceError: they could not be written in full.
        """
        flat = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1)
        assert self.writable, "opened for reading"
        assert offset % self.block_size == 0, "whole blocks"
        assert flat.size % self.block_size == 0, "whole blocks"
        if not _is_aligned(flat, offset):
            copy = aligned_buffer(flat.size)
            copy[:] = flat
            flat = copy
        self._write_exact(offset, flat.data)

    def flush(self) -> None:
        """Make every completed write durable.

        Raises:
            DeviceError: the device did not confirm; what was written since the last flush may
                or may not be there.
        """
        try:
            self._make_durable()
        except OSError as error:
            raise self._io_error("flush", 0, error) from None

    def discard(self, offset: int, length: int) -> bool:
        """Give a range's content up (it reads as anything afterwards); False if not supported."""
        assert self.writable, "opened for reading"
        return self._give_up(offset, length)

    # The calls that reach the medium; a simulated device has its own.

    def _transfer_in(self, offset: int, view: memoryview) -> int:
        return os.preadv(self._fd, [view], offset)

    def _transfer_out(self, offset: int, view: memoryview) -> int:
        return os.pwritev(self._fd, [view], offset)

    def _make_durable(self) -> None:
        os.fdatasync(self._fd)

    def _give_up(self, offset: int, length: int) -> bool:
        return linux.discard_range(self._fd, offset, length, is_block=self.is_block)

    def _read_exact(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + _TRANSFER_MAX]
            try:
                count = self._transfer_in(offset + done, part)
            except OSError as error:
                raise self._io_error("read", offset + done, error) from None
            done = self._advance(done, count, len(part), offset, "read")

    def _write_exact(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + _TRANSFER_MAX]
            try:
                count = self._transfer_out(offset + done, part)
            except OSError as error:
                raise self._io_error("write", offset + done, error) from None
            done = self._advance(done, count, len(part), offset, "write")

    def _advance(self, done: int, count: int, wanted: int, offset: int, what: str) -> int:
        # After a short transfer O_DIRECT must go on at a block boundary; a transfer that did not
        # get that far will get no further by being asked again.
        if count < wanted:
            count -= count % self.block_size
            if count <= 0:
                raise DeviceFailedError(
                    f"{self.path}: {what} at byte {offset + done} ended early, the device has "
                    f"{self.size} bytes; it may have shrunk; run: ls -l {self.path}"
                )
        return done + count

    def _io_error(self, what: str, offset: int, error: OSError) -> DeviceError:
        likely = _LIKELY.get(error.errno or 0)
        tail = f"; {likely}" if likely else ""
        text = os.strerror(error.errno or 0)
        kind = DeviceReadOnlyError if error.errno == errno.EROFS else DeviceFailedError
        return kind(f"{self.path}: {what} at byte {offset} failed: {text}{tail}")

    # --- descriptors and leases for readers ----------------------------------------------------

    def readonly_fd(self, lease: Iterable[tuple[int, int]] = ()) -> int:
        """Open the device once more, for reading only, and return the descriptor.

        It shares nothing with the exclusive open: whoever holds it keeps no daemon out.

        Args:
            lease: byte ranges (offset, length) to hold a shared lock on for as long as any copy
                of the descriptor is open, in whatever process.

        Raises:
            DeviceError: the device cannot be opened again, or the file system has no such locks.
        """
        flags = os.O_RDONLY | (os.O_DIRECT if self._o_direct else 0)
        # By way of /proc it is the very same file, whatever the path names by now.
        fd = _open_plain(f"/proc/self/fd/{self._fd}", flags, shown=self.path)
        for offset, length in lease:
            if not linux.lease_range(fd, offset, length):
                os.close(fd)
                raise DeviceError(
                    f"{self.path}: cannot lock the bytes at {offset} for a reader; its file system "
                    f"has no byte-range locks; use another; run: df -T {self.path}"
                )
        return fd

    def leased_ranges(self, offset: int, end: int) -> list[tuple[int, int]]:
        """Byte ranges (start, end) within [offset, end) that readers hold leases on."""
        return linux.leased_ranges(self._fd, offset, end)

    # --- what the device can do ------------------------------------------------------------------

    def _probe_block_size(self) -> int:
        if self.is_block:
            size = linux.logical_block_bytes(self._fd)
        else:
            size = linux.direct_alignment(self._fd) or PAGE_BYTES
        if size > PAGE_BYTES or PAGE_BYTES % size != 0:
            raise DeviceError(
                f"{self.path} has blocks of {size} bytes; tierd's pages have {PAGE_BYTES}, so the "
                "device cannot be used"
            )
        return size

    def _probe_direct(self) -> tuple[bool, str]:
        """Set O_DIRECT, try a read, and look whether that read went through the page cache."""
        if not linux.set_direct(self._fd, on=True):
            return False, "the file system refuses O_DIRECT"
        witness = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                os.posix_fadvise(witness, 0, 0, os.POSIX_FADV_DONTNEED)
            before = linux.is_resident(witness, 0) if self.size >= PAGE_BYTES else None
            try:
                os.preadv(self._fd, [aligned_buffer(PAGE_BYTES).data], 0)
            except OSError as error:
                linux.set_direct(self._fd, on=False)
                return False, f"an aligned O_DIRECT read fails: {os.strerror(error.errno or 0)}"
            after = linux.is_resident(witness, 0) if before is False else None
        finally:
            os.close(witness)
        self._o_direct = True
        return self._judge_direct(after)

    def _judge_direct(self, resident_after_read: bool | None) -> tuple[bool, str]:
        kind = linux.file_system_of(self.path)
        if not self.is_block and kind in _MEMORY_FILE_SYSTEMS:
            return False, f"{kind} keeps its pages in memory"
        if resident_after_read:
            return False, "reads go through the page cache although O_DIRECT is set"
        if self.is_block and _is_buffered_loop(self._fd):
            return False, "a loop device over a buffered file; set it up with --direct-io=on"
        if resident_after_read is None:
            return True, "O_DIRECT is accepted; its effect could not be observed"
        return True, ""


def _is_aligned(flat: NDArray[np.uint8], offset: int) -> bool:
    return not (flat.ctypes.data % PAGE_BYTES or offset % PAGE_BYTES or flat.size % PAGE_BYTES)


def _is_buffered_loop(fd: int) -> bool:
    device = os.fstat(fd).st_rdev
    folder = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/loop"
    try:
        with open(f"{folder}/dio", encoding="ascii") as file:
            return file.read().strip() == "0"
    except OSError:
        return False


def _open_plain(path: str, flags: int, *, shown: str | None = None) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise _open_error(shown or path, error) from None


def open_exclusive(path: str, mode: int, retry_s: float | None) -> int:
    """Open for writing, alone; wait a little for a holder that is on its way out."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_EXCL if stat.S_ISBLK(mode) else 0)
    deadline = time.monotonic() + (LOCK_RETRY_S if retry_s is None else retry_s)
    while True:
        fd = _try_exclusive(path, flags)
        if fd is not None:
            return fd
        if time.monotonic() >= deadline:
            try:
                who = holders.describe(os.stat(path))
            except OSError as error:
                raise _open_error(path, error) from None
            raise DeviceBusyError(f"{path} is in use: {who}; run: tierd status")
        time.sleep(_LOCK_PAUSE_S)


def _try_exclusive(path: str, flags: int) -> int | None:
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return None
        raise _open_error(path, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return None
        raise _open_error(path, error) from None
    return fd


def how_to_make(path: str) -> str:
    """Return the command for somebody who named a path where nothing is.

    A file in /dev would lie in memory, so there only devices are looked for.
    """
    folders = os.path.abspath(path).split("/")
    in_dev = folders[1] == "dev" and folders[2:3] != ["shm"]
    return "lsblk" if in_dev else f"tierd format {path} --size 64GiB"


def _open_error(path: str, error: OSError) -> DeviceError:
    gone = f"there is no such device or file; run: {how_to_make(path)}"
    number = error.errno or 0
    kind, why = {
        errno.ENOENT: (DeviceMissingError, gone),
        errno.ENXIO: (DeviceMissingError, "the device has gone away; run: lsblk"),
        errno.ENODEV: (DeviceMissingError, "the device has gone away; run: lsblk"),
        errno.EACCES: (DeviceError, f"this user may not open it; run: ls -l {path}"),
        errno.EPERM: (DeviceError, f"this user may not open it; run: ls -l {path}"),
        errno.EROFS: (DeviceReadOnlyError, "it is read-only; run: lsblk -o NAME,RO"),
    }.get(number, (DeviceError, "the kernel may know more; run: dmesg"))
    return kind(f"{path}: cannot open: {os.strerror(number)}; {why}")
