"""Tiny checkpoints whose tables have vLLM's real layouts. Needs nothing of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from tests import checkpoints
from tests.engines.sglang.layouts import PLE, PLE_DIM, PLE_LAYER, PLE_SCALE, ple_rows
from tierd.gpu.engram import EngramLayout

if TYPE_CHECKING:
    from pathlib import Path

    from tests.checkpoints import TinyCheckpoint

__all__ = ["PLE", "PLE_DIM", "PLE_LAYER"]

LAYERS = (1, 14)
# 0 is a scale of 0 to vLLM. The interpreter rounds subnormals in its own way, so no tiny ones.
SCALES = (0, *range(110, 145))
TOKENS, DISTINCT = 512, 410
TOKEN_MAP = [token % DISTINCT for token in range(TOKENS)]
ENGRAM = {
    "engram_layer_ids": list(LAYERS),
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_vocab_size": 401,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": DISTINCT,
}


def engram_layout() -> EngramLayout:
    return EngramLayout.make(LAYERS, vocab_size=401)


def engram_config() -> SimpleNamespace:
    return SimpleNamespace(**ENGRAM, engram_num_embeddings=list(engram_layout().rows))


def write(root: Path) -> dict[str, TinyCheckpoint]:
    """Write every checkpoint under ``root``; by name."""
    rows = engram_layout().rows
    config = {**ENGRAM, "engram_num_embeddings": list(rows)}
    made = {
        name: checkpoints.engram(
            root / name, layers=LAYERS, rows=rows, config=config, seed=seed, scales=SCALES
        )
        for name, seed in (("v41", 1), ("v41-other", 9))
    }
    for name, scale in (("ple-bf16", None), ("ple-fp8", PLE_SCALE)):
        made[name] = checkpoints.ple(
            root / name, layers=(PLE_LAYER,), rows=ple_rows(), dim=PLE_DIM, scale=scale,
            parts=PLE["split_ngram_parts"], config={**PLE, "ple_embed_dim": 16 * PLE_DIM},
            seed=3 if scale else 4,
        )  # fmt: skip
    return made
