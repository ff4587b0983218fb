"""Where things lie: pages in an image, images on a device, and what is free between them.

    byte 0          root A (4 KiB)          64 KiB       root B (4 KiB)
    1 MiB           table area 0            + area       table area 1
    data_start      data, handed out in units of 2 MiB, to the end of the device

docs/format.md is the reference; everything in this module is arithmetic.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING

from tierd.io import _core
from tierd.io.device import PAGE_BYTES
from tierd.types import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT_OFFSETS = (0, 64 << 10)
ROOT_BYTES = PAGE_BYTES
RESERVED_BYTES = 1 << 20  # everything before the table areas
TABLE_AREA_MIN = 512 << 10
TABLE_AREA_SHARE = 32768  # a table area has one byte for so many bytes of the device
UNIT_PAGES = 512  # 2 MiB: the granule of allocation, and of striping over devices
UNIT_BYTES = UNIT_PAGES * PAGE_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Areas:
    """Where the parts of a device of a given size lie, in bytes.

    Attributes:
        table_bytes: size of each of the two table areas.
        data_start: first byte of the data, a multiple of 2 MiB.
        data_end: end of the last whole unit.
    """

    table_bytes: int
    data_start: int
    data_end: int

    @classmethod
    def of(cls, device_bytes: int) -> Areas:
        """Lay out a device; ``data_end <= data_start`` means that it is too small."""
        table = max(TABLE_AREA_MIN, round_up(device_bytes // TABLE_AREA_SHARE, 64 << 10))
        start = round_up(RESERVED_BYTES + 2 * table, UNIT_BYTES)
        return cls(table, start, device_bytes // UNIT_BYTES * UNIT_BYTES)

    def table_offset(self, area: int) -> int:
        """Byte where table area 0 or 1 starts."""
        return RESERVED_BYTES + area * self.table_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """How a table's rows lie in pages.

    Attributes:
        stride: bytes from one row of a page to the next (row_bytes rounded up to 4).
    """

    row_bytes: int
    rows: int
    stride: int
    rows_per_page: int
    pages: int

    @classmethod
    def of(cls, row_bytes: int, rows: int) -> Geometry:
        """Compute; ValueError if a row does not fit a page."""
        per_page = int(_core.rows_per_page(row_bytes))
        return cls(
            row_bytes, rows, int(_core.row_stride(row_bytes)), per_page, -(-rows // per_page)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pages of an image that are consecutive on the device, too."""

    first_page: int
    pages: int
    device_page: int


def round_up(value: int, unit: int) -> int:
    """Smallest multiple of ``unit`` that is at least ``value``."""
    return -(-value // unit) * unit


def units_of(pages: int) -> int:
    """Units of 2 MiB that ``pages`` pages occupy."""
    return -(-pages // UNIT_PAGES)


def occupied(extent: Extent) -> tuple[int, int]:
    """Byte range (start, end) that an extent occupies on its device, whole units."""
    start = extent.device_page * PAGE_BYTES
    return start, start + units_of(extent.pages) * UNIT_BYTES


def runs(extents: Sequence[Extent], first_page: int, pages: int) -> Iterator[Run]:
    """Split image pages [first_page, +pages) into runs that one read can fetch each.

    ``extents`` must be sorted by first_page and cover the range.
    """
    starts = [extent.first_page for extent in extents]
    index = bisect.bisect_right(starts, first_page) - 1
    end = first_page + pages
    while first_page < end:
        extent = extents[index]
        into = first_page - extent.first_page
        assert 0 <= into < extent.pages, f"page {first_page} is in no extent"
        count = min(end - first_page, extent.pages - into)
        yield Run(first_page, count, extent.device_page + into)
        first_page += count
        index += 1


def free_ranges(areas: Areas, used: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Byte ranges of the data area that are in none of ``used``, whole units, in order."""
    free = []
    position = areas.data_start
    for start, end in sorted(used):
        low = start // UNIT_BYTES * UNIT_BYTES
        if low > position:
            free.append((position, low))
        position = max(position, round_up(end, UNIT_BYTES))
    if position < areas.data_end:
        free.append((position, areas.data_end))
    return free


def choose_extents(free: Sequence[tuple[int, int]], pages: int) -> list[Extent] | None:
    """Place ``pages`` image pages into free ranges; None if they do not fit.

    One run if any is long enough (the shortest such, so that long ones stay whole); otherwise
    the longest runs, so that the image has few extents.
    """
    need = units_of(pages) * UNIT_BYTES
    fitting = [run for run in free if run[1] - run[0] >= need]
    if fitting:
        chosen = [min(fitting, key=lambda run: (run[1] - run[0], run[0]))]
    else:
        chosen, room = [], 0
        for run in sorted(free, key=lambda run: (run[0] - run[1], run[0])):
            chosen.append(run)
            room += run[1] - run[0]
            if room >= need:
                break
        if room < need:
            return None
        chosen.sort()
    extents = []
    page = 0
    for start, end in chosen:
        count = min(pages - page, (end - start) // PAGE_BYTES)
        extents.append(Extent(page, count, start // PAGE_BYTES))
        page += count
    return extents
