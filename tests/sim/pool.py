"""Tiny checkpoints for the simulator, made once per process.

Each model has two variants of the same tables: staging the second replaces the first.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests import checkpoints
from tierd.io import _core
from tierd.io.checkpoint import Checkpoint
from tierd.io.tables import find_tables, fingerprint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierd.types import TableSpec

VARIANTS = 2


@dataclasses.dataclass(frozen=True)
class Source:
    """A model's checkpoint and what its tables hold.

    Attributes:
        rows: uint8 [rows, row_bytes] per table name, as written by the test's own code.
        decoded: the same as the engine is to see them.
        fingerprints: per table name.
    """

    model: str
    variant: int
    checkpoint: Checkpoint
    specs: tuple[TableSpec, ...]
    rows: dict[str, NDArray[np.uint8]]
    decoded: dict[str, NDArray[Any]]
    fingerprints: dict[str, str]


@functools.cache
def sources() -> tuple[tuple[Source, ...], ...]:
    """All models; per model its variants. The files live as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="tierd-sim-")
    _KEEP.append(folder)
    root = Path(folder.name)
    models = []
    for model, make in _MAKERS.items():
        variants = []
        for variant in range(VARIANTS):
            tiny = make(root / f"{model}-{variant}", 100 * variant + 7)
            checkpoint = Checkpoint.open(tiny.path)
            tensors = [name for name in tiny.tensors if ".lookup." in name]
            specs = tuple(find_tables(checkpoint, tensors=tensors))
            variants.append(_source(model, variant, checkpoint, specs, tiny.tables))
        models.append(tuple(variants))
    return tuple(models)


def _source(
    model: str,
    variant: int,
    checkpoint: Checkpoint,
    specs: tuple[TableSpec, ...],
    tables: dict[str, NDArray[np.uint8]],
) -> Source:
    decoded = {
        spec.name: _core.decode_rows(
            np.ascontiguousarray(tables[spec.name]), spec.dim, str(spec.row_format)
        )
        for spec in specs
    }
    marks = {spec.name: fingerprint(checkpoint, spec) for spec in specs}
    return Source(model, variant, checkpoint, specs, tables, decoded, marks)


_KEEP: list[tempfile.TemporaryDirectory[str]] = []
_MAKERS = {
    # 15 rows a page; two tables, the payload and its scales in two tensors.
    "engram": lambda path, seed: checkpoints.engram(path, rows=201, dim=256, shards=2, seed=seed),
    # 92 rows of 40 B a page: a few pages only.
    "ple": lambda path, seed: checkpoints.ple(path, rows=500, dim=20, parts=3, shards=1, seed=seed),
    # one row a page, 70 pages: the largest.
    "wide": lambda path, seed: checkpoints.plain(
        path, dtype="U8", item_bytes=1, rows=70, row_bytes=2999, seed=seed
    ),
    # two tables in the columns of one tensor, one page each.
    "columns": lambda path, seed: checkpoints.per_layer(
        path, layers=2, vocab=50, dim=8, shards=1, seed=seed
    ),
}
