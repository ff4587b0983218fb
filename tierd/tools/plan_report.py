"""What `tierd plan` and `tierd explain` print and plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tierd.tools import plots as drawing
from tierd.tools.show import size

if TYPE_CHECKING:
    from pathlib import Path


def show_plan(made: dict[str, Any]) -> None:
    """Print a plan for people."""
    console = _console()
    console.print(f"decode of B={made['batch']} over {made['ranks']} ranks")
    table = Table(box=None, pad_edge=False)
    for name in ("TABLE", "WINDOW", "TIER", "READ", "STALL", "CACHE", "IMAGE"):
        table.add_column(name, justify="left" if name in {"TABLE", "TIER"} else "right")
    for one in made["tables"]:
        table.add_row(
            one["name"],
            f"{one['window_ms']:.2f} ms",
            one["tier"],
            "-" if one["tier"] == "dram" else f"{one['read_ms']:.2f} ms",
            f"{one['stall_ms']:.2f} ms",
            f"{one['cache_rows']:,} rows" if one["cache_rows"] else "-",
            size(one["image_bytes"]),
        )
    console.print(table)
    for one in made["tables"]:
        for refusal in one["refused"]:
            console.print(f"{one['name']}: not {refusal['choice']}: {refusal['why']}")
        for warning in one["warnings"]:
            console.print(f"{one['name']}: warning: {warning}")
    memory = made["memory"]
    console.print(
        f"the step grows by {made['growth_ms']:.2f} ms; memory: host {size(memory['host_bytes'])}, "
        f"HBM {size(memory['hbm_bytes_per_rank'])} a rank, disk {size(memory['disk_bytes'])}"
        + (f", remote {size(memory['remote_bytes'])}" if memory["remote_bytes"] else "")
    )


def plot_plan(made: dict[str, Any], directory: Path) -> list[str]:
    """Draw windows against read times; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "name": one["name"],
            "window_ms": one["window_ms"],
            "reads": {f"read, {one['tier']}": one["read_ms"]},
        }
        for one in made["tables"]
    ]
    return drawing.windows(rows, directory / "plan")


def show_explained(state: dict[str, Any]) -> None:
    """Print what runs now, measured beside predicted."""
    console = _console()
    frozen = f"; frozen: {state['frozen']}" if state["frozen"] else ""
    console.print(f"controller: {state['mode']}{frozen}")
    for problem in state["problems"]:
        console.print(f"  {problem}")
    for client in state["clients"]:
        console.print(
            f"{client['engine']} rank {client['rank']} (pid {client['pid']}): {client['steps']:,} "
            f"steps seen"
        )
        console.print(_tables(client["tables"]))
        step = client["stall_ms"], client["predicted_ms"]
        measured, predicted = (("-" if x is None else f"{x:.3f} ms") for x in step)
        console.print(f"  stall a step: measured {measured}, predicted {predicted}")
        for cache in client["caches"]:
            console.print(f"  cache of {cache['row_bytes']} B rows: {cache['decision']}")
            if cache["size"]:
                console.print(f"    {cache['size']}")
    for device in state["devices"]:
        note = "; SLOW" if device["slow"] else ""
        console.print(
            f"pump {device['pump']}: reads take {device['base_ms']:.3f} ms + "
            f"{device['page_us']:.2f} us a page (+ {device['later_us']:.2f} us a later one), "
            f"from {device['seen']} looks{note}"
        )
    for placement in state["placements"]:
        console.print(f"{placement['image']} is read from")
        for number, tier in enumerate(placement["tiers"], 1):
            console.print(f"  {number}. {_tier(tier)}")
    for one in state["decisions"][:10]:
        console.print(f"{one['time']}  {one['action']}: {one['reason']}")


def _tier(tier: dict[str, Any]) -> str:
    """Say where a tier is, how long it takes, and why it stands where it stands."""
    text = f"{tier['tier']} {', '.join(tier['devices'])}"
    if tier["read_us"] is not None:
        text += f" over {tier['transport']}, {tier['read_pages']} pages in {tier['read_us']:.0f} us"
    return f"{text}: {tier['why']}"


def _tables(tables: list[dict[str, Any]]) -> Table:
    grid = Table(box=None, pad_edge=False)
    names = (
        "TABLE",
        "WINDOW",
        "WAYS",
        "ADVISED",
        "HITS",
        "PREDICTED",
        "PAGES",
        "READ",
        "PREDICTED",
        "STALL",
    )
    for name in names:
        grid.add_column(name, justify="left" if name == "TABLE" else "right")

    def number(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else f"{value:{form}}{unit}"

    for one in tables:
        grid.add_row(
            f"  {one['name']}",
            number(one["window_ms"], ".2f", " ms"),
            number(one["ways"], "d"),
            number(one["advised_ways"], "d"),
            number(one["hit_ratio"], ".1%"),
            number(one["predicted_hit_ratio"], ".1%"),
            number(one["pages"], ".1f"),
            number(one["read_ms"], ".2f", " ms"),
            number(one["predicted_read_ms"], ".2f", " ms"),
            number(one["stall_ms"], ".3f", " ms"),
        )
    return grid


def _console() -> Console:
    return Console(highlight=False, markup=False, width=400, color_system=None)
