"""``tierd plan``: where each table of a checkpoint can live, by arithmetic alone."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.controller.curves import MissCurve
from tierd.controller.placement import DIRECTORY_BYTES, Plan, TableNeed, Tier, place
from tierd.daemon.windows import load_windows, window_ms_of
from tierd.errors import CheckpointError, CurveError, PlacementError, WindowsMissingError
from tierd.io import _core
from tierd.io.checkpoint import Checkpoint
from tierd.io.tables import find_tables
from tierd.types import TableKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierd.controller.readtime import ReadTime
    from tierd.types import ProbedWindows


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTable:
    """What a checkpoint or a config says of a table."""

    name: str
    layer: int
    rows: int
    row_bytes: int
    rows_per_token: int

    @property
    def pages(self) -> int:
        """Pages of its image."""
        return -(-self.rows // int(_core.rows_per_page(self.row_bytes)))


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What the operator asked.

    Attributes:
        source: a checkpoint's directory, or a config.json.
        windows: the probe's file; None when `window` says them all.
        window: table or layer -> ms, by hand.
        model, gpu, engine: what the windows must have been measured for; None: as found here.
        batch: sequences in a decode step.
        ranks: the step's rows are divided between them.
        disk, remote: a model a device; empty: there is no such tier.
        dram_bytes, disk_bytes, remote_bytes: room; None: not checked (disk, remote) or none (dram).
        cache_bytes: HBM of one rank for the row cache.
        curves: a file of `tierd trace replay --json`.
        allowed_ms: growth of the step that a choice may cause.
    """

    source: Path
    windows: Path | None = None
    window: dict[str, float] = dataclasses.field(default_factory=dict)
    model: str | None = None
    gpu: str | None = None
    engine: str | None = None
    batch: int = 128
    ranks: int = 1
    disk: tuple[ReadTime, ...] = ()
    remote: tuple[ReadTime, ...] = ()
    dram_bytes: int | None = None
    disk_bytes: int | None = None
    remote_bytes: int | None = None
    cache_bytes: int = 0
    curves: Path | None = None
    allowed_ms: float = 0.1


def plan(asked: Request) -> tuple[Plan, dict[str, Any]]:
    """Place a model's tables.

    Returns:
        the plan, and the same JSON-ready.

    Raises:
        CheckpointError: no tables there.
        WindowsMissingError: a window, or every device's read time, is missing.
        WindowsForeignError: windows of another model, GPU or engine version.
        CurveError: a curve that cannot be one.
        PlacementError: a table fits nowhere; nothing else is said then.
    """
    if not (asked.disk or asked.remote or asked.dram_bytes):
        raise WindowsMissingError(
            "no read times: say what there is, --disk BASE_MS,PAGE_US for each disk (the paper's: "
            "0.30,3.05,0.37), --remote BASE_MS,PAGE_US, --dram SIZE"
        )
    tables = tables_of(asked.source)
    model = asked.model or (asked.source.resolve().name if asked.source.is_dir() else None)
    probed = None
    if asked.windows is not None:
        probed = load_windows(asked.windows, model=model, gpu=asked.gpu, engine=asked.engine)
    curves = {} if asked.curves is None else load_curves(asked.curves)
    needs = [_need(table, asked, probed, curves) for table in tables]
    slot = max(table.row_bytes for table in tables) + DIRECTORY_BYTES
    made = place(
        needs,
        _tiers(asked),
        cache_rows=asked.cache_bytes // slot,
        allowed_ms=asked.allowed_ms,
    )
    if made.problem:
        raise PlacementError(f"{asked.source}: {made.problem}")
    return made, to_json(made, asked)


def _tiers(asked: Request) -> list[Tier]:
    def room(size: int | None) -> float:
        return float("inf") if size is None else float(size)

    tiers = []
    if asked.disk:
        tiers.append(Tier("disk", asked.disk, room(asked.disk_bytes)))
    if asked.remote:
        tiers.append(Tier("remote", asked.remote, room(asked.remote_bytes)))
    if asked.dram_bytes:
        tiers.append(Tier("dram", (), float(asked.dram_bytes)))
    return tiers


def _need(
    table: PlannedTable,
    asked: Request,
    probed: ProbedWindows | None,
    curves: dict[str, MissCurve],
) -> TableNeed:
    by_hand = asked.window.get(table.name, asked.window.get(str(table.layer)))
    if by_hand is not None:
        window = by_hand
    elif probed is not None and (table.layer or 0 in probed.layers):
        window = window_ms_of(probed, table.layer, asked.batch, str(asked.windows))
    elif table.layer == 0:
        window = 0.0  # read at step start, whatever a probe says
    else:
        raise WindowsMissingError(
            f"no window for {table.name}: give --windows FILE of the probe, or "
            f"--window {table.name}=MS"
        )
    return TableNeed(
        table.name,
        table.layer,
        table.rows,
        table.row_bytes,
        table.pages,
        window,
        asked.batch * table.rows_per_token / asked.ranks,
        curves.get(table.name),
    )


