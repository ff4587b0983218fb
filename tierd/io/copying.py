"""A second copy of an image on other devices: the same pages, the same identity.

A table's next tier: where the first copy's page cannot be read, or is wrong twice, a pump reads
the second. Page by page the bytes are the same, so either passes the checks of the other. The
copy's home does not adopt the image's identity (:meth:`tierd.io.store.Store.commit_image`).
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from tierd.errors import ImageError, VerifyError
from tierd.io import walker
from tierd.io.blocks import BLOCK_PAGES, FAULT_WORDS, BlockBuffers, PageReader, block_starts
from tierd.io.device import PAGE_BYTES
from tierd.io.extent_table import StoredImage
from tierd.io.pipeline import in_order, thread_count
from tierd.io.staging import StageResult
from tierd.io.store_set import StripedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tierd.io.store_set import Share, StoreSet
    from tierd.types import ImageInfo


def copy_image(
    source: StoreSet,
    name: str,
    target: StoreSet,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> StageResult:
    """Copy an image; nothing is written if the copy is there already.

    Args:
        source: the devices that hold it; may be open for reading only.
        name: ``model/table``.
        target: other devices, open for writing; the copy is dealt out over all of them.
        progress: called with (page bytes written, page bytes to write).

    Raises:
        ImageError: no such image, it is not whole, or the two share a device.
        VerifyError: a page of the image, or of the copy, is wrong; there is no copy then.
        DeviceError: no room, or a device failed.
    """
    started = time.monotonic()
    image = source.image(name)
    image.require_whole()
    _require_apart(source, target)
    present = target.find(name)
    if present is not None and is_copy(present, image):
        return StageResult(present.info, 0, 0.0)
    target.require_room([(name, image.info.pages)])
    shares = target.allocate(name, image.info.pages)
    try:
        _copy_pages(image, shares, progress)
        written = time.monotonic()
        walker.verify(target, _unnamed(image.info, shares), sample=0, full=True).require_ok(
            *(share.path for share in shares)
        )
        target.commit(image.info, shares, copy=True)
    except BaseException:
        target.release(shares)
        raise
    size = image.info.pages * PAGE_BYTES
    return StageResult(image.info, size, time.monotonic() - started, written - started)


def is_copy(one: StripedImage, other: StripedImage) -> bool:
    """Whether two images are the same pages: identity, content and layout."""
    return one.info == other.info


def _require_apart(source: StoreSet, target: StoreSet) -> None:
    taken = {store.uuid for store in source.stores}
    for store in target.stores:
        if store.uuid in taken:
            raise ImageError(
                f"{store.device.path} holds the image or a part of it, or is named twice; a copy "
                "is worth something on other devices only; run: tierd devices list"
            )


def _unnamed(info: ImageInfo, shares: Sequence[Share]) -> StripedImage:
    devices = tuple(share.uuid for share in shares)
    return StripedImage(StoredImage(info, shares[0].extents, "staged", devices), tuple(shares))


def _copy_pages(
    image: StripedImage, shares: Sequence[Share], progress: Callable[[int, int], None] | None
) -> None:
    """Read, judge and write every page; flush."""
    reader, place = PageReader(image), _unnamed(image.info, shares)
    total = image.info.pages

    def carry(buffers: BlockBuffers, first: int) -> tuple[int, NDArray[np.uint8], bytes]:
        faults, block = reader.check_block(buffers, first)
        if not faults.any():
            count = faults.size
            for store, run in place.runs(first, count):
                at = (run.first_page - first) * PAGE_BYTES
                part = buffers.pages[at : at + run.pages * PAGE_BYTES]
                store.device.write(run.device_page * PAGE_BYTES, part)
        return first, faults, block

    digest = hashlib.sha256()
    states = [BlockBuffers(reader.geometry) for _ in range(thread_count())]
    for first, faults, block in in_order(carry, states, block_starts(total)):
        if faults.any():
            bad = int(faults.nonzero()[0][0])
            raise VerifyError(
                f"{image.name} cannot be copied: page {first + bad} on "
                f"{reader.device_of(first + bad)} is bad ({FAULT_WORDS[int(faults[bad])]}); "
                "stage it again; run: tierd stage CHECKPOINT --device DEVICE"
            )
        digest.update(block)
        if progress is not None:
            progress(min(first + BLOCK_PAGES, total) * PAGE_BYTES, total * PAGE_BYTES)
    if digest.hexdigest() != image.info.digest:
        raise VerifyError(
            f"{image.name} cannot be copied: every page is whole, but the digest of all rows is "
            "not the one of the import; run: tierd stage CHECKPOINT --device DEVICE"
        )
    for share in shares:
        assert share.store is not None, "it was allocated there"
        share.store.device.flush()
