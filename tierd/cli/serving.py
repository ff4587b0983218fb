"""Commands that serve tables, and that show how serving goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierd.cli.base import (
    absolute,
    api_option,
    ask,
    cli,
    config_option,
    device_path,
    json_option,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@cli.command()
@config_option
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="DEVICE",
    help="Serve this path or UUID=...; repeatable.",
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
    from tierd.tools.lean import lean_imports

    with lean_imports():
        from tierd import config, log
        from tierd.api.server import RestApi
        from tierd.daemon.service import serve as serve_tables
    from tierd.tools import doctor

    overrides = {
        "daemon.name": name,
        "daemon.runtime_dir": absolute(directory),
        "daemon.state_dir": absolute(directory),
        "devices.paths": [device_path(name) for name in devices] or None,
        "engine.socket": absolute(engine_socket),
        "api.socket": absolute(api_socket),
        "log.format": "json" if as_json else None,
    }

    def read_settings() -> config.Settings:
        return config.load(config_path, overrides=overrides).settings

    settings = read_settings()
    log.setup(settings.log.level, settings.log.format)
    serve_tables(settings, lambda made: RestApi(made, examine=doctor.examine), read_settings)


@cli.command()
@api_option
@config_option
@json_option
def status(api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """Show how the daemon is doing."""
    state = ask(api_socket, config_path, "/v1/status")
    if as_json:
        print_json(state)
        return
    listed = ask(api_socket, config_path, "/v1/clients")
    from tierd.tools import show

    show.status(state, listed["clients"], listed["engines"])


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
@json_option
def demo(directory: Path | None, keep: bool, as_json: bool) -> None:
    """See tierd at work on tiny checkpoints, with every row compared."""
    from tierd.tools import demo as tool

    sys.exit(tool.demo(json_output=as_json, directory=directory, keep=keep))