def tables_of(source: Path) -> list[PlannedTable]:
    """Return the tables of a checkpoint directory, or those that a config.json describes.

    Raises:
        CheckpointError: neither has any.
    """
    if source.is_dir():
        config = _config(source / "config.json") if (source / "config.json").exists() else {}
        per_token = {kind: _rows_per_token(kind, config) for kind in TableKind}
        return [
            PlannedTable(spec.name, spec.layer, spec.rows, spec.row_bytes, per_token[spec.kind])
            for spec in find_tables(Checkpoint.open(source))
        ]
    tables = _tables_of_config(_config(source))
    if not tables:
        raise CheckpointError(
            f"{source}: describes no table: neither engram_layer_ids, ple_layer_ids nor "
            "hidden_size_per_layer_input is set; give the checkpoint's directory"
        )
    return tables


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a model's config")
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _rows_per_token(kind: TableKind, config: dict[str, Any]) -> int:
    match kind:
        case TableKind.ENGRAM:
            sizes = int(config.get("engram_max_ngram_size") or 4) - 1
            return sizes * int(config.get("engram_n_heads") or 8)
        case TableKind.PLE:
            sizes = int(config.get("ngram_size") or 3) - 1
            return sizes * int(config.get("heads_per_ngram") or 8)
        case _:
            return 1


def _tables_of_config(config: dict[str, Any]) -> list[PlannedTable]:
    """Describe tables from a config alone, before anything is downloaded."""
    found = []
    dim = int(config.get("engram_head_dim") or 256)
    columns = _rows_per_token(TableKind.ENGRAM, config)
    rows = config.get("engram_num_embeddings") or []
    guess = columns * int(config.get("engram_vocab_size") or 0)
    for number, layer in enumerate(config.get("engram_layer_ids") or []):
        count = int(rows[number]) if number < len(rows) else guess
        name = f"layers.{layer}.engram"
        found.append(PlannedTable(name, int(layer), count, dim + dim // 32, columns))
    heads = _rows_per_token(TableKind.PLE, config)
    for layer in config.get("ple_layer_ids") or []:
        width = int(config.get("ple_embed_dim") or config.get("hidden_size") or 0) // heads
        count = heads * int(config.get("ngram_vocab_size_base") or 20_000_000)
        number = int(layer) - 1  # counted from 1 there
        found.append(PlannedTable(f"layers.{number}.ple", number, count, 2 * width, heads))
    width = int(config.get("hidden_size_per_layer_input") or 0)
    if width:
        count = int(config.get("vocab_size_per_layer_input") or config.get("vocab_size") or 0)
        layers = range(int(config.get("num_hidden_layers") or 0))
        found += [PlannedTable(f"layers.{n}.per_layer", n, count, 2 * width, 1) for n in layers]
    return [table for table in found if table.rows > 0 and table.row_bytes > 0]


def load_curves(path: Path) -> dict[str, MissCurve]:
    """Read miss curves from what ``tierd trace replay --json`` printed.

    Raises:
        CurveError: unreadable, or curves that cannot be.
    """
    try:
        data = json.loads(path.read_text())
        found = {}
        for table in data["tables"]:
            hits = [float(hit) for hit in table["hit_ratio"]["lru"]]
            sizes = [float(size) for size in table["sizes"]]
            start = [] if sizes and sizes[0] == 0 else [0.0]
            miss = [1.0] * len(start) + [1 - hit for hit in hits]
            found[str(table["name"])] = MissCurve.of(start + sizes, miss)
    except OSError as error:
        raise CurveError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CurveError(
            f"{path}: no miss curves ({type(error).__name__}: {error}); run: tierd trace replay"
        ) from None
    for name, curve in found.items():
        if trouble := curve.problem():
            raise CurveError(f"{path}: {name}: nonsense curve: {trouble}")
    return found


def to_json(made: Plan, asked: Request) -> dict[str, Any]:
    """Return a plan JSON-ready."""
    return {
        "source": str(asked.source),
        "batch": asked.batch,
        "ranks": asked.ranks,
        "growth_ms": made.growth_ms,
        "memory": {
            "host_bytes": made.host_bytes,
            "hbm_bytes_per_rank": made.hbm_bytes,
            "disk_bytes": made.disk_bytes,
            "remote_bytes": made.remote_bytes,
        },
        "tables": [
            {
                "name": one.table.name,
                "layer": one.table.layer,
                "rows": one.table.rows,
                "image_bytes": one.table.image_bytes,
                "window_ms": one.table.window_ms,
                "pages_per_step": one.table.lookups,
                "tier": one.choice,
                "read_ms": one.read_ms,
                "stall_ms": one.stall_ms,
                "cache_rows": one.cache_rows,
                "refused": [dataclasses.asdict(refusal) for refusal in one.refused],
                "warnings": list(one.warnings),
            }
            for one in made.tables
        ],
    }


def parse_windows(words: Sequence[str]) -> dict[str, float]:
    """Read TABLE=MS or LAYER=MS words.

    Raises:
        WindowsMissingError: a word that is neither.
    """
    found = {}
    for word in words:
        name, _, text = word.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (name and np.isfinite(value) and value >= 0):
            raise WindowsMissingError(f"--window {word}: write TABLE=MS, such as 14=9.35")
        found[name] = value
    return found
