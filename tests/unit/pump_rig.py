"""Images in files, a pump over them and clients of it, for the pump's tests."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

P = _core.protocol
PAGE = 4096
ROW_BYTES = 264
ROWS_PER_PAGE = 15
SECOND = 1_000_000_000


def open_direct(path: Path) -> int:
    """Open for reading with O_DIRECT, or without where the filesystem does not take it."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


@dataclasses.dataclass
class Image:
    """An image of `pages` full pages; `data` [pages, 4096] is what its file should hold."""

    image_id: int
    generation: int
    data: NDArray[np.uint8]

    @classmethod
    def make(cls, pages: int, *, image_id: int = 0x1234, generation: int = 1) -> Image:
        rng = np.random.default_rng(image_id)
        rows = rng.integers(0, 256, pages * ROWS_PER_PAGE * ROW_BYTES, dtype=np.uint8)
        data = np.zeros(pages * PAGE, np.uint8)
        _core.pack_pages(rows, ROW_BYTES, 0, image_id, generation, data)
        return cls(image_id, generation, data.reshape(pages, PAGE))

    @property
    def pages(self) -> int:
        return len(self.data)


class Served:
    """A pump that serves one image from one file, and channels on it."""

    def __init__(self, path: Path, image: Image, *, start: bool = True, **options: Any) -> None:
        self.path = path
        self.image = image
        if not path.exists():
            path.write_bytes(image.data.tobytes())
        self.pump = _core.Pump(**{"spin_us": 20, "read_threads": 3, **options})
        fd = open_direct(path)
        self.device = self.pump.add_device(fd)
        os.close(fd)
        self.table = self.add_table(window_ns=1_000_000)
        if start:
            self.pump.start()

    def add_table(
        self, window_ns: int, image: Image | None = None, copies: Sequence[Any] = ()
    ) -> int:
        image = image or self.image
        return int(
            self.pump.add_table(
                image_id=image.image_id,
                generation=image.generation,
                row_bytes=ROW_BYTES,
                rows=image.pages * ROWS_PER_PAGE,
                window_ns=window_ns,
                extents=np.array([[0, image.pages, self.device, 0]], np.uint64),
                copies=[np.array(copy, np.uint64) for copy in copies],
            )
        )

    def client(self, rows_max: int = 32, arena_pages: int = 256, **options: Any) -> Client:
        return Client(self, rows_max, arena_pages, **options)


class Client:
    """A channel with one ring, served by `served`, and a raw client on it."""

    def __init__(
        self,
        served: Served,
        rows_max: int,
        arena_pages: int,
        *,
        table: int | None = None,
        flags: int = 0,
        wake: bool = True,
        attach: bool = True,
        first_sequence: int = 0,
    ) -> None:
        self.image = served.image
        ring = (rows_max, arena_pages, 0, flags)
        self.channel = _core.Channel(rank=0, world=1, client_id=b"c" * 16, rings=[ring])
        wake_fd = served.pump.wake_fd if wake else -1
        self.ring = _core.RingClient(
            self.channel, 0, wake_fd, spin_us=20, first_sequence=first_sequence
        )
        self.number = -1
        if attach:
            self.attach(served, table)

    def attach(self, served: Served, table: int | None = None) -> None:
        self.number = served.pump.add_channel(self.channel.fd)
        served.pump.add_ring(self.number, 0, served.table if table is None else table)

    def publish(self, pages: NDArray[Any] | list[int], priority: int = 0) -> int:
        numbers = np.asarray(pages, np.uint32)
        zeros = np.zeros_like(numbers)
        return int(self.ring.publish(numbers, zeros, zeros, priority))

    def wait(self, sequence: int) -> int:
        return int(self.ring.wait(sequence, 20 * SECOND))

    def finish(self, sequence: int, pages: NDArray[Any] | list[int]) -> None:
        """Wait for `ok`, compare every page, retire."""
        assert self.wait(sequence) == P.Status.ok
        expected = self.image.data[np.asarray(pages)]
        assert np.array_equal(self.ring.pages(sequence), expected)
        self.ring.retire(sequence)

    def read(self, pages: NDArray[Any] | list[int]) -> None:
        self.finish(self.publish(pages), pages)

    def fails(self, pages: list[int]) -> int:
        """Publish, wait, retire; returns the status."""
        sequence = self.publish(pages)
        status = self.wait(sequence)
        self.ring.retire(sequence)
        return status

    def word(self, offset: int) -> NDArray[np.uint32]:
        """A writable view of one u32 of the ring's control words."""
        control: NDArray[np.uint8] = self.channel.control(0)
        return control[offset : offset + 4].view(np.uint32)

    def set_tenure(self, owner: int, epoch: int) -> None:
        control = self.channel.control(0)
        control[P.OFFSET_TENURE : P.OFFSET_TENURE + 8].view(np.uint64)[0] = epoch << 32 | owner


class RawChannel:
    """A memfd written by hand, so that it can say anything at all."""

    def __init__(self, size: int, *, seal: bool = True) -> None:
        self.fd = os.memfd_create("raw", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        if seal:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def bytes(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.memory, np.uint8)

    def u32(self, offset: int, value: int) -> None:
        self.memory[offset : offset + 4] = value.to_bytes(4, "little")

    def u64(self, offset: int, value: int) -> None:
        self.memory[offset : offset + 8] = value.to_bytes(8, "little")

    def read_u32(self, offset: int) -> int:
        return int.from_bytes(self.memory[offset : offset + 4], "little")

    def header(self, total: int, rings: int, *, magic: int = -1, abi: int = -1) -> None:
        self.u32(0, P.CHANNEL_MAGIC if magic == -1 else magic)
        self.u32(4, P.CHANNEL_ABI if abi == -1 else abi)
        self.u64(8, total)
        self.u32(16, rings)

    def entry(self, ring: int, **fields: int) -> None:
        """Write a RingEntry; offsets: control, descriptors, arena_d, arena_g, stats, samples."""
        at = P.OFFSET_RINGS + ring * P.RING_ENTRY_BYTES
        names = ["control", "descriptors", "arena_d", "arena_g", "stats", "samples"]
        for i, name in enumerate(names):
            self.u64(at + 8 * i, fields.get(name, 0))
        for i, name in enumerate(["rows_max", "arena_pages", "table", "flags"]):
            self.u32(at + 48 + 4 * i, fields.get(name, 0))

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)
