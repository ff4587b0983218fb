"""The last look, once a model is loaded: every table of it is served, and serves the right rows.

Only then are the tables attached, and only then does a forward kick them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tierd.errors import HookError
from tierd.hook.served import after_loading
from tierd.hook.vllm import guards, tables
from tierd.hook.vllm.plugin import or_exit

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn


def patch(module: ModuleType) -> None:
    """Patch one of vLLM's model runners."""

    def loaded(runner: Any) -> None:
        with or_exit():
            take(runner.model)

    after_loading(getattr(module, guards.RUNNERS[module.__name__].partition(".")[0]), loaded)


def take(model: nn.Module) -> None:
    """Attach what is not attached yet, try what was not tried, and let forwards kick.

    Args:
        model: the target model, loaded.

    Raises:
        HookError: it has no table that is served, or one that is not.
        AttachError: no daemon, or it refused.
    """
    served: list[Any] = [module for module in model.modules() if hasattr(module, "tierd")]
    _require_all(model, served)
    if not served:
        raise HookError(
            f"TIERD=1, but {type(model).__name__} has no lookup table that tierd serves "
            "(DeepSeek-V4.1, Qwen4Exp, Gemma 3n and Gemma 4 have); unset TIERD"
        )
    tables.RANKS.serve(served)
    _let_hashers_kick(model)
    names = ", ".join(f"layer {module.tierd.layer}" for module in served)
    print(f"tierd: tables of {names} are served", file=sys.stderr, flush=True)


def _require_all(model: nn.Module, served: list[Any]) -> None:
    """Refuse a model whose table is the stock one, made before the hook was active.

    Raises:
        HookError: it has such a table.
    """
    stock = set()
    for name, classes in (
        (guards.ENGRAM_MODULE, ("Engram",)),
        (guards.PLE_MODULE, ("Qwen4ExpPLEEmbedding",)),
    ):
        module = sys.modules.get(name)
        stock |= {getattr(module, one) for one in classes if module is not None}
    for name, module in model.named_modules():
        if not isinstance(module, tuple(stock)):
            continue
        if module not in served and getattr(module, "embed_tokens", None) not in served:
            raise HookError(
                f"{name} holds its table itself: it was constructed before the hook was active, "
                "or lies in GPU memory; start vLLM with TIERD=1 in its environment and without "
                "cpu_offload in --engram-config, or unset TIERD"
            )


def _let_hashers_kick(model: nn.Module) -> None:
    engine: Any = sys.modules.get(guards.ENGRAM_MODULE)
    if engine is None:
        return
    layers: list[Any] = [one for one in model.modules() if isinstance(one, engine.Engram)]
    # By the time they are read: the first layer has the shortest window.
    pairs = [(int(layer.layer_hash_index), layer.embed_tokens) for layer in layers]
    hasher: Any
    for hasher in model.modules():
        if isinstance(hasher, engine.NgramHashState):
            # In the instance's dict: a module would take the tables for its own children.
            hasher.__dict__["tierd_tables"] = tuple(sorted(pairs, key=lambda pair: pair[0]))
