"""How soon a daemon is ready on a device that holds 200 GB.

The device is a sparse file: what a start reads is roots and the extent table, and it reads no page.
The table is that of a device on which much was staged and deleted before: two images of V4.1's
size, each in a thousand extents, none beside the one before it.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.pump import span
from tests.daemons import Daemon, Node
from tierd.io import _core
from tierd.io.blocks import DIGEST_KIND
from tierd.io.layout import UNIT_PAGES, Areas, Geometry
from tierd.io.store import Store
from tierd.types import Extent, ImageInfo, RowFormat, TableKind, TableSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = {1: 384_006_168, 14: 384_016_682}  # DeepSeek-V4.1's, by layer
ROW_BYTES, DIM = 264, 256
EXTENT_UNITS = 50  # 100 MiB
DEVICE_BYTES = 224 * 10**9 // 4096 * 4096


def restart_200gb(*, quick: bool) -> list[dict[str, Any]]:
    """Seconds from starting the process until it says that it is ready."""
    rounds = 2 if quick else 9
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir="/var/tmp") as name:
        node = _node(Path(name))
        with Store.open(node.device, write=False) as store:
            table_bytes = store._root.table_bytes
            gigabytes = sum(image.info.pages for image in store.images) * 4096 / 1e9
            extents = sum(len(image.extents) for image in store.images)
        seconds = []
        for _ in range(rounds):
            started = time.monotonic()
            daemon = Daemon(node)
            seconds.append(time.monotonic() - started)
            assert daemon.stop() == 0
    return [
        {
            "name": "restart_200gb_s",
            "value": round(max(seconds), 3),
            "unit": "s",
            "repeats": rounds,
            "spread": f"{span(seconds, 2)}, median {statistics.median(seconds):.2f}",
            "detail": {
                "gigabytes": round(gigabytes, 1),
                "extents": extents,
                "extent_table_bytes": table_bytes,
                "of": "the whole process, interpreter start included",
            },
            "limit": "starting Python and importing the daemon take most of it",
        }
    ]


def _node(work: Path) -> Node:
    """A sparse device with two images that were never written."""
    device = work / "device"
    with device.open("wb") as file:
        file.truncate(DEVICE_BYTES)
    with Store.format(device) as store:
        places = _places()
        for layer, rows in ROWS.items():
            pages = Geometry.of(ROW_BYTES, rows).pages
            identity = store.reserve_identity(f"v41/layers.{layer}.engram")
            store.commit_image(_info(layer, rows, identity), _extents(pages, places))
    run = work / "run"
    run.mkdir()
    return Node(run, device, {})


def _places() -> Iterator[int]:
    """First pages of extents all over the data area, in no order."""
    areas = Areas.of(DEVICE_BYTES)
    step = EXTENT_UNITS * UNIT_PAGES
    first, end = areas.data_start // 4096, areas.data_end // 4096
    starts = list(range(first, end - step + 1, step))
    random.Random(1).shuffle(starts)
    return iter(starts)


def _extents(pages: int, places: Iterator[int]) -> list[Extent]:
    size = EXTENT_UNITS * UNIT_PAGES
    return [Extent(page, min(size, pages - page), next(places)) for page in range(0, pages, size)]


def _info(layer: int, rows: int, identity: tuple[int, int]) -> ImageInfo:
    table = TableSpec(
        name=f"layers.{layer}.engram",
        kind=TableKind.ENGRAM,
        layer=layer,
        rows=rows,
        dim=DIM,
        row_bytes=ROW_BYTES,
        row_format=RowFormat.E4M3_E8M0,
        group=f"layers.{layer}.engram",
        tensors=(f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"),
    )
    geometry = Geometry.of(ROW_BYTES, rows)
    return ImageInfo(
        image_id=identity[0],
        generation=identity[1],
        model="v41",
        table=table,
        fingerprint="0" * 64,
        rows_per_page=geometry.rows_per_page,
        pages=geometry.pages,
        page_version=_core.PAGE_VERSION,
        digest="0" * 64,
        digest_kind=DIGEST_KIND,
        staged_at=0.0,
    )
