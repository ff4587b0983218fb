"""All guards that need no running engine, against the SGLang of this environment.

Imports SGLang's modules, which takes it ten seconds and more, and starts nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING

from tierd.errors import HookError
from tierd.hook import settings
from tierd.hook.findings import Finding
from tierd.hook.sglang import guards, plugin

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = {
    plugin.ENGRAM_MODULE: guards.ENGRAM,
    plugin.PLE_MODULE: guards.PLE,
    plugin.RUNNER_MODULE: guards.RUNNER,
    plugin.MANAGER_MODULE: guards.MANAGER,
}


def run() -> list[Finding]:
    """Look at everything; one problem does not hide the next."""
    return [_environment(), _values(), _entry_point(), *_others(), *_sources()]


def _environment() -> Finding:
    what = "release and environment"
    try:
        problems = list(guards.environment_problems(os.environ))
        return Finding(what, "; ".join(problems) or None, f"sglang {guards.version()}")
    except HookError as error:
        return Finding(what, str(error))


def _values() -> Finding:
    what = "values of TIERD_*"
    try:
        wanted = settings.current()
        settings.switch("TIERD_EARLY_KICK")
        for name, number in (("TIERD_ROWS_MAX", "rows"), ("TIERD_EXPECTED_RANKS", "ranks")):
            settings.count(name, 1, what=number)
    except HookError as error:
        return Finding(what, str(error))
    return Finding(what, None, f"socket {wanted.socket}")


def _entry_point() -> Finding:
    what = f"entry point {guards.PLUGIN} of {guards.GROUP}"
    for entry in importlib.metadata.entry_points(group=guards.GROUP, name=guards.PLUGIN):
        return Finding(what, None, entry.value)
    return Finding(
        what,
        "tierd is not installed for this Python, so SGLang cannot find its plugin; "
        "install tierd into the environment of SGLang",
    )


def _others() -> Iterator[Finding]:
    """Other plugins are no problem by themselves; who replaced what is seen in the sources."""
    for entry in importlib.metadata.entry_points(group=guards.GROUP):
        if entry.name != guards.PLUGIN:
            yield Finding(f"plugin {entry.name}", None, f"{entry.value}, of somebody else")


def _sources() -> Iterator[Finding]:
    for name, parts in MODULES.items():
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever an engine's import may raise
            text = f"{name} cannot be imported: {type(error).__name__}: {error}"
            yield Finding(name, text.replace("\n", " "))
            continue
        try:
            problems = list(guards.source_problems(module, parts))
        except HookError as error:
            problems = [str(error)]
        yield Finding(name, "; ".join(problems) or None, ", ".join(parts))
