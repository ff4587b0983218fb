"""All guards that need no running engine, against the SGLang of this environment.

Imports SGLang's modules, which takes it ten seconds and more, and starts nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierd.errors import HookError
from tierd.hook import findings
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
    entries = findings.entry_points(guards.GROUP, guards.PLUGIN, "SGLang")
    values = findings.of_values(("TIERD_EARLY_KICK",), ("TIERD_ROWS_MAX", "TIERD_EXPECTED_RANKS"))
    return [_environment(), values, *entries, *_sources()]


def _environment() -> Finding:
    what = "release and environment"
    try:
        problems = list(guards.environment_problems(os.environ))
        return Finding(what, "; ".join(problems) or None, f"sglang {guards.version()}")
    except HookError as error:
        return Finding(what, str(error))


def _sources() -> Iterator[Finding]:
    for name, parts in MODULES.items():
        yield findings.of_module(name, parts, guards.source_problems)
