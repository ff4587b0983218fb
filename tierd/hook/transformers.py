"""What the hook changes in transformers itself, for any model: loading, and what it refuses.

``from_pretrained`` makes a model without memory, then reads the shards into it, tensor by tensor.
Between the two, when the files are known and nothing has been read, the tables are bound. The
tables' tensors are then keys that the model does not have, and transformers does not read those.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.errors import HookError
from tierd.hook import attach, rows, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    from torch import nn

VERSIONS = ((5, 17), (5, 24))
"""First and last release that this adapter was read against and tried with."""

_LOAD_PARAMETERS = ("model", "state_dict", "checkpoint_files", "load_config")


def patch_base(module: ModuleType) -> None:
    """Patch ``transformers.modeling_utils``.

    Raises:
        HookError: a release of transformers that the hook does not know.
    """
    engine = check_version()
    problem = loading_problem(module)
    if problem is not None:
        raise HookError(problem)
    base = module.PreTrainedModel
    load = base._load_pretrained_model  # noqa: SLF001 - the only place between files and reading
    rows.set_engine(engine)
    base._load_pretrained_model = staticmethod(_bind_before(load, engine))  # noqa: SLF001
    base.from_pretrained = classmethod(_mark_loading(base.from_pretrained.__func__))
    base.save_pretrained = _refuse(base.save_pretrained, "saved: its table would be missing")
    base.resize_token_embeddings = _refuse(
        base.resize_token_embeddings, "resized: its table is read-only"
    )


def loading_problem(module: Any) -> str | None:
    """Return why ``transformers.modeling_utils`` cannot be patched, if it cannot."""
    load = getattr(module.PreTrainedModel, "_load_pretrained_model", None)
    if load is not None and tuple(inspect.signature(load).parameters)[:4] == _LOAD_PARAMETERS:
        return None
    return (
        "this transformers loads models in a way that tierd does not know "
        "(PreTrainedModel._load_pretrained_model); run: pip install 'tierd[hf]'"
    )


def check_version() -> str:
    """Return the engine's name and release.

    Raises:
        HookError: a release that the hook does not know.
    """
    import transformers  # noqa: PLC0415 - it is being imported; this only looks it up

    version = str(transformers.__version__)
    first, last = VERSIONS
    if not first <= tuple(int(part) for part in version.split(".")[:2]) <= last:
        known = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        raise HookError(
            f"transformers {version} is not one that tierd knows ({known}); "
            "run: pip install 'tierd[hf]'"
        )
    return f"transformers {version}"


def stand_ins(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that stand in for a table."""
    return [m for m in model.modules() if isinstance(getattr(m, "tierd", None), rows.TableStandIn)]


def _mark_loading(from_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(from_pretrained)
    def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
        token = rows.LOADING.set(True)
        try:
            return from_pretrained(cls, *args, **kwargs)
        finally:
            rows.LOADING.reset(token)

    return wrapped


def _bind_before(load: Callable[..., Any], engine: str) -> Callable[..., Any]:
    @functools.wraps(load)
    def wrapped(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kw: Any
    ) -> Any:
        modules = stand_ins(model)
        if modules and state_dict is None:
            _check_load(load_config, checkpoint_files)
            _bind(modules, [Path(file) for file in checkpoint_files], engine)
        if modules:
            _refuse_tables_in(state_dict or {}, modules)
            ignored = set(model._keys_to_ignore_on_load_unexpected or ())  # noqa: SLF001
            patterns = {module.tierd_ignored_key for module in modules}
            model._keys_to_ignore_on_load_unexpected = ignored | patterns  # noqa: SLF001
        return load(model, state_dict, checkpoint_files, load_config, *args, **kw)

    return wrapped


def _check_load(load_config: Any, files: Any) -> None:
    """Refuse ways to load that would read the table into memory, or serve other bits."""
    if not files or not str(files[0]).endswith(".safetensors"):
        raise HookError(
            f"{files[0] if files else 'the model'}: not a safetensors file, so its tables cannot "
            "be told apart; convert the checkpoint to safetensors"
        )
    if load_config.disable_mmap:
        raise HookError(
            "disable_mmap=True reads whole shards into memory, tables included; leave it out"
        )
    if load_config.hf_quantizer is not None:
        raise HookError(
            "a quantized model is not served yet: tierd was not compared with it bit by bit; "
            "load it without quantization_config, or run it without tierd"
        )


def _refuse_tables_in(state_dict: Iterable[str], modules: list[nn.Module]) -> None:
    """Refuse tensors of a table that would be dropped without a word for rows from elsewhere."""
    for module in modules:
        pattern: str = module.tierd_ignored_key  # type: ignore[assignment]
        for key in state_dict:
            if re.search(pattern, key):
                raise HookError(
                    f"the given state_dict holds {key}, a table that tierd would not load but "
                    "serve; load the model from its safetensors files, or leave the table out and "
                    "set TIERD_MODEL=NAME; run: tierd images"
                )


def _bind(modules: list[nn.Module], files: list[Path], engine: str) -> None:
    wanted = settings.current()
    by_kind: dict[Any, attach.AttachedTables] = {}
    for module in modules:
        stand_in: rows.TableStandIn = module.tierd  # type: ignore[assignment]
        if stand_in.kind not in by_kind:
            by_kind[stand_in.kind] = attach.attach_checkpoint(
                files[0].parent, files, stand_in.kind, wanted, attach.EngineRank(engine)
            )
        stand_in.bind(by_kind[stand_in.kind], module.weight.dtype)  # type: ignore[arg-type]


def _refuse(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if stand_ins(self):
            raise HookError(
                f"a model whose tables tierd serves cannot be {what}; do it without tierd"
            )
        return method(self, *args, **kwargs)

    return wrapped
