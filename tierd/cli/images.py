"""Commands on staged images."""

from __future__ import annotations

from pathlib import Path

import click

from tierd.cli import jobs
from tierd.cli.base import (
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


@cli.group("images", cls=Group, invoke_without_command=True)
@devices_option(required=False)
@api_option
@config_option
@json_option
@click.pass_context
def images_(
    context: click.Context,
    devices: tuple[str, ...],
    api_socket: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """List images (as `tierd images list` does), show or delete one."""
    if context.invoked_subcommand is None:
        _list(devices, api_socket, config_path, as_json=as_json)


@images_.command("list")
@devices_option(required=False)
@api_option
@config_option
@json_option
def list_(
    devices: tuple[str, ...], api_socket: str | None, config_path: Path | None, as_json: bool
) -> None:
    """List images: those a daemon serves, or with --device those on devices."""
    _list(devices, api_socket, config_path, as_json=as_json)


@images_.command("show")
@click.argument("image", metavar="MODEL/TABLE")
@devices_option(required=False)
@config_option
@json_option
def show_(image: str, devices: tuple[str, ...], config_path: Path | None, as_json: bool) -> None:
    """Show one image: its manifest, and what each device holds of it.

    Without --device it is looked for on the configured devices. A daemon may be serving them.
    """
    from tierd.tools import offline, show_storage

    found = offline.image(devices or configured_devices(config_path), image)
    if as_json:
        print_json(found)
    else:
        show_storage.image(found)


@images_.command()
@click.argument("image", metavar="MODEL/TABLE")
@devices_option(required=True)
@click.option(
    "--to", "targets", multiple=True, required=True, metavar="DEVICE", help="To here; repeatable."
)
@json_option
def copy(image: str, devices: tuple[str, ...], targets: tuple[str, ...], as_json: bool) -> None:
    """Copy an image to other devices: a second tier, read where a page of the first is bad.

    A daemon may be serving the image; the devices it is copied to must not be served.
    """
    from tierd.tools import offline, show

    made = offline.copy_image(devices, image, targets, quiet=as_json)
    if as_json:
        print_json(made)
    elif made["written_bytes"]:
        size = show.size(made["written_bytes"])
        click.echo(f"{image}: copied to {' '.join(made['devices'])}, {size}")
    else:
        click.echo(f"{image}: the copy is there already")


@images_.command()
@click.argument("image", metavar="MODEL/TABLE")
@devices_option(required=False)
@click.option("--wipe", is_flag=True, help="Overwrite its bytes with zeroes, and read them back.")
@click.option("--parts", is_flag=True, help="Only what DEVICE holds of it; its home is gone.")
@api_option
@config_option
@json_option
def delete(
    image: str,
    devices: tuple[str, ...],
    wipe: bool,
    parts: bool,
    api_socket: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Delete an image and free its room.

    Refused while an engine reads the image. Where a daemon serves the devices, it does the work.
    Without --device the image is looked for on the daemon's devices, or on the configured ones.
    With --parts the daemon must not serve the devices.
    """
    from tierd.tools import offline, show

    if parts:
        given = offline.delete_parts(devices or configured_devices(config_path), image, wipe=wipe)
        if as_json:
            print_json(given)
        else:
            click.echo(f"{image}: parts given up, {show.size(given['size_bytes'])}")
        return
    serving = jobs.daemon_of(devices, api_socket, config_path)
    if serving is not None:
        result = jobs.delete_image(serving.path, image, wipe=wipe, quiet=as_json)
        if as_json:
            print_json(result)
        else:
            click.echo(f"{image}: deleted{', wiped' if wipe else ''}")
        return
    gone = offline.delete_image(devices or configured_devices(config_path), image, wipe=wipe)
    if as_json:
        print_json(gone)
        return
    what = "its wipe is given up" if gone["given_up"] else f"deleted{', wiped' if wipe else ''}"
    click.echo(f"{image}: {what}, {show.size(gone['size_bytes'])}")
    for path in gone["parts_kept_on"]:
        click.echo(f"note: {path} is not there; it gives its part up when it is opened again")


def _list(
    devices: tuple[str, ...], api_socket: str | None, config_path: Path | None, *, as_json: bool
) -> None:
    if devices:
        from tierd.tools import offline

        listed = offline.images(devices)
    else:
        listed = ask(api_socket, config_path, "/v1/images")["images"]
    if as_json:
        print_json({"images": listed})
        return
    if not listed:
        click.echo("no images; run: tierd stage CHECKPOINT --device DEVICE")
        return
    from tierd.tools import show

    show.images(listed)
