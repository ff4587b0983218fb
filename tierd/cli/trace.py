"""Commands on traces: record what an engine looks up, replay it, plot it, build seen-sets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierd.cli.base import cli, json_option, print_json
from tierd.cli.groups import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

_POLICIES = ("lru", "clock", "s3fifo", "static")


class Device(click.ParamType[Any]):
    """A device's read times: BASE_MS,PAGE_US or BASE_MS,PAGE_US,LATER_US."""

    name = "BASE_MS,PAGE_US[,LATER_US]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the numbers."""
        from tierd.controller.readtime import ReadTime

        try:
            numbers = [float(part) for part in str(value).split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in {2, 3} or any(not 0 <= number < 1e6 for number in numbers):
            self.fail(f"{value!r}: write 0.30,3.05 or 0.30,3.05,0.37", param, ctx)
        return ReadTime(*numbers)


@cli.group(cls=Group)
def trace() -> None:
    """Record which rows an engine looks up, and replay that against caches."""


# Options after the command's name are the command's own.
@trace.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The trace; {pid} stands for the process's number.",
)
@click.option("--socket", metavar="PATH", help="The daemon's engine socket.")
@click.option("--model", help="Attach this model's images only.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(out: Path, socket: str | None, model: str | None, command: Sequence[str]) -> None:
    """Run COMMAND as `tierd run` does and write every row it looks up to a trace."""
    from tierd.tools import trace as tool

    sys.exit(tool.record(command, out, socket=socket, model=model))


@trace.command()
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--model", help="Refuse a trace of any other model.")
@click.option(
    "--policy",
    "chosen",
    multiple=True,
    type=click.Choice(_POLICIES),
    help="Play this policy; repeatable. Default: lru.",
)
@click.option("--sizes", metavar="ROWS,...", help="Cache sizes of one table; default: 16 sizes.")
@click.option("--warm", default=0.3, show_default=True, type=click.FloatRange(0, 0.95),
              help="Share of the trace that only warms the caches.")  # fmt: skip
@click.option("--cache-rows", type=click.IntRange(32), help="Also play splits of such a cache.")
@click.option("--ways", metavar="W,...", help="This split only; ways by table, at most 32 in all.")
@click.option(
    "--window",
    "windows",
    multiple=True,
    metavar="TABLE=MS",
    help="A table's window, for splits; repeatable.",
)
@click.option(
    "--windows",
    "windows_path",
    type=click.Path(path_type=Path),
    help="Windows file of the probe, for splits.",
)
@click.option("--batch", type=click.IntRange(1), help="Batch size whose windows are meant.")
@click.option("--disk", type=Device(), help="Read times, for splits; default: the paper's disk.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write plots into this directory.")
@json_option
def replay(
    path: Path,
    model: str | None,
    chosen: tuple[str, ...],
    sizes: str | None,
    warm: float,
    cache_rows: int | None,
    ways: str | None,
    windows: tuple[str, ...],
    windows_path: Path | None,
    batch: int | None,
    disk: Any,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Play TRACE through caches: hit ratios by size and policy, splits, plots."""
    from tierd.tools import trace as tool
    from tierd.tools import trace_report as report

    loaded = tool.load(path, model=model)
    policies = tuple(dict.fromkeys(["lru", *chosen]))
    found = tool.replay(loaded, chosen=policies, sizes=_numbers("--sizes", sizes), warm=warm)
    if cache_rows:
        found["split"] = tool.splits(
            loaded,
            cache_rows=cache_rows,
            windows_ms=report.windows_of(loaded, windows, windows_path, batch),
            device=disk or report.PAPER_DISK,
            ways=_numbers("--ways", ways),
            warm=warm,
        )
    if plot is not None:
        found["plots"] = report.plots(found, plot)
    if as_json:
        print_json(found)
        return
    report.show(found)


@trace.command()
@click.argument(
    "paths", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--table", required=True, help="The table that the set is of.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The seen-set.")
@json_option
def seen(paths: tuple[Path, ...], table: str, out: Path, as_json: bool) -> None:
    """Build a seen-set from TRACEs: the rows that lossy skipping would still read."""
    from tierd.io import seen as seen_sets
    from tierd.tools import trace as tool

    made = tool.seen_set([tool.load(path, model=None) for path in paths], table)
    seen_sets.save(made, out)
    summary = {
        "table": made.table, "model": made.model, "rows": made.rows, "lookups": made.lookups,
        "seen_share": made.share, "bytes": made.bits.nbytes, "path": str(out),
    }  # fmt: skip
    if as_json:
        print_json(summary)
        return
    click.echo(
        f"{out}: {made.share:.2%} of {made.rows:,} rows seen in {made.lookups:,} lookups, "
        f"{made.bits.nbytes:,} bytes"
    )


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise click.BadParameter(f"{text!r}: write whole numbers with commas", param_hint=option)
    return numbers
