"""A device that is slow, or fails, when told to: a FUSE file of our own under a loop device.

    python -m tests.chaos.slowfs BACKING MOUNTPOINT CONTROL

serves one file, ``disk``, backed by BACKING. CONTROL is a file of three u32, read at every request:
delay of reads in ms, errno of reads (0: none), and the share of reads concerned in percent. The
kernel's FUSE protocol is spoken directly, so nothing needs to be installed; root is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import mmap
import os
import select
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
INIT_OUT = struct.Struct("<IIIIHHIIHHI7I")
ATTR = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
READ_IN = struct.Struct("<QQIIQII")
CONTROL = struct.Struct("<3I")
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS = 1, 2, 3, 4, 14, 15, 16, 17
RELEASE, FSYNC, FLUSH, INIT, OPENDIR, RELEASEDIR = 18, 20, 25, 26, 27, 29
INTERRUPT, DESTROY, BATCH_FORGET = 36, 38, 42
# Asynchronous reads, big writes, asynchronous direct I/O.
INIT_FLAGS = 1 | 1 << 5 | 1 << 15
DIRECT_IO = 1
ROOT, DISK = 1, 2
BUFFER_BYTES = 1 << 20
MS_NOSUID_NODEV = 6
MNT_DETACH = 2


class Server:
    """Answers the kernel's requests; those that are to be late wait in a heap."""

    def __init__(self, fuse: int, backing: Path, control: Path) -> None:
        self.fuse = fuse
        self.disk = os.open(backing, os.O_RDWR)
        self.size = backing.stat().st_size
        with control.open("rb") as file:
            self.control = mmap.mmap(file.fileno(), CONTROL.size, prot=mmap.PROT_READ)
        self.late: list[tuple[float, int, bytes, int]] = []
        self.turn = 0

    def run(self) -> None:
        poller = select.poll()
        poller.register(self.fuse, select.POLLIN)
        while True:
            wait_ms = None
            if self.late:
                wait_ms = max(0.0, (self.late[0][0] - time.monotonic()) * 1000)
            ready = poller.poll(wait_ms)
            while self.late and self.late[0][0] <= time.monotonic():
                _, unique, head, error = heapq.heappop(self.late)
                self.answer_read(unique, head, error)
            if ready and not self.serve_one():
                return

    def serve_one(self) -> bool:
        try:
            request = os.read(self.fuse, BUFFER_BYTES)
        except OSError as error:
            return error.errno in {errno.EINTR, errno.EAGAIN, errno.ENOENT}
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        body = request[IN_HEADER.size :]
        if opcode == READ:
            self.read(unique, body)
        elif opcode == DESTROY:
            return False
        elif opcode not in {FORGET, BATCH_FORGET, INTERRUPT}:
            self.reply(unique, self.result(opcode, node, body))
        return True

    def result(self, opcode: int, node: int, body: bytes) -> bytes | int:
        """Return what a request gets: bytes, or an errno."""
        answer: bytes | int = errno.ENOSYS
        if opcode == INIT:
            answer = INIT_OUT.pack(7, 31, 1 << 17, INIT_FLAGS, 64, 48, 1 << 17, 1, *[0] * 10)
        elif opcode == LOOKUP:
            answer = errno.ENOENT
            if body.rstrip(b"\0") == b"disk":
                answer = ENTRY.pack(DISK, 0, 3600, 3600, 0, 0) + self.attributes(DISK)
        elif opcode in {GETATTR, SETATTR}:
            answer = struct.pack("<QII", 3600, 0, 0) + self.attributes(node)
        elif opcode in {OPEN, OPENDIR}:
            answer = struct.pack("<QII", 0, DIRECT_IO, 0)
        elif opcode == WRITE:
            _, offset, size, *_ = READ_IN.unpack_from(body)
            data = body[READ_IN.size : READ_IN.size + size]
            answer = struct.pack("<II", os.pwrite(self.disk, data, offset), 0)
        elif opcode == STATFS:
            blocks = (1 << 20, 1 << 20, 1 << 20, 1, 1)
            answer = struct.pack("<5Q10I", *blocks, 4096, 255, *[0] * 8)
        elif opcode in {RELEASE, FSYNC, FLUSH, RELEASEDIR}:
            answer = b""
        return answer

    def attributes(self, node: int) -> bytes:
        is_root = node == ROOT
        mode = stat.S_IFDIR | 0o755 if is_root else stat.S_IFREG | 0o600
        size = 0 if is_root else self.size
        return ATTR.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def read(self, unique: int, body: bytes) -> None:
        delay_ms, error, share = CONTROL.unpack_from(self.control)
        self.turn += 1
        if self.turn * 61 % 100 >= share:
            delay_ms = error = 0
        if delay_ms:
            due = time.monotonic() + delay_ms / 1000
            heapq.heappush(self.late, (due, unique, body, error))
        else:
            self.answer_read(unique, body, error)

    def answer_read(self, unique: int, body: bytes, error: int) -> None:
        if error:
            self.reply(unique, error)
            return
        _, offset, size, *_ = READ_IN.unpack_from(body)
        self.reply(unique, os.pread(self.disk, size, offset))

    def reply(self, unique: int, result: bytes | int) -> None:
        data, error = (b"", -result) if isinstance(result, int) else (result, 0)
        with contextlib.suppress(OSError):  # whoever asked has gone
            os.write(self.fuse, OUT_HEADER.pack(OUT_HEADER.size + len(data), error, unique) + data)


class SlowDevice:
    """A loop device over a slow file; :meth:`set` says how slow."""

    def __init__(self, directory: Path, backing: Path) -> None:
        self.mount = directory / "slow"
        self.mount.mkdir()
        control = directory / "slow.control"
        control.write_bytes(CONTROL.pack(0, 0, 0))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), CONTROL.size)
        words = [sys.executable, "-m", "tests.chaos.slowfs", backing, self.mount, control]
        self._process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.path = ""
        try:
            if self._process.stdout.readline() != b"mounted\n":
                raise OSError("the FUSE file system cannot be mounted here")
            self.path = self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> str:
        words = ["losetup", "--find", "--show", "--direct-io=on", str(self.mount / "disk")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(done.stderr.strip())
        return done.stdout.strip()

    def set(self, *, delay_ms: int = 0, error: int = 0, share: int = 100) -> None:
        self._control[:] = CONTROL.pack(delay_ms, error, share)

    def close(self) -> None:
        self.set()
        if self.path:
            subprocess.run(["losetup", "--detach", self.path], check=False)
        self._control.close()
        _libc().umount2(os.fsencode(self.mount), MNT_DETACH)
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def main(backing: str, mount: str, control: str) -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    target = os.fsencode(mount)
    if _libc().mount(b"tierd-slow", target, b"fuse", MS_NOSUID_NODEV, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)
    Server(fuse, Path(backing), Path(control)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
