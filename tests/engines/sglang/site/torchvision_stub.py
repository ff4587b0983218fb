"""Stands in for torchvision, of which SGLang's modules import names and, for text, use nothing.

The real one comes for one build of torch only and is of no use here. transformers must go on
believing that it is missing, or it would import classes from it: so it is asked first, and keeps
its answer.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType


class _Missing:
    """What every name of the stub is; whoever calls it is told."""

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> object:
        raise RuntimeError("torchvision is a stub in this environment")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing()


class _Finder:
    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision" or self._asking:
            return None
        self._asking = True
        try:
            from transformers.utils.import_utils import (
                is_torchvision_available,
            )

            is_torchvision_available()
        finally:
            self._asking = False
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
