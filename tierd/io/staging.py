"""Staging: from a checkpoint's tensors to a committed image.

Each table is absent or complete, whenever this stops. The order is: reserve an identity (a
commit), write pages into extents that nothing names, flush, read every page back, and commit the
image (one more root). Killed before the last step, the extents are free again; killed after it,
the image is whole. A table whose fingerprint is on the devices already is not written at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.errors import ImageError
from tierd.io import _core, walker
from tierd.io.blocks import BLOCK_PAGES, DIGEST_KIND, block_starts
from tierd.io.device import PAGE_BYTES, aligned_buffer
from tierd.io.extent_table import StoredImage
from tierd.io.layout import Geometry
from tierd.io.pipeline import in_order, thread_count
from tierd.io.rows import RowReader, fingerprint
from tierd.io.store_set import StoreSet, StripedImage
from tierd.types import ImageInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tierd.io.checkpoint import Checkpoint
    from tierd.io.store import Store
    from tierd.io.store_set import Share
    from tierd.types import TableSpec

    Progress = Callable[[int, int], None]

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*(/[A-Za-z0-9][A-Za-z0-9._+@-]*)*")
_MODEL_NAME_MAX = 200


@dataclasses.dataclass(frozen=True, slots=True)
class StageResult:
    """One table's outcome.

    Attributes:
        info: the image, new or already there.
        written_bytes: page bytes written; 0 if the image was there already.
        seconds: in all, reading back included.
        write_seconds: until every page was written and flushed.
    """

    info: ImageInfo
    written_bytes: int
    seconds: float
    write_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "name": self.info.name,
            "image_id": f"{self.info.image_id:016x}",
            "generation": self.info.generation,
            "rows": self.info.table.rows,
            "pages": self.info.pages,
            "written_bytes": self.written_bytes,
            "seconds": self.seconds,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    spec: TableSpec
    name: str
    fingerprint: str
    geometry: Geometry
    present: StripedImage | None  # the image of this name, if it is there with this fingerprint


def stage(
    store: Store | StoreSet,
    checkpoint: Checkpoint,
    specs: Sequence[TableSpec],
    *,
    model: str,
    progress: Progress | None = None,
    sample: int = walker.SAMPLE_ROWS,
) -> list[StageResult]:
    """Stage tables of a checkpoint, in order; each is committed when it is complete.

    Args:
        store: open for writing; several devices share the pages of each image.
        checkpoint: what :func:`tierd.io.tables.find_tables` was given.
        specs: the tables.
        model: the name under which they are found; a table that is there under this name with
            another fingerprint is replaced by a new generation.
        progress: called in this thread with (page bytes written, page bytes to write).
        sample: rows of each table that are compared with the checkpoint before the commit,
            besides every page's checksum and the digest of all rows.

    Raises:
        DeviceTooSmallError: the tables do not fit; nothing was written.
        PayloadError: a forbidden value; this table is not there, earlier ones are.
        CheckpointError: a shard cannot be read or changed meanwhile; likewise.
        VerifyError: what was read back is not what was written; likewise.
        DeviceError: a write, a flush or a commit failed; likewise.
        ImageError: an unusable model name, or the image is there and a device of it is not.
    """
    require_model_name(model)
    stores = StoreSet.of(store)
    jobs = [_job(stores, checkpoint, spec, model) for spec in specs]
    stores.require_room([(job.name, job.geometry.pages) for job in jobs if job.present is None])
    stager = _Stager(stores, checkpoint, model, sample)
    total = sum(job.geometry.pages for job in jobs if job.present is None) * PAGE_BYTES
    written = 0
    results = []
    for job in jobs:
        if job.present is not None:
            results.append(StageResult(job.present.info, 0, 0.0))
            continue

        def report(done: int, written: int = written) -> None:
            if progress is not None:
                progress(written + done, total)

        results.append(stager.run(job, report))
        written += results[-1].written_bytes
    return results


def require_model_name(model: str) -> None:
    """Refuse a name under which images cannot be found.

    Raises:
        ImageError: it has other characters than names have, or too many.
    """
    if len(model) > _MODEL_NAME_MAX or not _MODEL_NAME.fullmatch(model):
        raise ImageError(
            f"model name {model[:_MODEL_NAME_MAX]!r} cannot be used: letters, digits and ._+@- in "
            f"parts joined by /, {_MODEL_NAME_MAX} characters at most; "
            "run: tierd stage CHECKPOINT --device DEVICE --model NAME"
        )


def _job(stores: StoreSet, checkpoint: Checkpoint, spec: TableSpec, model: str) -> _Job:
    name = f"{model}/{spec.name}"
    mark = fingerprint(checkpoint, spec)
    found = stores.find(name)
    same = found is not None and found.info.fingerprint == mark
    if found is not None and same:
        found.require_whole()
    return _Job(spec, name, mark, Geometry.of(spec.row_bytes, spec.rows), found if same else None)


class _Stager:
    """Stages one table after another of one checkpoint."""

    def __init__(self, stores: StoreSet, checkpoint: Checkpoint, model: str, sample: int) -> None:
        self._stores = stores
        self._checkpoint = checkpoint
        self._model = model
        self._sample = sample

    def run(self, job: _Job, report: Callable[[int], None]) -> StageResult:
        """Write, verify and commit one table."""
        started = time.monotonic()
        # First, since room is given only after a commit that overwrites the root before it.
        identity = self._stores.order_for(job.name)[0].reserve_identity(job.name)
        shares = self._stores.allocate(job.name, job.geometry.pages)
        try:
            digest = self._write(job, shares, identity, report)
            for share in shares:
                assert share.store is not None, "it was allocated there"
                share.store.device.flush()
            self._checkpoint.require_unchanged()
            info = self._manifest(job, identity, digest)
            written = time.monotonic()
            self._read_back(info, shares)
            self._stores.commit(info, shares)
        except BaseException:
            self._stores.release(shares)
            raise
        return StageResult(
            info,
            job.geometry.pages * PAGE_BYTES,
            time.monotonic() - started,
            written - started,
        )

    def _write(
        self,
        job: _Job,
        shares: Sequence[Share],
        identity: tuple[int, int],
        report: Callable[[int], None],
    ) -> str:
        """Write all pages and return the digest of all rows."""
        pages = job.geometry.pages
        place = StripedImage(
            self._unnamed(self._manifest(job, identity, ""), shares), tuple(shares)
        )
        writers = [
            _BlockWriter(place, RowReader(self._checkpoint, job.spec), job.geometry)
            for _ in range(thread_count())
        ]
        digest = hashlib.sha256()
        for first, block in in_order(_BlockWriter.write, writers, block_starts(pages)):
            digest.update(block)
            report(min(first + BLOCK_PAGES, pages) * PAGE_BYTES)
        return digest.hexdigest()

    def _manifest(self, job: _Job, identity: tuple[int, int], digest: str) -> ImageInfo:
        return ImageInfo(
            image_id=identity[0],
            generation=identity[1],
            model=self._model,
            table=job.spec,
            fingerprint=job.fingerprint,
            digest=digest,
            digest_kind=DIGEST_KIND,
            rows_per_page=job.geometry.rows_per_page,
            pages=job.geometry.pages,
            staged_at=time.time(),
        )

    def _read_back(self, info: ImageInfo, shares: Sequence[Share]) -> None:
        """Read every page from the devices, after the flush and before anything names the image."""
        unnamed = StripedImage(self._unnamed(info, shares), tuple(shares))
        found = walker.verify(
            self._stores, unnamed, checkpoint=self._checkpoint, sample=self._sample, full=True
        )
        found.require_ok(*(store.device.path for store in self._stores.stores))

    @staticmethod
    def _unnamed(info: ImageInfo, shares: Sequence[Share]) -> StoredImage:
        devices = tuple(share.uuid for share in shares)
        return StoredImage(info, shares[0].extents, "staged", devices)


class _BlockWriter:
    """Carries one block at a time from the checkpoint to the devices; one thread's buffers."""

    def __init__(self, place: StripedImage, reader: RowReader, geometry: Geometry) -> None:
        self._place = place
        self._reader = reader
        self._geometry = geometry
        self._identity = place.stored.identity
        pages = min(BLOCK_PAGES, geometry.pages)
        shape = (pages * geometry.rows_per_page, geometry.row_bytes)
        self._rows: NDArray[np.uint8] = np.empty(shape, np.uint8)
        self._pages = aligned_buffer(pages * PAGE_BYTES)

    def write(self, first: int) -> tuple[int, bytes]:
        """Write the block that starts at page ``first``; return it and the sha256 of its rows."""
        per_page = self._geometry.rows_per_page
        count = min(BLOCK_PAGES, self._geometry.pages - first)
        first_row = first * per_page
        rows = self._rows[: min(count * per_page, self._geometry.rows - first_row)]
        self._reader.read_into(first_row, rows)
        block = hashlib.sha256(rows.reshape(-1).data).digest()
        pages = self._pages[: count * PAGE_BYTES]
        _core.pack_pages(rows.reshape(-1), self._geometry.row_bytes, first, *self._identity, pages)
        for store, run in self._place.runs(first, count):
            at = (run.first_page - first) * PAGE_BYTES
            store.device.write(
                run.device_page * PAGE_BYTES, pages[at : at + run.pages * PAGE_BYTES]
            )
        return first, block
