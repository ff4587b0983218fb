"""The ``tierd`` command.

Everything beyond the standard library and click is imported where it is used, so that help and
small commands answer at once. An error meant for the user is one line and an exit code.
"""

# Imports stand in the commands for the reason above; click passes every option by position.
# ruff: noqa: PLC0415, PLR0917

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierd import __version__
from tierd.errors import ConfigError, TierdError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierd.config import Loaded

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class _Failure(click.ClickException):
    """A user's error: one line, no usage text, no traceback."""

    def __init__(self, error: TierdError) -> None:
        super().__init__(str(error))
        self.__dict__["exit_code"] = error.exit_code  # click declares it for the class

    def show(self, file: Any = None) -> None:
        del file
        click.echo(f"tierd: {self.message}", err=True)


class _Group(click.Group):
    """A group whose commands may raise TierdError."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TierdError as error:
            raise _Failure(error) from None


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)\s*([KMGT]?)(iB|B)?", value.strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a size; write 512MiB or 4GiB", param, ctx)
        return int(match[1]) * _UNITS[match[2].upper()]


_config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration file; default TIERD_CONFIG, else /etc/tierd/tierd.toml.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_api_option = click.option(
    "--api-socket", metavar="PATH", help="The daemon's REST socket; default api.socket."
)


def _device_option(*, required: bool) -> Callable[[Any], Any]:
    return click.option(
        "--device",
        "device",
        required=required,
        metavar="DEVICE",
        help="Block device or file made ready with `tierd format`.",
    )


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tierd")
def cli() -> None:
    """Serve the lookup tables of large language models from disk, bit-exact.

    Get going: format a device, stage a checkpoint's tables on it, serve them, run an engine:

    \b
      tierd format /srv/tierd.img --size 4GiB
      tierd stage CHECKPOINT --device /srv/tierd.img
      tierd serve --device /srv/tierd.img
      tierd run -- python script.py
    """  # noqa: D301 - click wants the backspace itself


@cli.command("format")
@click.argument("device")
@click.option("--size", type=_Size(), help="Make a file of this size, such as 4GiB.")
@click.option(
    "--force",
    metavar="NAME",
    help="Overwrite what the device holds; NAME is the device's own path, typed again.",
)
@_json_option
def format_(device: str, size: int | None, force: str | None, as_json: bool) -> None:
    """Make DEVICE (a block device or a file) ready for images."""
    from tierd.tools import offline

    result = offline.format_device(device, size=size, force=force)
    if as_json:
        _print_json(result)
        return
    click.echo(f"{result['device']}: ready, {result['size_bytes']:,} bytes, uuid {result['uuid']}")
    if not result["direct"]:
        click.echo(f"note: reads go through the page cache: {result['direct_reason']}")


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@_device_option(required=True)
@click.option("--model", help="Name of the images' model; default: the checkpoint's directory.")
@click.option("--tensor", "tensors", multiple=True, help="Take this tensor as a table; repeatable.")
@click.option("--table", "tables", multiple=True, help="Stage only this table; repeatable.")
@_config_option
@_json_option
def stage(
    checkpoint: Path,
    device: str,
    model: str | None,
    tensors: tuple[str, ...],
    tables: tuple[str, ...],
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Copy the lookup tables of CHECKPOINT (a directory) to a device.

    A table that is there already, from the same bytes, is left as it is.
    """
    from tierd.tools import offline

    results = offline.stage(
        checkpoint, device, model=model, tensors=tensors, tables_wanted=tables, quiet=as_json
    )
    _remember_staged(results, device, config_path)
    if as_json:
        _print_json({"images": results})
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
@_device_option(required=True)
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
@_json_option
def verify(
    images: tuple[str, ...],
    device: str,
    full: bool,
    checkpoint: Path | None,
    sample: int,
    as_json: bool,
) -> None:
    """Check images on a device; all of them, or those named MODEL/TABLE."""
    from tierd.tools import offline

    reports = offline.verify(
        device, images, full=full, checkpoint=checkpoint, sample=sample, quiet=as_json
    )
    if as_json:
        _print_json({"images": [report.to_json() for report in reports]})
    else:
        for report in reports:
            rows = f", {report.rows_compared:,} rows compared" if checkpoint else ""
            digest = ", digest of all rows right" if report.digest_ok else ""
            found = f"{report.pages_checked:,} pages checked{rows}{digest}" if report.ok else "BAD"
            click.echo(f"{report.image}: {found}")
    for report in reports:
        report.require_ok(device)


@cli.command()
@_device_option(required=False)
@_api_option
@_config_option
@_json_option
def images(
    device: str | None, api_socket: str | None, config_path: Path | None, as_json: bool
) -> None:
    """List images: those a daemon serves, or with --device those on a device."""
    if device is not None:
        from tierd.tools import offline

        listed = offline.images(device)
    else:
        listed = _ask(api_socket, config_path, "/v1/images")["images"]
    if as_json:
        _print_json({"images": listed})
        return
    if not listed:
        click.echo("no images; run: tierd stage CHECKPOINT --device DEVICE")
        return
    from tierd.tools import show

    show.images(listed)


