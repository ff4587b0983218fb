"""python -m bench.vllm_on_gpu.checkpoints FOLDER SITE [DEEP...]: tiny models with tables.

``q4``: Qwen4Exp with PLE tables at layers 0 and 2. Its sizes are what vLLM's kernels for Hopper
take without FlashInfer and CuTe: hc_count * hidden_size no multiple of 8, indexer heads of 128, an
output gate that is named. ``engram``: a Llama with vLLM's Engram at layers 1 and 3, tables of
256-wide fp8 rows, and a tokenizer of pairs that fall together in the compressed token map. All
weights are random; the output layer is scaled up, so that the most probable token is clear and a
wrong row changes it. ``q4-deep`` and ``engram-deep`` are these with so many layers that a step
takes a GPU milliseconds, as that of a model of everyday size does: times are taken of them.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 512
ENGRAM_LAYERS, ENGRAM_DIM, ENGRAM_HEADS, NGRAM = (1, 3), 256, 4, 3
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def spread(model: torch.nn.Module, seed: int, table: str) -> None:
    """Fill a model with random weights that keep its activations of everyday size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or "conv" in name:
                continue
            scale = weight.shape[-1] ** -0.5 * (8.0 if "lm_head" in name else 1.5)
            if table in name or "embed_tokens" in name:
                scale = 1.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def qwen4_exp(folder: Path, layers: int = 4) -> None:
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        vocab_size=VOCABULARY, hidden_size=132, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, hc_count=3, hc_lowrank=16, ple_layer_ids=[1, 3], ple_embed_dim=512,
        ple_conv_kernel_size=4, ngram_size=3, heads_per_ngram=4, ngram_vocab_size_base=1000,
        make_ngram_vocab_size_divisible_by=8, split_ngram_parts=4, indexer_n_heads=4,
        indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048, indexer_compress_ratio=4,
        max_position_embeddings=4096, initializer_range=0.15, output_gate_type="silu",
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        }, **TOKENS,
    )  # fmt: skip
    model = Qwen4ExpForCausalLM(config)
    spread(model, 7, "ngram_embedding")
    model.to(torch.bfloat16).save_pretrained(folder)


def tokenizer(folder: Path) -> Any:
    """A word for every id; every fourth comes in two cases, which the token map takes for one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>"]
    for number in range(VOCABULARY):
        words += [f"Tok{number}", f"tok{number}"] if number % 4 == 0 else [f"tok{number}"]
    known = {word: number for number, word in enumerate(words[:VOCABULARY])}
    made = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return fast


def stock_layout(site: Path) -> dict[str, Any]:
    """The functions of vLLM for layout and token map, without importing vLLM."""
    source = (site / "vllm/models/deepseek_v41/common/engram.py").read_text()
    names: dict[str, Any] = {"np": np, "torch": torch}
    start = source.index("def _is_prime")
    exec(source[start : source.index("@triton.jit", start)], names)
    return names


def engram(folder: Path, site: Path, layers: int = 4) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    names = stock_layout(site)
    _, distinct = names["build_compressed_token_map"](tokenizer(folder))
    extra: dict[str, Any] = {
        "engram_layer_ids": list(ENGRAM_LAYERS), "engram_max_ngram_size": NGRAM,
        "engram_n_heads": ENGRAM_HEADS, "engram_head_dim": ENGRAM_DIM,
        "engram_compressed_vocab_size": distinct, "engram_pad_token_id": 0,
        "engram_vocab_size": 1000, "engram_num_embeddings": [0, 0], "hc_mult": 1,
    }  # fmt: skip
    layout = names["EngramLayout"](types.SimpleNamespace(**extra))
    rows = [sum(sum(order) for order in layer) for layer in layout.primes]
    extra |= {"engram_num_embeddings": rows, "architectures": ["EngramLlamaForCausalLM"]}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            max_position_embeddings=4096, **TOKENS,
        )
    )  # fmt: skip
    spread(model, 3, "no table of its own")
    model.to(torch.bfloat16).save_pretrained(folder)
    add_tables(folder / "model.safetensors", dict(zip(ENGRAM_LAYERS, rows, strict=True)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | extra, indent=1))


def add_tables(file: Path, rows: dict[int, int]) -> None:
    """Add a table of so many rows to each layer, and what reads it."""
    weights = load_file(file)
    generator = torch.Generator().manual_seed(11)
    columns = (NGRAM - 1) * ENGRAM_HEADS * ENGRAM_DIM
    for layer, count in rows.items():
        stem = f"layers.{layer}.engram"
        values = torch.randn(count, ENGRAM_DIM, generator=generator)
        scales = torch.randint(125, 129, (count, ENGRAM_DIM // 32), generator=generator)
        scales[::97] = 0  # what vLLM takes for a scale of 0
        reader = torch.randn(256 * 2, columns, generator=generator) * columns**-0.5 * 2
        weights[f"{stem}.embed.weight"] = values.to(torch.float8_e4m3fn)
        weights[f"{stem}.embed.scale"] = scales.to(torch.uint8).view(torch.float8_e8m0fnu)
        weights[f"{stem}.wkv.weight"] = reader.to(torch.bfloat16)
        for name in ("q_weight", "k_weight"):
            weights[f"{stem}.{name}"] = torch.ones(1, 256, dtype=torch.bfloat16)
    save_file(weights, file, metadata={"format": "pt"})


def deep_qwen4_exp(folder: Path, _: Path) -> None:
    qwen4_exp(folder, layers=48)


def deep_engram(folder: Path, site: Path) -> None:
    engram(folder, site, layers=160)


def main() -> None:
    folder, site = map(Path, sys.argv[1:3])
    torch.set_num_threads(4)
    qwen4_exp(folder / "q4")
    engram(folder / "engram", site)
    for name in sys.argv[3:]:
        {"q4-deep": deep_qwen4_exp, "engram-deep": deep_engram}[name](folder / name, site)


if __name__ == "__main__":
    main()
