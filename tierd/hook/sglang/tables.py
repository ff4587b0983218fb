"""This rank's tables: found when the first is constructed, attached when the model is loaded.

To find them early costs a second and says so before hundreds of gigabytes of other weights were
loaded in vain. To attach them late lets one channel and one row cache serve all layers, whose row
ranges are known by then; and it still comes before SGLang shares the GPU's free memory out, so
the cache is accounted for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierd.errors import HookError
from tierd.hook import attach, hub, settings
from tierd.hook.served import Rank, Ranks
from tierd.hook.sglang import guards
from tierd.types import TableKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierd.hook.served import ServedTable

CACHE_ROWS = 1 << 20  # 285 MB of HBM at 264 B
# Rows of one token, in the public models: a graph's shape must fit one request.
COLUMNS = {TableKind.ENGRAM: 24, TableKind.PLE: 16}
_ROWS_MAX_LEAST = 2048
_ARENA_PAGES = 1 << 18  # of a client together: channel.arena_pages_max, unless it was changed
HINT_PAGES_MOST = 1 << 15  # 128 MiB of the daemon's memory for a table of a rank, unless asked for


def require_published() -> None:
    """Refuse a model that is constructed outside of SGLang's own launch.

    Raises:
        HookError: the engine has not published its settings.
    """
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - the engine's own

    if not get_context().is_config_namespace_published("model"):
        raise HookError(
            "a model with a lookup table is constructed before SGLang has published its settings, "
            "so tierd cannot know which checkpoint it is; start it by sglang.launch_server"
        )


def published(name: str) -> Any:
    """Return a setting of the engine as it was resolved; None if this release has no such."""
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - the engine's own

    try:
        return get_context().config_leaf(name)
    except ValueError:  # what SGLang raises for a name that this release does not have
        return None


RANKS = Ranks()


def register(table: ServedTable) -> Rank:
    """Take note of a table that the model constructs; the first one finds the images.

    Raises:
        HookError: a setting that cannot be served, or no image of this checkpoint.
        AttachError: no daemon within ``TIERD_WAIT_S``.
    """
    return RANKS.take(table, lambda: _find(table.kind))


def _find(kind: TableKind) -> Rank:
    guards.require_settings(published, hip=torch.version.hip is not None)
    device = torch.empty(0).device.type
    if device not in {"cpu", "cuda"}:
        raise HookError(f"tables on {device} are not served; run SGLang without tierd")
    rows = CACHE_ROWS if device == "cuda" else settings.DEFAULT_CACHE_ROWS
    wanted = settings.current(cache_rows=rows)
    directory = _checkpoint_directory()
    dummy = getattr(published("load_format"), "value", published("load_format")) == "dummy"
    if dummy and not any(directory.glob("*.safetensors")):
        if wanted.model is None:
            raise HookError(
                "--load-format dummy and no weights to tell which rows the model wants; set "
                "TIERD_MODEL=NAME to serve the tables staged under that name; run: tierd images"
            )
        return _rank(kind, attach.find_named(kind, wanted), wanted)
    files = sorted(directory.glob("*.safetensors"))
    return _rank(kind, attach.find_checkpoint(directory, files, kind, wanted), wanted)


def _rank(kind: TableKind, found: attach.FoundTables, wanted: settings.HookSettings) -> Rank:
    return Rank(
        "SGLang", kind, found, wanted, who=who, rows_max=lambda: _rows_max(kind),
        hints=lambda served: _hint_pages(kind, wanted, served),
    )  # fmt: skip


def _checkpoint_directory() -> Path:
    """Return where the weights lie, which a model's name may have to be resolved to."""
    path, cache = str(published("model_path")), published("download_dir")
    return hub.checkpoint_directory(path, published("revision"), cache)


def who() -> attach.EngineRank:
    """Return this rank among the ranks of its engine, each with a channel of its own."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - the engine's own

    parallel = get_parallel()
    replicas = 1 if published("enable_dp_attention") else int(published("dp_size") or 1)
    rank = int(parallel.tp_rank)
    if replicas > 1:
        rank += int(parallel.dp_rank or 0) * int(parallel.tp_size)
    world = int(parallel.tp_size) * replicas
    here = max(1, world // int(published("nnodes") or 1))
    expected = settings.count("TIERD_EXPECTED_RANKS", here, what="ranks")
    return attach.EngineRank(
        f"sglang {guards.version()}", rank, world, expected, applies_scale=True
    )


def _rows_max(kind: TableKind) -> int:
    """Return how many rows the largest decode or verify graph reads from one table.

    Under data parallel attention a rank looks up those of all its peers.
    """
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - the engine's own

    config = published("cuda_graph_config")
    batch = int(getattr(getattr(config, "decode", None), "max_bs", None) or 0)
    tokens = int(published("speculative_num_draft_tokens") or 1)
    rows = batch * tokens * COLUMNS[kind] * max(1, int(get_parallel().attn_dp_size))
    return settings.count("TIERD_ROWS_MAX", max(_ROWS_MAX_LEAST, rows))


def _hint_pages(
    kind: TableKind, wanted: settings.HookSettings, served: Sequence[ServedTable]
) -> int:
    """Return the memory for a table's hints: two chunks of a prefill, this rank's share of them.

    A CPU is busy with what hints would save, and Qwen4Exp's rows are hashed by the layer itself.
    """
    if kind != TableKind.ENGRAM:
        return 0
    if wanted.hint_pages is not None:
        return wanted.hint_pages
    if not served[0].on_gpu:
        return 0
    chunk = int(published("chunked_prefill_size") or 0)
    share = max((table.end - table.first) / table.rows for table in served)
    rows = int(chunk * COLUMNS[kind] * share) if chunk > 0 else HINT_PAGES_MOST
    room = _ARENA_PAGES // len(served) - 2 * _rows_max(kind)
    return max(0, min(HINT_PAGES_MOST, 2 * rows, room))
