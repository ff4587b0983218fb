"""Turns the hook on in a process, and says so when it served nothing.

``tierd run`` puts ``hook/site`` in front of the command's ``PYTHONPATH``; Python imports the
``sitecustomize`` there at its start, which calls :func:`start`. Only the standard library is needed
until a model module of transformers is imported.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from tierd.errors import HookError
from tierd.hook.imports import when_imported

if TYPE_CHECKING:
    from types import ModuleType

BASE_MODULE = "transformers.modeling_utils"
MODEL_MODULES = {
    "transformers.models.qwen4_exp.modeling_qwen4_exp": "tierd.hook.qwen4_exp",
    "transformers.models.gemma3n.modeling_gemma3n": "tierd.hook.gemma",
    "transformers.models.gemma4.modeling_gemma4": "tierd.hook.gemma",
}
# Engine's module that loads its plugins -> ours. An engine finds our plugin by itself, unless it
# was told to leave it out; here that is seen.
PLUGIN_MODULES = {
    "sglang.srt.plugins": "tierd.hook.sglang.plugin",
    "vllm.plugins": "tierd.hook.vllm.plugin",
}
RUN_PID = "TIERD_RUN_PID"

_tables_replaced = 0
_plugin_asked = False
_installed = False


def start() -> None:
    """Install the hook if ``TIERD=1``; do nothing if it is unset, empty or 0."""
    switch = os.environ.get("TIERD", "")
    if switch in {"", "0"}:
        return
    if switch != "1":
        _say(f"TIERD={switch!r} is neither 1 nor 0: no table is replaced")
        return
    install()
    atexit.register(_say_if_unused)


def install() -> None:
    """Patch transformers' model modules as they are imported, and those that have been."""
    global _installed  # noqa: PLW0603 - the process is what is switched
    if _installed:
        return
    _installed = True
    when_imported(BASE_MODULE, _patch_base)
    for name in MODEL_MODULES:
        when_imported(name, _patch_model)
    for name in PLUGIN_MODULES:
        when_imported(name, _activate_plugin)


def note_replaced() -> None:
    """Count a table that is served by tierd in this process."""
    global _tables_replaced  # noqa: PLW0603 - see above
    _tables_replaced += 1


def _patch_base(module: ModuleType) -> None:
    _adapter("tierd.hook.transformers").patch_base(module)


def _patch_model(module: ModuleType) -> None:
    _adapter(MODEL_MODULES[module.__name__]).patch(module)


def _activate_plugin(module: ModuleType) -> None:
    global _plugin_asked  # noqa: PLW0603 - as above
    _plugin_asked = True  # it says by itself what is in the way, and its engine's import ends
    _adapter(PLUGIN_MODULES[module.__name__]).activate()


def _adapter(name: str) -> Any:
    """Import an adapter, which needs torch (the engine has it by now) and tierd's core.

    Raises:
        HookError: this Python cannot load the core.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HookError(
            f"{sys.executable} cannot load tierd, so no table can be served ({error}); "
            f"run: {sys.executable} -m pip install tierd"
        ) from None


def _say_if_unused() -> None:
    """Speak up in the command itself, and in any other process that loaded the engine.

    Helpers that the command starts (a tokenizer worker, pip) would only be noise.
    """
    # These start many processes, most without a model; one whose model has no table ends.
    if _tables_replaced > 0 or _plugin_asked:
        return
    engine_loaded = BASE_MODULE in sys.modules
    if not engine_loaded and os.environ.get(RUN_PID) != str(os.getpid()):
        return
    why = "no model that it loaded has a table tierd knows" if engine_loaded else "no model loaded"
    _say(f"TIERD=1, but no lookup table was replaced ({why}); see docs/engines.md")


def _say(text: str) -> None:
    print(f"tierd[{os.getpid()}]: {text}", file=sys.stderr, flush=True)
