"""Commands on the machine: examine it, set it up; and what shells and writers of pages need."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tierd.cli.base import cli, config_option, device_path, json_option, load, print_json


@cli.command()
@click.option(
    "--device", "devices", multiple=True, metavar="DEVICE", help="Look at this one; repeatable."
)
@click.option(
    "--seconds",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 60),
    help="How long each device is read at queue depths 1 and 64; 0 reads nothing.",
)
@config_option
@json_option
def doctor(
    devices: tuple[str, ...], seconds: float, config_path: Path | None, as_json: bool
) -> None:
    """Say what this machine lacks for serving tables, why, and the command that cures it.

    Looks at io_uring, locked memory, huge pages, memory nodes, RDMA, CUDA, and the devices of the
    configuration (or --device). Devices are read, never written, also beside a daemon. The exit
    code is 1 if something does not work.
    """
    from tierd import config
    from tierd.tools import doctor as tool
    from tierd.tools import show

    overrides = {"devices.paths": [device_path(name) for name in devices] or None}
    settings = config.load(config_path, overrides=overrides).settings
    found = tool.examine(settings, seconds=seconds or None, gpu=True)
    if as_json:
        print_json({"findings": found})
    else:
        show.findings(found)
    sys.exit(any(finding["severity"] == "problem" for finding in found))


@cli.command()
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="Whose tables are to be served."
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="DEVICE",
    help="Use this one, formatted or not; repeatable. Default: those that are formatted.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("/etc/tierd/tierd.toml"),
    show_default=True,
    help="Where the configuration goes; - prints it.",
)
@click.option("--yes", is_flag=True, help="Overwrite and format without asking.")
@json_option
def init(
    checkpoint: Path | None, devices: tuple[str, ...], output: Path, yes: bool, as_json: bool
) -> None:
    """Write a configuration for this machine, with comments, and format new devices.

    Asks before it overwrites a file or formats a device: what that held is lost.
    """
    from tierd.config.layers import DEFAULT_PATH
    from tierd.tools import init as tool

    plan = tool.plan(checkpoint, devices)
    if str(output) == "-":
        click.echo(plan.text, nl=False)
        return
    for path in plan.format:
        question = f"{path} is not formatted: format it? Everything on it is lost."
        if not yes:
            click.confirm(question, abort=True, err=True)
    if output.exists() and not yes:
        click.confirm(f"{output} exists: overwrite it?", abort=True, err=True)
    tool.format_devices(plan.format)
    if plan.format:  # they have UUIDs now, which stay when names change
        plan = tool.plan(checkpoint, devices)
    tool.write(plan.text, output)
    load(output)
    if as_json:
        print_json({"written": str(output), **plan.to_json()})
        return
    click.echo(f"{output}: written")
    for key, (value, why) in plan.chosen.items():
        click.echo(f"  {key} = {value}  # {why}")
    for note in plan.notes:
        click.echo(f"note: {note}")
    click.echo("next:")
    if output.absolute() != DEFAULT_PATH:
        click.echo(f"  export TIERD_CONFIG={output.absolute()}")
    for step in plan.steps:
        click.echo(f"  {step}")


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete tierd's commands and options.

    \b
      bash:  tierd completion bash > /etc/bash_completion.d/tierd
      zsh:   tierd completion zsh > "${fpath[1]}/_tierd"
      fish:  tierd completion fish > ~/.config/fish/completions/tierd.fish
    """  # noqa: D301 - click wants the backspace itself
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the three"
    click.echo(kind(cli, {}, "tierd", "_TIERD_COMPLETE").source())


@cli.command()
@click.argument("page", type=click.Choice(["cli", "metrics", "rest"]))
def reference(page: str) -> None:
    """Print docs/cli.md, docs/metrics.md or docs/rest.md; see also `tierd config reference`."""
    if page == "cli":
        from tierd.cli.reference import markdown
    elif page == "rest":
        from tierd.api.reference import markdown
    else:
        from tierd.api.metrics import markdown

    click.echo(markdown(), nl=False)
