"""Work on a device itself: stage, verify, list. What ``tierd`` does where no daemon is asked."""

from __future__ import annotations

import contextlib
import difflib
import sys
from typing import TYPE_CHECKING, Any

from tierd.errors import NoTableError
from tierd.io import staging, tables, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tierd.types import TableSpec

PAGE_BYTES = 4096


def stage(
    checkpoint: Path,
    device: str,
    *,
    model: str | None,
    tensors: Sequence[str],
    tables_wanted: Sequence[str],
    quiet: bool,
) -> list[dict[str, Any]]:
    """Stage a checkpoint's tables.

    Args:
        checkpoint: its directory.
        device: path of a formatted device.
        model: name of the model; None means the directory's name.
        tensors: tensors that are tables although no rule recognises them.
        tables_wanted: names of the tables to stage; none means all.
        quiet: no progress bar.

    Returns:
        One JSON-ready dict an image.

    Raises:
        TierdError: bad input, or a device that cannot take it; no half image is left.
    """
    source = Checkpoint.open(checkpoint)
    specs = tables.find_tables(source, tensors=list(tensors))
    specs = _choose(specs, tables_wanted, checkpoint)
    name = model or checkpoint.resolve().name
    with Store.open(device, write=True) as store, _progress("staging", quiet=quiet) as progress:
        results = staging.stage(store, source, specs, model=name, progress=progress)
    return [
        {
            "name": result.info.name,
            "image_id": f"{result.info.image_id:016x}",
            "generation": result.info.generation,
            "rows": result.info.table.rows,
            "pages": result.info.pages,
            "written_bytes": result.written_bytes,
            "seconds": result.seconds,
        }
        for result in results
    ]


def verify(
    device: str,
    names: Sequence[str],
    *,
    full: bool,
    checkpoint: Path | None,
    sample: int,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Verify images on a device, also while a daemon serves them.

    Returns:
        One JSON-ready dict an image, with a ``summary`` for people.

    Raises:
        VerifyError: something is not what was staged; names the first finding.
    """
    source = Checkpoint.open(checkpoint) if checkpoint is not None else None
    reports = []
    with Store.open(device, write=False) as store:
        chosen = [store.image(name) for name in names] if names else store.images
        for image in chosen:
            with _progress(image.info.name, quiet=quiet) as progress:
                report = walker.verify(
                    store, image, checkpoint=source, sample=sample, full=full, progress=progress
                )
            reports.append({"name": image.info.name, **report.to_json()})
    return reports


def images(device: str) -> list[dict[str, Any]]:
    """List a device's images as REST does, as far as a device knows."""
    with Store.open(device, write=False) as store:
        return [
            {
                "name": image.info.name,
                **image.info.to_json(),
                "rows": image.info.table.rows,
                "row_bytes": image.info.table.row_bytes,
                "row_format": image.info.table.row_format.value,
                "size_bytes": image.info.pages * PAGE_BYTES,
                "device": store.device.path,
                "device_uuid": store.uuid,
            }
            for image in store.images
        ]


def _choose(specs: list[TableSpec], wanted: Sequence[str], checkpoint: Path) -> list[TableSpec]:
    if not wanted:
        return specs
    names = [spec.name for spec in specs]
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            text = f"{checkpoint}: no table {name!r} among its {len(names)}"
            raise NoTableError(f"{text}; near names: {', '.join(near)}")
    return [spec for spec in specs if spec.name in wanted]


@contextlib.contextmanager
def _progress(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on a terminal; the callback takes (done, total) in bytes or pages."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only for terminals
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
