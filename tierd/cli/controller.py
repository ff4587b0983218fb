"""Commands by which the operator has the last word on the cache split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierd.cli.base import api_option, api_path, cli, config_option, json_option, print_json
from tierd.cli.groups import Group


@cli.group(cls=Group)
def controller() -> None:
    """Let the controller move no ways, or go back on what it moved; `tierd explain` shows it."""


def _say(path: Path, word: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    from tierd.api import rest_client

    return rest_client.change(path, "POST", f"/v1/controller/{word}", body)


@controller.command()
@click.option("--reason", default="", metavar="TEXT", help="Why, for those who look later.")
@api_option
@config_option
@json_option
def freeze(reason: str, api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """Keep every split as it is, those of engines to come too."""
    body = {"reason": reason} if reason else {}
    answer = _say(api_path(api_socket, config_path), "freeze", body)
    if as_json:
        print_json(answer)
        return
    click.echo(f"frozen: {answer['frozen']}; it moves again with: tierd controller thaw")


@controller.command()
@api_option
@config_option
@json_option
def thaw(api_socket: str | None, config_path: Path | None, as_json: bool) -> None:
    """Let splits move again."""
    answer = _say(api_path(api_socket, config_path), "thaw")
    if as_json:
        print_json(answer)
        return
    click.echo("splits may move")


@controller.command()
@api_option
@config_option
@json_option
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
def undo(api_socket: str | None, config_path: Path | None, as_json: bool, dry_run: bool) -> None:
    """Go back to the splits before the last changes, and freeze there."""
    answer = _say(api_path(api_socket, config_path), "undo" + "?dry_run=true" * dry_run)
    if as_json:
        print_json(answer)
        return
    if dry_run:
        click.echo("\n".join(answer["changes"]) or "nothing would change")
    elif answer["splits"]:
        click.echo(f"{answer['splits']} splits are as before, and frozen: tierd controller thaw")
    else:
        click.echo("nothing to go back on")
