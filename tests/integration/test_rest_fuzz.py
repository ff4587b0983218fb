"""A short run of schemathesis against a live daemon; the long one is bench/operator.py's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from bench.operator import schemathesis

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(170)
def test_every_route_keeps_its_promises(tmp_path: Path) -> None:
    found = schemathesis(tmp_path, examples=1, seed=int(os.environ.get("TIERD_SEED", "1")))
    assert found["failures"] == 0, f"TIERD_SEED={found['seed']} repeats this\n{found['said']}"
    assert found["cases"] >= 300
