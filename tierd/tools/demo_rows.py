"""Reads real text through V4.1's hash and compares every row with the checkpoint.

Python's own standard library is the text: every machine that runs the demo has it, and its n-grams
repeat as those of prose do, which is what a row cache lives from.
"""

from __future__ import annotations

import dataclasses
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tierd.gpu.engram import EngramHash
    from tierd.gpu.tables import Table
    from tierd.tools.demo_engram import RowSource

CHUNK_TOKENS = 256
_PROGRESS_S = 4.0
_BLOCK_ROWS = 8192


@dataclasses.dataclass
class RowCheck:
    """What :func:`check_rows` found.

    Attributes:
        rows: rows compared.
        mismatched: rows of which any value differs.
        hits: lookups that the cache answered.
        lookups: lookups in all.
        seconds: time spent in kick and gather, without hash and comparison.
    """

    rows: int = 0
    mismatched: int = 0
    hits: int = 0
    lookups: int = 0
    seconds: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of lookups that the cache answered."""
        return self.hits / self.lookups if self.lookups else 0.0


def standard_library_tokens(
    tokenizer: Any, count: int, chunk_tokens: int = CHUNK_TOKENS
) -> Iterator[NDArray[np.int64]]:
    """Yield token ids of Python's standard library, in chunks, ``count`` in all or a little more.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        count: tokens wanted.
        chunk_tokens: tokens in a chunk, except at a file's end.
    """
    left = count
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        for start in range(0, len(ids), chunk_tokens):
            chunk = ids[start : start + chunk_tokens]
            yield chunk
            left -= len(chunk)
            if left <= 0:
                return


def check_rows(
    chunks: Iterator[NDArray[np.int64]],
    hasher: EngramHash,
    tables: Sequence[Table],
    oracle: Sequence[RowSource],
    progress: Callable[[RowCheck], None] | None = None,
) -> RowCheck:
    """Read the rows of a text as a model would, and compare each with the oracle's.

    Every chunk is a step: all tables are kicked, then gathered one after the other.

    Args:
        chunks: token ids [length] each.
        hasher: token ids to row numbers.
        tables: served tables, in the order of the hasher's layers.
        oracle: the same tables by other means.
        progress: called now and then with what was found so far.
    """
    found = RowCheck()
    before = [table.stats() for table in tables]
    context = None
    reported = time.monotonic()
    for chunk in chunks:
        rows = hasher.rows(chunk, context)
        context = hasher.next_context(chunk, context)
        ids = [torch.from_numpy(np.ascontiguousarray(rows[:, i])) for i in range(len(tables))]
        shape = (*ids[0].shape, tables[0].info.table.dim)
        served = [torch.zeros(shape, dtype=torch.bfloat16) for _ in tables]
        start = time.perf_counter()
        for table, wanted in zip(tables, ids, strict=True):
            table.kick(wanted)
        for table, wanted, out in zip(tables, ids, served, strict=True):
            table.gather(wanted, out)
        found.seconds += time.perf_counter() - start
        for source, wanted, out in zip(oracle, ids, served, strict=True):
            found.rows += wanted.numel()
            found.mismatched += count_differing(source, wanted, out)
        if progress is not None and time.monotonic() - reported > _PROGRESS_S:
            progress(found)
            reported = time.monotonic()
    for table, old in zip(tables, before, strict=True):
        now = table.stats()
        found.hits += now["hits"] - old["hits"]
        found.lookups += now["lookups"] - old["lookups"]
    return found


def check_every_row(table: Table, source: RowSource) -> RowCheck:
    """Compare a whole table, row by row, with the source's."""
    found = RowCheck()
    for start in range(0, table.info.table.rows, _BLOCK_ROWS):
        ids = torch.arange(start, min(start + _BLOCK_ROWS, table.info.table.rows))
        out = torch.zeros((len(ids), table.info.table.dim), dtype=torch.bfloat16)
        table.kick(ids)
        table.gather(ids, out)
        found.rows += len(ids)
        found.mismatched += count_differing(source, ids, out)
    return found


def count_differing(source: RowSource, ids: torch.Tensor, served: torch.Tensor) -> int:
    """Return how many of the served rows differ from the source's in any bit."""
    expected = torch.empty_like(served)
    source.gather(ids, expected)
    differs = served.view(torch.int16) != expected.view(torch.int16)
    return int(differs.any(dim=-1).sum())
