"""The host pool of KV: one memfd a node, leased in parts to engine ranks.

    HostPool    the daemon's side: the memfd, its leases, what each lease's owner counts
    PoolView    an engine's side: pages and owner headers inside its lease

A lease holds, from its first byte: a head of 4 KiB (what the pages are, and counters the owner
writes), owner headers of 16 B for every page of every layer, then the pages. A page is one block
of one layer, all KV heads: keys, then values of each head.

Fault model: an engine may die at any point and may write anything inside its own lease; the daemon
reads counters there and nothing else. A lease is given out again only after its memory was
returned to the system, so nobody ever sees another's KV.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.errors import KvPoolError, KvPoolFullError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = 0x564B4454  # "TDKV"
VERSION = 1
HEAD_BYTES = 4096
HEADER_BYTES = 16
ALIGN = 2 << 20  # leases and pages begin at huge-page boundaries
COUNTERS_AT = 256  # in the head
COUNTERS = (
    "steps", "bytes", "bytes_written", "admitted", "evicted", "wanted", "hit", "agreed", "judged",
    "wrong_owner", "stall_ns", "requests", "sparse_requests", "waits", "preemptions", "pages_used",
)  # fmt: skip

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_F_ADD_SEALS = 1033
_SEAL_SHRINK_GROW = 0x2 | 0x4


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclasses.dataclass(frozen=True, slots=True)
class PoolLayout:
    """Where things lie in a lease of some bytes.

    Attributes:
        layers: layers whose blocks are kept.
        block_bytes: bytes of a block of one layer, all KV heads.
        pages: blocks of the context that fit, each with its page in every layer.
        pages_at: offset of the first page.
    """

    layers: int
    block_bytes: int
    pages: int
    pages_at: int

    @classmethod
    def fit(cls, lease_bytes: int, layers: int, block_bytes: int) -> PoolLayout:
        """Return the layout with the most pages.

        Raises:
            KvPoolError: not even one page fits.
        """
        each = layers * (block_bytes + HEADER_BYTES)
        pages = max(0, lease_bytes - HEAD_BYTES) // each
        while pages > 0:
            at = _round_up(HEAD_BYTES + layers * pages * HEADER_BYTES, HEAD_BYTES)
            if at + layers * pages * block_bytes <= lease_bytes:
                return cls(layers, block_bytes, pages, at)
            pages -= 1
        raise KvPoolError(
            f"a lease of {lease_bytes} bytes holds no block of {layers} layers x {block_bytes} "
            "bytes; ask for more, or raise kv.pool_bytes"
        )

    @classmethod
    def bytes_for(cls, pages: int, layers: int, block_bytes: int) -> int:
        """Return the lease that holds so many pages."""
        at = _round_up(HEAD_BYTES + layers * pages * HEADER_BYTES, HEAD_BYTES)
        return at + layers * pages * block_bytes

    def headers_at(self, layer: int) -> int:
        """Offset of a layer's owner headers."""
        return HEAD_BYTES + layer * self.pages * HEADER_BYTES

    def layer_at(self, layer: int) -> int:
        """Offset of a layer's pages."""
        return self.pages_at + layer * self.pages * self.block_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A part of the pool that one engine rank owns.

    Attributes:
        number: its name in REST and in the log.
        offset: first byte in the memfd.
        bytes: its size.
        owner: who has it, in words.
    """

    number: int
    offset: int
    bytes: int
    owner: str


class HostPool:
    """The daemon's side of the pool.

    Attributes:
        bytes: size of the memfd; memory is taken as engines touch it.
        leases: what is given out, by number.
    """

    def __init__(self, size: int, name: str = "tierd-kv") -> None:
        """Make the memfd, sealed against growing and shrinking.

        Raises:
            KvPoolError: the system refuses one of that size.
        """
        self.bytes = _round_up(size, ALIGN)
        self.leases: dict[int, Lease] = {}
        self._returning: dict[int, Lease] = {}
        self._next = 1
        try:
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.bytes)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_SHRINK_GROW)
        except OSError as error:
            raise KvPoolError(
                f"a KV pool of {self.bytes} bytes (kv.pool_bytes): {error.strerror}"
            ) from None

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has leased."""
        return self.bytes - sum(lease.bytes for lease in self._taken())

    def _taken(self) -> list[Lease]:
        """Parts that nobody else may have, in their order."""
        taken = [*self.leases.values(), *self._returning.values()]
        return sorted(taken, key=lambda lease: lease.offset)

    def lease(self, size: int, owner: str) -> Lease:
        """Give out the first part that is large enough.

        Raises:
            KvPoolFullError: no such part is free now.
            KvPoolError: a size that no pool could give.
        """
        if not 0 < size <= self.bytes:
            raise KvPoolError(
                f"a lease of {size} bytes was asked; the pool (kv.pool_bytes) has {self.bytes}"
            )
        wanted, at = _round_up(size, ALIGN), 0
        for taken in self._taken():
            if taken.offset - at >= wanted:
                break
            at = taken.offset + taken.bytes
        if at + wanted > self.bytes:
            raise KvPoolFullError(
                f"a lease of {wanted} bytes was asked; {self.free_bytes} of {self.bytes} are free, "
                "not all in one piece; stop an engine, or raise kv.pool_bytes"
            )
        made = Lease(self._next, at, wanted, owner)
        self._next += 1
        self.leases[made.number] = made
        return made

    def release(self, number: int) -> None:
        """Take a lease back and return its memory to the system, so that it reads as zeroes."""
        lease = self.withdraw(number)
        self.punch(lease)
        self.free(lease)

    def withdraw(self, number: int) -> Lease:
        """Take a lease from its owner; its part is nobody's until it is punched and freed."""
        lease = self._returning[number] = self.leases.pop(number)
        return lease

    def free(self, lease: Lease) -> None:
        """Let others have the part of a lease whose memory went back."""
        del self._returning[lease.number]

    def punch(self, lease: Lease) -> None:
        """Return a withdrawn lease's memory to the system: seconds for many GB, on any thread.

        Raises:
            OSError: the system refuses.
        """
        assert lease.number in self._returning, "its owner may still use it"
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.fallocate(
            self.fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE,
            ctypes.c_long(lease.offset), ctypes.c_long(lease.bytes),
        )  # fmt: skip
        if code:
            raise OSError(ctypes.get_errno(), "punching a KV lease out of its memfd")

    def counters(self, number: int) -> dict[str, int]:
        """What a lease's owner has counted; zeroes before it wrote its head."""
        lease = self.leases[number]
        head = os.pread(self.fd, HEAD_BYTES, lease.offset)
        words = np.frombuffer(head, "<u8", len(COUNTERS), COUNTERS_AT)
        known = int.from_bytes(head[:4], "little") == MAGIC
        return {n: int(v) if known else 0 for n, v in zip(COUNTERS, words, strict=True)}

    def close(self) -> None:
        """Close the memfd; engines that have mapped it keep their memory."""
        os.close(self.fd)


