"""The ``tierd`` command.

A module here is a group of commands, hung on the root group when it is imported. Everything beyond
the standard library and click is imported inside the commands, so that help answers at once.
"""

from __future__ import annotations

from tierd.cli import (
    config,
    dashboard,
    devices,
    hook,
    images,
    jobs,
    machine,
    plan,
    probe,
    serving,
    storage,
    trace,
    watching,
)
from tierd.cli.base import cli, main

__all__ = [
    "cli",
    "config",
    "dashboard",
    "devices",
    "hook",
    "images",
    "jobs",
    "machine",
    "main",
    "plan",
    "probe",
    "serving",
    "storage",
    "trace",
    "watching",
]
