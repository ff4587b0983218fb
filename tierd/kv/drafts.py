"""Prompt lookup: a draft for nothing, from the request's own past.

The draft of the next token is what followed the latest earlier occurrence of the last few tokens,
for the longest run of them that occurred before. Where nothing matches there is no draft, and the
current token's query predicts instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NGRAMS = (6, 5, 4, 3, 2)


class PromptLookup:
    """The n-grams of one request, kept up as it grows; a draft costs as many look-ups as sizes."""

    def __init__(self, tokens: Iterable[int] = (), ngrams: tuple[int, ...] = NGRAMS) -> None:
        self._ngrams = tuple(sorted(ngrams, reverse=True))
        self._tokens: list[int] = []
        self._seen: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens that are final."""
        for token in tokens:
            for n in self._ngrams:
                if n <= len(self._tokens):
                    self._seen[tuple(self._tokens[-n:])] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, count: int = 1) -> list[int]:
        """Return up to ``count`` drafts; fewer where the past ends, none without a match."""
        for n in self._ngrams:
            at = self._seen.get(tuple(self._tokens[-n:])) if n <= len(self._tokens) else None
            if at is not None:
                return self._tokens[at : at + count]
        return []
