"""Commands that show what happens: events, and a live view."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from tierd.cli.base import api_option, api_path, cli, config_option, json_option, print_json


@cli.command()
@click.option("--follow", "-f", is_flag=True, help="Go on with events as they happen.")
@click.option("--kind", help="Only this kind, such as attached or failed.")
@click.option(
    "--limit", default=20, show_default=True, type=click.IntRange(1, 1000), help="Old ones shown."
)
@api_option
@config_option
@json_option
def events(
    follow: bool,
    kind: str | None,
    limit: int,
    api_socket: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Show what happened, oldest first; with --json and --follow, one object a line."""
    from tierd.api import rest_client
    from tierd.tools import show

    path = api_path(api_socket, config_path)
    query = f"limit={limit}" + (f"&kind={kind}" if kind else "")
    listed = rest_client.get(path, f"/v1/events?{query}")["events"]
    if as_json and not follow:
        print_json({"events": listed})
        return
    for event in reversed(listed):
        click.echo(json.dumps(event) if as_json else show.event(event))
    if not follow:
        return
    last = listed[0]["id"] if listed else 0
    # A stream that is asked to go on after number 0 begins with what happens next.
    for event in rest_client.follow(path, f"/v1/events?{query}&after={last}"):
        click.echo(json.dumps(event) if as_json else show.event(event))


@cli.command()
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(0.2), help="Seconds between."
)
@api_option
@config_option
@json_option
def top(
    once: bool, every: float, api_socket: str | None, config_path: Path | None, as_json: bool
) -> None:
    """Watch tables, caches and devices live: slack, stalls, hits, reads."""
    from tierd.api import rest_client
    from tierd.tools import top as view

    path = api_path(api_socket, config_path)

    def look() -> view.Look:
        return view.Look(
            at=time.monotonic(),
            status=rest_client.get(path, "/v1/status"),
            tables=rest_client.get(path, "/v1/tables")["tables"],
            jobs=rest_client.get(path, "/v1/jobs")["jobs"],
        )

    if as_json:
        print_json(view.to_json(look()))
    elif once:
        view.once(look())
    else:
        view.live(look, every)
