"""Groups of commands: errors for people, and a root that imports a command when it is asked for.

An error meant for the user is one line and an exit code.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from tierd.errors import TierdError

# Command: its module here, and its line in `tierd --help`. Importing every module for that help
# would cost half of its time; a test holds the table against the commands themselves.
COMMANDS = {
    "completion": ("machine", "Print what makes SHELL complete tierd's commands and options."),
    "config": ("config", "Check, show and explain the configuration."),
    "controller": (
        "controller",
        "Let the controller move no ways, or go back on what it moved; `tierd explain` shows it.",
    ),
    "dashboard": (
        "dashboard",
        "Show the daemon to a browser, read-only, on a loopback port, until Ctrl-C.",
    ),
    "demo": ("serving", "See tierd at work on tiny checkpoints, with every row compared."),
    "devices": ("devices", "List devices, make them ready, look into them."),
    "doctor": (
        "machine",
        "Say what this machine lacks for serving tables, why, and the command that cures it.",
    ),
    "events": (
        "watching",
        "Show what happened, oldest first; with --json and --follow, one object a line.",
    ),
    "explain": (
        "plan",
        "Say what the controller sees and decides: measured beside predicted, with reasons.",
    ),
    "format": ("devices", "Make DEVICE (a block device or a file) ready for images."),
    "hook": ("hook", "Look at the engine hooks."),
    "images": ("images", "List images (as `tierd images list` does), show or delete one."),
    "init": (
        "machine",
        "Write a configuration for this machine, with comments, and format new devices.",
    ),
    "jobs": ("jobs", "List, show and cancel the daemon's jobs."),
    "plan": ("plan", "Say where each table of CHECKPOINT (or a config.json) can live."),
    "probe": (
        "probe",
        "Measure the windows of MODEL's layers under transformers and write them to a file.",
    ),
    "reference": (
        "machine",
        "Print docs/cli.md, docs/metrics.md or docs/rest.md; see also `tierd config reference`.",
    ),
    "run": ("serving", "Run COMMAND with the engine hook: its tables are served by the daemon."),
    "serve": (
        "serving",
        "Serve the images of the configured devices until stopped (SIGTERM, Ctrl-C).",
    ),
    "stage": (
        "storage",
        "Copy the lookup tables of CHECKPOINT (a directory) to one or several devices.",
    ),
    "status": ("serving", "Show how the daemon is doing."),
    "top": ("watching", "Watch tables, caches and devices live: slack, stalls, hits, reads."),
    "trace": ("trace", "Record which rows an engine looks up, and replay that against caches."),
    "verify": ("storage", "Check images; all of them, or those named MODEL/TABLE."),
}


class Failure(click.ClickException):
    """A user's error: one line, no usage text, no traceback."""

    def __init__(self, error: TierdError) -> None:
        super().__init__(str(error))
        self.__dict__["exit_code"] = error.exit_code  # click declares it for the class

    def show(self, file: Any = None) -> None:
        """Print the one line on the error stream."""
        del file
        click.echo(f"tierd: {self.message}", err=True)


class Group(click.Group):
    """A group whose commands may raise TierdError."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a TierdError ends it with its line and exit code."""
        try:
            return super().invoke(ctx)
        except TierdError as error:
            raise Failure(error) from None


class Root(Group):
    """The root group: it knows its commands by name and line, and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, sorted."""
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module that hangs ``cmd_name`` on this group."""
        if cmd_name in COMMANDS:
            importlib.import_module(f"tierd.cli.{COMMANDS[cmd_name][0]}")
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands' lines without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

    def everything(self) -> Root:
        """Import every command; return this group."""
        for module, _ in COMMANDS.values():
            importlib.import_module(f"tierd.cli.{module}")
        return self
