"""Tiny checkpoints with real layouts, and a device with their tables, made once a test run."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import types
from pathlib import Path
from typing import Any

from tests.daemons import Node, make_node
from tierd.tools import demo_models

FAMILIES = ("qwen4_exp", "gemma4", "gemma3n")
WIDE_TABLE_BYTES = 48 << 20
"""At least: the table of ``wide``, a model that is nearly nothing but its table."""


@functools.cache
def checkpoints() -> dict[str, Path]:
    """Write the checkpoints; name -> directory. They live as long as the process."""
    root = _scratch()
    demo_models.write_qwen4_exp(root / "qwen4_exp")
    demo_models.write_gemma(root / "gemma4")
    demo_models.write_gemma(root / "gemma3n", family="gemma3n")
    demo_models.write_engram(root / "v41", vocab_size=500)
    demo_models.write_engram(root / "v41-other", vocab_size=500, seed=2)
    demo_models.write_gemma(root / "wide", dim=960, vocabulary=6656, shard="20MB")
    return {path.name: path for path in sorted(root.iterdir())}


def only(*names: str) -> dict[str, Any]:
    """Return some of them as ``make_node`` wants them."""
    return {name: types.SimpleNamespace(path=checkpoints()[name]) for name in names}


def staged(directory: Path) -> Node:
    """Stage all of them on a new device."""
    return make_node(directory, only(*checkpoints()), size=192 << 20)


@functools.cache
def _scratch() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tierd-test-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
