"""Row numbers of DeepSeek-V4.1's Engram tables, from token ids.

Each Engram layer has a table of ``columns = (max_ngram - 1) * heads`` hash columns (24 in the
public model). For every token and every n-gram size from 2 to ``max_ngram`` the layer hashes the
token with its predecessors, once, and takes the hash modulo one prime per head; the results, each
shifted to its column's stretch of the table, are the rows to read. Three things decide the numbers:

- primes: consecutive primes from ``vocab_size`` upwards, handed out in (layer, n-gram size, head)
  order and never twice, so no two columns of any layer share a prime;
- multipliers: one odd number per (layer, look-back), from numpy's generator seeded with
  ``10007 * layer_id``, small enough that a product never leaves 63 bits;
- the compressed token map: token ids that differ only in case, accents or white space fall
  together. It comes from the tokenizer, and its number of distinct entries bounds the multipliers:
  with another tokenizer every row number changes.

Look-back past the start of a sequence reads the padding token. Ids of an image token hide the token
and everything before it. Needs numpy alone, so that any adapter and any test can use it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_SEED_STEP = 10007
NOTHING = -1
"""In a context: no token here, the sequence has not started yet."""


def primes_from(start: int, count: int) -> NDArray[np.int64]:
    """Return the first ``count`` primes that are at least ``start``.

    A segmented sieve: 48 primes above 16 million lie within 1,000 numbers and take a millisecond.

    Args:
        start: lower bound, inclusive.
        count: how many.

    Returns:
        int64 [count], ascending.
    """
    found: list[NDArray[np.int64]] = []
    missing = count
    low = max(start, 2)
    width = 64 * max(count, 16)
    while missing > 0:
        segment = np.arange(low, low + width, dtype=np.int64)
        is_prime = np.ones(width, dtype=bool)
        for divisor in range(2, math.isqrt(low + width) + 1):
            first = max(divisor * divisor, -(-low // divisor) * divisor)
            is_prime[first - low :: divisor] = False
        found.append(segment[is_prime][:missing])
        missing -= len(found[-1])
        low += width
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def multipliers(layer_id: int, max_ngram: int, distinct_tokens: int) -> NDArray[np.int64]:
    """Return a layer's hash multipliers.

    Args:
        layer_id: the decoder layer, counted from 0.
        max_ngram: the longest n-gram; one multiplier per look-back 0 .. max_ngram - 1.
        distinct_tokens: distinct entries of the compressed token map.

    Returns:
        int64 [max_ngram], odd, each at most ``2**63 / distinct_tokens``.
    """
    bound = max(1, np.iinfo(np.int64).max // distinct_tokens // 2)
    generator = np.random.default_rng(_SEED_STEP * layer_id)
    return generator.integers(0, bound, size=max_ngram, dtype=np.int64) * 2 + 1


@dataclasses.dataclass(frozen=True)
class EngramLayout:
    """Where each layer's hash columns lie in its table.

    Attributes:
        layer_ids: the decoder layers that have a table, in the model's order.
        max_ngram: the longest n-gram.
        heads: primes, thus columns, per n-gram size.
        primes: int64 [layers, columns]; rows of each column.
        offsets: int64 [layers, columns]; the first row of each column.
    """

    layer_ids: tuple[int, ...]
    max_ngram: int
    heads: int
    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def make(
        cls, layer_ids: tuple[int, ...], *, vocab_size: int, max_ngram: int = 4, heads: int = 8
    ) -> Self:
        """Lay the columns out.

        Args:
            layer_ids: decoder layers with a table, in the model's order.
            vocab_size: the config's ``engram_vocab_size``; the primes start there.
            max_ngram: the config's ``engram_max_ngram_size``.
            heads: the config's ``engram_n_heads``.
        """
        columns = (max_ngram - 1) * heads
        primes = primes_from(vocab_size, len(layer_ids) * columns).reshape(-1, columns)
        offsets = np.cumsum(primes, axis=1) - primes
        return cls(tuple(layer_ids), max_ngram, heads, primes, offsets)

    @property
    def columns(self) -> int:
        """Rows that one token reads from one layer's table."""
        return int(self.primes.shape[1])

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each layer's table."""
        return tuple(int(total) for total in self.primes.sum(axis=1))


