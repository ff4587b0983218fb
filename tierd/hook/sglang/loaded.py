"""The last look, once a model is loaded: every table of it is served, and serves the right rows.

Only then are the tables attached, at the latest, and only then does a forward kick them.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Any

from tierd.errors import HookError
from tierd.hook.served import after_loading
from tierd.hook.sglang import probe, tables
from tierd.hook.sglang.hints import PrefillHints
from tierd.hook.sglang.plugin import ENGRAM_MODULE, PLE_MODULE, or_exit

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

log = logging.getLogger("tierd")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def patch(module: ModuleType) -> None:
    """Patch ``sglang.srt.model_executor.model_runner``."""

    def loaded(runner: Any) -> None:
        if not runner.is_draft_worker:  # drafts have no such tables
            with or_exit():
                take(runner.model)

    after_loading(module.ModelRunner, loaded)


def take(model: nn.Module) -> None:
    """Attach what is not attached yet, try what was not tried, and let forwards kick.

    Args:
        model: the target model, loaded.

    Raises:
        HookError: it has no table that is served, or one that is not.
        AttachError: no daemon, or it refused.
    """
    served = [*_engram_tables(model), *_ple_tables(model)]
    if not served:
        raise HookError(
            f"TIERD=1, but {type(model).__name__} has no lookup table that tierd serves "
            "(DeepSeek-V4.1 and Qwen4Exp have); unset TIERD"
        )
    tables.RANKS.serve(served)
    tables.RANKS.keep_weights(model, or_exit)
    _let_hashers_kick(model)
    probe.install(model, served)
    names = ", ".join(f"layer {module.tierd.layer}" for module in served)
    log.info("tables of %s are served by tierd", names)


def _engram_tables(model: nn.Module) -> list[Any]:
    engine: Any = sys.modules.get(ENGRAM_MODULE)
    if engine is None:
        return []
    found = [module.embed for module in model.modules() if isinstance(module, engine.Engram)]
    for embed in found:
        if type(embed) is not engine.EngramEmbedding or not hasattr(embed, "tierd"):
            raise _not_ours("an Engram table", embed)
    wanted = len(_text_config(model, "engram_layer_ids") or found)
    if len(found) != wanted:
        raise HookError(
            f"the model has {len(found)} Engram tables, its config names {wanted}: pipeline "
            "parallelism, perhaps, which is not served; run SGLang without tierd"
        )
    return found


def _ple_tables(model: nn.Module) -> list[Any]:
    engine: Any = sys.modules.get(PLE_MODULE)
    if engine is None:
        return []
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, engine.Qwen4ExpNGramEmbedding):
            continue
        table: Any = module.ngram_embedding
        if not hasattr(table, "tierd"):
            if not getattr(module.config, "ple_offload_embedding", False):
                raise HookError(
                    f"{name} lies in GPU memory, as --no-ple-offload-embedding has it; tierd takes "
                    "the place of the table in host memory: start SGLang with "
                    "--ple-offload-embedding, or unset TIERD"
                )
            raise _not_ours(name, table)
        layer = _LAYER.search(name)
        if layer is None:
            raise HookError(f"{name}: cannot tell its layer; run: tierd hook check sglang")
        table.tierd_bind(int(layer[1]))
        found.append(table)
    return found


def _not_ours(what: str, made: nn.Module) -> HookError:
    return HookError(
        f"{what} is a {type(made).__module__}.{type(made).__name__}, not tierd's: constructed "
        "before the hook was active (start SGLang by sglang.launch_server, or set "
        "SGLANG_EXTERNAL_MODEL_PACKAGE=tierd.hook.sglang.external), or of another plugin (set "
        "SGLANG_PLUGINS=tierd)"
    )


def _let_hashers_kick(model: nn.Module) -> None:
    engine: Any = sys.modules.get(ENGRAM_MODULE)
    if engine is None:
        return
    layers = [module for module in model.modules() if isinstance(module, engine.Engram)]
    # By the time they are read: the first layer has the shortest window.
    pairs = [(int(layer.layer_hash_index), layer.embed.tierd) for layer in layers]
    pairs.sort(key=lambda pair: pair[0])
    pages = max((rank.hint_pages for rank in tables.RANKS.all()), default=0)
    hasher: Any
    for hasher in model.modules():
        if not isinstance(hasher, engine.EngramHasher):
            continue
        # Neither may be in the copy that hints are hashed with.
        hasher.tierd_tables, hasher.tierd_hints = (), None
        if pairs and pages:
            hasher.tierd_hints = PrefillHints(hasher, pairs, pages)
        hasher.tierd_tables = tuple(pairs)


def _text_config(model: nn.Module, name: str) -> Any:
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    return getattr(config, name, None)
