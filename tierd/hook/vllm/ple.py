"""Qwen4Exp: the n-gram table of each PLE layer, as vLLM keeps it in pinned host memory.

``Qwen4ExpPLEPinnedHostEmbedding._lookup`` is called on a side stream while the layer before runs,
and joined where the rows are needed. It is replaced, and the table it would read is never
allocated. vLLM swaps the class itself, by its name (``register_oot``).
"""

from __future__ import annotations

import contextlib
import functools
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tierd.errors import HookError
from tierd.hook.served import ServedTable
from tierd.hook.vllm import guards, tables
from tierd.hook.vllm.plugin import or_exit
from tierd.types import RowFormat, TableKind

if TYPE_CHECKING:
    from collections.abc import Iterator

_STORED = {RowFormat.BF16: torch.bfloat16, RowFormat.E4M3: torch.float8_e4m3fn}
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def patch(module: Any) -> None:
    """Patch ``vllm.models.qwen4_exp.common.ngram_embedding``.

    Raises:
        HookError: another plugin has taken the class's place.
    """
    stock = module.Qwen4ExpPLEPinnedHostEmbedding
    guards.require_free(stock.__name__)
    own = {"tierd_module": module, "__module__": __name__}
    stock.register_oot(type(stock.__name__, (HostRows, stock), own))


class HostRows:
    """In front of the stock class: what it is without its table.

    Attributes:
        tierd: this rank's rows.
    """

    tierd_module: Any  # vLLM's, set by the class that is made of this and the stock one

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Whatever the stock class has."""

    def __init__(self, num_embeddings: int, embedding_dim: int, **options: Any) -> None:
        with or_exit():
            device = torch.empty(0).device
            with _no_view(self.tierd_module, device):
                super().__init__(num_embeddings, embedding_dim, **options)  # type: ignore[call-arg]
            _check_dtype(self.prefix, self.weight.dtype)
            vocabulary = self.shard_indices
            self.tierd = ServedTable(
                TableKind.PLE,
                _layer_of(self.prefix),
                rows=self.org_vocab_size,
                dim=self.embedding_dim,
                owned=(vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index),
                device=device,
            )
            self._tierd_rank = tables.register(self.tierd, self._num_ngram_heads)
            _check_format(self._tierd_rank.spec(self.tierd), self.weight.dtype)

    def allocate_embedding_weight(
        self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """No rows: nothing to load and nothing to pin."""
        del num_embeddings
        return torch.empty(0, embedding_dim, dtype=dtype, device="cpu")

    def weight_loader(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        checkpoint_start: int | None = None,
    ) -> None:
        """Leave the table's shards unread; its scale is loaded as ever."""
        with or_exit():
            self._tierd_rank.refuse_reload()
        if param is not self.weight:
            super().weight_loader(  # type: ignore[misc]
                param, loaded_weight, checkpoint_start
            )

    def _lookup(self, input_ids: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of ids that this rank owns, +0 for others, as they are stored."""
        shape = (*input_ids.shape, self.embedding_dim)
        stored = self.weight.dtype
        output = _output(output, shape, stored, input_ids.device)
        if input_ids.numel() == 0:
            return output
        rows = output
        if stored != torch.bfloat16:
            rows = torch.empty(shape, dtype=torch.bfloat16, device=input_ids.device)
        self.tierd.kick(input_ids)
        self.tierd.gather(input_ids, rows)
        if rows is not output:
            output.copy_(rows)  # every e4m3 is a bf16, so nothing is rounded
        return output

    def tierd_test(self) -> None:
        """Hold sampled rows against what the stock lookup makes of the checkpoint's bytes."""
        self._tierd_rank.test(
            self.tierd, functools.partial(decode, self.tierd_module, self.weight.dtype)
        )


@contextlib.contextmanager
def _no_view(module: Any, device: torch.device) -> Iterator[None]:
    """Let the constructor map no host memory: there is none, and it asks for the device only."""
    stock = module.get_accelerator_view_from_cpu_tensor
    module.get_accelerator_view_from_cpu_tensor = lambda weight: weight.to(device)
    try:
        yield
    finally:
        module.get_accelerator_view_from_cpu_tensor = stock


def _check_dtype(prefix: str, dtype: torch.dtype) -> None:
    if dtype not in _STORED.values():
        raise HookError(
            f"{prefix} is a table of {dtype} (NVFP4, perhaps), of which tierd has no images; "
            "unset TIERD"
        )


def _check_format(spec: Any, dtype: torch.dtype) -> None:
    if _STORED.get(spec.row_format) != dtype:
        raise HookError(
            f"{spec.name} is stored as {spec.row_format.value}, but the model would hold it as "
            f"{dtype}: vLLM would convert it; let the config's ple_embedding_dtype say what the "
            "checkpoint has (absent for bf16), or unset TIERD"
        )


def _output(
    given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the output that is given, or a new one.

    Raises:
        ValueError: another shape or dtype, which the stock lookup refuses as well.
    """
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise ValueError(
            f"invalid PLE output: {tuple(given.shape)} of {given.dtype}, not {shape} of {dtype}"
        )
    return given


def _layer_of(prefix: str) -> int:
    layer = _LAYER.search(prefix)
    if layer is None:
        raise HookError(f"{prefix}: cannot tell its layer; run: tierd hook check vllm")
    return int(layer[1])


def decode(module: Any, dtype: torch.dtype, raw: torch.Tensor) -> torch.Tensor:
    """Decode rows by the stock class's own lookup where its kernel runs, by a cast elsewhere.

    Args:
        module: vLLM's, with the kernel.
        dtype: how rows are stored.
        raw: uint8 [n, row bytes], as the checkpoint stores them.

    Returns:
        bf16 [n, dim].
    """
    weight = raw.contiguous().view(dtype)
    if not guards.kernels_run(raw.device):
        return weight.to(torch.bfloat16)
    count, dim = weight.shape
    probe = SimpleNamespace(
        embedding_dim=dim,
        weight=weight,
        _uva_weight=weight.view(torch.uint8),
        shard_indices=SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=count),
    )
    ids = torch.arange(count, device=raw.device)
    out = torch.empty((count, dim), dtype=dtype, device=raw.device)
    module.Qwen4ExpPLEEmbeddingMethod.lookup_from_pinned(None, probe, ids, out.view(torch.uint8))
    return out.to(torch.bfloat16)
