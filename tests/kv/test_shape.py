"""Sizes, caps and refusals; prompt lookup."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)

from tierd.errors import KvUnsupportedError
from tierd.kv.drafts import PromptLookup
from tierd.kv.shape import Budget, KvShape, StepBudget, cap_that_hides, step_bytes
from tierd.kv.transformers import refuse, shape_of

QWEN = KvShape(layers=36, kv_heads=8, group=4, head_dim=128)


def test_sizes_of_qwen3_8b() -> None:
    """147,456 B a token; K = 128 keeps 2,048 of them and the local blocks."""
    assert QWEN.full_bytes(16_384) == 16_384 * 147_456
    assert QWEN.entry_bytes == 8192
    summaries = 16_384 * 147_456 // 16
    assert QWEN.resident_bytes(16_384, Budget()) == 131 * 16 * 147_456 + summaries


def test_the_cap_follows_the_link_and_the_step() -> None:
    """Equation 3: 51 GB/s behind a 10 ms step is 510 MB: 5 blocks a head at 40 requests."""
    assert step_bytes(51e9, 0.010) == 510e6
    assert Budget(128, 0.05).admitted == 6
    assert cap_that_hides(QWEN, 40, 51e9, 0.010, Budget()) == 5
    assert cap_that_hides(QWEN, 8, 51e9, 0.010, Budget()) == 6
    assert cap_that_hides(QWEN, 1000, 51e9, 0.010, Budget()) == 1
    assert cap_that_hides(QWEN, 0, 51e9, 0.010, Budget()) == 6
    assert Budget(128, 0).admitted == 0


def test_the_gate_opens_and_closes_with_the_steps() -> None:
    gate = StepBudget(QWEN, Budget(128, 0.1), 51e9)
    assert gate.admit(40) == 12  # nothing is known yet
    gate.observe(0.010)
    assert gate.admit(40) == 5
    gate.observe(0.100)  # one slow step moves it by a tenth
    assert gate.admit(40) == 10
    for _ in range(60):
        gate.observe(0.004)
    assert gate.admit(40) == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"head_dim": 80}, "head size 80 is not supported"),
        ({"block": 24}, "blocks of 24 tokens"),
        ({"dtype": torch.float8_e4m3fn}, "a float8_e4m3fn KV cache is not supported"),
        ({"kv_heads": 0}, "0 KV heads"),
    ],
)
def test_shapes_are_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(KvUnsupportedError, match=text):
        KvShape(**{"layers": 2, "kv_heads": 2, "group": 2, "head_dim": 64, **given})


def test_budgets_are_refused() -> None:
    with pytest.raises(KvUnsupportedError, match="at least one block"):
        Budget(0)
    with pytest.raises(KvUnsupportedError, match="cap from 0 to 1"):
        Budget(4, 1.5)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (DeepseekV3Config(), "DeepseekV3 uses MLA"),
        (MistralConfig(sliding_window=4096), "Mistral has sliding_attention layers"),
        (Qwen3NextConfig(), "Qwen3Next has linear_attention layers"),
        (T5Config(), "T5 attends to an encoder"),
        (Gemma2Config(layer_types=["full_attention"] * 26), "Gemma2 caps its attention scores"),
        (
            Qwen3Config(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2),
            "Qwen3 has sliding_attention layers",
        ),
    ],
)
def test_models_are_refused_by_name(config: Any, text: str) -> None:
    with pytest.raises(KvUnsupportedError, match=text):
        refuse(config)


def test_fp8_caches_are_refused_and_gqa_is_taken() -> None:
    config = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    refuse(config)
    with pytest.raises(KvUnsupportedError, match="fp8_e4m3 is not supported; use bf16"):
        refuse(config, cache_dtype="fp8_e4m3")
    shape = shape_of(config, torch.bfloat16)
    assert (shape.kv_heads, shape.group, shape.head_dim) == (2, 4, 64)
    with pytest.raises(KvUnsupportedError, match="head size 80"):
        shape_of(LlamaConfig(hidden_size=640, num_attention_heads=8), torch.bfloat16)
    uneven = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=3)
    with pytest.raises(KvUnsupportedError, match="8 query heads do not divide among 3"):
        shape_of(uneven, torch.bfloat16)


def test_prompt_lookup_takes_the_longest_and_latest_match() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 2, 3])
    assert lookup.draft() == [5]  # the latest after (2, 3)
    assert lookup.draft(3) == [5, 2, 3]
    lookup.extend([4])
    assert lookup.draft() == [9]  # (2, 3, 4)
    lookup.extend([77])
    assert lookup.draft() == []
    assert PromptLookup().draft() == []
