"""A demo model: a tiny DeepSeek-V4 with Engram layers, standing in for DeepSeek-V4.1.

transformers has no V4.1 yet. This puts an Engram module in front of some layers of its V4, made
tiny, with the real layout: 24 hash columns, primes, multipliers, the true tokenizer's compressed
map, 264-byte rows, tensor names. The weights are random, so its text is noise; which rows it reads
is not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tierd.gpu.engram import NOTHING, EngramHash, EngramLayout
from tierd.tools.deepseek_tokens import deepseek_token_map

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

HEAD_DIM = 256
SCALE_BLOCK = 32
_ENGRAM_KEYS = r"(^|\.)layers\.\d+\.engram\."


class RowSource(Protocol):
    """Where an Engram module's rows come from."""

    def kick(self, ids: torch.Tensor) -> None:
        """Say which rows will be wanted; int64 of any shape."""

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rows to ``out``, bf16 [*ids.shape, 256]."""


class RowsInMemory:
    """The stock way: both tensors of the table in memory."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Take a table.

        Args:
            weight: float8_e4m3fn [rows, 256].
            scale: float8_e8m0fnu [rows, 8].
        """
        self.weight = weight
        self.scale = scale

    def kick(self, ids: torch.Tensor) -> None:
        """Everything is here already."""

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Dequantise in fp32, round once to bf16."""
        flat = ids.reshape(-1)
        values = self.weight.view(torch.uint8)[flat].view(torch.float8_e4m3fn).float()
        scales = self.scale.view(torch.uint8)[flat].view(torch.float8_e8m0fnu).float()
        blocks = values.view(len(flat), -1, SCALE_BLOCK)
        wide = blocks * scales.unsqueeze(-1)
        out.copy_(wide.flatten(-2).to(torch.bfloat16).view(out.shape))


class Engram(nn.Module):
    """Gated n-gram memory, added to the residual streams in front of one layer."""

    def __init__(self, hidden_size: int, streams: int, columns: int) -> None:
        super().__init__()
        self.wkv = nn.Linear(columns * HEAD_DIM, hidden_size * (streams + 1), bias=False)
        self.q_weight = nn.Parameter(torch.ones(streams, hidden_size))
        self.k_weight = nn.Parameter(torch.ones(streams, hidden_size))

    def forward(self, residual: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Gate and add.

        Args:
            residual: [batch, length, streams, hidden].
            embedded: rows [batch, length, columns, 256] in bf16.

        Returns:
            the residual with the memory added, same shape and dtype.
        """
        streams, hidden = residual.shape[-2:]
        mixed: torch.Tensor = self.wkv(embedded.flatten(-2).to(self.wkv.weight.dtype)).float()
        keys, value = mixed[..., : streams * hidden], mixed[..., streams * hidden :]
        keys = _normal(keys.reshape(residual.shape)) * self.k_weight.float()
        queries = _normal(residual.float()) * self.q_weight.float()
        match = (keys * queries).sum(-1, keepdim=True) / hidden**0.5
        gate = torch.sigmoid(match.abs().clamp_min(1e-6).sqrt() * match.sign())
        return (residual.float() + gate * value.unsqueeze(-2)).to(residual.dtype)


def _normal(values: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6)


class EngramModel:
    """A loaded stand-in: a stock tiny V4 with hooks on it.

    Attributes:
        base: the stock model; its ``generate`` runs the whole.
        hasher: token ids to row numbers.
        sources: where each layer's rows come from.
    """

    def __init__(
        self,
        base: DeepseekV4ForCausalLM,
        engrams: dict[int, Engram],
        hasher: EngramHash,
        sources: Mapping[int, RowSource],
    ) -> None:
        self.base = base
        self.hasher = hasher
        self._engrams = engrams
        self.sources = dict(sources)
        self._context: NDArray[np.int64] | None = None
        self._ids: dict[int, torch.Tensor] = {}
        base.model.register_forward_pre_hook(self._start, with_kwargs=True)
        for layer in engrams:
            base.model.layers[layer].register_forward_pre_hook(self._inject(layer))

    @classmethod
    def load(cls, directory: Path, sources: Mapping[int, RowSource] | None = None) -> EngramModel:
        """Load a checkpoint that ``write_engram`` wrote.

        Args:
            directory: the checkpoint.
            sources: layer -> where its rows come from; None reads the tables into memory.
        """
        config = DeepseekV4Config.from_pretrained(directory)
        base = _load_base(directory)
        layout = layout_of(config)
        hasher = EngramHash(layout, deepseek_token_map())
        engrams = {}
        for layer in layout.layer_ids:
            engram = Engram(config.hidden_size, config.hc_mult, layout.columns)
            names = ("wkv.weight", "q_weight", "k_weight")
            state = {name: read_tensor(directory, engram_key(layer, name)) for name in names}
            engram.load_state_dict(state)
            engrams[layer] = engram.eval().to(base.dtype)
        if sources is None:
            sources = {layer: rows_in_memory(directory, layer) for layer in layout.layer_ids}
        return cls(base, engrams, hasher, sources)

    def use(self, sources: Mapping[int, RowSource]) -> None:
        """Read rows from elsewhere from now on; layer -> source."""
        self.sources = dict(sources)

    def _start(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        """Hash the step's tokens and kick every layer's reads, before the first layer runs."""
        tokens = kwargs["input_ids"].numpy()
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            tokens = np.where(mask[:, -tokens.shape[1] :].numpy() != 0, tokens, NOTHING)
        if cache is None or cache.get_seq_length() == 0:
            self._context = None
        rows = self.hasher.rows(tokens, self._context)
        self._context = self.hasher.next_context(tokens, self._context)
        for index, layer in enumerate(self.hasher.layout.layer_ids):
            self._ids[layer] = torch.from_numpy(np.ascontiguousarray(rows[..., index, :]))
            self.sources[layer].kick(self._ids[layer])

    def _inject(self, layer: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            ids = self._ids[layer]
            embedded = torch.empty((*ids.shape, HEAD_DIM), dtype=torch.bfloat16)
            self.sources[layer].gather(ids, embedded)
            return (self._engrams[layer](args[0], embedded), *args[1:])

        return hook


def layout_of(config: DeepseekV4Config) -> EngramLayout:
    """Return the tables' layout that a config's ``engram_*`` fields describe."""
    return EngramLayout.make(
        tuple(config.engram_layer_ids),
        vocab_size=config.engram_vocab_size,
        max_ngram=config.engram_max_ngram_size,
        heads=config.engram_n_heads,
    )


def engram_key(layer: int, name: str) -> str:
    """Return the checkpoint's name of an Engram tensor."""
    return f"layers.{layer}.engram.{name}"


def rows_in_memory(directory: Path, layer: int) -> RowsInMemory:
    """Read one layer's table into memory."""
    return RowsInMemory(
        read_tensor(directory, engram_key(layer, "embed.weight")),
        read_tensor(directory, engram_key(layer, "embed.scale")),
    )


def read_tensor(directory: Path, name: str) -> torch.Tensor:
    """Read one tensor of a sharded checkpoint."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    with safe_open(directory / index["weight_map"][name], framework="pt") as shard:
        return shard.get_tensor(name)  # type: ignore[no-any-return]


def _load_base(directory: Path) -> DeepseekV4ForCausalLM:
    class Base(DeepseekV4ForCausalLM):  # type: ignore[misc]
        """The stock model, for which a checkpoint's Engram tensors are no surprise."""

        _keys_to_ignore_on_load_unexpected = (_ENGRAM_KEYS,)

    return Base.from_pretrained(directory).eval()
