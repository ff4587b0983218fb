"""OasisKV under Hugging Face transformers: an attention function and a cache layer.

    session = attach(model, budget=Budget(blocks=128), rows=1, context=32768)
    model.generate(ids, cache=new_cache(session), prompt_lookup_num_tokens=1)

Works for any GQA model whose attention goes through transformers' attention interface, on the CPU
and on a GPU. Drafts come from whatever drafts under transformers (prompt lookup, an assistant,
MTP): their rows are in the verification step already. This is the rig on which the method is
tested; it runs layer by layer in Python and is no fast engine.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from tierd.errors import KvUnsupportedError
from tierd.kv.session import Session
from tierd.kv.shape import Budget, KvShape

NAME = "tierd_oasis"


def refuse(config: Any, *, cache_dtype: str = "auto") -> None:
    """Refuse a model or cache that OasisKV does not serve.

    Raises:
        KvUnsupportedError: names what stands against it.
    """
    name = type(config).__name__.removesuffix("Config")
    if getattr(config, "kv_lora_rank", None):
        raise KvUnsupportedError(
            f"{name} uses MLA: its latent KV has no heads to select for; use the engine's own "
            "sparse KV"
        )
    if cache_dtype.startswith("fp8") or "float8" in cache_dtype:
        raise KvUnsupportedError(f"a KV cache of {cache_dtype} is not supported; use bf16 or fp16")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "use_sliding_window", False) or (
        getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    ):
        kinds.add("sliding_attention")
    if kinds != {"full_attention"}:
        others = ", ".join(sorted(kinds - {"full_attention"}))
        raise KvUnsupportedError(f"{name} has {others} layers; only full attention is supported")
    if getattr(config, "is_encoder_decoder", False):
        raise KvUnsupportedError(f"{name} attends to an encoder; only decoders are supported")
    if getattr(config, "attn_logit_softcapping", None):
        raise KvUnsupportedError(f"{name} caps its attention scores, which no kernel here does")


def shape_of(config: Any, dtype: torch.dtype, block: int = 16) -> KvShape:
    """Return the shape of a model's KV cache.

    Raises:
        KvUnsupportedError: a head size or dtype that is not supported.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % kv_heads:
        raise KvUnsupportedError(f"{heads} query heads do not divide among {kv_heads} KV heads")
    return KvShape(config.num_hidden_layers, kv_heads, heads // kv_heads, dim, block, dtype)


def attach(
    model: Any, *, budget: Budget, rows: int, context: int, threshold: int | None = None,
    block: int = 16, cache_dtype: str = "auto", **options: Any,
) -> Session:  # fmt: skip
    """Give a model our attention, and return the session that its caches belong to.

    Args:
        model: a transformers causal language model.
        budget: K and the cap.
        rows: sequences at once; all of one length, without padding.
        context: tokens that a sequence may have.
        threshold: tokens from which a sequence is sparse; by default K blocks and the local ones.
        block: tokens of a block.
        cache_dtype: of keys and values; only what the model computes in.
        options: see `Session`: view, judge.

    Raises:
        KvUnsupportedError: the model is not one that OasisKV serves.
    """
    config = model.config.get_text_config()
    refuse(config, cache_dtype=cache_dtype)
    shape = shape_of(config, model.dtype, block)
    if threshold is None:
        threshold = budget.slots * block
    session = Session(
        shape, budget, rows=rows, context=context, threshold=threshold, device=model.device,
        **options,
    )  # fmt: skip
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups"):
            module.tierd_kv = session
    return session


def new_cache(session: Session) -> Cache:
    """Return an empty cache on the session; what it held before ends."""
    session.reset()
    return Cache(layers=[OasisLayer(session, n) for n in range(session.shape.layers)])


class OasisLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that hands keys and values on; the session keeps them."""

    is_sliding = False
    is_croppable = True

    def __init__(self, session: Session, number: int) -> None:
        super().__init__()
        self._session, self._number = session, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the session has allocated everything."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Open the step at the first layer; the attention function stores what passes here."""
        if self._number == 0:
            self._session.settle()
            self._session.begin(len(key_states), key_states.shape[2])
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self._session.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset that a mask would have."""
        return self._session.length + query_length, 0

    def get_max_length(self) -> int:
        """No maximum but the session's context."""
        return -1

    def reset(self) -> None:
        """End all requests."""
        self._session.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget rejected drafts; layers agree, so the first one does it."""
        if self._number == 0 and tokens_to_remove < 0:
            self._session.crop(self._session.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:  # noqa: ARG002
        """Beams would fork requests at every step.

        Raises:
            KvUnsupportedError: always.
        """
        raise KvUnsupportedError("beam search is not supported; generate greedily or by sampling")


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention as transformers calls it: query [batch, heads, queries, head_dim].

    Masks carry nothing but causality here, which positions imply; padding is refused.
    """
    session: Session = module.tierd_kv
    if attention_mask is not None and attention_mask.shape[-2] == attention_mask.shape[-1]:
        last = attention_mask[..., -1, :]
        if not bool(last.all() if last.dtype == torch.bool else (last == 0).all()):
            raise KvUnsupportedError("padded batches are not supported; use prompts of one length")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = session.attend(module.layer_idx, q, k, v, scale)
    if module.layer_idx == session.shape.layers - 1:
        session.end()
    return out.contiguous(), None
