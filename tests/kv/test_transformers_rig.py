"""The rig: stock transformers models on our attention and cache, on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bench.kv_model import Model, draw, source_text
from tierd.errors import KvPoolFullError, KvUnsupportedError
from tierd.io.pool import COUNTERS, PoolView
from tierd.kv.shape import Budget
from tierd.kv.transformers import attach, new_cache

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.4,
    "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def tiny(kind: str = "llama") -> Any:
    torch.manual_seed(3)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, use_sliding_window=False)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def generate(model: Any, ids: torch.Tensor, tokens: int = 12, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)


def prompts(count: int, length: int) -> torch.Tensor:
    return torch.randint(3, 128, (count, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_covering_budget_gives_the_stock_tokens(kind: str) -> None:
    model, ids = tiny(kind), prompts(3, 70)
    want = generate(model, ids)
    ours = copy.deepcopy(model)
    session = attach(ours, budget=Budget(8, 1.0), rows=4, context=128, threshold=64)
    got = generate(ours, ids, cache=new_cache(session))
    assert torch.equal(got, want)
    assert all(request.sparse for request in session.requests.rows.values())
    counted = dict(zip(COUNTERS, session.view._counters.tolist(), strict=False))
    assert counted["admitted"] > 0
    assert counted["wrong_owner"] == 0
    assert torch.equal(generate(ours, ids, cache=new_cache(session)), want)  # and again


def test_speculation_with_rejected_drafts_gives_the_stock_tokens() -> None:
    model = tiny()
    ids = prompts(1, 24).repeat(1, 3)
    want = generate(model, ids, 24)
    session = attach(model, budget=Budget(8, 1.0), rows=1, context=128, threshold=64)
    got = generate(model, ids, 24, cache=new_cache(session), prompt_lookup_num_tokens=3)
    assert torch.equal(got, want)
    assert session.requests.rows[0].sparse


def test_an_assistant_s_drafts_and_a_gate_give_the_stock_tokens() -> None:
    """The cap follows step times: too small for all of the set, until it is made to cover it."""
    model, helper, ids = tiny(), tiny(), prompts(1, 70)
    want = generate(model, ids)
    session = attach(
        model, budget=Budget(8, 1.0), rows=1, context=128, threshold=64, link_bytes_s=1e12
    )
    got = generate(model, ids, cache=new_cache(session), assistant_model=helper)
    assert torch.equal(got, want)
    assert int(session.tables.admit[0]) == 8
    session = attach(
        model, budget=Budget(8, 1.0), rows=1, context=128, threshold=64, link_bytes_s=1.0
    )
    generate(model, ids, cache=new_cache(session))
    assert int(session.tables.admit[0]) == 1


def test_a_small_budget_changes_attention() -> None:
    """The rig can tell: with 2 of 5 blocks the tokens are others."""
    model, ids = tiny(), prompts(1, 100)
    want = generate(model, ids, 24)
    session = attach(model, budget=Budget(2, 0.5), rows=1, context=160, judge=True)
    got = generate(model, ids, 24, cache=new_cache(session))
    assert not torch.equal(got, want)
    counted = dict(zip(COUNTERS, session.view._counters.tolist(), strict=False))
    assert counted["judged"] > 0
    assert 0 < counted["agreed"] < counted["judged"]


def test_the_kept_model_recalls_over_a_sixteenth_of_its_context() -> None:
    """One record asked far behind, found through prompt lookup's drafts."""
    kept = Model.load()
    model = LlamaForCausalLM(LlamaConfig(**kept.llama_config())).eval()
    missing, unexpected = model.load_state_dict(kept.weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    model.generation_config.eos_token_id = None
    batch = draw(
        source_text(500_000), 1, 1024, held=False, generator=torch.Generator().manual_seed(1)
    )
    assert batch.rows is not None
    at = int(batch.rows[0].max())
    prompt = batch.inputs[:, : at - 1]  # up to `KEY`; k, k' and the value are to be processed
    with torch.no_grad():
        plain = model(batch.inputs[:, : at + 1]).logits[0, -1].argmax()
        session = attach(model, budget=Budget(4, 0.25), rows=1, context=1100)
        cache = new_cache(session)
        model(prompt, cache=cache)
        for step in (slice(at - 1, at + 1), slice(at, at + 1)):  # [k, draft k'], then [k']
            logits = model(batch.inputs[:, step], cache=cache).logits
            if step.stop - step.start == 2:
                session.crop(session.length - 1)
    assert logits[0, -1].argmax() == plain == batch.inputs[0, at + 1]


def test_what_the_rig_refuses() -> None:
    model = tiny()
    session = attach(model, budget=Budget(4), rows=2, context=128)
    with pytest.raises(KvUnsupportedError, match="a batch of 3; the session was made for 2"):
        model(prompts(3, 20), cache=new_cache(session))
    with pytest.raises(KvUnsupportedError, match="beam search"):
        generate(model, prompts(1, 20), cache=new_cache(session), num_beams=2)
    cache = new_cache(session)
    model(prompts(1, 20), cache=cache)
    with pytest.raises(KvUnsupportedError, match="a prompt comes in one piece"):
        model(prompts(1, 20), cache=cache)
    with pytest.raises(KvUnsupportedError, match="a batch of 2 on a cache that holds 1"):
        model(prompts(2, 1), cache=cache)
    with pytest.raises(KvUnsupportedError, match="crop to 21 tokens; the cache holds 20"):
        session.crop(21)
    with pytest.raises(KvUnsupportedError, match="make the session for a longer context"):
        model(prompts(2, 160), cache=new_cache(session))


def test_a_sparse_request_takes_back_its_last_step_only() -> None:
    model = tiny()
    session = attach(model, budget=Budget(2, 1.0), rows=1, context=128, threshold=64)
    cache = new_cache(session)
    model(prompts(1, 90), cache=cache)
    model(prompts(1, 3), cache=cache)
    assert session.requests.rows[0].sparse
    with pytest.raises(KvUnsupportedError, match=r"crop from 93 to 89 tokens: .* from 90 on"):
        session.crop(89)
    session.crop(91)
    model(prompts(1, 3), cache=cache)
    assert session.length == 94


def test_an_exhausted_pool_refuses_before_anything_changes() -> None:
    model = tiny()
    block_bytes = 2 * 2 * 16 * 16 * 4
    view = PoolView.private(3, layers=2, block_bytes=block_bytes)
    session = attach(model, budget=Budget(4), rows=1, context=128, view=view)
    with pytest.raises(KvPoolFullError, match="5 host pages wanted, 3 free: the request waits"):
        model(prompts(1, 70), cache=new_cache(session))
    assert session.length == 0
    model(prompts(1, 30), cache=new_cache(session))
    assert session.length == 30
