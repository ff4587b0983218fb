"""DeepSeek-V4.1: the two Engram tables (``layers.N.engram.embed``).

vLLM's ``Engram`` makes its table by the name ``ParallelEngramEmbedding`` in its module; the name is
bound to a subclass that holds no rows and whose ``lookup`` serves this rank's heads. What is done
with the rows (side stream, all-gather over the heads, the gate) stays the stock engine's.

All row numbers follow from the token ids. ``NgramHashState`` computes those of all layers first
thing in a forward, and there they are kicked.
"""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierd.errors import HookError
from tierd.hook.served import ServedTable
from tierd.hook.vllm import guards, tables
from tierd.hook.vllm.plugin import or_exit
from tierd.types import RowFormat, TableKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCALE_BLOCK = 32

_layer: ContextVar[int | None] = ContextVar("_layer", default=None)
"""The layer whose table is constructed."""


def patch(module: Any) -> None:
    """Patch ``vllm.models.deepseek_v41.common.engram``."""
    stock = module.ParallelEngramEmbedding
    own = {"tierd_module": module, "tierd_stock": stock, "__module__": __name__}
    module.ParallelEngramEmbedding = type(stock.__name__, (Heads, stock), own)
    engram, hasher = module.Engram, module.NgramHashState
    engram._create_embedding = _naming_the_layer(engram._create_embedding)  # noqa: SLF001
    hasher.forward = _kick_after(hasher.forward)


