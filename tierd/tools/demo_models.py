"""Writes tiny checkpoints with the layouts of real models, for the demo and the tests.

Names, dtypes, shapes and sharding are those of the real checkpoints; sizes are not, and all weights
are random, with a spread that lets a table's rows change what the model says.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from tierd.tools.demo_engram import (
    HEAD_DIM,
    SCALE_BLOCK,
    Engram,
    engram_key,
    layout_of,
)

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"
_NAN_PAYLOADS = (0x7F, 0xFF)


def write_qwen4_exp(
    directory: Path, *, seed: int = 1, rows_base: int = 1000, shard: str = "60KB"
) -> None:
    """Write a Qwen4Exp checkpoint with two PLE layers (0 and 2), bf16, sharded.

    Args:
        directory: where; made if missing.
        seed: of all weights.
        rows_base: each of a table's 8 columns has at least so many rows.
        shard: largest size of a file, in transformers' notation.
    """
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig  # noqa: PLC0415 - slow

    config = Qwen4ExpTextConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2, hc_count=2,
        hc_lowrank=16, ple_layer_ids=[1, 3], ple_embed_dim=64, ngram_size=3, heads_per_ngram=4,
        ngram_vocab_size_base=rows_base, make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=4, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16,
        indexer_budget=32, indexer_compress_ratio=4, eos_token_id=2, pad_token_id=0,
        bos_token_id=1, initializer_range=0.2,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    )  # fmt: skip
    _save(Qwen4ExpForCausalLM, config, directory, seed, shard)


def write_gemma(
    directory: Path,
    *,
    family: str = "gemma4",
    seed: int = 1,
    dim: int = 24,
    vocabulary: int = 512,
    shard: str = "60KB",
) -> None:
    """Write a Gemma 4 (or Gemma 3n) checkpoint with per-layer embeddings, bf16, sharded.

    Args:
        directory: where; made if missing.
        family: ``gemma4`` or ``gemma3n``.
        seed: of all weights.
        dim: values per layer; 24 because its square root, the scale, is no bf16 number.
        vocabulary: rows of the table.
        shard: largest size of a file, in transformers' notation.
    """
    import transformers  # noqa: PLC0415 - slow

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary, "hidden_size": 64,
        "hidden_size_per_layer_input": dim, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if family == "gemma3n":
        config = transformers.Gemma3nTextConfig(
            **sizes, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4
        )
        _save(transformers.Gemma3nForCausalLM, config, directory, seed, shard)
    else:
        config = transformers.Gemma4TextConfig(**sizes)
        _save(transformers.Gemma4ForCausalLM, config, directory, seed, shard)


def write_engram(
    directory: Path, *, seed: int = 1, vocab_size: int = 500, layers: tuple[int, ...] = (1, 3)
) -> None:
    """Write a stand-in for V4.1: a tiny V4, two Engram layers, fp8 tables of 264-byte rows.

    Args:
        directory: where; made if missing.
        seed: of all weights and rows.
        vocab_size: ``engram_vocab_size``; a table has a little over 24 times as many rows.
        layers: decoder layers with a table; there are 4 layers.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # noqa: PLC0415 - slow

    config = DeepseekV4Config(
        vocab_size=129_280, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, head_dim=32, q_lora_rank=32, num_experts_per_tok=2,
        n_routed_experts=4, hc_mult=2, hc_sinkhorn_iters=4, sliding_window=16, o_groups=2,
        o_lora_rank=16, index_n_heads=2, index_head_dim=32, index_topk=8,
        partial_rotary_factor=0.25, num_nextn_predict_layers=0, initializer_range=0.2,
        layer_types=[
            "sliding_attention", "sliding_attention", "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
        engram_layer_ids=list(layers), engram_vocab_size=vocab_size, engram_max_ngram_size=4,
        engram_n_heads=8, engram_head_dim=HEAD_DIM, engram_pad_token_id=2,
        engram_compressed_vocab_size=99_092,
    )  # fmt: skip
    layout = layout_of(config)
    config.engram_num_embeddings = list(layout.rows)
    _save(DeepseekV4ForCausalLM, config, directory, seed, "20MB")
    generator = torch.Generator().manual_seed(seed)
    for layer, rows in zip(layout.layer_ids, layout.rows, strict=True):
        engram = Engram(config.hidden_size, config.hc_mult, layout.columns)
        nn_init(engram, generator)
        weight, scale = engram_table(rows, generator)
        small = {engram_key(layer, n): t.bfloat16() for n, t in engram.state_dict().items()}
        # As in the public checkpoint, a table's two tensors need not share a shard.
        small[engram_key(layer, "embed.scale")] = scale
        add_shard(directory, f"engram-{layer}-small", small)
        add_shard(directory, f"engram-{layer}-rows", {engram_key(layer, "embed.weight"): weight})


def nn_init(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Give matrices random values; vectors of ones stay."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.shape[0] > 8:
                parameter.normal_(0.0, 0.05, generator=generator)


def engram_table(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a table of random bytes that the format allows.

    No two rows are equal: the first four payloads count the row in base 100. No payload is a NaN,
    and the scales run from 2**-9 to 2**2, so neither bf16 nor the model overflows.

    Returns:
        float8_e4m3fn [rows, 256] and float8_e8m0fnu [rows, 8].
    """
    payload = torch.randint(0, 256, (rows, HEAD_DIM), dtype=torch.uint8, generator=generator)
    for nan in _NAN_PAYLOADS:
        payload[payload == nan] = nan - 1
    numbers = torch.arange(rows)
    for digit in range(4):
        payload[:, digit] = (numbers // 100**digit % 100).to(torch.uint8)
    blocks = HEAD_DIM // SCALE_BLOCK
    scale = torch.randint(118, 130, (rows, blocks), dtype=torch.uint8, generator=generator)
    return payload.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def add_shard(directory: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Add a file to a sharded checkpoint and its index."""
    path = directory / f"{name}.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"].update(dict.fromkeys(tensors, path.name))
    index["metadata"]["total_size"] += sum(t.numel() * t.element_size() for t in tensors.values())
    (directory / INDEX).write_text(json.dumps(index, indent=1))


def _save(cls: Any, config: Any, directory: Path, seed: int, shard: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():  # a fresh model mutes some paths, a trained one does not
                    parameter.normal_(0.0, 0.5)
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=shard)
    if not (directory / INDEX).is_file():
        raise ValueError(f"{directory}: {shard} makes one shard only, and several are wanted")
