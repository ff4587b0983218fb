"""A device in memory that remembers its writes: for power cuts and for flipped bits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import DeviceError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from numpy.typing import NDArray


class MemoryDevice:
    """Stands in for tierd.io.device.Device where a test must hold the medium in its hands.

    ``log`` holds ("write", offset, bytes) and ("flush",) in order, for :func:`after_power_cut`.
    """

    def __init__(self, medium: bytes | bytearray, path: str = "memory") -> None:
        self.path = path
        self.medium = bytearray(medium)
        self.size = len(self.medium)
        self.block_size = 512
        self.writable = True
        self.log: list[tuple] = []
        self.leases: list[tuple[int, int]] = []

    def read(self, offset: int, size: int) -> bytes:
        if offset + size > self.size:
            raise DeviceError(f"{self.path}: read at byte {offset} ended early")
        return bytes(self.medium[offset : offset + size])

    def read_into(self, offset: int, buffer: NDArray[np.uint8]) -> None:
        buffer.reshape(-1)[:] = np.frombuffer(self.read(offset, buffer.size), np.uint8)

    def write(self, offset: int, data: NDArray[np.uint8] | bytes) -> None:
        raw = bytes(data)
        assert offset % self.block_size == 0
        assert len(raw) % self.block_size == 0
        self.medium[offset : offset + len(raw)] = raw
        self.log.append(("write", offset, raw))

    def flush(self) -> None:
        self.log.append(("flush",))

    def discard(self, offset: int, length: int) -> bool:
        self.medium[offset : offset + length] = bytes(length)
        return True

    def leased_ranges(self, offset: int, end: int) -> list[tuple[int, int]]:
        return [(max(a, offset), min(b, end)) for a, b in self.leases if a < end and b > offset]

    def readonly_fd(self, lease: Iterable[tuple[int, int]] = ()) -> int:
        """A descriptor that leads nowhere: nobody reads a device in memory through one."""
        return os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        pass


def after_power_cut(
    start: bytes, log: list[tuple], stop: int, rng: random.Random, *, block: int = 512
) -> bytearray:
    """The medium after a cut before log[stop]: flushed writes are there, of the rest any blocks."""
    medium = bytearray(start)
    flushed = max((i for i in range(stop) if log[i][0] == "flush"), default=-1)
    for index in range(stop):
        if log[index][0] != "write":
            continue
        _, offset, data = log[index]
        for at in range(0, len(data), block):
            if index < flushed or rng.random() < 0.5:
                medium[offset + at : offset + at + block] = data[at : at + block]
    return medium
