"""Engine adapters: they make an engine read its lookup tables through tierd.

Two switches do the same: ``tierd run -- COMMAND`` from outside, or from inside a script, before the
model is loaded::

    import tierd.hook
    tierd.hook.activate("transformers")

Importing this package changes nothing and imports nothing: an engine that looks for plugins pays
for it even when none is switched on.
"""

from __future__ import annotations

import importlib
import os

ENGINES = ("sglang", "transformers", "vllm")


def activate(
    engine: str,
    *,
    socket: str | None = None,
    model: str | None = None,
    cache_rows: int | None = None,
) -> None:
    """Serve an engine's tables from tierd for models that are loaded from here on.

    May be called again; what is given then replaces what was given before. SGLang and vLLM start
    processes of their own, which must serve too: for these two, ``TIERD=1`` and what is given are
    set in this process's environment.

    Args:
        engine: ``"sglang"``, ``"transformers"`` or ``"vllm"``.
        socket: the daemon's engine socket; None takes ``TIERD_SOCKET`` or the default.
        model: the name under which the tables were staged; None takes ``TIERD_MODEL`` or accepts
            any image of the checkpoint's tables.
        cache_rows: slots of the row cache; None takes ``TIERD_CACHE_ROWS`` or 65,536.

    Raises:
        HookError: an engine, or a version of it, that tierd does not serve.
        SystemExit: an SGLang or vLLM that it does not serve; these might swallow an error.
    """
    from tierd.errors import HookError  # noqa: PLC0415 - see above
    from tierd.hook import autostart, settings  # noqa: PLC0415 - see above

    if engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise HookError(f"engine {engine!r} is not one that tierd serves; there is: {known}")
    settings.override(socket=socket, model=model, cache_rows=cache_rows)
    if engine in {"sglang", "vllm"}:
        given = {"SOCKET": socket, "MODEL": model, "CACHE_ROWS": cache_rows}
        names = {f"TIERD_{name}": str(value) for name, value in given.items() if value is not None}
        os.environ.update({"TIERD": "1", **names})
        importlib.import_module(f"tierd.hook.{engine}.plugin").activate()
    else:
        autostart.install()
