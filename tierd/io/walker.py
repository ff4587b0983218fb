"""The walker: reads an image back and says whether it is what was imported.

Either some sampled rows (their pages whole, their bytes compared with the checkpoint), or every
page: identity, checksum, every row's tag, and the digest of all rows. What it finds is a report;
it stops for nothing but a device that cannot be reached at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import random
import secrets
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tierd.errors import ImageError, VerifyError
from tierd.io.blocks import FAULT_WORDS, BlockBuffers, PageReader, block_starts
from tierd.io.device import PAGE_BYTES, aligned_buffer
from tierd.io.extent_table import StoredImage
from tierd.io.pipeline import in_order, thread_count
from tierd.io.rows import RowReader, fingerprint
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tierd.io.checkpoint import Checkpoint
    from tierd.io.store import Store
    from tierd.io.store_set import StripedImage

SAMPLE_ROWS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        image: ``model/table``.
        full: every page rather than sampled rows.
        pages_checked: pages whose identity, checksum and tags were looked at.
        pages_bad: of them, how many failed.
        first_bad_page: the lowest of those, ``first_fault`` why, ``first_bad_device`` where.
        rows_compared: rows compared with the checkpoint.
        rows_wrong: of them, how many differ.
        first_wrong_row: the lowest of those.
        digest_ok: whether the digest of all rows is the one of the import; None if not computed.
        seed: of the sample, to draw the same rows again.
        bytes_read: from the device.
    """

    image: str
    full: bool
    pages_checked: int = 0
    pages_bad: int = 0
    first_bad_page: int | None = None
    first_fault: str = ""
    first_bad_device: str = ""
    rows_compared: int = 0
    rows_wrong: int = 0
    first_wrong_row: int | None = None
    digest_ok: bool | None = None
    seed: int = 0
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing wrong was found."""
        return not self.pages_bad and not self.rows_wrong and self.digest_ok is not False

    @property
    def mib_per_second(self) -> float:
        """Rate of reading."""
        return self.bytes_read / 2**20 / self.seconds if self.seconds else 0.0

    @property
    def finding(self) -> str:
        """What is wrong, the first of it with its place; empty if nothing is."""
        if self.pages_bad:
            return (
                f"{self.pages_bad} of {self.pages_checked} pages are bad, the first is page "
                f"{self.first_bad_page} ({self.first_fault}) on {self.first_bad_device}"
            )
        if self.rows_wrong:
            return (
                f"{self.rows_wrong} of {self.rows_compared} rows differ from the checkpoint, the "
                f"first is row {self.first_wrong_row}"
            )
        if self.digest_ok is False:
            return "every page is whole, but the digest of all rows is not the one of the import"
        return ""

    @property
    def summary(self) -> str:
        """The report in one line."""
        done = f"{self.pages_checked:,} pages checked"
        if self.rows_compared:
            done += f", {self.rows_compared:,} rows compared with the checkpoint"
        if self.digest_ok:
            done += ", digest of all rows right"
        if self.full:
            done += f", {self.mib_per_second:,.0f} MiB/s"
        return f"{'whole' if self.ok else self.finding}: {done}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        derived = {
            "ok": self.ok,
            "finding": self.finding,
            "summary": self.summary,
            "mib_per_second": round(self.mib_per_second, 1),
        }
        return {**dataclasses.asdict(self), **derived}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build from :meth:`to_json`'s dict; derived and unknown keys are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})

    def require_ok(self, *paths: str) -> None:
        """Raise VerifyError, naming the devices and the first page or row, if anything is wrong."""
        if self.ok:
            return
        named = " ".join(f"--device {path}" for path in paths)
        raise VerifyError(
            f"{self.image} on {' '.join(paths)}: {self.finding}; the device changed or lost what "
            "was written; delete the image and stage it again; "
            f"run: tierd verify {named} --full {self.image}"
        )


def verify(
    store: Store | StoreSet,
    image: StripedImage | StoredImage | str,
    *,
    checkpoint: Checkpoint | None = None,
    sample: int = SAMPLE_ROWS,
    full: bool = False,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Verify an image.

    Args:
        store: the store, or the stores, that hold it.
        image: the image or its name.
        checkpoint: what sampled rows are compared with; without one only their pages are checked.
        sample: rows to draw, besides the first and the last.
        full: also read every page and compare the digest of all rows.
        seed: of the drawing; a new one if None.
        progress: called with (bytes read, bytes to read).

    Raises:
        ImageError: no such image, one of its devices is missing, or the checkpoint is not the one
            it was staged from.
        DeviceError: the device cannot be opened for reading once more.
        CheckpointError: the checkpoint cannot be read.
    """
    stores = StoreSet.of(store)
    if isinstance(image, str):
        image = stores.image(image)
    elif isinstance(image, StoredImage):
        image = stores.striped(stores.home_of(image), image)
    image.require_whole()
    if checkpoint is not None:
        _require_same(checkpoint, image)
    with contextlib.ExitStack() as leases:
        # Leases keep the image's extents as they are; one that is being staged has no name yet
        # and is safe from others as it is.
        for share in image.shares:
            if share.store is not None and share.holding is not None:
                leases.callback(os.close, share.store.reader_fd([share.holding]))
        walk = _Walk(image, secrets.randbits(32) if seed is None else seed)
        if full:
            walk.check_all(progress)
        walk.check_rows(checkpoint, sample, count_pages=not full)
        return walk.report(full=full)


