"""Loop devices over a file, opened with O_DIRECT: block devices as fast as memory.

Where the system has no loop devices, the file itself is opened instead; `Loops.kind` says which.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

_SET_FD, _CLR_FD, _SET_DIRECT_IO, _GET_FREE = 0x4C00, 0x4C01, 0x4C08, 0x4C82
_MAJOR = 7


class Loops:
    """Several devices that all show one file.

    Attributes:
        fds: descriptors, one a device, read-only.
        kind: what they are, in words.
    """

    def __init__(self, file: Path, count: int) -> None:
        """Make them; undone by :meth:`close`."""
        self._held: list[int] = []
        self.fds: list[int] = []
        try:
            self.kind = ""
            for _ in range(count):
                self._add(file)
        except OSError as error:
            self.close()
            self.fds = [os.open(file, os.O_RDONLY)] * count
            self._held = [self.fds[0]]
            self.kind = f"the file itself ({error.strerror or error})"

    def _add(self, file: Path) -> None:
        control = os.open("/dev/loop-control", os.O_RDWR)
        try:
            number = fcntl.ioctl(control, _GET_FREE)
        finally:
            os.close(control)
        path = f"/dev/loop{number}"
        if not os.path.exists(path):  # no devtmpfs
            os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(_MAJOR, number))
        loop = os.open(path, os.O_RDONLY)
        backing = os.open(file, os.O_RDONLY)
        try:
            fcntl.ioctl(loop, _SET_FD, backing)
        finally:
            os.close(backing)
        self._held.append(loop)
        direct = "direct"
        try:
            fcntl.ioctl(loop, _SET_DIRECT_IO, 1)
        except OSError:
            direct = "buffered"
        self.fds.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
        self.kind = f"loop devices over {file.parent}, {direct}"

    def close(self) -> None:
        """Detach the devices."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        for loop in self._held:
            with contextlib.suppress(OSError):
                fcntl.ioctl(loop, _CLR_FD)
                os.close(loop)
        self.fds, self._held = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
