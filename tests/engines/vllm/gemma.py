"""One vLLM on a CPU with a tiny Gemma 4: ``python -m tests.engines.vllm.gemma FACTS``.

Under ``TIERD=1`` its per-layer table comes from the daemon. Reports the tokens of every request.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any


def make(folder: Path) -> None:
    """A saved model whose logits are sharp enough that a wrong row shows."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=512, vocab_size_per_layer_input=512, hidden_size=128,
        hidden_size_per_layer_input=32, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, global_head_dim=64,
        sliding_window=64, num_kv_shared_layers=0,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], eos_token_id=2,
        pad_token_id=0, bos_token_id=1, max_position_embeddings=1024, initializer_range=0.25,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    Gemma4ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def prompts(count: int) -> list[dict[str, Any]]:
    """Several share their first 64 tokens, which the prefix cache then holds."""
    chosen = random.Random(8)
    shared = [chosen.randrange(3, 512) for _ in range(64)]
    made = []
    for number in range(count):
        own = [chosen.randrange(3, 512) for _ in range(chosen.randint(3, 40))]
        made.append({"prompt_token_ids": [*shared, *own] if number % 2 else own})
    return made


def main() -> None:
    facts = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=facts["model"], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256,
        max_num_seqs=8, enforce_eager=not facts["compiled"], enable_prefix_caching=True, seed=0,
    )  # fmt: skip
    asked = SamplingParams(
        max_tokens=facts["tokens"], temperature=0, detokenize=False, ignore_eos=True
    )
    tokens = []
    for prompt in prompts(facts["requests"]):  # one at a time: company changes roundings
        out = llm.generate([prompt], asked, use_tqdm=False)[0]
        tokens.append(list(out.outputs[0].token_ids))
    found: dict[str, Any] = {"tokens": tokens}
    if os.environ.get("TIERD") == "1":
        from tierd.hook.vllm import tables

        found["lookups"] = [
            table.stats()["lookups"] for rank in tables.RANKS.all() for table in rank.tables
        ]
    Path(os.environ["TIERD_TEST_REPORT"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
