"""What the entry point does when it is switched on."""

from __future__ import annotations

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

from tierd.hook import sources
from tierd.hook.imports import when_imported
from tierd.hook.vllm import guards

if TYPE_CHECKING:
    from types import ModuleType

ENVS_MODULE = "vllm.envs"
# Module of vLLM -> the adapter that patches it, and the parts of it that the adapter relies on.
# The adapters need torch, which a process that imports these modules has loaded by then.
ADAPTERS = {
    guards.ENGRAM_MODULE: ("tierd.hook.vllm.engram", guards.ENGRAM),
    guards.PLE_MODULE: ("tierd.hook.vllm.ple", guards.PLE),
    guards.VOCABULARY_MODULE: ("tierd.hook.vllm.per_layer", guards.VOCABULARY),
    **{name: ("tierd.hook.vllm.loaded", (part,)) for name, part in guards.RUNNERS.items()},
}

_state = {"active": False}

or_exit = functools.partial(sources.or_exit, "vLLM", "vllm")
"""What ends the process with one line."""


def activate() -> None:
    """Check the engine and arrange for its modules to be patched. Idempotent.

    Raises:
        SystemExit: see :mod:`tierd.hook.vllm.guards`.
    """
    if _state["active"]:
        return
    with or_exit():
        guards.require_environment()
    _state["active"] = True
    when_imported(ENVS_MODULE, _mark_compiled)
    for name in ADAPTERS:
        when_imported(name, _patch)


def _mark_compiled(envs: Any) -> None:
    """Let compiled graphs with and without tierd have different keys in vLLM's cache.

    It keeps what it compiled across starts, by its settings and by the variables listed here; a
    graph that reads the stock table must not be loaded into an engine that has none.
    """
    envs.environment_variables["TIERD"] = lambda: os.environ.get("TIERD")


def _patch(module: ModuleType) -> None:
    adapter, parts = ADAPTERS[module.__name__]
    with or_exit():
        guards.require_source(module, parts)
        importlib.import_module(adapter).patch(module)
