"""The Engram classes of vLLM, unmodified, on a Llama: the table path of V4.1 in a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.models.deepseek_v41.common.engram as stock
from torch import nn
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

ARCHITECTURE = "EngramLlamaForCausalLM"
# Name in a checkpoint of V4.1's kind -> name in the modules below.
_RENAMED = {
    ".embed.weight": ".embed_tokens.weight",
    ".embed.scale": ".embed_tokens.weight_scale_inv",
}


def register() -> None:
    """Make the architecture known; --engram-config goes by its name."""
    from vllm import ModelRegistry
    from vllm.config import engram

    engram._NGRAM_LAYER_FIELDS.setdefault(ARCHITECTURE, "engram_layer_ids")
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:{ARCHITECTURE}")


class SlidingCache(nn.Module):
    """What the hasher wants of V4.1's cache: whether it is bound, and its block size."""

    def __init__(self, attention: nn.Module, block_size: int) -> None:
        super().__init__()
        self.__dict__["attention"] = attention  # no child: it belongs to its layer
        self.block_size = block_size

    @property
    def kv_cache(self) -> torch.Tensor:
        return self.__dict__["attention"].kv_cache


class EngramLlamaForCausalLM(LlamaForCausalLM):
    decoder_replay_layers = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        layout = stock.EngramLayout.from_config(config)
        stream = torch.cuda.Stream() if vllm_config.engram_config.cpu_offload else None
        self.engrams = nn.ModuleDict(
            {
                str(layer): stock.Engram(
                    config, None, layout, index, False, f"engrams.{layer}", prefetch_stream=stream
                )
                for index, layer in enumerate(layout.layer_ids)
            }
        )
        attention = self.model.layers[0].self_attn.attn
        self.first_attention = attention.layer_name
        cache = SlidingCache(attention, vllm_config.cache_config.block_size)
        self.engram_hash = stock.NgramHashState(vllm_config, layout, cache)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights((renamed(name), weight) for name, weight in weights)

    def get_model_state_cls(self) -> type:
        return DeepseekV41ModelState

    @property
    def token_lookback_depth(self) -> int:
        return self.engram_hash.lookback_depth

    def hashes(
        self, input_ids: torch.Tensor, positions: torch.Tensor, lookback: torch.Tensor
    ) -> torch.Tensor | None:
        """Row numbers [tokens, layers, columns]; None while no cache is bound."""
        if not is_forward_context_available():
            return None
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not self.engram_hash.ensure_cache():
            return None
        starts = metadata[self.first_attention].query_start_loc
        dead = torch.zeros_like(input_ids, dtype=torch.bool)
        dead_before = torch.zeros_like(lookback, dtype=torch.bool)
        return self.engram_hash(
            input_ids, positions, starts, dead, lookback, dead_before, None, None
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,  # noqa: ARG002 - as vLLM calls it
        inputs_embeds: torch.Tensor | None = None,
        lookback_token_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        assert lookback_token_ids is not None
        hidden = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hashes = self.hashes(input_ids, positions, lookback_token_ids)
        if hashes is not None:
            for one in self.engrams.values():
                one.prepare_embeddings(hashes[:, one.layer_hash_index])
        residual = None
        for index, layer in enumerate(self.model.layers):
            if hashes is not None and str(index) in self.engrams:
                one = self.engrams[str(index)]
                stream = hidden if residual is None else hidden + residual
                mixed = one(stream.unsqueeze(1), hashes[:, one.layer_hash_index], None)
                hidden, residual = mixed.squeeze(1), None
            hidden, residual = layer(positions, hidden, residual)
        return self.model.norm(hidden, residual)[0]


def renamed(name: str) -> str:
    if ".engram." not in name:
        return name
    name = name.replace("layers.", "engrams.", 1).replace(".engram.", ".")
    for end, other in _RENAMED.items():
        if name.endswith(end):
            return name.removesuffix(end) + other
    return name
