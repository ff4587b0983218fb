"""V4.1's row numbers against those of the engine that defines them.

``tests/data/engram_golden.json`` was recorded from sglang 0.5.23's torch reference (its ``made``
field says how); it holds numbers only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.gpu.engram import NOTHING, EngramHash, EngramLayout, multipliers, primes_from
from tierd.tools.deepseek_tokens import deepseek_token_map, load_tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "data/engram_golden.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer()


@pytest.fixture(scope="module")
def token_map() -> Any:
    return deepseek_token_map()


def test_public_model_row_counts() -> None:
    layout = EngramLayout.make((1, 14), vocab_size=16_000_000, max_ngram=4, heads=8)
    assert layout.rows == (384_006_168, 384_016_682)
    assert layout.columns == 24
    assert (layout.primes[0, 0], layout.primes[1, -1]) == (16_000_057, 16_000_889)
    assert len(np.unique(layout.primes)) == layout.primes.size  # handed out once, across layers
    assert layout.offsets[1, 0] == 0
    assert (layout.offsets[:, 1:] == np.cumsum(layout.primes, axis=1)[:, :-1]).all()


def test_primes_across_segments() -> None:
    # A start of 2 and a count that spans several sieve segments.
    found = primes_from(2, 2000)
    assert found[:6].tolist() == [2, 3, 5, 7, 11, 13]
    assert found[-1] == 17_389  # the 2,000th prime
    assert primes_from(17_389, 1).tolist() == [17_389]
    assert primes_from(17_390, 0).tolist() == []


def test_multipliers_fit_63_bits() -> None:
    values = multipliers(14, 4, 99_092)
    assert (values % 2 == 1).all()
    assert all(int(value) * 99_091 < 2**63 for value in values)


def test_token_map_is_the_models(token_map: Any) -> None:
    expected = GOLDEN["token_map"]
    assert len(token_map) == 129_280
    assert token_map.max() + 1 == expected["distinct"] == 99_092
    assert token_map[2] == 2
    digest = hashlib.sha256(json.dumps(token_map.tolist()).encode()).hexdigest()
    assert digest == expected["sha256_json"]
    assert digest.startswith("de40bcdd71f24430")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["layers"]))
def test_golden_rows(case: dict[str, Any], token_map: Any) -> None:
    layout = EngramLayout.make(
        tuple(case["layers"]),
        vocab_size=case["vocab_size"],
        max_ngram=case["max_ngram"],
        heads=case["heads"],
    )
    assert list(layout.rows) == case["table_rows"]
    hasher = EngramHash(layout, token_map, image_token_id=case["image_token_id"])
    assert hasher.rows(case["tokens"]).tolist() == case["rows"]


def test_golden_text(tokenizer: Any, token_map: Any) -> None:
    tokens = tokenizer.encode(GOLDEN["text"], add_special_tokens=False).ids
    assert tokens == GOLDEN["text_ids"]
    layout = EngramLayout.make((1, 14), vocab_size=16_000_000)
    assert EngramHash(layout, token_map).rows(tokens).tolist() == GOLDEN["text_rows"]


SMALL = EngramHash(EngramLayout.make((0, 2), vocab_size=101, heads=2), np.arange(50) // 2)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 49), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_any_split_gives_the_same_rows(tokens: list[int], cuts: list[int]) -> None:
    # Prefill in chunks and decode token by token must read what one pass reads.
    whole = SMALL.rows(tokens)
    context = None
    parts = []
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for start, end in itertools.pairwise(bounds):
        parts.append(SMALL.rows(tokens[start:end], context))
        context = SMALL.next_context(tokens[start:end], context)
    assert np.array_equal(np.concatenate(parts), whole)
    limits = SMALL.layout.offsets + SMALL.layout.primes
    assert ((whole >= SMALL.layout.offsets) & (whole < limits)).all()


def test_batch_and_empty_input() -> None:
    batch = np.arange(12).reshape(2, 6)
    rows = SMALL.rows(batch)
    assert rows.shape == (2, 6, 2, 6)
    assert np.array_equal(rows[1], SMALL.rows(batch[1]))
    assert SMALL.rows(np.empty((2, 0), dtype=np.int64)).shape == (2, 0, 2, 6)


def test_context_start_is_not_a_token() -> None:
    started = SMALL.rows([5], [NOTHING, NOTHING, 7])
    assert np.array_equal(started, SMALL.rows([7, 5])[1:])


@pytest.mark.parametrize("bad", [50, -2])
def test_foreign_token_is_refused(bad: int) -> None:
    with pytest.raises(IndexError, match=rf"token id {bad} is not in 0..49"):
        SMALL.rows([1, bad, 2])
    with pytest.raises(IndexError, match="token id"):
        SMALL.rows([1], [0, 0, 77])
