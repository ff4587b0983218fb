"""All guards that need no running engine, against the vLLM of this environment.

Imports vLLM's modules, which takes it ten seconds and more, and starts nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierd.errors import HookError
from tierd.hook import findings
from tierd.hook.findings import Finding
from tierd.hook.vllm import guards, plugin

if TYPE_CHECKING:
    from collections.abc import Iterator


def run() -> list[Finding]:
    """Look at everything; one problem does not hide the next."""
    entries = findings.entry_points(guards.GROUP, guards.PLUGIN, "vLLM")
    return [_environment(), *entries, *_sources()]


def _environment() -> Finding:
    what = "release and environment"
    try:
        problems = list(guards.environment_problems(os.environ))
        return Finding(what, "; ".join(problems) or None, f"vllm {guards.version()}")
    except HookError as error:
        return Finding(what, str(error))


def _sources() -> Iterator[Finding]:
    for name, (_, parts) in plugin.ADAPTERS.items():
        yield findings.of_module(name, parts, guards.source_problems)
