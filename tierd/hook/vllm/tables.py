"""This rank's tables: found when the first is constructed, attached when the model is loaded.

To find them early costs a second and says so before hundreds of gigabytes of other weights were
loaded in vain. To attach them late lets one channel and one row cache serve all layers; and it
still comes before vLLM profiles its memory, so the cache is accounted for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierd.errors import HookError
from tierd.hook import attach, hub, settings
from tierd.hook.served import Rank, Ranks
from tierd.hook.vllm import guards
from tierd.hook.vllm.plugin import or_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.hook.served import ServedTable
    from tierd.types import TableKind

CACHE_ROWS = 1 << 20  # 285 MB of HBM at 264 B
_ROWS_MAX_LEAST = 2048
_PER_LAYER_ROWS_MAX_LEAST = 512  # an image a layer, each with arenas of its own

RANKS = Ranks()
_columns: dict[TableKind, int] = {}


def current_config() -> Any:
    """Return the settings of the engine whose model is constructed now.

    Raises:
        HookError: there is none, or one that cannot be served.
    """
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415 - the engine's own

    config = get_current_vllm_config_or_none()
    if config is None:
        raise HookError(
            "a model with a lookup table is constructed outside of vLLM's own loading, so tierd "
            "cannot know which checkpoint it is; start it by `vllm serve` or vllm.LLM"
        )
    return config


def register(table: ServedTable, columns: int) -> Rank:
    """Take note of a table that the model constructs; the first one finds the images.

    Args:
        table: the one that is constructed.
        columns: rows that a token reads from it.

    Raises:
        HookError: a setting that cannot be served, or no image of this checkpoint.
        AttachError: no daemon within ``TIERD_WAIT_S``.
    """
    config = current_config()
    rank = RANKS.take(table, lambda: _find(config, table.kind))
    _columns[table.kind] = max(columns, _columns.get(table.kind, 1))
    return rank


def load_nothing(rank: Rank) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a loader for a parameter of no rows: it leaves the checkpoint's table unread."""

    def load(_: torch.Tensor, __: torch.Tensor) -> None:
        with or_exit():
            rank.refuse_reload()

    return load


def forget() -> None:
    """Detach everything: an engine that shuts down and starts again in one process."""
    RANKS.forget()
    _columns.clear()


def _find(config: Any, kind: TableKind) -> Rank:
    platform = "rocm" if torch.version.hip is not None else torch.empty(0).device.type
    guards.require_settings(config, kind, platform)
    device = torch.empty(0).device.type
    if device not in {"cpu", "cuda"}:
        raise HookError(f"tables on {device} are not served; run vLLM without tierd")
    rows = CACHE_ROWS if device == "cuda" else settings.DEFAULT_CACHE_ROWS
    wanted = settings.current(cache_rows=rows)
    model = config.model_config
    directory = hub.checkpoint_directory(
        str(model.model), model.revision, config.load_config.download_dir
    )
    files = sorted(directory.glob("*.safetensors"))
    found = attach.find_checkpoint(directory, files, kind, wanted)
    return Rank(
        "vLLM", kind, found, wanted,
        who=lambda: _who(config),
        rows_max=lambda: rows_max(config, kind, _columns[kind]),
        # vLLM pads ids with what happens to be there and zeroes what is outside; and it makes a
        # scale of an exponent by a shift alone.
        options={"any_id": True, "scale_zero": True},
    )  # fmt: skip


def _who(config: Any) -> attach.EngineRank:
    """Return this rank among the ranks of its engine, each with a channel of its own."""
    from vllm.distributed import get_tensor_model_parallel_rank  # noqa: PLC0415 - the engine's

    parallel = config.parallel_config
    tensor = int(parallel.tensor_parallel_size)
    replicas = int(parallel.data_parallel_size or 1)
    rank = int(parallel.data_parallel_rank or 0) * tensor + int(get_tensor_model_parallel_rank())
    world = tensor * replicas
    local = int(parallel.data_parallel_size_local or 0)
    if int(parallel.nnodes or 1) == 1 and 1 < local < replicas:
        here = tensor * local  # nodes that each start their replicas, with nnodes left at 1
    else:
        here = max(1, world // int(parallel.nnodes or 1))
    expected = settings.count("TIERD_EXPECTED_RANKS", here, what="ranks")
    return attach.EngineRank(f"vllm {guards.version()}", rank, world, expected, applies_scale=True)


def rows_max(config: Any, kind: TableKind, columns: int) -> int:
    """Return how many rows the largest captured step reads from one table.

    Engram's and Qwen4Exp's lookups run between the segments of piecewise graphs, so only decode
    graphs hold them, unless mixed batches are captured whole; Gemma's are in every graph.

    Args:
        config: the engine's settings.
        kind: which kind of table.
        columns: rows that a token reads.
    """
    compilation = config.compilation_config
    tokens = max(compilation.cudagraph_capture_sizes or [0])
    mode = compilation.cudagraph_mode
    whole = mode is not None and mode.mixed_mode().name == "FULL"
    least = _ROWS_MAX_LEAST
    if kind == "per_layer":
        least = _PER_LAYER_ROWS_MAX_LEAST
    elif not whole:
        tokens = min(tokens, int(config.scheduler_config.max_num_seqs))
    return settings.count("TIERD_ROWS_MAX", max(least, tokens * columns))
