"""Rows straight from safetensors files, without any of tierd's code.

The file format is parsed here (a length, a JSON header, bytes), rows are joined here, and numbers
are decoded with torch's own types. Whoever compares with this does not compare tierd with itself.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"
SCALE_BLOCK = 32


class Shards:
    """Tensors of a checkpoint, as bytes."""

    def __init__(self, directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(set(index["weight_map"].values())):
            path = directory / file
            with path.open("rb") as shard:
                (length,) = struct.unpack("<Q", shard.read(8))
                header = json.loads(shard.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                assert index["weight_map"][name] == file
                self._places[name] = (path, 8 + length, entry)

    @property
    def names(self) -> list[str]:
        return sorted(self._places)

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as uint8 [rows, bytes of a row]."""
        path, base, entry = self._places[name]
        start, end = entry["data_offsets"]
        with path.open("rb") as shard:
            shard.seek(base + start)
            data = shard.read(end - start)
        assert len(data) == end - start
        return np.frombuffer(data, dtype=np.uint8).reshape(entry["shape"][0], -1)


class EngramOracle:
    """One Engram table: 256 e4m3 payloads and 8 e8m0 scales a row."""

    def __init__(self, shards: Shards, layer: int) -> None:
        stem = f"layers.{layer}.engram.embed"
        self.payload = shards.tensor(f"{stem}.weight")
        self.scale = shards.tensor(f"{stem}.scale")
        self.rows = len(self.payload)

    def bf16(self, ids: np.ndarray) -> np.ndarray:
        """Return rows as bf16 bits: uint16 [*ids.shape, 256]."""
        flat = np.asarray(ids).reshape(-1)
        payload = torch.from_numpy(self.payload[flat]).view(torch.float8_e4m3fn)
        scale = torch.from_numpy(self.scale[flat]).view(torch.float8_e8m0fnu)
        wide = payload.float() * scale.float().repeat_interleave(SCALE_BLOCK, dim=1)
        bits = wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return bits.reshape(*np.shape(ids), -1)


def ple_bits(shards: Shards, layer: int) -> np.ndarray:
    """Return a Qwen4Exp table, shards joined: uint16 [rows, dim]."""
    stem = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_"
    names = [name for name in shards.names if name.startswith(stem)]
    names.sort(key=lambda name: int(name.removeprefix(stem).split(".")[0]))
    joined = np.concatenate([shards.tensor(name) for name in names])
    return np.ascontiguousarray(joined).view(np.uint16)


def per_layer_bits(shards: Shards, layer: int, dim: int) -> np.ndarray:
    """Return one layer's columns of a Gemma table: uint16 [rows, dim]."""
    whole = np.ascontiguousarray(shards.tensor("model.embed_tokens_per_layer.weight"))
    return whole.view(np.uint16)[:, layer * dim : (layer + 1) * dim]
