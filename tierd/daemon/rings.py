"""A view of a client's channel: what it asked for, how its rings are doing, what is wished of it.

Fault model: the memory belongs to the client and may hold any bytes at any time. Offsets are
checked and copied once; the seals keep the file's size, so no later access can leave the mapping.
Numbers from here go to people and to the controller and never steer a read: the pump checks its
own copy. One word a ring is written, the wish for its table's ways, which only the client acts on.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import AttachError
from tierd.io._core import protocol
from tierd.io.samples import SampleReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.config import ChannelSection
    from tierd.types import RowSamples

_HEADER = struct.Struct("<2IQ4I16s")
_ENTRY = struct.Struct("<6Q4I")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
PAGE_BYTES = 4096
STAT_NAMES = (
    "lookups",
    "hits",
    "misses",
    "bypasses",
    "demands",
    "steps",
    "late_steps",
    "stall_ns",
    "tag_errors",
    "ring_full",
    "failed",
    "published",
)
_STATS = struct.Struct(f"<{len(STAT_NAMES)}Q")
_QUOTA_AT = _STATS.size  # in RingStats
WAYS = 32
# Generous, for layouts that newer clients may have.
RING_BYTES, ROW_BYTES = 1 << 20, 256
LARGEST_PAGE_BYTES = 1 << 30  # that a memfd may have, whose size is whole pages


@dataclasses.dataclass(frozen=True, slots=True)
class RingLayout:
    """Where one ring's words lie in the channel; bytes from its start."""

    control: int
    stats: int
    samples: int  # 0: none
    rows_max: int
    arena_pages: int
    table: int
    flags: int