@cli.command()
@_config_option
@click.option(
    "--device", "devices", multiple=True, metavar="DEVICE", help="Serve this; repeatable."
)
@click.option("--socket", "engine_socket", metavar="PATH", help="Where engines attach.")
@click.option("--api-socket", metavar="PATH", help="Where REST is served.")
@click.option("--dir", "directory", metavar="DIR", help="Keep sockets, locks and history here.")
@click.option("--name", help="Name of this instance.")
@click.option("--json", "as_json", is_flag=True, help="Log one JSON object a line.")
def serve(
    config_path: Path | None,
    devices: tuple[str, ...],
    engine_socket: str | None,
    api_socket: str | None,
    directory: str | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Serve the images of the configured devices until stopped (SIGTERM, Ctrl-C)."""
    from tierd import config, daemon, log
    from tierd.api.server import RestApi

    loaded = config.load(
        config_path,
        overrides={
            "daemon.name": name,
            "daemon.runtime_dir": _absolute(directory),
            "daemon.state_dir": _absolute(directory),
            "devices.paths": [str(Path(path).absolute()) for path in devices] or None,
            "engine.socket": _absolute(engine_socket),
            "api.socket": _absolute(api_socket),
            "log.format": "json" if as_json else None,
        },
    )
    settings = loaded.settings
    log.setup(settings.log.level, settings.log.format)
    daemon.serve(settings, RestApi)


@cli.command()
@_api_option
@_config_option
@_json_option
def status(api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """Show how the daemon is doing."""
    state = _ask(api_socket, config_path, "/v1/status")
    if as_json:
        _print_json(state)
        return
    clients = _ask(api_socket, config_path, "/v1/clients")["clients"]
    from tierd.tools import show

    show.status(state, clients)


# Options after the command's name are the command's own.
@cli.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--socket", "engine_socket", metavar="PATH", help="The daemon's engine socket.")
@click.option("--model", help="Attach this model's images only.")
def run(command: Sequence[str], engine_socket: str | None, model: str | None) -> None:
    """Run COMMAND with the engine hook: its tables are served by the daemon."""
    from tierd.tools import run as tool

    sys.exit(tool.run(list(command), socket=engine_socket, model=model))


@cli.command()
@click.option("--directory", type=click.Path(path_type=Path), help="Work here, not in a new place.")
@click.option("--keep", is_flag=True, help="Leave checkpoints, device and logs for a look.")
@_json_option
def demo(directory: Path | None, keep: bool, as_json: bool) -> None:
    """See tierd at work on tiny checkpoints, with every row compared."""
    from tierd.tools import demo as tool

    sys.exit(tool.demo(json_output=as_json, directory=directory, keep=keep))


@cli.group("config", cls=_Group)
def config_() -> None:
    """Check, show and explain the configuration."""


@config_.command()
@_config_option
@_json_option
def check(config_path: Path | None, as_json: bool) -> None:
    """Say whether the configuration can be used."""
    loaded = _load(config_path)
    source = str(loaded.path) if loaded.path else "no file; defaults"
    if as_json:
        _print_json({"ok": True, "path": str(loaded.path) if loaded.path else None})
        return
    click.echo(f"ok ({source})")


@config_.command("show")
@_config_option
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@_json_option
def show_config(config_path: Path | None, origin: bool, as_json: bool) -> None:
    """Print every value in force."""
    from tierd.config import in_force

    loaded = _load(config_path)
    values = in_force(loaded.settings)
    if as_json:
        _print_json(
            {k: {"value": v, "origin": loaded.origins[k]} for k, v in values.items()}
            if origin
            else values
        )
        return
    for key, value in values.items():
        # Octal, as people write permissions and as TOML reads them.
        text = f"{key} = {f'0o{value:o}' if key.endswith('_mode') else json.dumps(value)}"
        click.echo(f"{text:<56}  # {loaded.origins[key]}" if origin else text)


@config_.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["toml", "markdown"]),
    default="toml",
    help="A file to start from, or docs/config.md.",
)
def reference(form: str) -> None:
    """Print every key with its default and its meaning."""
    from tierd.tools import reference as page

    click.echo(page.toml() if form == "toml" else page.markdown(), nl=False)


def main() -> None:
    """Entry point of the ``tierd`` script."""
    cli.main(prog_name="tierd")


def _load(config_path: Path | None) -> Loaded:
    from tierd import config

    return config.load(config_path)


def _ask(api_socket: str | None, config_path: Path | None, resource: str) -> dict[str, Any]:
    from tierd.api import rest_client

    path = Path(api_socket) if api_socket else _load(config_path).settings.paths.api_socket
    return rest_client.get(path, resource)


def _remember_staged(results: list[dict[str, Any]], device: str, config_path: Path | None) -> None:
    """Tell history, if there is a place for it: staging needs neither it nor a configuration."""
    from tierd.catalog import Catalog

    try:
        paths = _load(config_path).settings.paths
    except ConfigError as error:
        click.echo(f"note: history does not learn of this: {error}", err=True)
        return
    if not paths.state_dir.is_dir():
        return
    catalog = Catalog(paths.catalog)
    for result in results:
        if result["written_bytes"]:
            catalog.record("staged", result["name"], device=device, **result)
    catalog.close()


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


if __name__ == "__main__":
    main()
