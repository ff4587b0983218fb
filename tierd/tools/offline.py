"""Work on a device itself: stage, verify, list. What ``tierd`` does where no daemon is asked."""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import TYPE_CHECKING, Any

from tierd.errors import DeviceBusyError
from tierd.io import staging, tables, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.store import Store
from tierd.tools.progress import bar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
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
    found = tables.find_tables(source, tensors=list(tensors))
    specs = tables.choose_tables(found, tables_wanted, source)
    name = model or checkpoint.resolve().name
    with (
        explained_busy(),
        Store.open(device, write=True) as store,
        bar("staging", quiet=quiet) as progress,
    ):
        results = staging.stage(store, source, specs, model=name, progress=progress)
    return [result.to_json() for result in results]


def verify(
    device: str,
    names: Sequence[str],
    *,
    full: bool,
    checkpoint: Path | None,
    sample: int,
    quiet: bool,
) -> list[walker.VerifyReport]:
    """Verify images on a device, also while a daemon serves them.

    Args:
        device: path of the device.
        names: ``model/table`` each; none means all.
        full: every page and the digest of all rows, not only sampled rows.
        checkpoint: what sampled rows are compared with.
        sample: rows drawn of each image.
        quiet: no progress bar.
    """
    source = Checkpoint.open(checkpoint) if checkpoint is not None else None
    reports = []
    with Store.open(device, write=False) as store:
        for image in [store.image(name) for name in names] if names else store.images:
            with bar(image.name, quiet=quiet) as progress:
                reports.append(
                    walker.verify(
                        store,
                        image,
                        checkpoint=source,
                        sample=sample,
                        full=full,
                        progress=progress,
                    )
                )
    return reports


def images(device: str) -> list[dict[str, Any]]:
    """List a device's images: what REST says of an image, except who has attached it."""
    with Store.open(device, write=False) as store:
        return [
            {
                "name": image.name,
                "model": image.info.model,
                "table": image.info.table.name,
                "image_id": f"{image.info.image_id:016x}",
                "generation": image.info.generation,
                **_table_json(image.info.table),
                "pages": image.info.pages,
                "size_bytes": image.info.pages * PAGE_BYTES,
                "fingerprint": image.info.fingerprint,
                "digest": image.info.digest,
                "digest_kind": image.info.digest_kind,
                "staged_at": dt.datetime.fromtimestamp(image.info.staged_at, tz=dt.UTC).isoformat(),
                "device": store.device.path,
                "device_uuid": store.uuid,
                "extents": len(image.extents),
            }
            for image in store.images
        ]


def _table_json(table: TableSpec) -> dict[str, Any]:
    names = ("kind", "layer", "group", "rows", "dim", "row_bytes", "row_format", "tensors")
    whole = table.to_json()
    return {name: whole[name] for name in names}


def format_device(device: str, *, size: int | None, force: str | None) -> dict[str, Any]:
    """Make a device ready for images; return what it is, JSON-ready."""
    with explained_busy(), Store.format(device, size=size, force=force) as store:
        return {
            "device": store.device.path,
            "uuid": store.uuid,
            "size_bytes": store.device.size,
            "direct": store.device.direct,
            "direct_reason": store.device.direct_reason,
        }


@contextlib.contextmanager
def explained_busy() -> Iterator[None]:
    """Say what to do about a daemon that holds the device."""
    try:
        yield
    except DeviceBusyError as error:
        what = str(error).partition("; run: ")[0]
        text = f"{what}; if it is a daemon, name its REST socket with --api-socket, or stop it"
        raise DeviceBusyError(f"{text}; run: systemctl stop tierd") from None
