"""Qwen4Exp: the n-gram table of each PLE layer, as SGLang offloads it to host memory.

``Qwen4ExpPinnedHostEmbedding.gather`` is called on a side stream while the layer before runs, and
joined where the rows are needed. It is replaced, and the table it would read is never allocated:
its parameter stays on the meta device, where the stock loader's copies move nothing.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierd.errors import HookError
from tierd.hook.served import ServedTable
from tierd.hook.sglang import tables
from tierd.hook.sglang.plugin import or_exit
from tierd.types import RowFormat, TableKind

if TYPE_CHECKING:
    from collections.abc import Iterator

_STORED = {RowFormat.BF16: torch.bfloat16, RowFormat.E4M3: torch.float8_e4m3fn}


def patch(module: Any) -> None:
    """Patch ``sglang.srt.models.qwen4_exp``."""
    stock = module.Qwen4ExpPinnedHostEmbedding
    module.Qwen4ExpPinnedHostEmbedding = _subclass(module, stock)


def _subclass(module: Any, stock: Any) -> type[nn.Module]:
    class TierdHostEmbedding(stock):  # type: ignore[misc]
        """The stock class without its table."""

        def __init__(self, embedding: Any, **kwargs: Any) -> None:
            with or_exit():
                tables.require_published()
                device = embedding.weight_scale.device
                with _table_on_meta(module):
                    super().__init__(embedding, **kwargs)
                # Dummy weights are written to what the state holds; meta has no memory for them.
                self._register_state_dict_hook(_drop_table)
                vocabulary = self.shard_indices
                self.tierd = ServedTable(
                    TableKind.PLE,
                    None,
                    rows=self.org_vocab_size,
                    dim=self.embedding_dim,
                    owned=(vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index),
                    device=device,
                )
                self._tierd_rank = tables.register(self.tierd)

        def gather(self, input_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            """Rows of ids that this rank owns, +0 for others, before the table's scale; bf16."""
            shape = (*input_ids.shape, self.embedding_dim)
            output = self.allocate_output(shape, input_ids.device) if out is None else out
            _check_output(output, shape)
            ids = input_ids.long()
            self.tierd.begins()
            with or_exit():
                self.tierd.kick(ids)
                self.tierd.gather(ids, output)
            return output

        def tierd_bind(self, layer: int) -> None:
            """Take the layer's table.

            Raises:
                HookError: there is none, or it is stored in another dtype than the model's.
            """
            self.tierd.layer = layer
            spec = self._tierd_rank.spec(self.tierd)
            if _STORED.get(spec.row_format) != self.weight.dtype:
                raise HookError(
                    f"{spec.name} is stored as {spec.row_format.value}, but the model would hold "
                    f"it as {self.weight.dtype}: SGLang would convert it; set the config's "
                    "ple_embedding_dtype to the checkpoint's, or unset TIERD"
                )

        def tierd_test(self) -> None:
            """Hold sampled rows against what the stock gather makes of the checkpoint's bytes."""
            stored = functools.partial(decode, stock, self.weight.dtype, self.embedding_dim)
            self._tierd_rank.test(self.tierd, stored)

    TierdHostEmbedding.__qualname__ = TierdHostEmbedding.__name__ = stock.__name__
    return TierdHostEmbedding


def _check_output(output: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse what the stock gather refuses.

    Raises:
        ValueError: another shape or dtype.
    """
    if tuple(output.shape) != shape or output.dtype != torch.bfloat16:
        raise ValueError(
            f"invalid PLE output: {tuple(output.shape)} of {output.dtype}, not {shape}"
        )


@contextlib.contextmanager
def _table_on_meta(module: Any) -> Iterator[None]:
    """While it is entered, the module's tables take no memory."""
    allocate = module.allocate_ple_host_table
    module.allocate_ple_host_table = _on_meta
    try:
        yield
    finally:
        module.allocate_ple_host_table = allocate


def _on_meta(shape: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _drop_table(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    state.pop(prefix + "weight", None)


def decode(stock: Any, dtype: torch.dtype, dim: int, raw: torch.Tensor) -> torch.Tensor:
    """Decode rows by the stock class's own gather where its kernel runs, by a cast elsewhere.

    Args:
        stock: SGLang's ``Qwen4ExpPinnedHostEmbedding``.
        dtype: how rows are stored.
        dim: values of a row.
        raw: uint8 [n, row bytes], as the checkpoint stores them.

    Returns:
        bf16 [n, dim].
    """
    weight = raw.contiguous().view(dtype)
    if raw.device.type != "cuda":
        return weight.to(torch.bfloat16)
    ids = torch.arange(len(raw), device=raw.device)
    probe = SimpleNamespace(
        embedding_dim=dim,
        weight=weight,
        shard_indices=SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=len(raw)),
        _file_prefetcher=None,
        _block_d=1 << (dim - 1).bit_length(),
    )
    out = torch.empty((len(raw), dim), dtype=torch.bfloat16, device=raw.device)
    decoded: torch.Tensor = stock.gather(probe, ids, out)
    return decoded
