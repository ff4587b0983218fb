"""What every command uses: the root group, options, output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierd import __version__
from tierd.cli.groups import Root
from tierd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.config import Loaded

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType[int]):
    """A number of bytes, as people write it: 512MiB, 4GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of ``value``."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)\s*([KMGT]?)(iB|B)?", value.strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a size; write 512MiB or 4GiB", param, ctx)
        return int(match[1]) * _UNITS[match[2].upper()]


config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration file; default TIERD_CONFIG, else /etc/tierd/tierd.toml.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
api_option = click.option(
    "--api-socket", metavar="PATH", help="The daemon's REST socket; default api.socket."
)


def devices_option(*, required: bool) -> Callable[[Any], Any]:
    """``--device``, as often as there are devices."""
    return click.option(
        "--device",
        "devices",
        multiple=True,
        required=required,
        metavar="DEVICE",
        help="Block device or file made ready with `tierd format`, or UUID=...; repeatable.",
    )


def configured_devices(config_path: Path | None) -> tuple[str, ...]:
    """``devices.paths``; ConfigError if it is empty."""
    names = tuple(load(config_path).settings.devices.paths)
    if not names:
        raise ConfigError(
            "no device is named, and devices.paths is empty; name devices with --device; "
            "run: tierd devices list"
        )
    return names


def device_path(name: str) -> str:
    """A device's name as the daemon needs it: a path from the root, or ``UUID=...`` as it is."""
    return name if name.startswith("UUID=") else str(Path(name).absolute())


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
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


def load(config_path: Path | None) -> Loaded:
    """The configuration in force; ConfigError when it cannot be used."""
    from tierd import config

    return config.load(config_path)


def api_path(api_socket: str | None, config_path: Path | None) -> Path:
    """Where the daemon's REST socket is."""
    return Path(api_socket) if api_socket else load(config_path).settings.paths.api_socket


def ask(api_socket: str | None, config_path: Path | None, resource: str) -> dict[str, Any]:
    """The running daemon's answer to GET ``resource``."""
    from tierd.api import rest_client

    return rest_client.get(api_path(api_socket, config_path), resource)


def absolute(path: str | None) -> str | None:
    """``path`` from the root, as the daemon needs it."""
    return None if path is None else str(Path(path).absolute())


def print_json(value: object) -> None:
    """The one JSON object that ``--json`` promises."""
    click.echo(json.dumps(value, indent=2, default=str))


def main() -> None:
    """Entry point of the ``tierd`` script."""
    cli.main(prog_name="tierd")
