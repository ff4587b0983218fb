"""SGLang: its plugin group ``sglang.srt.plugins`` calls :func:`activate` in every process.

SGLang goes on without a plugin that raises an ``Exception``, so whatever is in the way ends the
process: ``SystemExit`` with one line. Without ``TIERD=1`` nothing is imported and nothing patched.

Nothing of SGLang is imported here either. Its modules are patched right after they were imported,
before anybody can have copied a name out of them, and only in processes that import them.

- ``guards`` says what must hold of the engine, its settings and its environment;
- ``tables`` finds and attaches this rank's tables;
- ``engram`` and ``ple`` replace the classes that hold a table; ``early`` kicks after sampling,
  ``hints`` looks a chunk ahead in prefill, ``probe`` measures windows;
- ``loaded`` looks at the model once it is loaded;
- ``check`` does all that can be done without starting the engine.
"""

from __future__ import annotations

import os


def activate() -> None:
    """Serve the tables of the model that this process will load, if ``TIERD=1``. Idempotent.

    Raises:
        SystemExit: this SGLang, or a setting, that tierd does not serve.
    """
    switch = os.environ.get("TIERD", "")
    if switch in {"", "0"}:
        return
    if switch != "1":
        raise SystemExit(f"tierd: TIERD={switch!r} is neither 1 nor 0; set TIERD=1, or unset it")
    from tierd.hook.sglang import plugin  # noqa: PLC0415 - nothing is imported unless asked for

    plugin.activate()
