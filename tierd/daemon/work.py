"""What jobs do: stage, verify, delete, probe, on the devices that the daemon holds.

Each function here judges its request at once, so that a mistake is told to whoever makes it, and
returns the work that a job will do later in a worker thread.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.errors import DeviceBusyError, ImageError
from tierd.io import probe as probing
from tierd.io import staging, tables, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.layout import Geometry
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.catalog import Catalog
    from tierd.daemon.jobs import Job, Work
    from tierd.daemon.plane import DataPlane
    from tierd.daemon.served import ServedImage
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
    stores: StoreSet
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
        devices: Sequence[str],
        model: str | None,
        wanted: Sequence[str],
        tensors: Sequence[str],
    ) -> Staging:
        """Read the checkpoint's headers and look whether its tables fit the devices.

        Args:
            plane: whose device it is.
            checkpoint: directory, as the daemon sees it.
            devices: path or UUID each; none means all of the daemon's.
            model: None means the directory's name.
            wanted: names of tables; none means all.
            tensors: tensors that are tables although no rule recognises them.

        Raises:
            TierdError: it cannot be done, and why.
        """
        stores = StoreSet(list(map(plane.store_of, devices)) or plane.stores)
        source = Checkpoint.open(checkpoint)
        found = tables.find_tables(source, tensors=list(tensors))
        specs = tables.choose_tables(found, wanted, source)
        name = model or Path(checkpoint).resolve().name
        staging.require_model_name(name)
        planned = [_plan(stores, source, spec, name) for spec in specs]
        new = [table for table in planned if not table.present]
        stores.require_room([(table.name, table.size_bytes // PAGE_BYTES) for table in new])
        return cls(plane, stores, source, specs, name, planned)

    def work(self, catalog: Catalog) -> Work:
        """Return the work: stage, then serve what is new."""

        def run(job: Job) -> dict[str, Any]:
            job.say(f"staging to {self.stores.path}")
            try:
                results = staging.stage(
                    self.stores, self.source, self.specs, model=self.model, progress=job.report
                )
            finally:
                self.plane.refresh()  # tables that were committed before an error are served too
            for result in results:
                if result.written_bytes:
                    devices = [store.device.path for store in self.stores.stores]
                    details = {k: v for k, v in result.to_json().items() if k != "name"}
                    catalog.record("staged", result.info.name, devices=devices, **details)
            return {"images": [result.to_json() for result in results]}

        return run


def _plan(stores: StoreSet, source: Checkpoint, spec: TableSpec, model: str) -> PlannedTable:
    name = f"{model}/{spec.name}"
    there = stores.find(name)
    present = there is not None and there.info.fingerprint == tables.fingerprint(source, spec)
    pages = Geometry.of(spec.row_bytes, spec.rows).pages
    replaces = there is not None and not present
    return PlannedTable(name, spec.rows, pages * PAGE_BYTES, present, replaces)


def verify(
    plane: DataPlane, *, images: Sequence[str], full: bool, checkpoint: str | None, sample: int
) -> Work:
    """Judge a verification and return its work.

    Raises:
        TierdError: an image or the checkpoint is not there.
    """
    chosen: list[ServedImage] = [plane.named(name) for name in images]
    for image in chosen:
        image.require_local()
    source = Checkpoint.open(checkpoint) if checkpoint is not None else None

    def run(job: Job) -> dict[str, Any]:
        reports = []
        for image in chosen or [each for each in plane.images.values() if each.local]:
            job.say(f"verifying {image.info.name}")
            reports.append(
                walker.verify(
                    plane.store_set,
                    image.striped,
                    checkpoint=source,
                    sample=sample,
                    full=full,
                    progress=job.report,
                )
            )
        return {
            "ok": all(report.ok for report in reports),
            "images": [report.to_json() for report in reports],
        }

    return run


def delete(plane: DataPlane, catalog: Catalog, name: str, *, wipe: bool) -> Work:
    """Judge a deletion and return its work.

    Raises:
        ImageError: there is no such image.
        DeviceBusyError: somebody has attached it.
    """
    image = plane.named(name)
    image.require_local()
    if image.clients:
        raise DeviceBusyError(
            f"image {name} is attached by {image.clients} clients, so it cannot be deleted; stop "
            "the engines first; run: tierd status"
        )

    def run(job: Job) -> dict[str, Any]:
        job.say(f"wiping {name}" if wipe else f"deleting {name}")
        if plane.named(name).info.generation != image.info.generation:
            raise ImageError(
                f"{name} was staged anew while its deletion waited, and stays; delete it again if "
                "the new one is meant too; run: tierd images"
            )
        plane.delete(name, wipe=wipe)
        devices = [store.device.path for store in image.striped.stores]
        catalog.record("deleted", name, devices=devices, wiped=wipe)
        return {"name": name, "devices": devices, "wiped": wipe}

    return run


def finish_wipe(plane: DataPlane, catalog: Catalog, name: str, *, wipe: bool) -> Work:
    """Return the work that ends a wipe which was cut off: finishes it, or gives it up.

    Args:
        plane: whose devices they are.
        catalog: of history.
        name: of the image that was deleted.
        wipe: False frees the room as it is.
    """

    def run(job: Job) -> dict[str, Any]:
        job.say(f"wiping {name}" if wipe else f"giving the wipe of {name} up")
        devices = sorted({store.device.path for store, _ in plane.store_set.wipes(name)})
        plane.store_set.finish_wipes(name, overwrite=wipe)
        catalog.record("deleted", name, devices=devices, wiped=wipe)
        return {"name": name, "devices": devices, "wiped": wipe}

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
