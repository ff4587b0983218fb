"""All that can be said of the transformers of this environment without loading a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.errors import HookError
from tierd.hook import autostart, findings, transformers
from tierd.hook.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

# What the adapters replace, and what they call.
PARTS = {
    "transformers.models.qwen4_exp.modeling_qwen4_exp": (
        "Qwen4ExpTextNGramEmbedding",
        "Qwen4ExpTextModel",
    ),
    "transformers.models.gemma3n.modeling_gemma3n": (
        "Gemma3nTextScaledWordEmbedding",
        "Gemma3nTextModel",
    ),
    "transformers.models.gemma4.modeling_gemma4": (
        "Gemma4TextScaledWordEmbedding",
        "Gemma4TextModel",
    ),
}


def run() -> list[Finding]:
    """Look at everything; one problem does not hide the next."""
    found = [_release(), findings.of_module(autostart.BASE_MODULE, ("loading",), _loading)]
    return found + [
        findings.of_module(name, PARTS[name], _parts) for name in autostart.MODEL_MODULES
    ]


def _release() -> Finding:
    what = "release"
    try:
        return Finding(what, None, transformers.check_version())
    except HookError as error:
        return Finding(what, str(error))
    except ImportError as error:
        return Finding(
            what, f"transformers cannot be imported ({error}); run: pip install 'tierd[hf]'"
        )


def _loading(module: ModuleType, _: Iterable[str]) -> Iterator[str]:
    problem = transformers.loading_problem(module)
    if problem is not None:
        yield problem


def _parts(module: ModuleType, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if not hasattr(module, name):
            yield f"{module.__name__} has no {name}; run: pip install 'tierd[hf]'"
