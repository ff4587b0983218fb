"""Blocks of an image: read from its devices and judged, page by page.

What :mod:`tierd.io.walker` does at once and the daemon's scrub little by little. A block is 1,024
pages, 4 MiB: the unit of reading, and of the digest of all rows.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import DeviceError
from tierd.io import _core
from tierd.io.device import PAGE_BYTES, aligned_buffer
from tierd.io.layout import Geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tierd.io.device import Device
    from tierd.io.store_set import StripedImage

BLOCK_PAGES = 1024
DIGEST_KIND = f"sha256 of sha256 of {BLOCK_PAGES}-page blocks"

UNREADABLE = 255  # beside the core's PageFault numbers
FAULT_WORDS = {
    int(_core.PageFault.magic): "no page of tierd's there",
    int(_core.PageFault.version): "a page of another format version",
    int(_core.PageFault.image): "a page of another image",
    int(_core.PageFault.generation): "a page of another generation",
    int(_core.PageFault.number): "another page of the image",
    int(_core.PageFault.rows): "a wrong number of rows",
    int(_core.PageFault.crc): "its checksum is wrong",
    int(_core.PageFault.tag): "a row's tag is wrong",
    UNREADABLE: "the device cannot read it",
}


class PageReader:
    """Reads an image's pages and judges each; any thread, each with buffers of its own."""

    def __init__(self, image: StripedImage) -> None:
        """Take an image that is whole."""
        self._image = image
        self._info = image.info
        self.geometry = Geometry.of(image.info.table.row_bytes, image.info.table.rows)

    def device_of(self, page: int) -> str:
        """Name of the device that holds a page."""
        store, _ = next(iter(self._image.runs(page, 1)))
        return store.device.path

    def check_block(
        self,
        buffers: BlockBuffers,
        first: int,
        *,
        piece_pages: int = BLOCK_PAGES,
        before_read: Callable[[int], None] | None = None,
    ) -> tuple[NDArray[np.uint8], bytes]:
        """Read and judge the block that starts at page ``first``.

        Args:
            buffers: this thread's.
            first: a multiple of BLOCK_PAGES.
            piece_pages: read so many pages at a time.
            before_read: called with the number of pages before each of these reads.

        Returns:
            a PageFault or UNREADABLE for each page, uint8 [pages]; and the sha256 of its rows.
        """
        count = min(BLOCK_PAGES, self.geometry.pages - first)
        pages = buffers.pages[: count * PAGE_BYTES]
        faults = np.empty(count, np.uint8)
        for at in range(0, count, piece_pages):
            size = min(piece_pages, count - at)
            if before_read is not None:
                before_read(size)
            part = pages[at * PAGE_BYTES : (at + size) * PAGE_BYTES]
            faults[at : at + size] = self.read(first + at, part)
        return faults, hashlib.sha256(buffers.unpack(pages, first)).digest()

    def read(self, first: int, pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Fill ``pages`` and return one PageFault per page, or UNREADABLE: uint8 [pages]."""
        count = pages.size // PAGE_BYTES
        unreadable = np.zeros(count, bool)
        for store, run in self._image.runs(first, count):
            at = run.first_page - first
            part = pages[at * PAGE_BYTES : (at + run.pages) * PAGE_BYTES]
            try:
                store.device.read_into(run.device_page * PAGE_BYTES, part)
            except DeviceError:
                # Page by page, so that one bad block does not condemn its neighbours.
                unreadable[at : at + run.pages] = _read_singly(store.device, run.device_page, part)
        faults = np.empty(count, np.uint8)
        _core.check_pages(
            pages,
            self.geometry.row_bytes,
            self.geometry.rows,
            first,
            self._info.image_id,
            self._info.generation,
            True,
            True,
            faults,
        )
        faults[unreadable] = UNREADABLE
        return faults


def _read_singly(device: Device, device_page: int, part: NDArray[np.uint8]) -> NDArray[np.bool_]:
    failed = np.zeros(part.size // PAGE_BYTES, bool)
    for index in range(failed.size):
        page = part[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
        try:
            device.read_into((device_page + index) * PAGE_BYTES, page)
        except DeviceError:
            page[:] = 0
            failed[index] = True
    return failed


class BlockBuffers:
    """One thread's buffers for a block."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        pages = min(BLOCK_PAGES, geometry.pages)
        self.pages = aligned_buffer(pages * PAGE_BYTES)
        self._rows = np.empty((pages, geometry.rows_per_page, geometry.row_bytes), np.uint8)

    def unpack(self, pages: NDArray[np.uint8], first: int) -> memoryview:
        """Return the rows of consecutive pages, back to back."""
        shape = self._geometry
        count = pages.size // PAGE_BYTES
        used = shape.rows_per_page * shape.stride
        rows = pages.reshape(count, PAGE_BYTES)[:, :used]
        out = self._rows[:count]
        out[:] = rows.reshape(count, shape.rows_per_page, shape.stride)[:, :, : shape.row_bytes]
        left = shape.rows - first * shape.rows_per_page
        present = min(left, count * shape.rows_per_page)
        return out.reshape(-1)[: present * shape.row_bytes].data


def block_starts(pages: int) -> Iterator[int]:
    """First page of each block of an image of ``pages`` pages."""
    return iter(range(0, pages, BLOCK_PAGES))
