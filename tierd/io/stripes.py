"""How an image's pages are dealt out over devices: arithmetic alone.

An image over k devices lies in units of 2 MiB in turn: unit u (512 pages) is on device u mod k, as
that device's unit u div k. What one device holds is its **share**; a page's number within it is
its local number. On one device local numbers are the image's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierd.io.layout import UNIT_PAGES, units_of
from tierd.types import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

DEVICES_MAX = 8


def devices_used(pages: int, devices: int) -> int:
    """Of ``devices``, how many an image of ``pages`` pages is dealt out over."""
    return max(1, min(devices, units_of(pages)))


def share_pages(pages: int, index: int, count: int) -> int:
    """Pages of an image of ``pages`` pages that device ``index`` of ``count`` holds.

    1,300 pages are three units, the last of 276: of two devices the first holds 788, the second
    512.
    """
    units = units_of(pages)
    own = len(range(index, units, count))
    has_last = own > 0 and (units - 1) % count == index
    return own * UNIT_PAGES - (units * UNIT_PAGES - pages if has_last else 0)


def pieces(first_page: int, pages: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Split image pages [first_page, +pages) by device.

    Yields:
        (device index, first page in the image, first local page, pages), in the image's order.
    """
    if count == 1:
        yield 0, first_page, first_page, pages
        return
    end = first_page + pages
    while first_page < end:
        unit, into = divmod(first_page, UNIT_PAGES)
        size = min(UNIT_PAGES - into, end - first_page)
        yield unit % count, first_page, unit // count * UNIT_PAGES + into, size
        first_page += size


def image_rows(extents: Sequence[Extent], index: int, count: int) -> NDArray[np.uint64]:
    """Where a share's pages lie, in the image's numbers.

    Args:
        extents: the share's, in local numbers.
        index: the share's device.
        count: of so many.

    Returns:
        uint64 [n, 3]: first page in the image, pages, page on the device; a row for each unit
        where the image lies on several devices.
    """
    rows = np.array([(e.first_page, e.pages, e.device_page) for e in extents], np.uint64)
    rows = rows.reshape(-1, 3)
    if count == 1:
        return rows
    parts = []
    for first, pages, place in rows.astype(np.int64):
        local = np.arange(first, first + pages, UNIT_PAGES)  # extents start on a unit
        part = np.empty((local.size, 3), np.int64)
        part[:, 0] = (local // UNIT_PAGES * count + index) * UNIT_PAGES
        part[:, 1] = np.minimum(UNIT_PAGES, first + pages - local)
        part[:, 2] = place + local - first
        parts.append(part)
    return np.concatenate(parts or [np.empty((0, 3), np.int64)]).astype(np.uint64)


def image_extents(extents: Sequence[Extent], index: int, count: int) -> list[Extent]:
    """Return :func:`image_rows` as extents."""
    return [Extent(*map(int, row)) for row in image_rows(extents, index, count)]
