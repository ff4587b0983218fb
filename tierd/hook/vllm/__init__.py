"""vLLM: its plugin group ``vllm.general_plugins`` calls :func:`activate` in every process.

Without ``TIERD=1`` nothing is imported and nothing patched. With it, whatever is in the way ends
the process: ``SystemExit`` with one line.

Nothing of vLLM is imported here either. Its modules are patched right after they were imported,
before anybody can have copied a name out of them, and only in processes that import them.

- ``guards`` says what must hold of the engine, its settings and its environment;
- ``tables`` finds and attaches this rank's tables;
- ``engram``, ``ple`` and ``per_layer`` replace the classes that hold a table;
- ``loaded`` looks at the model once it is loaded;
- ``check`` does all that can be done without starting the engine.
"""

from __future__ import annotations

import os


def activate() -> None:
    """Serve the tables of the model that this process will load, if ``TIERD=1``. Idempotent.

    Raises:
        SystemExit: this vLLM, or a setting, that tierd does not serve; or ``TIERD`` is no switch.
    """
    switch = os.environ.get("TIERD", "")
    if switch in {"", "0"}:
        return
    if switch != "1":
        raise SystemExit(f"tierd: TIERD={switch!r} is neither 1 nor 0; set TIERD=1, or unset it")
    from tierd.hook.vllm import plugin  # noqa: PLC0415 - nothing is imported unless asked for

    plugin.activate()
