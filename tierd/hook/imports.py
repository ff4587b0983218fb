"""Act on a module right after it was imported, without importing it.

An engine takes seconds to import, and a process that never loads a model must not pay for that.
So the hook waits: a finder in front of ``sys.meta_path`` recognises the few modules it cares for
and lets everything else through untouched.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Callback = Callable[[ModuleType], None]


class _PostImportFinder:
    """Finds nothing itself: lets the others find, then adds a callback to the loader."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}
        self._finding: set[str] = set()

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Part of the import system's finder protocol; package path and target are not needed."""
        if name not in self.callbacks or name in self._finding:
            return None
        self._finding.add(name)  # the search below comes back to this finder
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module
        callback = self.callbacks[name]

        def exec_module(module: ModuleType) -> None:
            run(module)
            callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _PostImportFinder()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once the module ``name`` is there: now, or when it is imported.

    A second callback for the same module replaces the first unless that has run.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_being_imported(module):
        callback(module)
        return
    _finder.callbacks[name] = callback
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _is_being_imported(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
