"""Tiny checkpoints of every kind, written byte by byte without the code under test.

Each writer returns a :class:`TinyCheckpoint` whose ``tables`` are the rows that tierd must serve
(uint8 [rows, row_bytes]), by table name. Values are random bytes that the format allows.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

Tensor = tuple[str, tuple[int, ...], bytes]  # safetensors dtype, shape, bytes


@dataclasses.dataclass
class TinyCheckpoint:
    """A checkpoint on disk and what must be read from it."""

    path: Path
    tensors: dict[str, Tensor]
    tables: dict[str, NDArray[np.uint8]]

    @property
    def shards(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file: header length, header, tensors back to back in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + len(data)],
        }
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def write_checkpoint(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    shards: int = 3,
    config: dict[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Spread tensors over shards in a shuffled order, with an index; one shard has no index."""
    path.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return
    names = list(tensors)
    np.random.default_rng(seed).shuffle(names)
    weight_map = {}
    for index in range(shards):
        shard = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        mine = {name: tensors[name] for name in names[index::shards]}
        write_safetensors(path / shard, mine)
        weight_map |= dict.fromkeys(mine, shard)
    total = sum(len(data) for _, _, data in tensors.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index_json))


def random_e4m3(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.uint8]:
    """Random fp8 payloads of both signs, subnormals and zeroes included, NaN left out."""
    payload = rng.integers(0, 256, (rows, dim), np.uint8)
    payload[(payload & 0x7F) == 0x7F] ^= 1
    return payload


def filler(rng: np.random.Generator) -> dict[str, Tensor]:
    """Tensors that are no tables, as every checkpoint has them."""
    return {
        "model.embed_tokens.weight": ("BF16", (16, 8), rng.bytes(16 * 8 * 2)),
        "model.layers.0.mlp.down_proj.weight": ("BF16", (8, 24), rng.bytes(8 * 24 * 2)),
        "model.norm.weight": ("F32", (8,), rng.bytes(32)),
    }


def engram(
    path: Path,
    *,
    layers: tuple[int, ...] = (1, 14),
    rows: int | tuple[int, ...] = 1000,
    dim: int = 256,
    prefix: str = "",
    shards: int = 3,
    seed: int = 1,
    config: dict[str, Any] | None = None,
    scales: tuple[int, ...] = tuple(range(255)),
) -> TinyCheckpoint:
    """DeepSeek-V4.1: fp8 payloads and e8m0 scales of every scale byte but 255, or of these."""
    rng = np.random.default_rng(seed)
    tensors, tables = filler(rng), {}
    counts = (rows,) * len(layers) if isinstance(rows, int) else rows
    for layer, count in zip(layers, counts, strict=True):
        weight = random_e4m3(rng, count, dim)
        scale = rng.integers(0, 255, (count, dim // 32), np.uint8)
        scale = np.array(scales, np.uint8)[scale % len(scales)]
        stem = f"{prefix}layers.{layer}.engram.embed"
        tensors[f"{stem}.weight"] = ("F8_E4M3", weight.shape, weight.tobytes())
        tensors[f"{stem}.scale"] = ("F8_E8M0", scale.shape, scale.tobytes())
        tables[f"layers.{layer}.engram"] = np.concatenate([weight, scale], axis=1)
    write_checkpoint(path, tensors, shards=shards, seed=seed, config=config)
    return TinyCheckpoint(path, tensors, tables)


def ple(
    path: Path,
    *,
    layers: tuple[int, ...] = (0,),
    rows: int = 1002,
    dim: int = 160,
    parts: int = 4,
    scale: float | None = None,
    scale_dtype: str = "BF16",
    shards: int = 3,
    seed: int = 2,
    config: dict[str, Any] | None = None,
) -> TinyCheckpoint:
    """Qwen4Exp: a table in row blocks; bf16, or fp8 when ``scale`` is given."""
    rng = np.random.default_rng(seed)
    tensors, tables = filler(rng), {}
    block = -(-rows // parts)
    for layer in layers:
        stem = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
        if scale is None:
            table = rng.integers(0, 256, (rows, 2 * dim), np.uint8)
        else:
            table = random_e4m3(rng, rows, dim)
            word = np.float32(scale).tobytes()
            data = word[2:] if scale_dtype == "BF16" else word
            tensors[f"{stem}.weight_scale"] = (scale_dtype, (1,), data)
        for part in range(parts):
            piece = table[part * block : (part + 1) * block]
            dtype = "BF16" if scale is None else "F8_E4M3"
            tensors[f"{stem}.shard_{part}.weight"] = (dtype, (len(piece), dim), piece.tobytes())
        tables[f"layers.{layer}.ple"] = table
    write_checkpoint(path, tensors, shards=shards, seed=seed, config=config)
    return TinyCheckpoint(path, tensors, tables)


def per_layer(
    path: Path,
    *,
    layers: int = 4,
    vocab: int = 512,
    dim: int = 16,
    shards: int = 2,
    seed: int = 3,
    nested_config: bool = True,
) -> TinyCheckpoint:
    """Gemma 3n and 4: one wide bf16 tensor, a table per layer in its columns."""
    rng = np.random.default_rng(seed)
    tensors = filler(rng)
    wide = rng.integers(0, 256, (vocab, layers * dim * 2), np.uint8)
    name = "model.language_model.embed_tokens_per_layer.weight"
    tensors[name] = ("BF16", (vocab, layers * dim), wide.tobytes())
    tables = {
        f"layers.{layer}.per_layer": wide[:, layer * dim * 2 : (layer + 1) * dim * 2]
        for layer in range(layers)
    }
    text = {"num_hidden_layers": layers, "hidden_size_per_layer_input": dim}
    config = {"text_config": text} if nested_config else text
    write_checkpoint(path, tensors, shards=shards, seed=seed, config=config)
    return TinyCheckpoint(path, tensors, tables)


def plain(
    path: Path,
    *,
    name: str = "model.layers.3.lookup.weight",
    dtype: str = "BF16",
    rows: int = 300,
    row_bytes: int = 64,
    item_bytes: int = 2,
    shards: int = 1,
    seed: int = 4,
) -> TinyCheckpoint:
    """One tensor that is a table because the operator says so."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 256, (rows, row_bytes), np.uint8)
    tensors = filler(rng)
    tensors[name] = (dtype, (rows, row_bytes // item_bytes), table.tobytes())
    write_checkpoint(path, tensors, shards=shards, seed=seed)
    return TinyCheckpoint(path, tensors, {name.removesuffix(".weight"): table})
