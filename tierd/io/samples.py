"""The daemon's reading of a ring's samples: which rows a client looked up, for miss curves.

Fault model: the memory belongs to the client and may hold any bytes at any time. Nothing read here
is used as an index or a length; numbers out of range are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierd.io._core import protocol
from tierd.types import RowSamples

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROW_MASK = (1 << 34) - 1
_COUNT = 1 << 62


def set_sample_rate(channel: NDArray[np.uint8], offset: int, rate: float) -> None:
    """Sample this share of all rows, 0 to 1; by the client, before its table is made.

    Args:
        channel: the whole channel.
        offset: RingEntry.samples.
        rate: share; 1 leaves out one row in 2^32.
    """
    channel[offset + 12 : offset + 16].view(np.uint32)[0] = min(int(rate * 2**32), 2**32 - 1)


class SampleReader:
    """Reads each sample of one ring once.

    It keeps up with a ring if it comes by once in 2,048 samples; at the default rate of one row in
    64 and 3,072 rows a step that is every 42 steps.
    """

    def __init__(self, channel: NDArray[np.uint8], offset: int, table: int) -> None:
        """Look at a ring's samples in a mapped channel.

        Args:
            channel: the whole channel as bytes, mapped as long as this lives.
            offset: RingEntry.samples; 0 means that this ring has none.
            table: the client's table number.

        Raises:
            ValueError: the ring has no samples, or they lie outside the channel.
        """
        head, size = protocol.SAMPLE_HEADER_BYTES, 8 * protocol.SAMPLE_CAPACITY
        if offset < protocol.HEADER_BYTES or offset % 64 or offset + head + size > channel.nbytes:
            raise ValueError(f"samples at {offset} lie outside a channel of {channel.nbytes} B")
        self._written = channel[offset : offset + 8].view(np.uint64)
        self._threshold = channel[offset + 12 : offset + 16].view(np.uint32)
        self._entries = channel[offset + head : offset + head + size].view(np.uint64)
        self._read = 0
        self.table = table

    def read(self) -> RowSamples:
        """Return what was sampled since the last call."""
        # Half of the circle is left to the kick that is writing now, which counts only at its end.
        usable = len(self._entries) // 2
        written = int(self._written[0]) % _COUNT
        fresh = (written - self._read) % _COUNT
        numbers = np.arange(written - min(fresh, usable), written)
        entries = self._entries[numbers % len(self._entries)]
        behind = (int(self._written[0]) - written) % _COUNT  # kicks while we copied
        entries = entries[max(0, len(entries) + behind - usable) :]
        self._read = written
        return RowSamples(
            table=self.table,
            rows=(entries & np.uint64(_ROW_MASK)).astype(np.int64),
            stamps=(entries >> np.uint64(protocol.SAMPLE_STAMP_SHIFT)).astype(np.int64),
            prefill=(entries & np.uint64(protocol.SAMPLE_PREFILL)) != 0,
            rate=int(self._threshold[0]) / 2**32,
            lost=fresh - len(entries),
        )
