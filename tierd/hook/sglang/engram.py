"""DeepSeek-V4.1: the two Engram tables (``layers.N.engram.embed``).

SGLang's lookup stands behind its collectives: ``EngramEmbedding._owned_rows`` returns the rows of
this rank's range and zeroes for the others, and whatever assembles them (all-reduce, gather of ids
under data or context parallelism) is the stock engine's. So that one method is replaced, and with
it where the rows lie; sharding, collectives and the sign of zero stay as they are.

All row numbers follow from the input ids. ``EngramHasher`` computes those of all layers first
thing in a forward, and there they are kicked.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierd.errors import HookError
from tierd.hook import rows
from tierd.hook.served import ServedTable
from tierd.hook.sglang import tables
from tierd.hook.sglang.plugin import or_exit
from tierd.types import RowFormat, TableKind

if TYPE_CHECKING:
    from collections.abc import Callable

SCALE_BLOCK = 32


def patch(module: Any) -> None:
    """Patch ``sglang.srt.layers.engram``.

    Raises:
        HookError: its tables have another row format.
    """
    if module.FP8_BLOCK_SIZE != SCALE_BLOCK:
        raise HookError(
            f"this SGLang scales blocks of {module.FP8_BLOCK_SIZE} values; images have blocks of "
            f"{SCALE_BLOCK}; run: tierd hook check sglang"
        )
    module.EngramEmbedding = _subclass(module.EngramEmbedding)
    hasher = module.EngramHasher
    hasher.forward = _kick_after(hasher.forward)


def _subclass(stock: type[nn.Module]) -> type[nn.Module]:
    # Imported by the patched module, so both are there by now.
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (  # noqa: PLC0415
        breakable_cuda_graph,
        context,
    )

    @breakable_cuda_graph.eager_on_graph(True)  # type: ignore[untyped-decorator]
    def gather_between_segments(table: ServedTable, ids: torch.Tensor, out: torch.Tensor) -> None:
        table.gather(ids, out)

    class TierdEngramEmbedding(stock):  # type: ignore[valid-type, misc]
        """The stock class without its table."""

        def __init__(
            self, num_embeddings: int, dim: int, layer_id: int, *args: Any, **kwargs: Any
        ) -> None:
            with or_exit():
                tables.require_published()
                device = torch.empty(0).device
                with rows.TablesOnMeta():
                    super().__init__(num_embeddings, dim, layer_id, *args, **kwargs)
                # No parameters: nothing to load, to offload or to fill with dummy values.
                del self.weight, self.scale
                self.tierd = ServedTable(
                    TableKind.ENGRAM,
                    layer_id,
                    rows=num_embeddings,
                    dim=dim,
                    owned=(self.row_start, self.row_start + self.rows),
                    device=device,
                )
                self._tierd_rank = tables.register(self.tierd)
                _check_format(self._tierd_rank.spec(self.tierd))

        def finish_load(self, label: str) -> None:
            """Attach with the first layer, then try this layer's rows."""
            del label
            with or_exit():
                self._tierd_rank.attach()
                self.tierd_test()

        def tierd_test(self) -> None:
            """Hold sampled rows against what the stock lookup makes of the checkpoint's bytes."""
            self._tierd_rank.test(self.tierd, functools.partial(decode, stock, self.dim))

        def _owned_rows(self, indices: torch.Tensor) -> torch.Tensor:
            """Rows of ``indices`` that this rank owns, zero for the rest; bf16 [..., dim]."""
            out = torch.empty(*indices.shape, self.dim, dtype=torch.bfloat16, device=indices.device)
            if context.is_in_breakable_cuda_graph():
                # Prefill: too many rows for one request, and no graph can hold sub-batches.
                gather_between_segments(self.tierd, indices, out)
            else:
                self.tierd.gather(indices, out)
            return out

    TierdEngramEmbedding.__qualname__ = TierdEngramEmbedding.__name__ = stock.__name__
    return TierdEngramEmbedding


def _check_format(spec: Any) -> None:
    if spec.row_format != RowFormat.E4M3_E8M0:
        raise HookError(
            f"{spec.name} is stored as {spec.row_format.value}; SGLang reads fp8 rows with block "
            "scales there: the image is of another checkpoint; run: tierd images"
        )


def decode(stock: type[nn.Module], dim: int, raw: torch.Tensor) -> torch.Tensor:
    """Decode rows by the stock class's own lookup, in a table of nothing but these rows.

    Args:
        stock: SGLang's ``EngramEmbedding``.
        dim: values of a row.
        raw: uint8 [n, dim + dim / 32], as the checkpoint stores them: payload, then scales.

    Returns:
        bf16 [n, dim].
    """
    probe: Any = stock.__new__(stock)
    nn.Module.__init__(probe)
    probe.dim, probe.rows, probe.row_start = dim, len(raw), 0
    probe.host_table, probe._sort_host_reads = None, False  # noqa: SLF001 - what its lookup reads
    payload = raw[:, :dim].contiguous().view(torch.float8_e4m3fn)
    scales = raw[:, dim:].contiguous().view(torch.float8_e8m0fnu)
    probe.weight = nn.Parameter(payload, requires_grad=False)
    probe.scale = nn.Parameter(scales, requires_grad=False)
    ids = torch.arange(len(raw), device=raw.device)
    decoded: torch.Tensor = probe._owned_rows(ids)  # noqa: SLF001 - see above
    return decoded


def _kick_after(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def wrapped(self: Any, input_ids: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        ids = forward(self, input_ids, forward_batch)
        kicked = getattr(self, "tierd_tables", ())
        if kicked:
            kicked[0][1].begins()
        if kicked and not looked_up_elsewhere(forward_batch):
            with or_exit():
                for index, table in kicked:
                    table.kick(ids[:, index])
        return ids

    return wrapped


def looked_up_elsewhere(forward_batch: Any) -> bool:
    """Whether this rank will look up other ids than its hasher's, so that a kick were in vain.

    Under data parallelism it looks up those of all ranks, under context parallelism a part of
    them; and nobody reads what an idle batch hashes.
    """
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - imported by then

    if forward_batch.forward_mode.is_idle():
        return True
    parallel = get_parallel()
    if int(parallel.tp_size) > 1 and int(parallel.attn_dp_size) > 1:
        return True
    return int(parallel.attn_cp_size) > 1 and bool(forward_batch.forward_mode.is_extend())
