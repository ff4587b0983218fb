"""What `tierd trace` prints, plots and writes beside its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tierd.controller.load import NodeLoad, TableLoad, predict
from tierd.controller.readtime import PAPER_DISK
from tierd.daemon.windows import load_windows, window_ms_of
from tierd.errors import WindowsMissingError
from tierd.tools import plots as drawing
from tierd.tools.trace import curve_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierd.io.tracefile import Trace

__all__ = ["PAPER_DISK", "plots", "show", "windows_of"]


def windows_of(
    trace: Trace, given: Sequence[str], path: Path | None, batch: int | None
) -> dict[str, float]:
    """Return each table's window in ms, from TABLE=MS words and a windows file.

    Raises:
        WindowsMissingError: a table has none.
        WindowsForeignError: the file is of another model.
    """
    found: dict[str, float] = {}
    if path is not None:
        probed = load_windows(path, model=trace.model)
        for table in trace.tables:
            found[table.name] = window_ms_of(probed, table.layer, batch, str(path))
    for word in given:
        name, _, value = word.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = float("nan")
        if not (name and np.isfinite(found[name]) and found[name] >= 0):
            raise WindowsMissingError(
                f"--window {word}: write TABLE=MS, such as layers.1.engram=0.3"
            )
    missing = [table.name for table in trace.tables if table.name not in found]
    if missing:
        raise WindowsMissingError(
            f"no window for {', '.join(missing)}: give --windows FILE of the probe, or "
            f"--window {missing[0]}=MS"
        )
    return found


def plots(found: dict[str, Any], directory: Path) -> list[str]:
    """Draw what a replay found; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    written = drawing.miss_curves(found, directory / "miss_curves")
    split = found.get("split")
    if split:
        written += drawing.split(split, directory / "split")
        written += drawing.windows(_window_rows(found, split), directory / "windows")
    return written


def _window_rows(found: dict[str, Any], split: dict[str, Any]) -> list[dict[str, Any]]:
    """Per table: its window, its read uncached and under the best split."""
    best = min(split["splits"], key=lambda one: one["growth_ms"])
    by_name = {table["name"]: table for table in found["tables"]}
    loads = [
        TableLoad(name, window, by_name[name]["lookups_per_step"], curve_of(by_name[name]))
        for name, window in zip(split["tables"], split["windows_ms"], strict=True)
    ]
    bare = predict(NodeLoad(tuple(loads), (PAPER_DISK,)), np.zeros(len(loads))).reads_ms
    return [
        {
            "name": name,
            "window_ms": split["windows_ms"][number],
            "reads": {
                "read, uncached": float(bare[number]),
                "read, cached": best["reads_ms"][number],
            },
        }
        for number, name in enumerate(split["tables"])
    ]


def show(found: dict[str, Any]) -> None:
    """Print a replay for people."""
    console = Console(highlight=False, markup=False, width=200, color_system=None)
    cut = "; its last block is cut short" if found["cut"] else ""
    console.print(f"{found['model']}: {found['kicks']:,} kicks{cut}")
    for table in found["tables"]:
        console.print(
            f"{table['name']}: {table['lookups']:,} lookups of {table['distinct_rows']:,} rows, "
            f"{table['lookups_per_step']:,.0f} a step"
        )
        grid = Table(box=None, pad_edge=False)
        grid.add_column("ROWS", justify="right")
        for policy in table["hit_ratio"]:
            grid.add_column(policy.upper(), justify="right")
        for place, size in enumerate(table["sizes"]):
            ratios = [f"{hits[place]:.1%}" for hits in table["hit_ratio"].values()]
            grid.add_row(f"{size:,}", *ratios)
        console.print(grid)
    if split := found.get("split"):
        console.print(
            f"splits of {split['cache_rows']:,} rows, ways of {', '.join(split['tables'])}"
        )
        for one in sorted(split["splits"], key=lambda one: one["growth_ms"])[:5]:
            reads = ", ".join(f"{read:.2f}" for read in one["reads_ms"])
            console.print(f"  {one['ways']}: +{one['growth_ms']:.3f} ms a step (reads {reads} ms)")
    for path in found.get("plots", []):
        console.print(path)
