"""``tierd dashboard``: the page that an operator keeps open."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tierd.cli.base import api_option, api_path, cli, config_option, json_option


@cli.command()
@click.option(
    "--port", default=9470, show_default=True, type=click.IntRange(0, 65535),
    help="Of 127.0.0.1; 0: any that is free.",
)  # fmt: skip
@api_option
@config_option
@json_option
def dashboard(port: int, api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """Show the daemon to a browser, read-only, on a loopback port, until Ctrl-C.

    Prints an address that lets one browser in, and the next one once it has been used. From
    another machine: ssh -L 9470:127.0.0.1:9470 NODE tierd dashboard
    """
    import asyncio
    import contextlib

    from tierd.api.door import Door

    path = api_path(api_socket, config_path)

    def say(url: str) -> None:
        click.echo(json.dumps({"url": url}) if as_json else f"open in one browser: {url}")

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Door(path, say).run(port))
