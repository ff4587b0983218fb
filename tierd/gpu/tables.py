"""What an engine sees of a table, whichever way its rows come: CPU twin, GPU cache or dram image.

Needs no triton, so that an engine on a CPU does not have to have one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from tierd.errors import AttachError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tierd.types import ImageInfo

RINGS = 64


class Table(Protocol):
    """One attached table.

    Attributes:
        info: the image it reads.
    """

    info: ImageInfo

    @property
    def quota(self) -> int:
        """Ways of each set of its cache that it may hold; 0 without a cache."""

    @property
    def raw(self) -> bool:
        """Whether rows are served as bytes rather than as bf16."""

    def kick(self, ids: Any) -> None:
        """Start reading the rows that are not cached."""

    def gather(self, ids: Any, out: Any) -> None:
        """Wait for the rows and write them to ``out``."""

    def warm(self, ids: Any) -> None:
        """Bring rows into the cache without using them; comes not between kick and gather."""

    def skip_unseen(self, bits: NDArray[np.uint8]) -> None:
        """Leave out, from now on, rows that a seen-set does not have: they are zero, not read."""

    def is_read(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which rows [n] are served as they are stored: those that are not left out."""

    def set_quota(self, ways: int) -> None:
        """Change how many ways of each set this table may hold; nothing is flushed."""

    def stats(self) -> dict[str, int]:
        """Return the counters of protocol.md's RingStats, since attach."""

    def close(self) -> None:
        """Refuse further use."""


@dataclasses.dataclass(frozen=True, slots=True)
class TableOptions:
    """How an engine rank wants its tables.

    Attributes:
        device: a CUDA device, such as ``cuda:0``: ids and rows are its tensors, and kick and
            gather may be captured in its graphs. None: the CPU twin. ``cpu`` runs the GPU's
            kernels in Triton's interpreter, for tests.
        row_ranges: table name -> (first row, end) that this rank owns, where the engine shards
            its tables and adds the ranks' rows up; other rows are served as +0 and not read.
            Absent: all rows. Only with a device.
        canonical_zero: turn -0 into +0, as such an addition does.
        any_id: serve a row number outside the table as +0, as an engine does that pads its ids
            with what happens to be there; otherwise it is a fault. Only with a device.
        scale_zero: take an e8m0 scale of 0 for 0, as vLLM does, rather than for 2^-127, as the
            format and SGLang do. Only with a device.
        sample_rate: share of all rows that is sampled for miss curves; None keeps one in 64.
        hint_pages: memory of the daemon for each table's hints, in pages; 0: no hints. Twice what
            a prefill chunk reads lets the next one be read ahead.
        audit_every: every so many gathers, compare rows with the image, read past cache and
            daemon; 0 never does. A row that differs ends the process.
    """

    device: str | None = None
    row_ranges: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    canonical_zero: bool = False
    any_id: bool = False
    scale_zero: bool = False
    sample_rate: float | None = None
    hint_pages: int = 0
    audit_every: int = 0

    def check(self, images: tuple[ImageInfo, ...]) -> None:
        """Refuse what cannot be served.

        Raises:
            AttachError: a range outside its table or of no table, or a number out of range.
        """
        if self.row_ranges and self.device is None:
            raise AttachError("row ranges need a device: the CPU twin serves whole tables")
        by_name = {name: image for image in images for name in (image.name, image.table.name)}
        for name, (low, high) in self.row_ranges.items():
            if name not in by_name:
                known = ", ".join(image.table.name for image in images)
                raise AttachError(f"row range of table {name}: not attached; there are: {known}")
            rows = by_name[name].table.rows
            if not 0 <= low <= high <= rows:
                raise AttachError(f"{name}: rows {low} to {high} are no range of its {rows} rows")
        if self.sample_rate is not None and not 0 <= self.sample_rate <= 1:
            raise AttachError(f"a sample rate is 0 to 1, not {self.sample_rate}")
        if self.hint_pages < 0:
            raise AttachError(f"hint_pages is 0 or more pages, not {self.hint_pages}")
        if self.hint_pages and len(images) * 2 > RINGS:
            raise AttachError(f"{len(images)} images and their hints; a channel has {RINGS} rings")
        if self.audit_every < 0:
            raise AttachError(f"audit_every is 0 or more gathers, not {self.audit_every}")

    def rows_of(self, image: ImageInfo) -> tuple[int, int]:
        """Return the rows of an image that this rank owns, as (first, end)."""
        whole = (0, image.table.rows)
        return self.row_ranges.get(image.name, self.row_ranges.get(image.table.name, whole))


def by_names(images: tuple[ImageInfo, ...], made: Mapping[int, Table]) -> dict[str, Table]:
    """Return the tables by ``model/table``, and by ``table`` where only one model has it."""
    tables: dict[str, Table] = {}
    names = [image.table.name for image in images]
    for index, image in enumerate(images):
        tables[image.name] = made[index]
        if names.count(image.table.name) == 1:
            tables[image.table.name] = made[index]
    return tables


def move_quotas(tables: Mapping[str, Table], quotas: Mapping[str, int]) -> None:
    """Change several tables' ways: first what some give up, then what others take.

    Raises:
        AttachError: a table that is not there; nothing has changed then.
        TierdError, ValueError: a cache's ways do not suffice; some may have changed.
    """
    for name in quotas:
        if name not in tables:
            raise AttachError(f"table {name} is not attached; there are: {', '.join(tables)}")
    growth = {name: ways - tables[name].quota for name, ways in quotas.items()}
    for name in sorted(quotas, key=growth.__getitem__):
        tables[name].set_quota(quotas[name])
