"""Commands of the controller: plan a placement, explain what runs, freeze and undo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierd.cli.base import Size, api_option, ask, cli, config_option, json_option, print_json
from tierd.cli.trace import Device


@cli.command()
@click.argument("source", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.option(
    "--windows", type=click.Path(path_type=Path), help="Windows file, as the probe writes it."
)
@click.option(
    "--window",
    multiple=True,
    metavar="TABLE=MS",
    help="A window by hand (or LAYER=MS); repeatable.",
)
@click.option("--model", help="The model the windows must be of; default: the directory's name.")
@click.option("--gpu", help="The GPU the windows must be of; default: this machine's.")
@click.option("--engine", help="The engine and version that the windows must be of.")
@click.option("--batch", default=128, show_default=True, type=click.IntRange(1), help="Sequences.")
@click.option(
    "--ranks", default=1, show_default=True, type=click.IntRange(1), help="Of the engine."
)
@click.option("--disk", multiple=True, type=Device(), help="A disk's read times; repeatable.")
@click.option("--remote", multiple=True, type=Device(), help="A remote link's; repeatable.")
@click.option("--dram", type=Size(), help="Host memory that images may take; none if not given.")
@click.option("--disk-size", type=Size(), help="Room on the disks together.")
@click.option("--remote-size", type=Size(), help="Room in remote memory.")
@click.option("--cache", type=Size(), help="HBM of one rank for the row cache.")
@click.option(
    "--curves", type=click.Path(path_type=Path), help="Output of `tierd trace replay --json`."
)
@click.option(
    "--allowed-ms", default=0.1, show_default=True, help="Growth of the step that is still in time."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot into this directory.")
@json_option
def plan(
    source: Path,
    windows: Path | None,
    window: tuple[str, ...],
    model: str | None,
    gpu: str | None,
    engine: str | None,
    batch: int,
    ranks: int,
    disk: tuple[Any, ...],
    remote: tuple[Any, ...],
    dram: int | None,
    disk_size: int | None,
    remote_size: int | None,
    cache: int | None,
    curves: Path | None,
    allowed_ms: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Say where each table of CHECKPOINT (or a config.json) can live. Nothing is written.

    For every table: its window, its read time on each tier, the tier chosen and why every cheaper
    one was refused; and the memory that takes.
    """
    from tierd.tools import plan as tool
    from tierd.tools import plan_report as report

    _, made = tool.plan(
        tool.Request(
            source=source,
            windows=windows,
            window=tool.parse_windows(window),
            model=model,
            gpu=gpu,
            engine=engine,
            batch=batch,
            ranks=ranks,
            disk=disk,
            remote=remote,
            dram_bytes=dram,
            disk_bytes=disk_size,
            remote_bytes=remote_size,
            cache_bytes=cache or 0,
            curves=curves,
            allowed_ms=allowed_ms,
        )
    )
    if plot is not None:
        made["plots"] = report.plot_plan(made, plot)
    if as_json:
        print_json(made)
        return
    report.show_plan(made)
    for path in made.get("plots", []):
        click.echo(path)


@cli.command()
@api_option
@config_option
@json_option
def explain(api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """Say what the controller sees and decides: measured beside predicted, with reasons."""
    state = ask(api_socket, config_path, "/v1/controller")
    state["placements"] = ask(api_socket, config_path, "/v1/placements")["placements"]
    if as_json:
        print_json(state)
        return
    from tierd.tools import plan_report as report

    report.show_explained(state)
