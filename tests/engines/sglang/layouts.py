"""Tiny checkpoints whose tables have SGLang's real layouts. Needs nothing of SGLang."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests import checkpoints
from tierd.gpu.engram import EngramLayout, primes_from

if TYPE_CHECKING:
    from pathlib import Path

    from tests.checkpoints import TinyCheckpoint

LAYERS = (1, 14)
ENGRAM = {
    "engram_layer_ids": list(LAYERS),
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_vocab_size": 401,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99_092,
}
PLE_LAYER = 1
PLE = {
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 500,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
    "ple_layer_ids": [PLE_LAYER + 1],  # counted from 1
    "vocab_size": 32_000,
    "eos_token_id": 5,
}
PLE_DIM = 160
PLE_SCALE = 0.0625


def engram_layout() -> EngramLayout:
    return EngramLayout.make(LAYERS, vocab_size=ENGRAM["engram_vocab_size"])


def ple_rows() -> int:
    total = int(primes_from(PLE["ngram_vocab_size_base"], 16).sum())
    step = PLE["make_ngram_vocab_size_divisible_by"]
    return -(-total // step) * step


def write(root: Path) -> dict[str, TinyCheckpoint]:
    """Write every checkpoint under ``root``; by name."""
    rows = engram_layout().rows
    config = {**ENGRAM, "engram_num_embeddings": list(rows)}
    made = {
        "v41": checkpoints.engram(root / "v41", layers=LAYERS, rows=rows, config=config),
        "v41-other": checkpoints.engram(
            root / "v41-other", layers=LAYERS, rows=rows, config=config, seed=9
        ),
        "ple-bf16": _ple(root / "ple-bf16", None),
        "ple-fp8": _ple(root / "ple-fp8", PLE_SCALE),
    }
    nothing = root / "v41-no-weights"
    nothing.mkdir()
    (nothing / "config.json").write_text(json.dumps(config))
    return made


def _ple(path: Path, scale: float | None) -> TinyCheckpoint:
    return checkpoints.ple(
        path,
        layers=(PLE_LAYER,),
        rows=ple_rows(),
        dim=PLE_DIM,
        scale=scale,
        parts=PLE["split_ngram_parts"],
        config={**PLE, "ple_embed_dim": 16 * PLE_DIM},
        seed=3 if scale else 4,
    )
