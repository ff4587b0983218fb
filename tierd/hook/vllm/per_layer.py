"""Gemma 3n and Gemma 4: ``embed_tokens_per_layer``, one row of columns per decoder layer.

vLLM makes it of the class of its token embedding and lets that be replaced by its name
(``register_oot``), so the replacement goes by the place in the model and hands everything else back
to the stock class. An image holds one table per layer's columns: all of them are kicked first and
then gathered, and the row is put together as the stock table has it.

The stock forward is compiled. The lookup is one operator that torch.compile does not look into; it
takes a number for the table and writes into a tensor that it is given.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierd.errors import HookError
from tierd.hook import rows
from tierd.hook.served import ServedTable
from tierd.hook.vllm import guards, tables
from tierd.hook.vllm.plugin import or_exit
from tierd.types import TableKind

OPERATOR = "tierd_per_layer_rows"
# Gemma 4 and Gemma 3n.
_PLACE = re.compile(r"(^|\.)(embed_tokens_per_layer|per_layer_embed_tokens)$")

_served: list[tuple[ServedTable, ...]] = []
"""The tables of each stand-in; its operator is called with the place in this list."""


def patch(module: Any) -> None:
    """Patch ``vllm.model_executor.layers.vocab_parallel_embedding``.

    Raises:
        HookError: another plugin has taken the class's place.
    """
    stock = module.VocabParallelEmbedding
    guards.require_free(stock.__name__)
    own = {"tierd_module": module, "tierd_stock": stock, "__module__": __name__}
    stock.register_oot(type(stock.__name__, (Columns, stock), own))


class Lookup:
    """In front of the stock method: embeds by the operator."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """There are none."""

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """Return rows [*ids.shape, columns] in the dtype of the stock table."""
        out = torch.empty(
            (*input_.shape, layer.embedding_dim), dtype=torch.bfloat16, device=input_.device
        )
        getattr(torch.ops.vllm, OPERATOR)(input_, out, layer.tierd_handle)
        return out.to(layer.weight.dtype)


class Columns:
    """In front of the stock class: what it is where it would be the per-layer table.

    Attributes:
        tierd_tables: a table for each layer's columns.
    """

    tierd_module: Any  # vLLM's, set by the class that is made of this and the stock one
    tierd_stock: Any
    weight: Any
    quant_method: Any

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Whatever the stock class has."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **options: Any) -> None:
        if not _PLACE.search(options.get("prefix", "")):
            stock = self.tierd_stock
            self.__class__ = stock  # nobody will see that it was another
            stock.__init__(self, num_embeddings, embedding_dim, *args, **options)
            return
        with or_exit():
            device = torch.empty(0).device
            with rows.TablesOnMeta():
                super().__init__(  # type: ignore[call-arg]
                    num_embeddings, embedding_dim, *args, **options
                )
            self._tierd_take(device)

    def _tierd_take(self, device: torch.device) -> None:
        unquantized = self.tierd_module.UnquantizedEmbeddingMethod
        if type(self.quant_method) is not unquantized:
            raise HookError(
                f"{self.prefix} is quantized ({type(self.quant_method).__name__}); tierd "
                "serves bf16 rows: load the model without quantizing it, or unset TIERD"
            )
        if self.tp_size > 1:
            raise HookError(
                f"{self.prefix} is sharded over {self.tp_size} ranks, which was not tried for "
                "Gemma's table; start vLLM with --tensor-parallel-size 1, or unset TIERD"
            )
        layers = int(tables.current_config().model_config.hf_text_config.num_hidden_layers)
        empty = torch.empty(0, self.embedding_dim, dtype=self.weight.dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.quant_method = type("TierdEmbeddingMethod", (Lookup, unquantized), {})()
        self.tierd_tables = tuple(
            ServedTable(
                TableKind.PER_LAYER,
                layer,
                rows=self.org_vocab_size,
                dim=self.embedding_dim // layers,
                owned=(0, self.org_vocab_size),
                device=device,
            )
            for layer in range(layers)
        )
        ranks = [tables.register(table, 1) for table in self.tierd_tables]
        self._tierd_rank = ranks[0]
        self.weight.weight_loader = tables.load_nothing(ranks[0])
        self.tierd = self.tierd_tables[0]
        self.tierd_handle = len(_served)
        _served.append(self.tierd_tables)
        _register_operator()

    def tierd_test(self) -> None:
        """Hold sampled rows of every layer's columns against the checkpoint's bytes."""
        for table in self.tierd_tables:
            self._tierd_rank.test(table, lambda raw: raw.contiguous().view(torch.bfloat16))


@functools.cache
def _register_operator() -> None:
    from vllm.utils.torch_utils import direct_register_custom_op  # noqa: PLC0415 - the engine's own

    direct_register_custom_op(
        op_name=OPERATOR, op_func=_look_up, mutates_args=["out"], fake_impl=_look_up_nothing
    )


# Their annotations become the operator's schema.
def _look_up(ids: torch.Tensor, out: torch.Tensor, handle: int) -> None:
    found = _served[handle]
    parts = torch.empty((len(found), *ids.shape, found[0].dim), dtype=out.dtype, device=out.device)
    for table in found:
        table.kick(ids)
    for table, part in zip(found, parts, strict=True):
        table.gather(ids, part)
    out.view(*ids.shape, len(found), -1).copy_(parts.movedim(0, -2))


def _look_up_nothing(ids: torch.Tensor, out: torch.Tensor, handle: int) -> None:
    del ids, out, handle
