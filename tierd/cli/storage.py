"""Commands that put images on devices and check them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierd.cli import jobs
from tierd.cli.base import (
    api_option,
    cli,
    config_option,
    configured_devices,
    devices_option,
    json_option,
    load,
    print_json,
)
from tierd.errors import ConfigError

if TYPE_CHECKING:
    from tierd.io.walker import VerifyReport


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@devices_option(required=False)
@click.option("--model", help="Name of the images' model; default: the checkpoint's directory.")
@click.option("--tensor", "tensors", multiple=True, help="Take this tensor as a table; repeatable.")
@click.option("--table", "tables", multiple=True, help="Stage only this table; repeatable.")
@api_option
@config_option
@json_option
def stage(
    checkpoint: Path,
    devices: tuple[str, ...],
    model: str | None,
    tensors: tuple[str, ...],
    tables: tuple[str, ...],
    api_socket: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Copy the lookup tables of CHECKPOINT (a directory) to one or several devices.

    Over several (up to 8) each image is dealt out in turn, 2 MiB at a time. A table that is there
    already, from the same bytes, is left as it is. Where a daemon serves the devices, it does the
    work, and serves the images to the next engine that attaches. Without --device: all devices of
    the daemon, or those of the configuration.
    """
    from tierd.tools import offline

    serving = jobs.daemon_of(devices, api_socket, config_path)
    if serving is not None:
        request = {
            "kind": "stage",
            "checkpoint": str(checkpoint.absolute()),
            "devices": serving.devices,
            "model": model,
            "tables": list(tables),
            "tensors": list(tensors),
        }
        results = jobs.run(serving.path, request, title="staging", quiet=as_json)["images"]
    else:
        devices = devices or configured_devices(config_path)
        results = offline.stage(
            checkpoint, devices, model=model, tensors=tensors, tables_wanted=tables, quiet=as_json
        )
        _remember_staged(results, devices, config_path)
    if as_json:
        print_json({"images": results})
        return
    for result in results:
        what = (
            "is there already"
            if not result["written_bytes"]
            else (f"staged, {result['written_bytes']:,} bytes in {result['seconds']:.1f} s")
        )
        click.echo(f"{result['name']}: {result['rows']:,} rows, {what}")


@cli.command()
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@devices_option(required=False)
@click.option(
    "--full", is_flag=True, help="Every page's CRC, every tag, and the digest of all rows."
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Compare rows with this checkpoint's.",
)
@click.option(
    "--sample", default=200, show_default=True, type=click.IntRange(1), help="Rows a table."
)
@api_option
@config_option
@json_option
def verify(
    images: tuple[str, ...],
    devices: tuple[str, ...],
    full: bool,
    checkpoint: Path | None,
    sample: int,
    api_socket: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Check images; all of them, or those named MODEL/TABLE.

    With --device they are read from there, by this command. Without, the daemon checks what it
    serves; if none runs, the configured devices are read.
    """
    from tierd.io.walker import VerifyReport

    serving = None if devices else jobs.daemon_of((), api_socket, config_path)
    if serving is not None:
        request = {
            "kind": "verify",
            "images": list(images),
            "full": full,
            "checkpoint": None if checkpoint is None else str(checkpoint.absolute()),
            "sample": sample,
        }
        found = jobs.run(serving.path, request, title="verifying", quiet=as_json)["images"]
        reports = [VerifyReport.from_json(each) for each in found]
        devices = tuple(f"UUID={uuid}" for uuid in serving.devices)
    else:
        from tierd.tools import offline

        devices = devices or configured_devices(config_path)
        reports = offline.verify(
            devices, images, full=full, checkpoint=checkpoint, sample=sample, quiet=as_json
        )
    if as_json:
        print_json({"images": [report.to_json() for report in reports]})
    else:
        if not reports:
            click.echo("no images, so nothing was verified")
        for report in reports:
            _print_report(report, compared=checkpoint is not None)
        if not reports:
            click.echo("no images, so nothing was checked; run: tierd stage CHECKPOINT")
    for report in reports:
        report.require_ok(*devices)


def _print_report(report: VerifyReport, *, compared: bool) -> None:
    rows = f", {report.rows_compared:,} rows compared" if compared else ""
    digest = ", digest of all rows right" if report.digest_ok else ""
    found = f"{report.pages_checked:,} pages checked{rows}{digest}" if report.ok else "BAD"
    click.echo(f"{report.image}: {found}")


def _remember_staged(
    results: list[dict[str, Any]], devices: tuple[str, ...], config_path: Path | None
) -> None:
    """Tell history, if there is a place for it: staging needs neither it nor a configuration."""
    from tierd.catalog import Catalog

    try:
        paths = load(config_path).settings.paths
    except ConfigError as error:
        click.echo(f"note: history does not learn of this: {error}", err=True)
        return
    if not paths.state_dir.is_dir():
        return
    catalog = Catalog(paths.catalog)
    for result in results:
        if result["written_bytes"]:
            catalog.record("staged", result["name"], devices=list(devices), **result)
    catalog.close()
