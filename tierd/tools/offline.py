"""Work on a device itself: stage, verify, list. What ``tierd`` does where no daemon is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import sys
from typing import TYPE_CHECKING, Any

from tierd.errors import DeviceBusyError
from tierd.io import copying, find_devices, staging, tables, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.store import Store
from tierd.io.store_set import StoreSet
from tierd.tools.progress import bar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tierd.io.store_set import StripedImage
    from tierd.types import TableSpec

PAGE_BYTES = 4096


def stage(
    checkpoint: Path,
    devices: Sequence[str],
    *,
    model: str | None,
    tensors: Sequence[str],
    tables_wanted: Sequence[str],
    quiet: bool,
) -> list[dict[str, Any]]:
    """Stage a checkpoint's tables.

    Args:
        checkpoint: its directory.
        devices: formatted devices, paths or ``UUID=...``; an image's pages are dealt out over all
            of them, and the first becomes its home.
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
        open_set(devices, write=True) as stores,
        bar("staging", quiet=quiet) as progress,
    ):
        results = staging.stage(stores, source, specs, model=name, progress=progress)
    return [result.to_json() for result in results]


def verify(
    devices: Sequence[str],
    names: Sequence[str],
    *,
    full: bool,
    checkpoint: Path | None,
    sample: int,
    quiet: bool,
) -> list[walker.VerifyReport]:
    """Verify images, also while a daemon serves them.

    Args:
        devices: those that hold them.
        names: ``model/table`` each; none means all.
        full: every page and the digest of all rows, not only sampled rows.
        checkpoint: what sampled rows are compared with.
        sample: rows drawn of each image.
        quiet: no progress bar.
    """
    source = Checkpoint.open(checkpoint) if checkpoint is not None else None
    reports = []
    with open_set(devices, write=False) as stores:
        for image in [stores.image(name) for name in names] if names else stores.images:
            with bar(image.name, quiet=quiet) as progress:
                reports.append(
                    walker.verify(
                        stores,
                        image,
                        checkpoint=source,
                        sample=sample,
                        full=full,
                        progress=progress,
                    )
                )
    return reports


def images(devices: Sequence[str]) -> list[dict[str, Any]]:
    """List the images on devices: what REST says of an image, except who has attached it."""
    with open_set(devices, write=False) as stores:
        groups: list[list[StripedImage]] = []
        for found in stores.images:
            whole = [group for group in groups if not (group[0].fault or found.fault)]
            same = next((group for group in whole if copying.is_copy(group[0], found)), None)
            if same is None:
                groups.append([found])
            else:
                same.append(found)
        return [image_json(first, copies) for first, *copies in groups]


def image(devices: Sequence[str], name: str) -> dict[str, Any]:
    """Say everything about one image: :func:`images`' entry, and what each device holds of it."""
    with open_set(devices, write=False) as stores:
        found = stores.image(name)
        shares = [
            {
                "device": share.path,
                "device_uuid": share.uuid,
                "fault": share.fault,
                "extents": [list(dataclasses.astuple(extent)) for extent in share.extents],
            }
            for share in found.shares
        ]
        placement = found.home.placements.get(name)
        return {**image_json(found), "shares": shares, "placement": placement}


def copy_image(
    devices: Sequence[str], name: str, targets: Sequence[str], *, quiet: bool
) -> dict[str, Any]:
    """Copy an image to other devices, where it becomes the table's next tier."""
    with (
        explained_busy(),
        open_set(targets, write=True) as target,
        open_set(devices, write=False) as source,
        bar(name, quiet=quiet) as progress,
    ):
        result = copying.copy_image(source, name, target, progress=progress)
        made = image_json(target.image(name))
    return {**made, "written_bytes": result.written_bytes, "seconds": result.seconds}


def delete_image(devices: Sequence[str], name: str, *, wipe: bool) -> dict[str, Any]:
    """Delete an image from its devices; return what it was, and which devices kept their part.

    Of an image that is gone already, and whose wipe was cut off, the wipe is finished; without
    ``wipe`` it is given up.
    """
    with explained_busy(), open_set(devices, write=True) as stores:
        if stores.find(name) is None and stores.wipes(name):
            size = stores.finish_wipes(name, overwrite=wipe)
            made = {"name": name, "wiped": wipe, "given_up": not wipe, "size_bytes": size}
            return {**made, "parts_kept_on": []}
        gone = stores.delete(name, wipe=wipe)
        kept = [share.path for share in gone.shares if share.store is None]
        return {**image_json(gone), "wiped": wipe, "given_up": False, "parts_kept_on": kept}


def delete_parts(devices: Sequence[str], name: str, *, wipe: bool) -> dict[str, Any]:
    """Give up what devices hold of an image whose home is gone for good."""
    with explained_busy(), open_set(devices, write=True) as stores:
        size = stores.drop_orphans(name, wipe=wipe)
        paths = [store.device.path for store in stores.stores]
    return {"name": name, "devices": paths, "wiped": wipe, "size_bytes": size}


def image_json(image: StripedImage, copies: Sequence[StripedImage] = ()) -> dict[str, Any]:
    """One image and the devices of its copies, JSON-ready."""
    info = image.info
    return {
        "name": image.name,
        "model": info.model,
        "table": info.table.name,
        "image_id": f"{info.image_id:016x}",
        "generation": info.generation,
        **_table_json(info.table),
        "pages": info.pages,
        "size_bytes": info.pages * PAGE_BYTES,
        "page_version": info.page_version,
        "fingerprint": info.fingerprint,
        "digest": info.digest,
        "digest_kind": info.digest_kind,
        "staged_at": dt.datetime.fromtimestamp(info.staged_at, tz=dt.UTC).isoformat(),
        "device": image.shares[0].path,
        "device_uuid": image.shares[0].uuid,
        "devices": [share.path for share in image.shares],
        "copies": [[share.path for share in copy.shares] for copy in copies],
        "extents": sum(len(share.extents) for share in image.shares),
        "fault": image.fault,
    }


@contextlib.contextmanager
def open_set(devices: Sequence[str], *, write: bool) -> Iterator[StoreSet]:
    """Open devices, each named by its path or ``UUID=...``."""
    with StoreSet.open([find_devices.resolve(name) for name in devices], write=write) as stores:
        for note in stores.notes:
            print(f"note: {note}", file=sys.stderr)
        yield stores


def _table_json(table: TableSpec) -> dict[str, Any]:
    names = ("kind", "layer", "group", "rows", "dim", "row_bytes", "row_format", "tensors")
    whole = table.to_json()
    return {name: whole[name] for name in names}


def format_device(device: str, *, size: int | None, force: str | None) -> dict[str, Any]:
    """Make a device ready for images; return what it is, JSON-ready."""
    path = find_devices.resolve(device)
    named = path if force == device else force
    with explained_busy(), Store.format(path, size=size, force=named) as store:
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
