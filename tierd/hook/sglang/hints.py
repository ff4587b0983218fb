"""Hints: the rows of a prompt's next chunk, told to the daemon while this chunk is computed.

The scheduler holds a prompt's tokens long before the forward that looks their rows up. When it has
made a batch, this hashes what comes next, on the CPU and on a thread of its own, and hints the
rows: the chunk behind this batch, and, under the overlap schedule, this batch as well, since the
forward before it is still running. A hint is only ever a matter of speed, so whatever goes wrong
here switches hints off and nothing else.
"""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierd.hook.sglang.engram import looked_up_elsewhere
from tierd.hook.sglang.plugin import ENGRAM_MODULE
from tierd.hook.sglang.tables import published

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierd.hook.served import ServedTable

log = logging.getLogger("tierd")
_DONE = "tierd_hinted"  # set on a request: its tokens up to here were hinted


def patch(module: Any) -> None:
    """Patch ``...model_runner_components.ngram_embedding_manager``."""
    manager = module.NgramEmbeddingManager
    stock = manager.prepare_for_forward

    @functools.wraps(stock)
    def prepare_for_forward(self: Any, batch: Any, *, chunked_req: Any) -> Any:
        result = stock(self, batch, chunked_req=chunked_req)
        hints: PrefillHints | None = getattr(self.engram_hasher, "tierd_hints", None)
        if hints is not None and result is not None:
            hints.look_ahead(result, chunked_req)
        return result

    manager.prepare_for_forward = prepare_for_forward


class PrefillHints:
    """Hints of one rank's Engram tables.

    Attributes:
        given: pages asked for so far.
        skipped: batches left out, because the last one was still being hashed.
    """

    def __init__(self, hasher: Any, served: Sequence[tuple[int, ServedTable]], pages: int) -> None:
        """Take a copy of the hasher to the CPU.

        Args:
            hasher: SGLang's.
            served: (index in its output, table) of every layer.
            pages: memory for each table's hints. Half is for what is read now, so that the
                hints for what comes next do not push it out.
        """
        history, hasher.history = hasher.history, None  # of the GPU's requests; not needed here
        try:
            self._hasher = copy.deepcopy(hasher).to("cpu")
        finally:
            hasher.history = history
        self._served = tuple(served)
        self._limit = max(1, pages // 2)
        share = max((table.end - table.first) / table.rows for _, table in self._served)
        a_token = max(1.0, int(self._hasher.offsets.shape[1]) * share)
        self._tokens = max(1, int(self._limit / a_token))
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "tierd-hints")
        self._running: concurrent.futures.Future[None] | None = None
        self._on = True
        self.given = 0
        self.skipped = 0

    def look_ahead(self, batch: Any, chunked_req: Any) -> None:
        """Hint what follows, and at once return; called where a batch was made."""
        if not self._on:
            return
        try:
            if not batch.forward_mode.is_extend_without_speculative() or looked_up_elsewhere(batch):
                return
            if self._running is not None and not self._running.done():
                self.skipped += 1
                return
            parts = list(self._parts(batch, chunked_req))
            if parts:
                self._running = self._pool.submit(self._work, parts)
        except Exception as error:  # noqa: BLE001 - whatever it is, the batch goes on
            self._switch_off(error)

    def wait(self) -> None:
        """Wait until what was seen so far has been hinted."""
        if self._running is not None:
            self._running.result()

    def _parts(self, batch: Any, chunked_req: Any) -> Iterator[tuple[int, list[int]]]:
        """Yield (position of the first token to hash, that token's predecessors and it and more).

        Predecessors are as many as an n-gram has, fewer at a prompt's start.
        """
        overlapped = not published("disable_overlap_schedule")
        room = self._tokens
        for request, start, count in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            end = start + count
            first = start if overlapped else end
            last = end
            if request is chunked_req:
                last += int(published("chunked_prefill_size") or 0)
            first = max(first, int(getattr(request, _DONE, 0)))
            tokens = request.full_untruncated_fill_ids
            last = min(last, len(tokens), first + room)
            if first >= last:
                continue
            setattr(request, _DONE, last)
            room -= last - first
            before = min(first, self._hasher.max_ngram_size - 1)
            yield first, list(tokens[first - before : last])

    def _work(self, parts: list[tuple[int, list[int]]]) -> None:
        try:
            rows = self.rows(parts).numpy()
            for index, table in self._served:
                self.given += table.hint(np.ascontiguousarray(rows[:, index]), self._limit)
        except Exception as error:  # noqa: BLE001 - as above
            self._switch_off(error)

    def rows(self, parts: list[tuple[int, list[int]]]) -> torch.Tensor:
        """Return the rows of tokens, by the engine's own hash; int64 [tokens, layers, columns].

        Args:
            parts: of :meth:`_parts`.
        """
        engine: Any = sys.modules[ENGRAM_MODULE]
        reach = self._hasher.max_ngram_size - 1
        tokens, positions, histories = [], [], []
        for first, found in parts:
            before = min(first, reach)
            tokens.append(torch.tensor(found[before:], dtype=torch.int64))
            positions.append(first + torch.arange(len(found) - before))
            histories.append([0] * (reach - before) + list(found[:before]))
        counts = torch.tensor([len(one) for one in tokens])
        rows: torch.Tensor
        with torch.no_grad():
            rows, _ = self._hasher._torch_hash_ids(  # noqa: SLF001 - what its forward calls
                torch.cat(tokens),
                torch.cat(positions),
                engine.MODE_EXTEND,
                torch.tensor(histories, dtype=torch.int64),
                int(counts.sum()),
                1,
                torch.repeat_interleave(torch.arange(len(counts)), counts),
                torch.cumsum(counts, 0) - counts,
            )
        return rows

    def _switch_off(self, error: Exception) -> None:
        self._on = False
        log.warning("hints are off: %s: %s", type(error).__name__, error)
