"""Commands on the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tierd.cli.base import cli, config_option, json_option, load, print_json
from tierd.cli.groups import Group


@cli.group("config", cls=Group)
def config_() -> None:
    """Check, show and explain the configuration."""


@config_.command()
@config_option
@json_option
def check(config_path: Path | None, as_json: bool) -> None:
    """Say whether the configuration can be used."""
    loaded = load(config_path)
    source = str(loaded.path) if loaded.path else "no file; defaults"
    if as_json:
        print_json({"ok": True, "path": str(loaded.path) if loaded.path else None})
        return
    click.echo(f"ok ({source})")


@config_.command("show")
@config_option
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@json_option
def show_config(config_path: Path | None, origin: bool, as_json: bool) -> None:
    """Print every value in force."""
    from tierd.config import in_force

    loaded = load(config_path)
    values = in_force(loaded.settings)
    if as_json:
        print_json(
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
