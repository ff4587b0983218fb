"""Qwen4Exp: the n-gram table of each PLE layer (``layers.N.ple.ple_embedding.ngram_embedding``).

The stock module hashes token ids to row numbers and looks them up when its layer runs. Its hash is
left to it; only the lookup is replaced. All row numbers follow from the input ids and the cached
context, so they are hashed once more when the model's forward starts, and reading starts there.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierd.hook import rows
from tierd.types import TableKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def patch(module: ModuleType) -> None:
    """Patch ``transformers.models.qwen4_exp.modeling_qwen4_exp``."""
    name = "Qwen4ExpTextNGramEmbedding"
    setattr(module, name, _subclass(getattr(module, name)))
    text_model = module.Qwen4ExpTextModel
    stock_init = text_model.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        self.register_forward_pre_hook(_kick_all, with_kwargs=True)

    text_model.__init__ = init


class _Kicked(Exception):  # noqa: N818 - not an error: it ends a stock forward at the lookup
    pass


_kicking: ContextVar[NGramRows | None] = ContextVar("_kicking", default=None)


class NGramRows(nn.Module):
    """In place of the table's ``nn.Embedding``."""

    weight: torch.Tensor
    tierd_ignored_key = r"ple_embedding\.ngram_embedding\.(weight|shard_\d+\.weight)$"

    def __init__(self, table_rows: int, dim: int, layer: int) -> None:
        super().__init__()
        self.tierd = rows.TableStandIn(TableKind.PLE, [layer], table_rows, dim)
        self.register_buffer("weight", torch.empty(0, dim), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [*ids.shape, dim]; see :class:`rows.TableStandIn`."""
        if _kicking.get() is self:
            self.tierd.kick(ids, self.weight)
            raise _Kicked
        rows.refuse_training(self)
        if self.weight.device.type == "cuda":
            self.tierd.kick(ids, self.weight)
        return self.tierd.gather(ids, self.weight)

    @contextlib.contextmanager
    def kicks_only(self) -> Iterator[None]:
        """Let this thread's :meth:`forward` kick, and end the forward that called it."""
        token = _kicking.set(self)
        try:
            yield
        except _Kicked:
            pass
        finally:
            _kicking.reset(token)

    def _apply(self, *args: Any) -> Any:
        super()._apply(*args)  # type: ignore[no-untyped-call]
        self.tierd.cast(self.weight.dtype)
        return self


def _subclass(stock: type[nn.Module]) -> type[nn.Module]:
    class TierdNGramEmbedding(stock):  # type: ignore[valid-type, misc]
        """The stock module without its table."""

        ngram_embedding: Any

        def __init__(
            self, config: Any, embedding_dim: int, layer_idx: int, ple_layer_index: int = 0
        ) -> None:
            rows.check_origin()
            with rows.TablesOnMeta():
                super().__init__(config, embedding_dim, layer_idx, ple_layer_index)
            sizes = (self.ngram_embedding.num_embeddings, self.ngram_embedding.embedding_dim)
            self.ngram_embedding = NGramRows(*sizes, layer_idx)

        def tierd_kick(self, input_ids: torch.Tensor, cache: Any) -> None:
            """Hash ids as :meth:`forward` will and start reading; the cache is left alone."""
            with self.ngram_embedding.kicks_only():
                stock.forward(self, input_ids, None if cache is None else _Peek(cache))

    TierdNGramEmbedding.__qualname__ = TierdNGramEmbedding.__name__ = stock.__name__
    return TierdNGramEmbedding


class _Peek:
    """A cache that can be read and is not written."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""


def _kick_all(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Start all PLE layers' reads: a pre-hook of the text model's forward.

    What it cannot see (ids that follow from embeddings, a mask made elsewhere) is read when the
    layer asks for it. So is everything on a GPU, where to hash twice costs more kernels than the
    stock step has time for; reading starts where the layer looks its rows up.
    """
    ids = kwargs.get("ple_input_ids")
    if ids is None:
        ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, torch.Tensor) or ids.device.type == "cuda":
        return
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and ids.shape[1] > 1:
        # The stock model reads padding as end of text.
        eos = model.config.eos_token_id
        eos = eos[0] if isinstance(eos, list) else eos
        ids = torch.where(mask[:, -ids.shape[1] :].bool(), ids, eos)
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    for layer in model.layers:
        if layer.ple is not None:
            layer.ple.ple_embedding.tierd_kick(ids, cache)
