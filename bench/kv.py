"""`make bench-kv`: OasisKV on the CPU: a budget that covers all blocks gives the stock tokens.

A thousand prompts and more, on tiny Llama and Qwen3 models in fp32, greedy, with and without
speculation: every token is compared with stock transformers' (SDPA, no cache of ours). Requests
turn sparse during their prompt or soon after, so their tokens come from working sets that were
predicted, fetched from the host pool and mapped.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch

from bench import record as records
from tierd.io.pool import COUNTERS
from tierd.kv.shape import Budget
from tierd.kv.transformers import attach, new_cache

BATCH, TOKENS = 40, 14
SIZES = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.4,
    "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def models() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(11)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    qwen = Qwen3ForCausalLM(Qwen3Config(**SIZES, use_sliding_window=False)).eval()
    return {"llama": llama, "qwen3": qwen}


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=TOKENS, do_sample=False, **options)


def run(prompts: int) -> dict[str, int]:
    """Compare; returns prompts, those with speculation, tokens that differ, and what moved."""
    found = {"prompts": 0, "speculated": 0, "differing": 0, "sparse": 0, "admitted": 0, "wrong": 0}
    generator = torch.Generator().manual_seed(23)
    for model in models().values():
        ours = copy.deepcopy(model)
        batches = attach(ours, budget=Budget(8, 1.0), rows=BATCH, context=128, threshold=48)
        for _ in range(-(-prompts // (2 * BATCH))):
            length = int(torch.randint(30, 100, (), generator=generator))
            ids = torch.randint(3, 160, (BATCH, length), generator=generator)
            want = generate(model, ids)
            compare(found, batches, want, generate(ours, ids, cache=new_cache(batches)))
        alone = attach(ours, budget=Budget(8, 1.0), rows=1, context=128, threshold=48)
        for _ in range(prompts // 10):
            length = int(torch.randint(10, 33, (), generator=generator))
            ids = torch.randint(3, 160, (1, length), generator=generator).repeat(1, 3)
            want = generate(model, ids)
            got = generate(ours, ids, cache=new_cache(alone), prompt_lookup_num_tokens=3)
            compare(found, alone, want, got)
            found["speculated"] += 1
        for session in (batches, alone):
            counted = dict(zip(COUNTERS, session.view._counters.tolist(), strict=False))
            found["admitted"] += counted["admitted"]
            found["wrong"] += counted["wrong_owner"]
    return found


def compare(found: dict[str, int], session: Any, want: torch.Tensor, got: torch.Tensor) -> None:
    found["prompts"] += len(want)
    found["differing"] += int((want != got).sum()) if want.shape == got.shape else want.numel()
    found["sparse"] += sum(request.sparse for request in session.requests.rows.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=1040, help="without speculation")
    options = parser.parse_args()
    began = time.perf_counter()
    found = run(options.prompts)
    detail = {**found, "seconds": round(time.perf_counter() - began, 1), "tokens_each": TOKENS}
    common = {
        "command": "python -m bench.kv", "repeats": 1, "spread": "exact", "detail": detail,
        "packages": ("torch", "transformers"),
    }  # fmt: skip
    made = [
        records.record(
            "kv.dense_equal_prompts", found["prompts"], unit="prompts",
            limit="fewer were asked for", **common,
        ),
        records.record(
            "kv.dense_tokens_differing", found["differing"], unit="tokens",
            limit="see which prompts with --prompts 80", **common,
        ),
    ]  # fmt: skip
    print(records.save("kv", made))
    for one in made:
        print(one["id"], one["value"], "met" if one["met"] else "MISSED", detail)


if __name__ == "__main__":
    main()
