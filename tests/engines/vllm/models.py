"""vLLM's real modules around the tables, on the CPU: for the Python of an engine's environment.

A served table and a stock one are built from the same classes, the one under ``TIERD=1`` and the
other from what was replaced. Kernels run in Triton's interpreter; streams and events do
nothing. Of the model there is only what reads the tables.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from triton.runtime import interpreter

warnings.simplefilter("ignore")

from tests.engines.vllm import layouts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


class Nothing:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def pretend_a_gpu() -> None:
    """Before vLLM is imported: what its modules ask of the GPU when tables are made."""
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, name="NVIDIA H200"
    )
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: Nothing()  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment, method-assign]
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # the other wants compiled parts
    mend_the_interpreter()


def mend_the_interpreter() -> None:
    """Three things that vLLM's kernels do and this Triton's interpreter cannot."""
    # A flag that is no constant is an i1, which it cannot hold.
    convert = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda arg: convert(int(arg) if isinstance(arg, bool) else arg)
    # A range's bounds are arrays of one element, which this numpy does not take for a number.
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    # A pointer that is declared as one to bytes goes on being one to what the tensor holds.
    call = interpreter.GridExecutor.__call__

    def typed(executor: Any, *args: Any, **kwargs: Any) -> Any:
        declared = executor.fn.__annotations__
        names = [*executor.arg_names[: len(args)], *kwargs]
        values = [
            value.view(torch.uint8)
            if "pointer" in str(declared.get(name)) and "uint8" in str(declared.get(name))
            else value
            for name, value in zip(names, [*args, *kwargs.values()], strict=True)
        ]
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        return call(executor, *values[: len(args)], **named)

    interpreter.GridExecutor.__call__ = typed


def load_plugins() -> None:
    """What every process of vLLM does first."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def settings(checkpoint: Path | str, **changes: Any) -> SimpleNamespace:
    """Of vLLM's settings, those that the hook and the tables' modules read."""
    none = SimpleNamespace
    fields: dict[str, Any] = {
        "model_config": none(
            model=str(checkpoint), revision=None, enable_sleep_mode=False,
            architecture="DeepseekV41ForCausalLM", hf_text_config=none(num_hidden_layers=2),
        ),
        "load_config": none(
            load_format="auto", download_dir=None, safetensors_load_strategy=None
        ),
        "parallel_config": none(
            pipeline_parallel_size=1, tensor_parallel_size=1, data_parallel_size=1,
            data_parallel_rank=0, data_parallel_size_local=1, nnodes=1,
            prefill_context_parallel_size=1, enable_elastic_ep=False,
        ),
        "compilation_config": none(cudagraph_capture_sizes=[], cudagraph_mode=None),
        "scheduler_config": none(max_num_seqs=8, max_num_batched_tokens=512),
        "engram_config": none(
            cpu_offload=True, dp_shared_memory=None, use_thp=False, embedding_across_dp=False
        ),
        "offload_config": none(
            uva=none(cpu_offload_gb=0), prefetch=none(offload_group_size=0)
        ),
        "additional_config": {}, "speculative_config": None, "lora_config": None,
        "weight_transfer_config": None,
        "use_v2_model_runner": True,
    }  # fmt: skip
    for name, value in changes.items():
        group, _, leaf = name.partition("__")
        if leaf:
            setattr(fields[group], leaf, value)
        else:
            fields[group] = value
    return none(**fields)


@contextlib.contextmanager
def loading(config: Any, *, tp: int = 1, rank: int = 0) -> Iterator[None]:
    """vLLM's settings as its loader has them current, and this process's place among ranks."""
    import vllm.config.vllm as module
    import vllm.distributed.parallel_state as state

    group = SimpleNamespace(world_size=tp, rank_in_group=rank)
    before = (module._current_vllm_config, state._TP, getattr(state, "_ETP", None))
    module._current_vllm_config = config
    state._TP = state._ETP = group
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        module._current_vllm_config, state._TP, state._ETP = before


def engram_module() -> Any:
    import vllm.models.deepseek_v41.common.engram as module

    module.is_uva_available = lambda: True
    return module


def stock_of(cls: type) -> type:
    """The class that a served one replaced, or the class itself."""
    return cls.__mro__[2] if cls.__module__.startswith("tierd") else cls


