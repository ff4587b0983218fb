"""A device with every checkpoint, a daemon that serves it, and the engines' environments."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import TinyCheckpoint
from tests.daemons import make_node, running
from tests.engines.vllm import engines, gemma, layouts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [r for r in (engines.SOURCES, engines.CPU) if not engines.python_of(r).exists()]
    if missing:
        reason = f"no environment of vllm {' and '.join(missing)}; run: make test-vllm"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where everything is; the daemon lives as long."""
    root = tmp_path_factory.mktemp("vllm")
    checkpoints: Path = root / "checkpoints"
    checkpoints.mkdir()
    made = layouts.write(checkpoints)
    del made["v41-other"]  # is never staged
    gemma.make(checkpoints / "gemma")
    made["gemma"] = TinyCheckpoint(checkpoints / "gemma", {}, {})
    node = make_node(root, made, size=96 << 20)
    with running(node):
        yield {
            "checkpoints": str(checkpoints),
            "gemma": str(checkpoints / "gemma"),
            "scratch": str(root),
            "socket": str(node.engine_socket),
        }


@pytest.fixture(scope="session")
def served(facts: dict[str, str]) -> dict[str, Any]:
    switch = {"TIERD": "1", "TIERD_SOCKET": facts["socket"]}
    return engines.scenario("served", json.dumps(facts), **switch).found()


@pytest.fixture(scope="session")
def refused(facts: dict[str, str]) -> dict[str, Any]:
    return engines.scenario("refused", json.dumps(facts), TIERD_SOCKET=facts["socket"]).found()
