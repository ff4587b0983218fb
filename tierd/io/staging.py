"""Staging: from a checkpoint's tensors to a committed image.

Each table is absent or complete, whenever this stops. The order is: reserve an identity (a
commit), write pages into extents that nothing names, flush, read samples back, and commit the
image (one more root). Killed before the last step, the extents are free again; killed after it,
the image is whole. A table whose fingerprint is on the device already is not written at all.
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
from tierd.io.device import PAGE_BYTES, aligned_buffer
from tierd.io.layout import UNIT_PAGES, Geometry, runs, units_of
from tierd.io.pipeline import in_order, thread_count
from tierd.io.rows import RowReader, fingerprint
from tierd.io.superblock import StoredImage
from tierd.io.walker import BLOCK_PAGES, DIGEST_KIND, block_starts
from tierd.types import ImageInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tierd.io.checkpoint import Checkpoint
    from tierd.io.device import Device
    from tierd.io.store import Store
    from tierd.types import Extent, TableSpec

    Progress = Callable[[int, int], None]

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*(/[A-Za-z0-9][A-Za-z0-9._+@-]*)*")
_MODEL_NAME_MAX = 200


@dataclasses.dataclass(frozen=True, slots=True)
class StageResult:
    """One table's outcome.

    Attributes:
        info: the image, new or already there.
        written_bytes: page bytes written; 0 if the image was there already.
    """

    info: ImageInfo
    written_bytes: int
    seconds: float

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
    present: StoredImage | None  # the image of this name, if it is there with this fingerprint


def stage(
    store: Store,
    checkpoint: Checkpoint,
    specs: Sequence[TableSpec],
    *,
    model: str,
    progress: Progress | None = None,
    sample: int = walker.SAMPLE_ROWS,
) -> list[StageResult]:
    """Stage tables of a checkpoint, in order; each is committed when it is complete.

    Args:
        store: open for writing.
        checkpoint: what :func:`tierd.io.tables.find_tables` was given.
        specs: the tables.
        model: the name under which they are found; a table that is there under this name with
            another fingerprint is replaced by a new generation.
        progress: called in this thread with (page bytes written, page bytes to write).
        sample: rows of each table that are read back and compared before the commit.

    Raises:
        DeviceTooSmallError: the tables do not fit; nothing was written.
        PayloadError: a forbidden value; this table is not there, earlier ones are.
        CheckpointError: a shard cannot be read or changed meanwhile; likewise.
        VerifyError: what was read back is not what was written; likewise.
        DeviceError: a write, a flush or a commit failed; likewise.
        ImageError: an unusable model name.
    """
    require_model_name(model)
    jobs = [_job(store, checkpoint, spec, model) for spec in specs]
    _require_room(store, jobs)
    stager = _Stager(store, checkpoint, model, sample)
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


def _job(store: Store, checkpoint: Checkpoint, spec: TableSpec, model: str) -> _Job:
    name = f"{model}/{spec.name}"
    mark = fingerprint(checkpoint, spec)
    found = store.find(name)
    same = found is not None and found.info.fingerprint == mark
    return _Job(spec, name, mark, Geometry.of(spec.row_bytes, spec.rows), found if same else None)


def _require_room(store: Store, jobs: Sequence[_Job]) -> None:
    """Play the allocations through: each replaced image frees its room once its successor is in."""
    free = store.free_pages
    need = 0
    for job in jobs:
        if job.present is not None:
            continue
        pages = units_of(job.geometry.pages) * UNIT_PAGES
        need += pages
        if pages > free:
            raise store.too_small(need, need - pages + free)
        free += store.pages_after_dropping(job.name) - pages


class _Stager:
    """Stages one table after another of one checkpoint."""

    def __init__(self, store: Store, checkpoint: Checkpoint, model: str, sample: int) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._model = model
        self._sample = sample

    def run(self, job: _Job, report: Callable[[int], None]) -> StageResult:
        """Write, verify and commit one table."""
        started = time.monotonic()
        extents = self._store.allocate(job.geometry.pages)
        try:
            identity = self._store.reserve_identity(job.name)
            digest = self._write(job, extents, identity, report)
            self._store.device.flush()
            self._checkpoint.require_unchanged()
            info = self._manifest(job, identity, digest)
            self._read_back(info, extents)
            self._store.commit_image(info, extents)
        except BaseException:
            self._store.release(extents)
            raise
        return StageResult(info, job.geometry.pages * PAGE_BYTES, time.monotonic() - started)

    def _write(
        self,
        job: _Job,
        extents: Sequence[Extent],
        identity: tuple[int, int],
        report: Callable[[int], None],
    ) -> str:
        """Write all pages and return the digest of all rows."""
        pages = job.geometry.pages
        writers = [
            _BlockWriter(
                self._store.device,
                RowReader(self._checkpoint, job.spec),
                job.geometry,
                extents,
                identity,
            )
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

    def _read_back(self, info: ImageInfo, extents: Sequence[Extent]) -> None:
        """Read samples from the device and compare them, before anything names the image."""
        unnamed = StoredImage(info, tuple(extents), "staged", (self._store.uuid,))
        found = walker.verify(
            self._store, unnamed, checkpoint=self._checkpoint, sample=self._sample
        )
        found.require_ok(self._store.device.path)


class _BlockWriter:
    """Carries one block at a time from the checkpoint to the device; one thread's buffers."""

    def __init__(
        self,
        device: Device,
        reader: RowReader,
        geometry: Geometry,
        extents: Sequence[Extent],
        identity: tuple[int, int],
    ) -> None:
        self._device = device
        self._reader = reader
        self._geometry = geometry
        self._extents = extents
        self._identity = identity
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
        for run in runs(self._extents, first, count):
            at = (run.first_page - first) * PAGE_BYTES
            self._device.write(
                run.device_page * PAGE_BYTES, pages[at : at + run.pages * PAGE_BYTES]
            )
        return first, block
