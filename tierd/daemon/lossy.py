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
    from tierd.types import ImageInfo

log = structlog.get_logger("tierd.daemon.lossy")


@dataclasses.dataclass(frozen=True, slots=True)
class LossyTable:
    """A table whose never-seen rows are skipped.

    Attributes:
        name: of the image, model/table.
        path: of the seen-set; clients open it themselves.
        share: of the table's rows, how many were seen.
        rows, fingerprint: of the table whose reads were traced.
    """

    name: str
    path: Path
    share: float
    rows: int
    fingerprint: str

    def is_of(self, info: ImageInfo) -> bool:
        """Whether an image holds that table, and not another staging's rows under its name."""
        return (self.rows, self.fingerprint) == (info.table.rows, info.fingerprint)


def find(settings: LossySection, images: Iterable[ServedImage]) -> dict[str, LossyTable]:
    """Read the seen-sets; image name -> what is skipped while such an image is served.

    Raises:
        SeenSetError: a file that is no seen-set, or is of another checkpoint than the image here.
    """
    served = {image.info.name: image.info for image in images}
    found: dict[str, LossyTable] = {}
    for text in settings.seen_sets:
        path = Path(text).absolute()
        made = seen.load(path)
        name = f"{made.model}/{made.table}"
        table = LossyTable(name, path, made.share, made.rows, made.fingerprint)
        info = served.get(name)
        if info is not None and not table.is_of(info):
            raise SeenSetError(
                f"{path}: a seen-set of another checkpoint's {name} ({made.rows} rows, the image "
                f"has {info.table.rows}); record its traces anew; run: tierd trace seen"
            )
        found[name] = table
        if info is None:  # its device may only be away; it must not keep the others waiting
            log.error("lossy.seen_sets names a table that is not served", image=name, path=text)
        else:
            log.warning(
                "LOSSY: rows that no trace saw are served as zero", image=name, seen_set=str(path),
                seen_share=round(made.share, 4),
            )  # fmt: skip
    return found


def in_force(
    lossy: Mapping[str, LossyTable], images: Iterable[ServedImage]
) -> dict[int, LossyTable]:
    """Return which images are served lossily, by number.

    An image that was staged anew since the daemon's start, from another checkpoint, is served
    whole: what was seen are other rows.
    """
    return {
        image.info.image_id: lossy[image.info.name]
        for image in images
        if image.info.name in lossy and lossy[image.info.name].is_of(image.info)
    }


def answer(lossy: Mapping[str, LossyTable], wanted: Iterable[ServedImage]) -> dict[str, str]:
    """Return what an attaching client is told: image id in hex -> path of its seen-set."""
    return {f"{number:016x}": str(one.path) for number, one in in_force(lossy, wanted).items()}
