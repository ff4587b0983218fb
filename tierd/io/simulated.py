"""A simulated device: the interface of :class:`tierd.io.device.Device` over memory that lies.

The bytes live in the core's SimDevice, which loses unflushed writes at a power cut and commits
every fault that its seed asks for. Locks and leases are the kernel's own, taken on an empty memfd
of the device's size, so exclusive opening and leases are the code that serves a real disk. A pump
with the transport ``simulated`` reads the same SimDevice by way of that descriptor.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.io.device import PAGE_BYTES, Device, open_exclusive

if TYPE_CHECKING:
    from collections.abc import Iterable


class PowerCut(BaseException):
    """The power went in the middle of a call.

    Not an Exception: nothing of the process under test runs on after it, so nothing may handle it
    as an error of the device.
    """


class SimulatedDevice(Device):
    """An open simulated device; see :class:`tierd.io.device.Device` for what the methods do."""

    def __init__(self, path: str, fd: int, native: Any, *, write: bool, block_size: int) -> None:
        """Take over ``fd``, a descriptor of the native device's memfd."""
        self.path = path
        self.writable = write
        self.is_block = False
        self.size = int(native.bytes)
        self.block_size = block_size
        self.direct, self.direct_reason = True, ""
        self._fd = fd
        self._o_direct = False
        self._native = native

    def _transfer_in(self, offset: int, view: memoryview) -> int:
        return _checked(self._native.read(offset, np.frombuffer(view, np.uint8)))

    def _transfer_out(self, offset: int, view: memoryview) -> int:
        return _checked(self._native.write(offset, np.frombuffer(view, np.uint8)))

    def _make_durable(self) -> None:
        _checked(self._native.flush())

    def _give_up(self, offset: int, length: int) -> bool:
        return _checked(self._native.discard(offset, length)) == 0


class SimulatedHost:
    """The devices of a simulated machine, by path; stands in for the class ``Device``.

    A path is ``/proc/self/fd/N`` of the device's memfd, so that it can be looked at as a file.
    """

    def __init__(self, natives: Iterable[Any], power: Any, *, block_size: int = PAGE_BYTES) -> None:
        """Hold native SimDevices and their SimPower; ``block_size`` is 512 or 4,096."""
        self.natives = list(natives)
        self.power = power
        self.block_size = block_size
        self.paths = [f"/proc/self/fd/{native.fd}" for native in self.natives]

    def open(
        self, path: str | os.PathLike[str], *, write: bool, retry_s: float | None = None
    ) -> SimulatedDevice:
        """Open a device, exclusively if for writing; nobody is waited for.

        Raises:
            DeviceBusyError: it is open for writing already.
        """
        del retry_s  # a simulated predecessor is gone at once
        path = os.fspath(path)
        native = self.natives[self.paths.index(path)]
        if write:
            fd = open_exclusive(path, os.stat(path).st_mode, 0.0)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return SimulatedDevice(path, fd, native, write=write, block_size=self.block_size)

    def native_at(self, path: str) -> Any:
        """Return the native device that a path names."""
        return self.natives[self.paths.index(path)]

    def power_up(self, loss: Any) -> None:
        """Let the power come back; ``loss`` (a SimLoss) says what becomes of unflushed writes."""
        for native in self.natives:
            native.settle(loss)
        self.power.restore()


def _checked(result: int) -> int:
    if result == -errno.ESHUTDOWN:
        raise PowerCut
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
