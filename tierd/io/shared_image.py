"""An image in a memory file, for engines of this node to map: the dram tier.

Huge pages where the kernel has them to give: a GPU that gathers rows of 264 B over the link then
translates 512 times fewer addresses. Every page is checked on the way in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import DramError
from tierd.io.device import PAGE_BYTES
from tierd.io.exports import HUGE_BYTES, load
from tierd.io.linux import memory_available, memory_spare

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tierd.io.store_set import StripedImage

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedImage:
    """One image's pages in order, in a memory file that others may map.

    Attributes:
        fd: the memory file, sealed against growing and shrinking; closed by :meth:`close`.
        size: of the file, bytes; at least that of the pages.
        page_kind: what backs it: "huge pages" or why not.
    """

    def __init__(self, image: StripedImage) -> None:
        """Take the memory.

        Raises:
            DramError: there is not enough.
        """
        need = image.info.pages * PAGE_BYTES
        self.size = -(-need // HUGE_BYTES) * HUGE_BYTES
        self._image = image
        try:
            self.fd, self._map = _memory(self.size, huge=True)
            self.page_kind = "huge pages"
        except OSError as error:
            self.page_kind = (
                f"normal pages: {self.size // HUGE_BYTES} huge pages of 2 MiB are not free "
                f"({error.strerror})"
            )
            free = memory_available()
            if free < self.size + memory_spare():
                raise DramError(
                    f"image {image.name} takes {self.size >> 20} MiB of memory, {free >> 20} MiB "
                    "are free; run: tierd plan, or take it out of dram.images"
                ) from None
            try:
                self.fd, self._map = _memory(self.size, huge=False)
            except OSError as worse:
                raise DramError(
                    f"image {image.name}: {self.size >> 20} MiB of memory are refused: "
                    f"{worse.strerror}; run: free -m"
                ) from None
        self._pages: NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)[:need]

    def load(self, progress: Callable[[int, int], bool] | None = None) -> None:
        """Read the image into it and check every page; see :func:`tierd.io.exports.load`."""
        assert self._pages is not None
        load(self._image, self._pages, progress)

    def close(self) -> None:
        """Give it up; who has mapped it keeps it. Idempotent."""
        self._pages = None
        with contextlib.suppress(BufferError):
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _memory(size: int, *, huge: bool) -> tuple[int, mmap.mmap]:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    fd = os.memfd_create("tierd-image", flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        # Huge pages are reserved here, so that one that is not there ends no process later.
        return fd, mmap.mmap(fd, size)
    except OSError as error:
        os.close(fd)
        if error.errno is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
        raise