class PoolView:
    """An engine's lease, mapped.

    Attributes:
        layout: how many pages, and where.
        memory: uint8, the whole lease; whoever uses it on a GPU registers it.
        counters: uint64 by the names of COUNTERS, read by the daemon.
    """

    def __init__(self, fd: int, offset: int, size: int, *, layers: int, block_bytes: int) -> None:
        """Map a lease and write its head.

        Raises:
            KvPoolError: it cannot be mapped or holds not one page.
        """
        self.layout = PoolLayout.fit(size, layers, block_bytes)
        try:
            self._map = mmap.mmap(fd, size, offset=offset)
        except (OSError, ValueError) as error:
            raise KvPoolError(f"a KV lease of {size} bytes at {offset}: {error}") from None
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._counters: NDArray[Any] = self.memory[COUNTERS_AT:HEAD_BYTES].view("<u8")
        self._counters[: len(COUNTERS)] = 0
        head = (MAGIC, VERSION, layers, block_bytes, self.layout.pages)
        self.memory[:20].view("<u4")[:] = head

    @classmethod
    def private(cls, pages: int, *, layers: int, block_bytes: int) -> PoolView:
        """Make a pool of one's own, for an engine without a daemon, for tests and benches."""
        size = _round_up(PoolLayout.bytes_for(pages, layers, block_bytes), HEAD_BYTES)
        fd = os.memfd_create("tierd-kv-private", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return cls(fd, 0, size, layers=layers, block_bytes=block_bytes)
        finally:
            os.close(fd)

    def count(self, **amounts: int) -> None:
        """Add to counters."""
        for name, amount in amounts.items():
            self._counters[COUNTERS.index(name)] += np.uint64(amount)

    def set(self, **values: int) -> None:
        """Set counters that are levels."""
        for name, value in values.items():
            self._counters[COUNTERS.index(name)] = value
