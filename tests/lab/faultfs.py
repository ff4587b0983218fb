"""A file system with one file whose pages fail on demand; a loop device over it is a bad disk.

    python -m tests.lab.faultfs BACKING MOUNT

MOUNT/disk mirrors BACKING. On standard input it takes JSON lines, each a whole set of faults by
4 KiB page, and answers each with a JSON line of counters:

    {"eio": {"7": 1, "9": -1}, "corrupt": [3], "slow": {"5": 200}, "lose": [4],
     "every": {"ms": 200, "errno": 0, "share": 30}}

``eio``: reads that fail, so many times, -1 for ever. ``corrupt``: every byte reads inverted.
``slow``: milliseconds that a read takes. ``lose``: writes that are acknowledged and dropped.
``every``: reads of any page that are late or fail, so many in a hundred. It ends, and unmounts,
when standard input ends. It speaks the kernel's FUSE protocol itself, so nothing has to be
installed; it needs root for mount(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import json
import os
import stat
import struct
import sys
import threading
import time
from typing import Any

PAGE = 4096
THREADS = 8
WRITE_BYTES_MAX = 128 << 10
BUFFER_BYTES = WRITE_BYTES_MAX + PAGE
ROOT, DISK = 1, 2  # node numbers

# Operations of <linux/fuse.h> that are answered; those in SILENT want no answer.
LOOKUP, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS = 1, 3, 4, 14, 15, 16, 17
RELEASE, FSYNC, FLUSH, INIT, OPENDIR, RELEASEDIR, ACCESS, DESTROY = 18, 20, 25, 26, 27, 29, 34, 38
SILENT = {2, 36, 42}  # forget, interrupt, batch forget
NOTHING = {RELEASE, FSYNC, FLUSH, OPENDIR, RELEASEDIR, ACCESS, DESTROY}
ASYNC_READ, BIG_WRITES, ASYNC_DIO, MAX_PAGES = 1 << 0, 1 << 5, 1 << 15, 1 << 22
DIRECT_IO = 1  # of an open file: past the page cache

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
ATTR = struct.Struct("<6Q10I")
TRANSFER_IN = struct.Struct("<QQIIQII")

libc = ctypes.CDLL(None, use_errno=True)
MNT_DETACH = 2


class FaultFs:
    """The file system: a backing file, the faults, and threads that answer the kernel."""

    def __init__(self, backing: str, mount: str) -> None:
        self._backing = os.open(backing, os.O_RDWR | os.O_CLOEXEC)
        self._size = os.fstat(self._backing).st_size
        self._mount = mount
        self._lock = threading.Lock()
        self._faults: dict[str, Any] = {}
        self._counts = {"reads": 0, "writes": 0, "eio": 0, "corrupt": 0, "slow": 0, "lose": 0}
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0,allow_other"
        if libc.mount(b"faultfs", os.fsencode(mount), b"fuse", 0, options.encode()) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"mount: {os.strerror(number)}")
        # Reads that are to be late: due time, request, errno, offset, size. They hold no thread up.
        self._late: list[tuple[float, int, int, int, int]] = []
        self._late_news = threading.Condition(self._lock)
        self._turn = 0
        for work in (*(self._serve,) * THREADS, self._answer_late):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        libc.umount2(os.fsencode(self._mount), MNT_DETACH)

    def set(self, faults: dict[str, Any]) -> dict[str, int]:
        """Take a whole new set of faults; return what the last one came to."""
        with self._lock:
            self._faults = {
                "eio": {int(page): times for page, times in faults.get("eio", {}).items()},
                "corrupt": set(faults.get("corrupt", ())),
                "slow": {int(page): ms for page, ms in faults.get("slow", {}).items()},
                "lose": set(faults.get("lose", ())),
                "every": faults.get("every", {}),
            }
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
            return counts

    # --- the kernel's requests -------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                data = os.read(self._fuse, BUFFER_BYTES)
            except OSError as error:
                if error.errno in {errno.EINTR, errno.EAGAIN, errno.ENOENT}:
                    continue
                return  # ENODEV: unmounted
            _, operation, unique, node, *_ = IN_HEADER.unpack_from(data)
            if operation in SILENT:
                continue
            body = data[IN_HEADER.size :]
            if operation == READ:
                _, offset, size, *_ = TRANSFER_IN.unpack_from(body)
                self._read(unique, offset, size)
                continue
            try:
                self._reply(unique, self._answer(operation, node, body))
            except OSError as error:
                self._reply(unique, b"", error.errno or errno.EIO)

    def _reply(self, unique: int, answer: bytes, number: int = 0) -> None:
        head = OUT_HEADER.pack(OUT_HEADER.size + len(answer), -number, unique)
        with contextlib.suppress(OSError):  # the request was given up meanwhile
            os.writev(self._fuse, [head, answer])

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:  # noqa: PLR0911
        if operation == INIT:
            flags = ASYNC_READ | BIG_WRITES | ASYNC_DIO | MAX_PAGES
            return INIT_OUT.pack(
                7, 31, 0, flags, 64, 48, WRITE_BYTES_MAX, 1, WRITE_BYTES_MAX // PAGE, 0, 0, 0
            )
        if operation == LOOKUP:
            if node != ROOT or body.rstrip(b"\0") != b"disk":
                raise OSError(errno.ENOENT, "no such file")
            return struct.pack("<QQQQII", DISK, 1, 60, 60, 0, 0) + self._attributes(DISK)
        if operation in {GETATTR, SETATTR}:
            return struct.pack("<QII", 60, 0, 0) + self._attributes(node)
        if operation == OPEN:
            return struct.pack("<QIi", 0, DIRECT_IO, 0)
        if operation == WRITE:
            _, offset, size, *_ = TRANSFER_IN.unpack_from(body)
            self._write(offset, body[TRANSFER_IN.size :])
            return struct.pack("<II", size, 0)
        if operation == STATFS:
            return struct.pack("<5Q10I", *(1 << 30,) * 5, PAGE, 255, PAGE, *(0,) * 7)
        if operation == FSYNC:
            os.fdatasync(self._backing)
        if operation in NOTHING:
            return struct.pack("<QIi", 0, 0, 0) if operation == OPENDIR else b""
        raise OSError(errno.ENOSYS, "not here")

    def _attributes(self, node: int) -> bytes:
        folder = node == ROOT
        mode = stat.S_IFDIR | 0o755 if folder else stat.S_IFREG | 0o600
        size = 0 if folder else self._size
        return ATTR.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, PAGE, 0)

    # --- faults ----------------------------------------------------------------------------------

    def _read(self, unique: int, offset: int, size: int) -> None:
        pages = range(offset // PAGE, -(-(offset + size) // PAGE))
        with self._lock:
            self._counts["reads"] += 1
            faults = self._faults
            wait = max((faults.get("slow", {}).get(page, 0) for page in pages), default=0)
            failing = [page for page in pages if faults.get("eio", {}).get(page, 0)]
            for page in failing:
                if faults["eio"][page] > 0:
                    faults["eio"][page] -= 1
            number = errno.EIO if failing else 0
            every = faults.get("every", {})
            self._turn += 1
            if self._turn * 61 % 100 < every.get("share", 100):
                wait = max(wait, every.get("ms", 0))
                number = number or every.get("errno", 0)
            self._counts["slow"] += wait > 0
            self._counts["eio"] += number != 0
            if wait:
                due = time.monotonic() + wait / 1000
                heapq.heappush(self._late, (due, unique, number, offset, size))
                self._late_news.notify()
        if not wait:
            self._answer_read(unique, number, offset, size)

    def _answer_late(self) -> None:
        while True:
            with self._late_news:
                while not self._late or self._late[0][0] > time.monotonic():
                    left = self._late[0][0] - time.monotonic() if self._late else None
                    self._late_news.wait(left)
                _, unique, number, offset, size = heapq.heappop(self._late)
            self._answer_read(unique, number, offset, size)

    def _answer_read(self, unique: int, number: int, offset: int, size: int) -> None:
        if number:
            self._reply(unique, b"", number)
            return
        with self._lock:
            inverted = [
                page
                for page in range(offset // PAGE, -(-(offset + size) // PAGE))
                if page in self._faults.get("corrupt", ())
            ]
            self._counts["corrupt"] += len(inverted)
        data = bytearray(os.pread(self._backing, size, offset))
        for page in inverted:
            low = max(page * PAGE - offset, 0)
            high = min((page + 1) * PAGE - offset, len(data))
            data[low:high] = bytes(byte ^ 0xFF for byte in data[low:high])
        self._reply(unique, bytes(data))

    def _write(self, offset: int, data: bytes) -> None:
        with self._lock:
            self._counts["writes"] += 1
            lost = self._faults.get("lose", set())
            self._counts["lose"] += any(
                offset < (page + 1) * PAGE and page * PAGE < offset + len(data) for page in lost
            )
        at = 0
        while at < len(data):
            step = min(PAGE - (offset + at) % PAGE, len(data) - at)
            if (offset + at) // PAGE not in lost:
                os.pwrite(self._backing, data[at : at + step], offset + at)
            at += step


def main() -> None:
    served = FaultFs(sys.argv[1], sys.argv[2])
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(served.set(json.loads(line))), flush=True)
    finally:
        served.close()


if __name__ == "__main__":
    main()