def _naming_the_layer(create: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(create)
    def wrapped(self: Any, layout: Any, layer_hash_index: int) -> nn.Module:
        with or_exit():
            config = tables.current_config()
            if config.engram_config is None:
                raise HookError(
                    f"vLLM's EngramConfig does not know {config.model_config.architecture} (it "
                    "knows an architecture by its name), so it cannot place its tables; give the "
                    "model the architecture string of the stock one"
                )
        token = _layer.set(int(layout.layer_ids[layer_hash_index]))
        try:
            return create(self, layout, layer_hash_index)
        finally:
            _layer.reset(token)

    return wrapped


class Heads:
    """In front of the stock class: what it is without its table.

    Attributes:
        tierd: this rank's heads.
    """

    tierd_module: Any  # vLLM's, set by the class that is made of this and the stock one
    tierd_stock: Any

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Whatever the stock class has."""

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        head_sizes: tuple[int, ...],
        block_size: int = SCALE_BLOCK,
        **places: bool,
    ) -> None:
        with or_exit():
            _check_block(block_size)
            device = torch.empty(0).device
            with _every_replica_alike(self.tierd_module, places.get("dp_shared_memory", False)):
                super().__init__(  # type: ignore[call-arg]
                    num_embeddings,
                    dim,
                    head_sizes,
                    block_size,
                    cpu_offload=places.get("cpu_offload", False),
                )
            self.tierd = ServedTable(
                TableKind.ENGRAM,
                _layer.get(),
                rows=num_embeddings,
                dim=dim,
                owned=(self.vocab_start_idx, self.vocab_end_idx),
                device=device,
            )
            self._tierd_kicked = False
            self._tierd_rank = tables.register(self.tierd, self.part_n_hash_cols)
            _check_format(self._tierd_rank.spec(self.tierd))
            self._tierd_drop_weights(dim)

    def _allocate_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.dim // self.block_size
        return (
            torch.empty(0, self.dim, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(0, blocks, dtype=torch.uint8, device="meta"),
        )

    def _tierd_drop_weights(self, dim: int) -> None:
        """Keep parameters of no rows, for who looks for them, and load nothing into them."""
        for name, width, dtype in (
            ("weight", dim, torch.float8_e4m3fn),
            ("weight_scale_inv", dim // SCALE_BLOCK, torch.uint8),
        ):
            empty = torch.empty(0, width, dtype=dtype)
            parameter: Any = nn.Parameter(empty, requires_grad=False)
            parameter.weight_loader = tables.load_nothing(self._tierd_rank)
            setattr(self, name, parameter)

    def _tierd_columns(self, ids: torch.Tensor) -> torch.Tensor:
        end = min(self.head_start + self.part_n_hash_cols, self.n_hash_cols)
        return ids[:, self.head_start : end]

    def tierd_kick(self, ids: torch.Tensor) -> None:
        """Start reading; the next :meth:`lookup` is of the same ids [tokens, columns]."""
        self.tierd.kick(self._tierd_columns(ids))
        self._tierd_kicked = True

    def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
        """Write this rank's heads, bf16 [tokens, heads, dim]; zero where it owns no row."""
        del background
        if indices.shape[0] == 0:
            return
        _check_output(out)
        columns = self._tierd_columns(indices)
        if not self._tierd_kicked:
            self.tierd.kick(columns)
        self._tierd_kicked = False
        if columns.shape[1] == out.shape[1]:
            self.tierd.gather(columns, out)
            return
        rows = out.new_empty((*columns.shape, self.dim))
        self.tierd.gather(columns, rows)
        out.zero_()
        out[:, : columns.shape[1]] = rows

    def tierd_test(self) -> None:
        """Hold sampled rows against what the stock lookup makes of the checkpoint's bytes."""
        self._tierd_rank.test(self.tierd, functools.partial(decode, self.tierd_stock, self.dim))


@contextlib.contextmanager
def _every_replica_alike(module: Any, shared: bool) -> Iterator[None]:
    """Shard over tensor parallel ranks alone, as the stock class does with memory that is shared.

    Raises:
        HookError: a table that is sharded over data parallel ranks.
    """
    stock = module.get_engram_dp_size
    if stock() > 1 and not shared:
        raise HookError(
            "Engram tables that data parallel replicas do not share were not tried: vLLM shares "
            "them unless embedding_across_dp or use_thp is set or dp_shared_memory is false in "
            "--engram-config, or /dev/shm has no room for the tables; mend that, or unset TIERD"
        )
    module.get_engram_dp_size = lambda: 1
    try:
        yield
    finally:
        module.get_engram_dp_size = stock


def _check_block(block_size: int) -> None:
    if block_size != SCALE_BLOCK:
        raise HookError(
            f"this model scales blocks of {block_size} values; images have blocks of "
            f"{SCALE_BLOCK}; unset TIERD"
        )


def _check_output(out: torch.Tensor) -> None:
    if out.dtype != torch.bfloat16:
        raise HookError(
            "Engram rows are wanted in packed form, as data parallel tables have them; tierd "
            "serves bf16 rows: set embedding_across_dp to false"
        )


def _check_format(spec: Any) -> None:
    if spec.row_format != RowFormat.E4M3_E8M0:
        raise HookError(
            f"{spec.name} is stored as {spec.row_format.value}; vLLM reads fp8 rows with block "
            "scales there: the image is of another checkpoint; run: tierd images"
        )


def decode(stock: Any, dim: int, raw: torch.Tensor) -> torch.Tensor:
    """Decode rows by the stock class's own lookup, in a table of nothing but these rows.

    Args:
        stock: vLLM's ``ParallelEngramEmbedding``.
        dim: values of a row.
        raw: uint8 [n, dim + dim / 32], as the checkpoint stores them: payload, then scales.

    Returns:
        bf16 [n, dim].
    """
    probe: Any = stock.__new__(stock)
    nn.Module.__init__(probe)
    count = len(raw)
    probe.dim, probe.block_size, probe.cpu_offload = dim, SCALE_BLOCK, False
    probe.head_start, probe.n_hash_cols, probe.part_n_hash_cols = 0, 1, 1
    probe.vocab_start_idx, probe.vocab_end_idx, probe.peer_rows = 0, count, 0
    probe._num_sms = 64  # noqa: SLF001 - what its lookup reads
    weight = raw[:, :dim].contiguous().view(torch.float8_e4m3fn)
    probe.weight = nn.Parameter(weight, requires_grad=False)
    probe.weight_scale_inv = nn.Parameter(raw[:, dim:].contiguous(), requires_grad=False)
    out = torch.empty((count, 1, dim), dtype=torch.bfloat16, device=raw.device)
    ids = torch.arange(count, dtype=torch.int32, device=raw.device)
    probe.lookup(ids[:, None], out)
    return out[:, 0]


def _kick_after(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids = forward(self, *args, **kwargs)
        kicked = getattr(self, "tierd_tables", ())
        if kicked and ids.shape[0] > 0 and not guards.cut_by_lookups():
            for index, embedding in kicked:
                embedding.tierd_kick(ids[:, index])
        return ids

    return wrapped
