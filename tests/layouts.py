"""How engines split a table over the ranks of a tensor-parallel group, written from their sources.

Each function returns, for every rank, the rows [first, end) that it owns; a rank may own none.
``starts`` are the first rows of an Engram table's hash columns, and its end.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.gpu.client import Client, list_images
from tierd.io import _core
from tierd.io.checkpoint import Checkpoint
from tierd.io.rows import RowReader
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tests.daemons import Node
    from tierd.gpu.client import TableClient
    from tierd.types import ImageInfo

WORLDS = (1, 2, 3, 4, 5, 6, 8)
VOCAB_PADDING = 64  # vLLM's VocabParallelEmbedding pads to a multiple of it

Ranges = list[tuple[int, int]]


def by_rows(starts: Sequence[int], world: int) -> Ranges:
    """SGLang 0.5.22, and 0.5.23 when the ranks do not divide the columns: n * r // world."""
    rows = starts[-1]
    return [(rows * rank // world, rows * (rank + 1) // world) for rank in range(world)]


def by_columns_or_rows(starts: Sequence[int], world: int) -> Ranges:
    """SGLang 0.5.23: whole hash columns when the ranks divide them, rows otherwise."""
    columns = len(starts) - 1
    if columns % world:
        return by_rows(starts, world)
    each = columns // world
    return [(starts[rank * each], starts[(rank + 1) * each]) for rank in range(world)]


def by_heads(starts: Sequence[int], world: int) -> Ranges:
    """VLLM: whole hash columns, rounded up, so that the last ranks may have fewer or none."""
    return [(starts[first], starts[end]) for first, end in _columns(starts, world)]


def _columns(starts: Sequence[int], world: int) -> Ranges:
    columns = len(starts) - 1
    each = -(-columns // world)
    return list(itertools.pairwise(min(rank * each, columns) for rank in range(world + 1)))


def by_padded_rows(starts: Sequence[int], world: int) -> Ranges:
    """VLLM's vocab-parallel tables: equal parts of the padded rows; the padding holds no rows."""
    rows = starts[-1]
    unit = VOCAB_PADDING * world
    each = -(-rows // unit) * unit // world
    return [(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(world)]


SPLITS: dict[str, Callable[[Sequence[int], int], Ranges]] = {
    split.__name__: split for split in (by_rows, by_columns_or_rows, by_heads, by_padded_rows)
}


@dataclasses.dataclass
class Tally:
    """What was read: rows through clients, rows by the importer, and those that were wrong."""

    layouts: int = 0
    rows: int = 0
    mismatches: int = 0


def columns_of(rows: int, columns: int) -> list[int]:
    """Starts of ``columns`` (an even number) hash columns of unlike sizes, and their end, ``rows``.

    The sizes are short and long in turns.
    """
    sizes = np.full(columns, rows // columns)
    sizes[: rows % columns] += 1
    shift = rows // columns // 3
    sizes[0::2] -= shift
    sizes[1::2] += shift
    return [0, *np.cumsum(sizes).tolist()]


def read_every_layout(
    node: Node, worlds: Sequence[int] = WORLDS, *, columns: int = 24, seed: int = 1
) -> Tally:
    """Read every table of a served node through every split of every world; compare every row.

    Each rank is a client of its own with a cache that holds a part of its rows. It reads the rows
    that it owns, in an order of its own, as one engine's rank does; the ranks' rows are put
    together and compared with the source.
    """
    tally = Tally()
    images = list_images(node.engine_socket)
    chance = np.random.default_rng(seed)
    for world, name in itertools.product(worlds, SPLITS):
        tally.layouts += 1
        whole = {image.name: _Assembly(node, image) for image in images}
        for rank in range(world):
            with Client.attach(
                node.engine_socket,
                images,
                engine=f"layout {name}",
                cache_rows=128,
                rows_max=64,
                rank=rank,
                world=world,
            ) as client:
                for image in images:
                    starts = columns_of(image.table.rows, columns)
                    ids = _ids(name, starts, world, rank, chance)
                    whole[image.name].add(client.table(image.name), ids)
        for assembly in whole.values():
            tally.rows += assembly.expected.shape[0]
            tally.mismatches += assembly.wrong_rows()
    return tally


def read_by_importer(node: Node, worlds: Sequence[int] = WORLDS, *, columns: int = 24) -> Tally:
    """The same with the importer's reader, by which a rank's range is read from the checkpoint."""
    tally = Tally()
    for image in list_images(node.engine_socket):
        tiny = node.checkpoints[image.model]
        reader = RowReader(Checkpoint.open(tiny.path), image.table)
        source = tiny.tables[image.table.name]
        for world, split in itertools.product(worlds, SPLITS.values()):
            tally.layouts += 1
            for first, end in split(columns_of(image.table.rows, columns), world):
                found = reader.read(first, end - first)
                tally.rows += end - first
                tally.mismatches += int((found != source[first:end]).any(axis=1).sum())
    return tally


class _Assembly:
    """One table, put together from its ranks."""

    def __init__(self, node: Node, image: ImageInfo) -> None:
        table = image.table
        rows = np.ascontiguousarray(node.checkpoints[image.model].tables[table.name])
        self.expected: NDArray[Any] = (
            rows
            if table.row_format is RowFormat.RAW
            else _core.decode_rows(rows, table.dim, table.row_format.value)
        )
        self.found = np.zeros_like(self.expected)
        self.owners = np.zeros(table.rows, np.int64)

    def add(self, table: TableClient, ids: NDArray[np.int64]) -> None:
        out = np.zeros((*ids.shape, self.expected.shape[1]), self.expected.dtype)
        table.kick(ids)
        table.gather(ids, out)
        self.found[ids] = out
        self.owners[np.unique(ids)] += 1

    def wrong_rows(self) -> int:
        """Rows that differ, or that no rank or two of them own."""
        return int(((self.found != self.expected).any(axis=1) | (self.owners != 1)).sum())


def _ids(
    split: str, starts: Sequence[int], world: int, rank: int, chance: np.random.Generator
) -> NDArray[np.int64]:
    """Every id that a rank may look up: shuffled rows, or [tokens, columns] if it has columns.

    There, every column counts through its own rows, and a shorter one repeats its last.
    """
    if split != "by_heads":
        return chance.permutation(np.arange(*SPLITS[split](starts, world)[rank]))
    first, end = _columns(starts, world)[rank]
    sizes = np.diff(starts)[first:end]
    tokens = np.arange(sizes.max(initial=0))[:, None]
    return np.asarray(starts[first:end], np.int64) + np.minimum(tokens, sizes - 1)