class EngramTables(nn.Module):
    """The Engram layers of a DeepSeek-V4.1 without what follows the lookup, and the hasher."""

    def __init__(self, *, served: bool = True) -> None:
        super().__init__()
        engine = engram_module()
        self.layout = engine.EngramLayout(layouts.engram_config())
        replaced = engine.ParallelEngramEmbedding
        if not served:
            engine.ParallelEngramEmbedding = stock_of(replaced)
            pinned, torch.empty = torch.empty, _unpinned(torch.empty)
        try:
            self.layers = nn.ModuleList()
            for index in range(len(self.layout.layer_ids)):
                layer = engine.Engram.__new__(engine.Engram)
                nn.Module.__init__(layer)
                layer.layer_hash_index = index
                layer._prefetch_stream = Nothing()
                layer.embed_tokens = layer._create_embedding(self.layout, index)
                layer._init_staging(512, self.layout.head_dim)
                self.layers.append(layer)
        finally:
            engine.ParallelEngramEmbedding = replaced
            if not served:
                torch.empty = pinned
        self.hasher = hasher(engine, self.layout)

    def load(self, checkpoint: Path) -> None:
        """By each parameter's own loader, as AutoWeightsLoader does it."""
        tensors = read_tensors(checkpoint)
        for layer, number in zip(self.layers, self.layout.layer_ids, strict=True):
            stem = f"layers.{number}.engram.embed"
            table = layer.embed_tokens
            for parameter, name in ((table.weight, "weight"), (table.weight_scale_inv, "scale")):
                parameter.weight_loader(parameter, tensors[f"{stem}.{name}"])
        if hasattr(self.layers[0].embed_tokens, "_storage"):
            for layer in self.layers:
                table = layer.embed_tokens
                table._storage = lambda t=table: (t.weight.data, t.weight_scale_inv.data)

    def forward(self, tokens: torch.Tensor, before: torch.Tensor, dead: torch.Tensor) -> Any:
        """(row numbers, rows of every layer) of one request's tokens, as the model's forward."""
        count = len(tokens)
        ids = self.hasher(
            tokens, torch.arange(len(before), len(before) + count),
            torch.tensor([0, count], dtype=torch.int32), dead, before[None],
            torch.zeros_like(before[None], dtype=torch.bool), None, None,
        )  # fmt: skip
        for layer in self.layers:
            layer.prepare_embeddings(ids[:, layer.layer_hash_index])
        return ids, [layer._ready_rows(count) for layer in self.layers]


def _unpinned(make: Any) -> Any:
    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = make(*args, **kwargs)
        return made

    return empty


def hasher(engine: Any, layout: Any) -> Any:
    """A NgramHashState; any token map of the right size hashes alike."""
    made = engine.NgramHashState.__new__(engine.NgramHashState)
    nn.Module.__init__(made)
    made.layout, made.use_slot_cache, made.block_size, made._cache = layout, False, 64, None
    made.lookback_depth = layout.max_ngram_size - 1
    made.pad_id = layouts.TOKEN_MAP[layout.pad_token_id]
    made.register_buffer("token_map", torch.tensor(layouts.TOKEN_MAP, dtype=torch.int32))
    made.register_buffer("primes", torch.tensor(layout.primes))
    made.register_buffer("offsets", layout.offsets)
    multipliers = engine.compute_hash_multipliers(
        layout.layer_ids, layout.max_ngram_size, layout.compressed_vocab_size
    )
    made.register_buffer("multipliers", multipliers)
    return made


class PleTable(nn.Module):
    """One PLE layer's n-gram embedding, as vLLM's model makes it."""

    def __init__(self, *, served: bool, fp8: bool) -> None:
        super().__init__()
        import vllm.models.qwen4_exp.common.ngram_embedding as common
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpNGramEmbedding

        common.is_uva_available = lambda: True
        held = {} if served else dict(op_registry_oot)
        view = common.get_accelerator_view_from_cpu_tensor
        if not served:
            op_registry_oot.clear()
            common.get_accelerator_view_from_cpu_tensor = lambda weight: weight
            pinned, torch.empty = torch.empty, _unpinned(torch.empty)
        dtype = "float8_e4m3fn" if fp8 else None
        config = SimpleNamespace(**layouts.PLE, ple_embedding_dtype=dtype)
        try:
            self.ple = Qwen4ExpNGramEmbedding(
                config, 16 * layouts.PLE_DIM, 0, 512, data_parallel_rank=0,
                prefix=f"model.layers.{layouts.PLE_LAYER}.ple.ple_embedding",
            )  # fmt: skip
        finally:
            op_registry_oot.update(held)
            common.get_accelerator_view_from_cpu_tensor = view
            if not served:
                torch.empty = pinned

    @property
    def table(self) -> Any:
        return self.ple.ngram_embedding

    def load(self, checkpoint: Path) -> None:
        stem = f"layers.{layouts.PLE_LAYER}.ple.ple_embedding."
        own = [
            (name.partition(stem)[2], tensor)
            for name, tensor in read_tensors(checkpoint).items()
            if stem in name
        ]
        self.ple.load_weights(iter(own))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [tokens, columns * dim], as they are stored, through vLLM's prefetch."""
        self.table.start_prefetch(ids)
        rows: torch.Tensor = self.table.finalize_prefetch(len(ids))
        return rows


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8 if rows.element_size() == 1 else torch.int16)


def differing_rows(a: torch.Tensor, b: torch.Tensor) -> int:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return int((bits(a) != bits(b)).any(dim=-1).sum())


def report(found: dict[str, Any]) -> None:
    Path(os.environ["TIERD_TEST_REPORT"]).write_text(json.dumps(found))
