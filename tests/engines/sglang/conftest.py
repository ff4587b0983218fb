"""A device with every checkpoint, a daemon that serves it, and the engines' environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import make_node, running
from tests.engines.sglang import engines, layouts

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [r for r in engines.RELEASES if not engines.python_of(r).exists()]
    if missing:
        reason = f"no environment of sglang {' and '.join(missing)}; run: make test-sglang"
        here = Path(__file__).parent
        for item in (item for item in items if here in item.path.parents):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where everything is; the daemon lives as long."""
    root = tmp_path_factory.mktemp("sglang")
    checkpoints: Path = root / "checkpoints"
    checkpoints.mkdir()
    made = layouts.write(checkpoints)
    del made["v41-other"]  # is never staged
    node = make_node(root, made, size=96 << 20)
    with running(node):
        yield {
            "checkpoints": str(checkpoints),
            "scratch": str(root),
            "api": str(node.api_socket),
            "socket": str(node.engine_socket),
        }


SWITCHES = {
    "TIERD": "1",
    "TIERD_EARLY_KICK": "1",
    "TIERD_HINT_PAGES": "8192",
    "TIERD_AUDIT_EVERY": "3",
}


class Scenarios:
    """One process per scenario of a release; all start at once, two at a time."""

    def __init__(self, release: str, facts: dict[str, str]) -> None:
        self._release, self._facts = release, facts
        self._running: dict[str, engines.Process] = {}
        self._found: dict[str, Any] = {}

    def start(self, scenario: str) -> None:
        switch = {} if scenario == "refused" else SWITCHES
        self._running[scenario] = engines.Process(
            self._release,
            "tests.engines.sglang.engine",
            scenario,
            json.dumps(self._facts),
            environ={**switch, "TIERD_SOCKET": self._facts["socket"]},
        )

    def __getitem__(self, scenario: str) -> dict[str, Any]:
        if scenario not in self._found:
            self._found[scenario] = self._running[scenario].found()
        return self._found[scenario]

    def close(self) -> None:
        for process in self._running.values():
            process.close()


@pytest.fixture(scope="session", params=engines.RELEASES)
def scenarios(request: pytest.FixtureRequest, facts: dict[str, str]) -> Iterator[Scenarios]:
    own = Path(facts["scratch"]) / request.param
    own.mkdir()
    own_facts = {**facts, "scratch": str(own), "rendezvous": f"{own}/rendezvous", "modes": True}
    made = Scenarios(request.param, own_facts)
    for name in ("served", "sharded", "refused", "on_gpu"):
        made.start(name)
    yield made
    made.close()
