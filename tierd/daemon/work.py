"""What jobs do: stage, verify, delete, probe, on the devices that the daemon holds.

Each function here judges its request at once, so that a mistake is told to whoever makes it, and
returns the work that a job will do later in a worker thread.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.errors import DeviceBusyError, DeviceTooSmallError
from tierd.io import probe as probing
from tierd.io import staging, tables, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.layout import UNIT_PAGES, Geometry, units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.catalog import Catalog
    from tierd.daemon.jobs import Job, Work
    from tierd.daemon.plane import DataPlane, ServedImage
    from tierd.io.store import Store
    from tierd.types import TableSpec

PAGE_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTable:
    """One table that a staging would write.

    Attributes:
        name: ``model/table``.
        present: it is there already, from the same bytes; nothing is written.
        replaces: an image of this name, from other bytes, will be replaced.
    """

    name: str
    rows: int
    size_bytes: int
    present: bool
    replaces: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Staging:
    """A staging that can be done: judged, and not begun.

    Attributes:
        model: the name under which its images will be found.
        tables: what will be written.
    """

    plane: DataPlane
    store: Store
    source: Checkpoint
    specs: list[TableSpec]
    model: str
    tables: list[PlannedTable]

    @classmethod
    def judge(
        cls,
        plane: DataPlane,
        *,
        checkpoint: str,
        device: str | None,
        model: str | None,
        wanted: Sequence[str],
        tensors: Sequence[str],
    ) -> Staging:
        """Read the checkpoint's headers and look whether its tables fit the device.

        Args:
            plane: whose device it is.
            checkpoint: directory, as the daemon sees it.
            device: path or UUID; None means the only one.
            model: None means the directory's name.
            wanted: names of tables; none means all.
            tensors: tensors that are tables although no rule recognises them.

        Raises:
            TierdError: it cannot be done, and why.
        """
        store = plane.stores[0] if device is None else plane.store_of(device)
        source = Checkpoint.open(checkpoint)
        found = tables.find_tables(source, tensors=list(tensors))
        specs = tables.choose_tables(found, wanted, source)
        name = model or Path(checkpoint).resolve().name
        staging.require_model_name(name)
        planned = [_plan(store, source, spec, name) for spec in specs]
        _require_room(store, planned)
        return cls(plane, store, source, specs, name, planned)

    def work(self, catalog: Catalog) -> Work:
        """Return the work: stage, then serve what is new."""

        def run(job: Job) -> dict[str, Any]:
            job.say(f"staging to {self.store.device.path}")
            try:
                results = staging.stage(
                    self.store, self.source, self.specs, model=self.model, progress=job.report
                )
            finally:
                self.plane.refresh()  # tables that were committed before an error are served too
            for result in results:
                if result.written_bytes:
                    name, device = result.info.name, self.store.device.path
                    catalog.record("staged", name, device=device, **result.to_json())
            return {"images": [result.to_json() for result in results]}

        return run


def _plan(store: Store, source: Checkpoint, spec: TableSpec, model: str) -> PlannedTable:
    name = f"{model}/{spec.name}"
    there = store.find(name)
    present = there is not None and there.info.fingerprint == tables.fingerprint(source, spec)
    pages = Geometry.of(spec.row_bytes, spec.rows).pages
    replaces = there is not None and not present
    return PlannedTable(name, spec.rows, pages * PAGE_BYTES, present, replaces)


def _require_room(store: Store, planned: Sequence[PlannedTable]) -> None:
    """Refuse at once what cannot fit; the staging itself looks again, and exactly."""
    unit = UNIT_PAGES * PAGE_BYTES
    need = sum(
        units_of(each.size_bytes // PAGE_BYTES) * unit for each in planned if not each.present
    )
    dropped = sum(store.pages_after_dropping(each.name) for each in planned if each.replaces)
    have = (store.free_pages + dropped) * PAGE_BYTES
    if need > have:
        raise DeviceTooSmallError(
            f"{store.device.path} has {have} bytes free, the tables need {need}; delete an image "
            "or use a larger device; run: tierd images"
        )


def verify(
    plane: DataPlane, *, images: Sequence[str], full: bool, checkpoint: str | None, sample: int
) -> Work:
    """Judge a verification and return its work.

    Raises:
        TierdError: an image or the checkpoint is not there.
    """
    chosen: list[ServedImage] = [plane.named(name) for name in images]
    source = Checkpoint.open(checkpoint) if checkpoint is not None else None

    def run(job: Job) -> dict[str, Any]:
        reports = []
        for image in chosen or list(plane.images.values()):
            job.say(f"verifying {image.info.name}")
            reports.append(
                walker.verify(
                    image.store,
                    image.stored,
                    checkpoint=source,
                    sample=sample,
                    full=full,
                    progress=job.report,
                )
            )
        found = [{**report.to_json(), "device": _device(plane, report.image)} for report in reports]
        return {"ok": all(report.ok for report in reports), "images": found}

    return run


def _device(plane: DataPlane, name: str) -> str:
    return plane.named(name).store.device.path


def delete(plane: DataPlane, catalog: Catalog, name: str, *, wipe: bool) -> Work:
    """Judge a deletion and return its work.

    Raises:
        ImageError: there is no such image.
        DeviceBusyError: somebody has attached it.
    """
    image = plane.named(name)
    if image.clients:
        raise DeviceBusyError(
            f"image {name} is attached by {image.clients} clients, so it cannot be deleted; stop "
            "the engines first; run: tierd status"
        )

    def run(job: Job) -> dict[str, Any]:
        job.say(f"wiping {name}" if wipe else f"deleting {name}")
        plane.delete(name, wipe=wipe)
        device = image.store.device.path
        catalog.record("deleted", name, device=device, wiped=wipe)
        return {"name": name, "device": device, "wiped": wipe}

    return run


def probe(plane: DataPlane, device: str, *, seconds: float) -> Work:
    """Judge a probe of a device's read time and return its work.

    Raises:
        NoDeviceError: the daemon does not have the device.
    """
    store = plane.store_of(device)

    def run(job: Job) -> dict[str, Any]:
        found = []
        for depth in probing.DEPTHS:
            job.say(f"reading {store.device.path} at queue depth {depth}")
            fd = store.device.readonly_fd()
            found.append(probing.read_randomly(fd, store.device.size, depth=depth, seconds=seconds))
        return {"device": store.device.path, "depths": [each.to_json() for each in found]}

    return run
