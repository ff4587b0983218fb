"""Gemma 3n and Gemma 4: ``embed_tokens_per_layer``, one row of columns per decoder layer.

The stock model looks up all layers' columns when its forward starts, scales them and hands each
layer its own. An image holds one table per layer's columns, so all of them are kicked first and
then gathered, and the row is put together as the stock table has it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from tierd.errors import HookError
from tierd.hook import rows
from tierd.types import TableKind

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

_config: ContextVar[Any] = ContextVar("_config", default=None)
"""The config of the text model that is being constructed."""


def patch(module: ModuleType) -> None:
    """Patch ``transformers.models.gemma3n.modeling_gemma3n`` or its ``gemma4`` sibling."""
    family = "Gemma4" if "gemma4" in module.__name__ else "Gemma3n"
    name = f"{family}TextScaledWordEmbedding"
    setattr(module, name, _subclass(getattr(module, name)))
    text_model = getattr(module, f"{family}TextModel")
    stock_init = text_model.__init__

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        token = _config.set(config)
        try:
            stock_init(self, config, *args, **kwargs)
        finally:
            _config.reset(token)
        _check_places(self, config)

    text_model.__init__ = init


def _check_places(model: Any, config: Any) -> None:
    """Hold the guess of :func:`_is_table` against where the modules went.

    Raises:
        HookError: the table was not replaced, or the token embedding was.
    """
    wants_table = bool(getattr(config, "hidden_size_per_layer_input", 0))
    table = getattr(model, "embed_tokens_per_layer", None)
    replaced = isinstance(getattr(table, "tierd", None), rows.TableStandIn)
    if replaced != wants_table or hasattr(model.embed_tokens, "tierd"):
        raise HookError(
            f"{type(model).__name__}: tierd could not tell its per-layer table from its token "
            "embedding; run this model without tierd"
        )


def _is_table(given: dict[str, Any]) -> bool:
    """Whether a scaled embedding that is constructed with these arguments is the per-layer table.

    The text model makes two of one class: the token embedding and, after it, the table.
    """
    config = _config.get()
    dim = getattr(config, "hidden_size_per_layer_input", 0)
    if not dim:
        return False
    expected = {
        "num_embeddings": config.vocab_size_per_layer_input,
        "embedding_dim": config.num_hidden_layers * dim,
        "embed_scale": dim**0.5,
    }
    return all(given.get(name) == value for name, value in expected.items())


def _subclass(stock: type[nn.Module]) -> type[nn.Module]:
    class ScaledWordEmbedding(stock):  # type: ignore[valid-type, misc]
        """The stock class; but where it would be the table, its stand-in."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            names = ("num_embeddings", "embedding_dim", "padding_idx", "embed_scale")
            given = dict(zip(names, args, strict=False)) | kwargs
            if cls is ScaledWordEmbedding and _is_table(given):
                return object.__new__(PerLayerRows)
            return object.__new__(cls)

    class PerLayerRows(ScaledWordEmbedding):
        """The table's place: scales and nothing else."""

        tierd_ignored_key = r"embed_tokens_per_layer\.weight$"

        def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kw: Any) -> None:
            rows.check_origin()
            with rows.TablesOnMeta():
                super().__init__(num_embeddings, embedding_dim, *args, **kw)
            del self.weight
            self.padding_idx = None  # only initialisation looks at it, and there is no row to set
            self.register_buffer("weight", torch.empty(0, embedding_dim), persistent=False)
            layers = range(_config.get().num_hidden_layers)
            dim = embedding_dim // len(layers)
            self.tierd = rows.TableStandIn(TableKind.PER_LAYER, layers, num_embeddings, dim)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            """Return scaled rows [*ids.shape, layers * dim], as the stock module computes them."""
            rows.refuse_training(self)
            self.tierd.kick(input_ids, self.weight)
            values = self.tierd.gather(input_ids, self.weight)
            scale: torch.Tensor = self.embed_scale.to(self.weight.dtype)
            return values * scale

        def _apply(self, *args: Any) -> Any:
            super()._apply(*args)
            self.tierd.cast(self.weight.dtype)
            return self

    for cls in (ScaledWordEmbedding, PerLayerRows):
        cls.__qualname__ = cls.__name__ = stock.__name__
    return ScaledWordEmbedding