def _require_same(checkpoint: Checkpoint, image: StripedImage) -> None:
    table = image.info.table
    missing = [name for name in table.tensors if name not in checkpoint.tensors]
    if missing or fingerprint(checkpoint, table) != image.info.fingerprint:
        why = f"it has no {missing[0]}" if missing else "its fingerprint is another"
        raise ImageError(
            f"{image.name} was not staged from {checkpoint.path}: {why}; name the checkpoint it "
            f"came from, or stage this one; run: tierd stage {checkpoint.path} --device "
            f"{image.home.device.path}"
        )


class _Walk:
    """One verification: what is read and what was found so far."""

    def __init__(self, image: StripedImage, seed: int) -> None:
        self._image = image
        self._info = image.info
        self._reader = PageReader(image)
        self._geometry = self._reader.geometry
        self._seed = seed
        self._started = time.monotonic()
        self._bad: dict[int, str] = {}
        self._wrong: list[int] = []
        self._pages = self._compared = self._bytes = 0
        self._digest_ok: bool | None = None

    def report(self, *, full: bool) -> VerifyReport:
        first = min(self._bad, default=None)
        return VerifyReport(
            image=self._image.name,
            full=full,
            pages_checked=self._pages,
            pages_bad=len(self._bad),
            first_bad_page=first,
            first_fault="" if first is None else self._bad[first],
            first_bad_device="" if first is None else self._reader.device_of(first),
            rows_compared=self._compared,
            rows_wrong=len(self._wrong),
            first_wrong_row=min(self._wrong, default=None),
            digest_ok=self._digest_ok,
            seed=self._seed,
            bytes_read=self._bytes,
            seconds=time.monotonic() - self._started,
        )

    # --- sampled rows ----------------------------------------------------------------------------

    def check_rows(self, checkpoint: Checkpoint | None, sample: int, *, count_pages: bool) -> None:
        """Check the pages of the first, the last and some drawn rows; compare those rows."""
        seen: set[int] = set()
        rows = self._geometry.rows
        drawn = random.Random(self._seed).choices(range(rows), k=max(0, sample))  # noqa: S311
        reader = RowReader(checkpoint, self._info.table) if checkpoint is not None else None
        page = aligned_buffer(PAGE_BYTES)
        for row in sorted({0, rows - 1, *drawn}):
            number, inside = divmod(row, self._geometry.rows_per_page)
            faults = self._reader.read(number, page)
            if count_pages and number not in seen:
                self._count(number, faults)
                seen.add(number)
            if reader is None:
                continue
            start = inside * self._geometry.stride
            stored = page[start : start + self._geometry.row_bytes]
            self._compared += 1
            if faults[0] or not np.array_equal(stored, reader.read(row, 1)[0]):
                self._wrong.append(row)

    # --- every page ------------------------------------------------------------------------------

    def check_all(self, progress: Callable[[int, int], None] | None) -> None:
        """Check every page of the image, and the digest of all rows."""
        total = self._geometry.pages
        states = [BlockBuffers(self._geometry) for _ in range(thread_count())]
        digest = hashlib.sha256()
        for first, faults, block in in_order(self._check_block, states, block_starts(total)):
            self._count(first, faults)
            digest.update(block)
            if progress is not None:
                progress(self._pages * PAGE_BYTES, total * PAGE_BYTES)
        self._digest_ok = digest.hexdigest() == self._info.digest

    def _check_block(self, state: BlockBuffers, first: int) -> tuple[int, NDArray[np.uint8], bytes]:
        faults, block = self._reader.check_block(state, first)
        return first, faults, block

    def _count(self, first: int, faults: NDArray[np.uint8]) -> None:
        self._pages += faults.size
        self._bytes += faults.size * PAGE_BYTES
        for index in np.flatnonzero(faults):
            self._bad[first + int(index)] = FAULT_WORDS[int(faults[index])]
