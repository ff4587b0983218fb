"""The ``tierd`` command.

A module here is a group of commands, hung on the root group when one of them is asked for: the
table in groups.py says which. Everything beyond the standard library and click is imported inside
the commands, so that help answers at once.
"""

from __future__ import annotations

from tierd.cli.base import cli, main

__all__ = ["cli", "main"]
