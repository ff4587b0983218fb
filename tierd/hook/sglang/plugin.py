"""What the entry point does when it is switched on."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tierd.hook import sources
from tierd.hook.imports import when_imported
from tierd.hook.sglang import guards

if TYPE_CHECKING:
    from types import ModuleType

ENGRAM_MODULE = "sglang.srt.layers.engram"
PLE_MODULE = "sglang.srt.models.qwen4_exp"
RUNNER_MODULE = "sglang.srt.model_executor.model_runner"
MANAGER_MODULE = "sglang.srt.model_executor.model_runner_components.ngram_embedding_manager"

_state = {"active": False}


or_exit = functools.partial(sources.or_exit, "SGLang", "sglang")
"""What ends the process with one line."""


def activate() -> None:
    """Check the engine and arrange for its modules to be patched. Idempotent.

    Raises:
        SystemExit: see :mod:`tierd.hook.sglang.guards`.
    """
    if _state["active"]:
        return
    with or_exit():
        guards.require_environment()
    _state["active"] = True
    when_imported(ENGRAM_MODULE, _patch_engram)
    when_imported(PLE_MODULE, _patch_ple)
    when_imported(RUNNER_MODULE, _patch_runner)
    when_imported(MANAGER_MODULE, _patch_manager)


# The adapters need torch, which a process that imports these modules has loaded by then.


def _patch_engram(module: ModuleType) -> None:
    with or_exit():
        guards.require_source(module, guards.ENGRAM)
        from tierd.hook.sglang import engram  # noqa: PLC0415 - see above

        engram.patch(module)


def _patch_ple(module: ModuleType) -> None:
    with or_exit():
        guards.require_source(module, guards.PLE)
        from tierd.hook.sglang import ple  # noqa: PLC0415 - see above

        ple.patch(module)


def _patch_runner(module: ModuleType) -> None:
    with or_exit():
        guards.require_source(module, guards.RUNNER)
        from tierd.hook.sglang import loaded, probe  # noqa: PLC0415 - see above

        loaded.patch(module)
        probe.patch(module)


def _patch_manager(module: ModuleType) -> None:
    with or_exit():
        guards.require_source(module, guards.MANAGER)
        from tierd.hook.sglang import early, hints  # noqa: PLC0415 - see above

        early.patch(module)
        hints.patch(module)
