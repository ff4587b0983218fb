"""Commands on devices themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierd.cli.base import (
    Size,
    api_option,
    ask,
    cli,
    config_option,
    configured_devices,
    devices_option,
    json_option,
    print_json,
)
from tierd.cli.groups import Group
from tierd.errors import TierdError


@cli.command("format")
@click.argument("device")
@click.option("--size", type=Size(), help="Make a file of this size, such as 4GiB.")
@click.option(
    "--force",
    metavar="NAME",
    help="Overwrite what the device holds; NAME is the device's own path, typed again.",
)
@json_option
def format_(device: str, size: int | None, force: str | None, as_json: bool) -> None:
    """Make DEVICE (a block device or a file) ready for images."""
    from tierd.tools import offline

    result = offline.format_device(device, size=size, force=force)
    if as_json:
        print_json(result)
        return
    click.echo(f"{result['device']}: ready, {result['size_bytes']:,} bytes, uuid {result['uuid']}")
    if not result["direct"]:
        click.echo(f"note: reads go through the page cache: {result['direct_reason']}")


@cli.group("devices", cls=Group)
def devices_() -> None:
    """List devices, make them ready, look into them."""


devices_.add_command(format_, "format")


@devices_.command("list")
@devices_option(required=False)
@api_option
@config_option
@json_option
def list_(
    devices: tuple[str, ...], api_socket: str | None, config_path: Path | None, as_json: bool
) -> None:
    """List devices: those a daemon serves, or with --device these.

    When no daemon answers, those of devices.paths and every block device that tierd has formatted.
    """
    from tierd.tools import device_list, show_storage

    listed = None if devices else _served(api_socket, config_path)
    if listed is None:
        listed = device_list.devices(devices) if devices else _here(config_path)
    if as_json:
        print_json({"devices": listed})
    elif listed:
        show_storage.devices(listed)
    else:
        click.echo("no devices; run: tierd format DEVICE")


@devices_.command()
@click.argument("device")
@json_option
def inspect(device: str, as_json: bool) -> None:
    """Print what DEVICE says of itself, whatever state it is in.

    Roots, images, parts, the map of free space; of a damaged device what can still be made out.
    Nothing is changed, and a daemon may be serving it.
    """
    from tierd.tools import device_list, show_storage

    found = device_list.inspect(device)
    if as_json:
        print_json(found)
    else:
        show_storage.device(found)


def _served(api_socket: str | None, config_path: Path | None) -> list[dict[str, Any]] | None:
    """Devices of the running daemon; None if there is none to ask."""
    try:
        listed: list[dict[str, Any]] = ask(api_socket, config_path, "/v1/status")["devices"]
    except TierdError:
        if api_socket is not None:
            raise
        return None
    return [{**device, "state": "served"} for device in listed]


def _here(config_path: Path | None) -> list[dict[str, Any]]:
    from tierd.tools import device_list

    try:
        names = configured_devices(config_path)
    except TierdError:
        names = ()
    return device_list.devices([*names, *device_list.formatted(but=names)])
