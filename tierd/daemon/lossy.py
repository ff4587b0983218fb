"""Which tables are served lossily, because the operator's configuration names seen-sets of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tierd.errors import SeenSetError
from tierd.io import seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tierd.config import LossySection
    from tierd.daemon.served import ServedImage

log = structlog.get_logger("tierd.daemon.lossy")


@dataclasses.dataclass(frozen=True, slots=True)
class LossyTable:
    """A table whose never-seen rows are skipped.

    Attributes:
        name: of the image, model/table.
        path: of the seen-set; clients open it themselves.
        share: of the table's rows, how many were seen.
    """

    name: str
    path: Path
    share: float


def find(settings: LossySection, images: Iterable[ServedImage]) -> dict[int, LossyTable]:
    """Read the seen-sets and find the images that they are of; image id -> what is skipped.

    Raises:
        SeenSetError: a file that is no seen-set, is of no image here, or is of another checkpoint.
    """
    served = {image.info.name: image.info for image in images}
    found: dict[int, LossyTable] = {}
    for text in settings.seen_sets:
        path = Path(text).absolute()
        made = seen.load(path)
        name = f"{made.model}/{made.table}"
        info = served.get(name)
        if info is None:
            raise SeenSetError(
                f"{path}: a seen-set of {name}, which is not served; run: tierd images"
            )
        if (made.rows, made.fingerprint) != (info.table.rows, info.fingerprint):
            raise SeenSetError(
                f"{path}: a seen-set of another checkpoint's {name} ({made.rows} rows, the image "
                f"has {info.table.rows}); record its traces anew; run: tierd trace seen"
            )
        found[info.image_id] = LossyTable(name, path, made.share)
        log.warning(
            "LOSSY: rows that no trace saw are served as zero", image=name, seen_set=str(path),
            seen_share=round(made.share, 4),
        )  # fmt: skip
    return found


def answer(lossy: Mapping[int, LossyTable], wanted: Iterable[ServedImage]) -> dict[str, str]:
    """Return what an attaching client is told: image id in hex -> path of its seen-set."""
    return {
        f"{image.info.image_id:016x}": str(lossy[image.info.image_id].path)
        for image in wanted
        if image.info.image_id in lossy
    }
