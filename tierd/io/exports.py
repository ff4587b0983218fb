"""An image in memory, for other nodes to read: loaded page by page, each of them checked.

Huge pages where the kernel has them to give (the NIC then translates 512 times fewer addresses),
else normal ones, and `page_kind` says which.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.errors import RdmaMemoryError, VerifyError
from tierd.io.blocks import FAULT_WORDS, PageReader
from tierd.io.device import PAGE_BYTES
from tierd.io.linux import memory_available, memory_spare, populate

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tierd.io.store_set import StripedImage

HUGE_BYTES = 2 << 20
BLOCK_PAGES = 512  # read and checked at a time
# (first page, pages, address, key) of a contiguous piece of an image in a peer's memory.
Place = tuple[int, int, int, int]
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_HUGETLB = 0x40000
_MADV_HUGEPAGE = 14


class ImageMemory:
    """Memory that holds one image.

    Attributes:
        pages: uint8 [pages * 4096], page aligned; none after :meth:`close`.
        page_kind: what backs it: "huge pages" or why not.
    """

    def __init__(self, pages: int) -> None:
        """Take the memory.

        Raises:
            RdmaMemoryError: there is not enough.
        """
        size = pages * PAGE_BYTES
        whole = -(-size // HUGE_BYTES) * HUGE_BYTES
        try:
            self._map = _huge(whole)
            self.page_kind = "huge pages"
        except OSError as error:
            self.page_kind = (
                f"normal pages: {whole // HUGE_BYTES} huge pages of 2 MiB are not free "
                f"({error.strerror})"
            )
            self._map = _normal(whole)
        self.pages: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[:size]

    def close(self) -> None:
        """Give it up, once nobody else holds a part of it. Idempotent."""
        self.pages = np.empty(0, np.uint8)
        # Collected, the map would hold up every other thread for as long as it takes.
        with contextlib.suppress(BufferError):
            self._map.close()


def _huge(size: int) -> mmap.mmap:
    """Return huge pages that are there, or a page that is not would end the process later."""
    memory = mmap.mmap(-1, size, _PRIVATE | _MAP_HUGETLB)
    failed = populate(np.frombuffer(memory, np.uint8))
    if failed not in {0, errno.EINVAL}:  # an old kernel has reserved them at least
        memory.close()
        raise OSError(failed, os.strerror(failed))
    return memory


def _normal(size: int) -> mmap.mmap:
    free = memory_available()
    spare = memory_spare()
    if free < size + spare:
        raise RdmaMemoryError(
            f"an export of {size >> 20} MiB does not fit the {free >> 20} MiB of memory that "
            f"are available, of which {spare >> 20} MiB are left alone; run: free -m"
        )
    try:
        memory = mmap.mmap(-1, size, _PRIVATE)
    except OSError as error:
        raise RdmaMemoryError(
            f"{size >> 20} MiB of memory for an export are refused: {error.strerror}; run: free -m"
        ) from None
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_HUGEPAGE)
    return memory


def load(
    image: StripedImage,
    pages: NDArray[np.uint8],
    progress: Callable[[int, int], bool] | None = None,
) -> None:
    """Read an image into memory and check every page and tag of it.

    Args:
        image: what is read.
        pages: uint8 [pages * 4096], page aligned; they go there.
        progress: called with (pages done, pages in all); False stops it.

    Raises:
        VerifyError: a page is not what was staged.
    """
    reader = PageReader(image)
    total = image.info.pages
    for first in range(0, total, BLOCK_PAGES):
        count = min(BLOCK_PAGES, total - first)
        faults = reader.read(first, pages[first * PAGE_BYTES : (first + count) * PAGE_BYTES])
        bad = np.flatnonzero(faults)
        if bad.size:
            page = first + int(bad[0])
            raise VerifyError(
                f"image {image.name} cannot be loaded: page {page} on {reader.device_of(page)}: "
                f"{FAULT_WORDS[int(faults[bad[0]])]}; run: tierd verify {image.name} --full"
            )
        if progress is not None and not progress(first + count, total):
            return


def places_json(places: list[Place]) -> list[dict[str, Any]]:
    """Return where the pages lie, for a peer. Addresses are hex: JSON's numbers have 53 bits."""
    return [
        {"first_page": first, "pages": pages, "address": f"{address:016x}", "key": key}
        for first, pages, address, key in places
    ]


def places_from(rows: list[dict[str, Any]]) -> list[Place]:
    """Build from :func:`places_json`'s list."""
    return [
        (int(row["first_page"]), int(row["pages"]), int(row["address"], 16), int(row["key"]))
        for row in rows
    ]
