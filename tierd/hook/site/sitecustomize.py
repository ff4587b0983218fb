"""Imported by Python at its start under ``tierd run``; then hands over to the next sitecustomize.

Python imports only the first ``sitecustomize`` on its path. Whoever else has one (a distribution, a
debugger, another tool) must not notice that this one stands in front.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _next_sitecustomize() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module  # as if this file did not exist
    spec.loader.exec_module(module)


def _start() -> None:
    if os.environ.get("TIERD", "") in {"", "0"}:
        return
    try:
        from tierd.hook import autostart  # noqa: PLC0415 - only if it is switched on
    except ImportError as error:
        print(
            f"tierd[{os.getpid()}]: {sys.executable} cannot import tierd ({error}): no table is "
            f"replaced; run: {sys.executable} -m pip install tierd",
            file=sys.stderr,
        )
        return
    autostart.start()


_start()
_next_sitecustomize()
