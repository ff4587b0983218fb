"""A kick right after sampling, before the next step is even launched: ``TIERD_EARLY_KICK=1``.

Layer 1 of DeepSeek-V4.1 looks its rows up after one decoder layer, too soon for any disk. But the
next step's row numbers follow from the token that was sampled and from the history that the step
has just committed, so they can be hashed while the CPU still prepares that step. The step's own
kick then finds the rows on their way. It costs every step a hash and a lookup more, so it is off
unless asked for. Not with speculative decoding, where the next tokens are the draft's.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from tierd.hook import probing, settings
from tierd.hook.sglang.engram import looked_up_elsewhere
from tierd.hook.sglang.plugin import ENGRAM_MODULE, or_exit

if TYPE_CHECKING:
    import torch

SWITCH = "TIERD_EARLY_KICK"


def patch(module: Any) -> None:
    """Patch ``...model_runner_components.ngram_embedding_manager`` if it is switched on."""
    # A probe counts from where a step begins.
    if not settings.switch(SWITCH) or probing.asked() is not None:
        return
    manager = module.NgramEmbeddingManager
    stock = manager.update_after_decode

    @functools.wraps(stock)
    def update_after_decode(self: Any, next_token_ids: torch.Tensor, forward_batch: Any) -> Any:
        result = stock(self, next_token_ids=next_token_ids, forward_batch=forward_batch)
        kicked = getattr(self.engram_hasher, "tierd_tables", ())
        if kicked and _is_plain(next_token_ids, forward_batch):
            with or_exit():
                ids = next_ids(self.engram_hasher, next_token_ids, forward_batch)
                for index, table in kicked:
                    table.kick(ids[:, index])
        return result

    manager.update_after_decode = update_after_decode


def _is_plain(tokens: torch.Tensor, batch: Any) -> bool:
    """Whether each request's next step begins with the token that was sampled for it."""
    return (
        tokens.numel() > 0
        and tokens.numel() == batch.req_pool_indices.numel() == batch.seq_lens.numel()
        and getattr(batch, "spec_info", None) is None
        and not looked_up_elsewhere(batch)
    )


def next_ids(hasher: Any, tokens: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the rows of the next step, int64 [requests, layers, columns]; history stays as it is.

    Args:
        hasher: SGLang's, its history committed up to the token before.
        tokens: the sampled ones [requests].
        batch: the step that sampled them.
    """
    engine: Any = sys.modules[ENGRAM_MODULE]
    positions, slots = batch.seq_lens, batch.req_pool_indices
    found: torch.Tensor
    if not tokens.is_cuda:
        history = hasher.history[slots]
        found, _ = hasher._torch_hash_ids(  # noqa: SLF001 - what its forward calls on a CPU
            tokens, positions, engine.MODE_DECODE, history, tokens.numel(), 1, None, None
        )
        return found
    found, _ = engine.engram_hash_ids(
        tokens,
        positions,
        mode=engine.MODE_DECODE,
        history=hasher.history,
        token_map=hasher.token_map,
        multipliers=hasher.multipliers,
        primes=hasher.primes,
        offsets=hasher.offsets,
        pad_id=hasher.pad_id,
        req_slots=slots,
        image_token_id=hasher.image_token_id,
        mm_pad_shift=engine.MM_PAD_SHIFT_VALUE,
    )
    return found