class EngramHash:
    """Turns token ids into row numbers, for every layer of a layout at once."""

    def __init__(
        self,
        layout: EngramLayout,
        token_map: ArrayLike,
        *,
        pad_token_id: int = 2,
        image_token_id: int | None = None,
    ):
        """Bind a layout to a tokenizer.

        Args:
            layout: the tables' columns.
            token_map: [vocabulary], token id to compressed id, counted up from 0.
            pad_token_id: the config's ``engram_pad_token_id``, before the map.
            image_token_id: a token that hides itself and all before it; None for text models.
        """
        self.layout = layout
        self.token_map = np.ascontiguousarray(token_map, dtype=np.int64)
        self.distinct_tokens = int(self.token_map.max()) + 1
        self._pad = int(self.token_map[pad_token_id])
        self._image_token_id = image_token_id
        self._multipliers = np.stack(
            [multipliers(i, layout.max_ngram, self.distinct_tokens) for i in layout.layer_ids]
        )

    def rows(self, tokens: ArrayLike, context: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the rows that each token reads.

        Args:
            tokens: ids [..., length]; each leading index is a sequence of its own.
            context: ids [..., max_ngram - 1], oldest first: what came before ``tokens``.
                ``NOTHING`` (-1) where the sequence had not begun. None: it begins here.

        Returns:
            int64 [..., length, layers, columns]; columns by n-gram size, then head.

        Raises:
            IndexError: a token id lies outside the map.
        """
        history = self._history(tokens, context)
        if history.shape[-1] < self.layout.max_ngram:  # no token at all
            shape = (len(self.layout.layer_ids), self.layout.columns)
            return np.empty((*history.shape[:-1], 0, *shape), dtype=np.int64)
        self._check(history)
        windows = np.lib.stride_tricks.sliding_window_view(history, self.layout.max_ngram, axis=-1)
        windows = windows[..., ::-1]  # [..., length, look-back], the token itself first
        blocked = windows == NOTHING
        if self._image_token_id is not None:
            hidden = windows == self._image_token_id
            blocked = np.maximum.accumulate(blocked | hidden, axis=-1)
        compressed = np.where(blocked, self._pad, self.token_map[windows])
        return self._hash(compressed)

    def next_context(
        self, tokens: ArrayLike, context: ArrayLike | None = None
    ) -> NDArray[np.int64]:
        """Return the context for what follows ``tokens``; arguments as :meth:`rows`."""
        history = self._history(tokens, context)
        return history[..., history.shape[-1] - (self.layout.max_ngram - 1) :]

    def _history(self, tokens: ArrayLike, context: ArrayLike | None) -> NDArray[np.int64]:
        ids = np.asarray(tokens, dtype=np.int64)
        lookback = self.layout.max_ngram - 1
        if context is None:
            context = np.full((*ids.shape[:-1], lookback), NOTHING, dtype=np.int64)
        return np.concatenate([np.asarray(context, dtype=np.int64), ids], axis=-1)

    def _check(self, history: NDArray[np.int64]) -> None:
        if history.size == 0:
            return
        low, high = int(history.min()), int(history.max())
        if low < NOTHING or high >= len(self.token_map):
            bad = low if low < NOTHING else high
            raise IndexError(f"token id {bad} is not in 0..{len(self.token_map) - 1}")

    def _hash(self, compressed: NDArray[np.int64]) -> NDArray[np.int64]:
        layout = self.layout
        out = np.empty(
            (*compressed.shape[:-1], len(layout.layer_ids), layout.columns), dtype=np.int64
        )
        for layer, layer_multipliers in enumerate(self._multipliers):
            products = compressed * layer_multipliers
            mixed = products[..., 0]
            for size in range(1, layout.max_ngram):
                mixed = mixed ^ products[..., size]
                span = slice((size - 1) * layout.heads, size * layout.heads)
                np.remainder(
                    mixed[..., None], layout.primes[layer, span], out=out[..., layer, span]
                )
            out[..., layer, :] += layout.offsets[layer]
        return out