class ChannelView:
    """The daemon's look at one channel.

    Attributes:
        rank: the rank that the header names.
        world: ranks of the engine, as the header says.
        client_id: 16 bytes that the client chose.
        abi: version of this protocol that the client speaks.
        on_gpu: whether a GPU looks rows up, which can read an image in memory by itself.
        guarded: whether a guardian of the client answers what a daemon leaves.
        rings: layouts of the images' rings, in ring order.
        hints: rings behind these that carry hints, ring by ring; none or one for each.
    """

    def __init__(self, fd: int, limits: ChannelSection) -> None:
        """Map a channel.

        Args:
            fd: the client's memfd; stays the caller's.
            limits: bounds that the header is held to.

        Raises:
            AttachError: not a sealed memfd, or a header that is nonsense or over the bounds.
        """
        size = _sealed_size(fd)
        if size < protocol.HEADER_BYTES:
            raise AttachError(f"channel of {size} bytes: smaller than its header")
        self._readers: dict[int, SampleReader] = {}
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            self._read_header(size, limits)
        except BaseException:
            self._map.close()
            raise
        # An engine outlives daemons, and its counters with it.
        self._at_attach = [self._counters(ring) for ring in self.rings]

    def _read_header(self, size: int, limits: ChannelSection) -> None:
        magic, abi, total, count, rank, world, _, client_id = _HEADER.unpack_from(self._map)
        served = range(protocol.CHANNEL_ABI_OLDEST, protocol.CHANNEL_ABI + 1)
        if magic != protocol.CHANNEL_MAGIC or abi not in served:
            raise AttachError(f"channel with magic {magic:#x} and ABI {abi}: not one of ours")
        if total != size:
            raise AttachError(f"channel of {size} bytes whose header says {total}")
        if not 1 <= count <= protocol.RINGS_MAX:
            raise AttachError(f"channel with {count} rings; 1 to {protocol.RINGS_MAX} are served")
        self.rank, self.world, self.client_id = rank, world, client_id
        self.abi = abi
        self.bytes = size
        self.rings = tuple(self._read_entry(ring, size, limits) for ring in range(count))
        pages = sum(ring.arena_pages for ring in self.rings)
        self.hints = tuple(r for r in self.rings if r.flags & protocol.RING_FLAG_HINT)
        self.rings = self.rings[: count - len(self.hints)]
        if self.hints and [r.table for r in self.hints] != [r.table for r in self.rings]:
            raise AttachError("hint rings do not follow the rings that they are for")
        self.on_gpu = all(ring.flags & protocol.RING_FLAG_GPU for ring in self.rings)
        self.guarded = all(ring.flags & protocol.RING_FLAG_GUARDED for ring in self.rings)
        if pages > limits.arena_pages_max:
            raise AttachError(
                f"the client's arenas have {pages} pages together; "
                f"channel.arena_pages_max of the daemon is {limits.arena_pages_max}"
            )
        most = _bytes_max([*self.rings, *self.hints])
        if size > most:  # the pump maps all of it, and address space is finite, too
            raise AttachError(
                f"channel of {size} bytes; its rings and arenas need less than {most}"
            )

    def _read_entry(self, ring: int, size: int, limits: ChannelSection) -> RingLayout:
        offset = protocol.OFFSET_RINGS + ring * protocol.RING_ENTRY_BYTES
        entry = _ENTRY.unpack_from(self._map, offset)
        control, _, _, _, stats, samples, rows_max, arena_pages, table, flags = entry
        if not 1 <= rows_max <= limits.rows_max:
            raise AttachError(
                f"ring {ring} asks for requests of {rows_max} rows; "
                f"channel.rows_max of the daemon is {limits.rows_max}"
            )
        last = max(control + protocol.CONTROL_BYTES, stats + protocol.STATS_BYTES)
        if last > size or control % protocol.LINE_BYTES or stats % protocol.LINE_BYTES:
            raise AttachError(f"ring {ring} lies outside its channel")
        return RingLayout(control, stats, samples, rows_max, arena_pages, table, flags)

    def read_samples(self, ring: int) -> RowSamples | None:
        """Return the rows that were sampled since the last call; None where a ring has no samples.

        One caller at a time, and not after :meth:`close`.
        """
        reader = self._readers.get(ring)
        if reader is None:
            layout = self.rings[ring]
            try:
                data = np.frombuffer(self._map, np.uint8)
                reader = self._readers[ring] = SampleReader(data, layout.samples, layout.table)
            except ValueError:  # the client wrote nonsense there, or is an older one
                return None
        return reader.read()

    def stats(self, ring: int) -> dict[str, int]:
        """Return the client's counters since it attached to this daemon."""
        now, before = self._counters(self.rings[ring]), self._at_attach[ring]
        # A client that writes nonsense there has counted nothing, rather than less than that.
        gained = (max(0, n - b) for n, b in zip(now, before, strict=True))
        return dict(zip(STAT_NAMES, gained, strict=True))

    def _counters(self, ring: RingLayout) -> tuple[int, ...]:
        return _STATS.unpack_from(self._map, ring.stats)

    def ways(self, ring: int) -> int | None:
        """Return a table's ways per set in force; None where the client takes no wishes."""
        word = _U64.unpack_from(self._map, self.rings[ring].stats + _QUOTA_AT)[0]
        return int(word) - 1 if 1 <= word <= WAYS + 1 else None

    def wish(self, ring: int, ways: int) -> None:
        """Say how many ways of each set a ring's table is to have; clients follow within steps."""
        _U32.pack_into(self._map, self.rings[ring].control + protocol.OFFSET_QUOTA, 1 + ways)

    def outstanding(self, ring: int) -> int:
        """Return how many published requests no server has answered, 0..8."""
        doorbell = self._word(ring, protocol.OFFSET_DOORBELL)
        words = (protocol.OFFSET_DONE_D, protocol.OFFSET_DONE_G)
        ahead = min((doorbell - self._word(ring, done)) & 0xFFFFFFFF for done in words)
        return ahead if ahead <= protocol.RING_DEPTH else 0

    def server(self, ring: int) -> str:
        """Return who serves a ring: ``daemon`` or ``guardian``."""
        return "guardian" if self._word(ring, protocol.OFFSET_TENURE) == 1 else "daemon"

    def handed_over(self, ring: int) -> bool:
        """Tell whether the guardian serves a ring and no read of the daemon is in flight."""
        epoch = self._word(ring, protocol.OFFSET_TENURE + 4)
        drained = self._word(ring, protocol.OFFSET_DRAINED) == epoch
        return drained and self.server(ring) == "guardian"

    def _word(self, ring: int, offset: int) -> int:
        return int(_U32.unpack_from(self._map, self.rings[ring].control + offset)[0])

    def close(self) -> None:
        """Unmap."""
        self._readers.clear()  # they look into the mapping
        self._map.close()


def _bytes_max(rings: Sequence[RingLayout]) -> int:
    """Return more than any layout needs: two arenas a ring, and what lies beside them."""
    beside = sum(RING_BYTES + protocol.RING_DEPTH * ROW_BYTES * ring.rows_max for ring in rings)
    return LARGEST_PAGE_BYTES + beside + sum(2 * PAGE_BYTES * ring.arena_pages for ring in rings)


def _sealed_size(fd: int) -> int:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise AttachError("the channel's descriptor is not a memfd") from None
    if seals & _SEALS != _SEALS:
        raise AttachError("the channel's memfd is not sealed against growing and shrinking")
    return os.fstat(fd).st_size
