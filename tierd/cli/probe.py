"""`tierd probe`: measure when a model's layers need their rows."""

from __future__ import annotations

from pathlib import Path

import click

from tierd.cli.base import cli, json_option, print_json


@cli.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--name", help="Name under which the model's tables are staged; default: directory.")
@click.option("--batch", default="1,8", show_default=True, help="Batch sizes, with commas between.")
@click.option("--layers", default="", help="Decoder layers, counted from 0; default: all.")
@click.option("--device", help="cuda or cpu; default: a GPU if there is one.")
@click.option("--repeats", default=5, show_default=True, help="Steps for each delay.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The windows file to write."
)
@json_option
def probe(
    model: Path,
    name: str | None,
    batch: str,
    layers: str,
    device: str | None,
    repeats: int,
    out: Path,
    as_json: bool,
) -> None:
    """Measure the windows of MODEL's layers under transformers and write them to a file.

    Name the file in controller.windows; it holds for this GPU, engine and model alone.
    """
    from tierd.tools import probe as tool

    options = tool.ProbeOptions(
        model=model,
        name=name or model.name,
        batches=tool.numbers(batch, "--batch"),
        layers=tool.numbers(layers, "--layers"),
        device=device,
        repeats=repeats,
    )
    windows = tool.probe(options, (lambda _: None) if as_json else click.echo)
    from tierd.gpu.probe import write  # after torch was found to be there

    write(windows, out)
    if as_json:
        print_json(windows.to_json())
    else:
        click.echo(f"wrote {out}; set controller.windows to it")
