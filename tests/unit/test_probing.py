"""The probe inside an engine: steps come when they come, and their lengths later."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tierd.errors import HookError
from tierd.gpu.probe import HostDelay
from tierd.hook import probing
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from pathlib import Path

LAYER_S = 0.002
ABOUT = probing.About("", "engine 1", "tiny", {"tierd": "0"})


class Clock:
    """Passes only where somebody works or waits."""

    def __init__(self) -> None:
        self.now = 50.0

    def read(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class LateTimer(probing.HostTimer):
    """A GPU's: the end of a step is known only some looks later."""

    def __init__(self, clock: Clock, looks: int) -> None:
        super().__init__(clock.read)
        self._looks = self._left = looks

    def between(self, first: float, last: float) -> float | None:
        self._left -= 1
        if self._left > 0:
            return None
        self._left = self._looks
        return last - first


class Engine:
    """Ten layers, two of which read tables; a larger batch takes longer in each."""

    def __init__(self, out: Path, looks: int) -> None:
        self.clock = Clock()
        delay = HostDelay(self.clock.read, self.clock.pass_by)
        self.probe = probing.EngineProbe((6, 1), delay, LateTimer(self.clock, looks), out, ABOUT)
        self.layers = [nn.Identity() for _ in range(10)]
        for layer in (1, 6):
            self.probe.hook(self.layers[layer], layer)

    def step(self, size: int) -> int:
        def run() -> int:
            self.probe.begin()
            for layer in self.layers:
                layer(torch.zeros(1))
                self.clock.pass_by(LAYER_S * size)
            return size

        return self.probe.step(size, run)


def windows_at(path: Path) -> ProbedWindows:
    return ProbedWindows.from_json(json.loads(path.read_text()))


@pytest.mark.parametrize("looks", [1, 3])
def test_windows_come_from_the_steps_that_an_engine_runs(tmp_path: Path, looks: int) -> None:
    out = tmp_path / "windows.json"
    engine = Engine(out, looks)
    steps = 0
    # Batches of two sizes in turn: each size has its own windows, and the file has both.
    while not (out.exists() and len(windows_at(out).step_s) == 2):
        assert engine.step(1 + steps % 2) == 1 + steps % 2
        steps += 1
        assert steps < 4000
    found = windows_at(out)
    assert (found.engine, found.model) == ("engine 1", "tiny")
    assert found.step_s == pytest.approx({1: 0.020, 2: 0.040})
    for size in (1, 2):
        assert found.layers[1][size] == pytest.approx(1 * LAYER_S * size, abs=1e-9)
        assert found.layers[6][size] == pytest.approx(6 * LAYER_S * size, abs=1e-9)
    began = engine.clock.now
    engine.step(1)  # nothing is wanted any more, so nothing is delayed
    assert engine.clock.now - began == pytest.approx(0.020)


def test_only_so_many_batch_sizes_are_probed(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "windows.json", 1)
    for size in range(1, 2 * probing.SIZES_MAX):
        engine.step(size)
    assert len(engine.probe._sizes) == probing.SIZES_MAX


def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(HookError, match=r"TIERD_PROBE=.*/no/w\.json: .*/no is no directory"):
        Engine(tmp_path / "no" / "w.json", 1)
    gone = tmp_path / "gone"
    gone.mkdir()
    engine = Engine(gone / "w.json", 1)
    gone.rmdir()
    for _ in range(500):
        assert engine.step(1) == 1  # the engine serves on
    assert "cannot be written" in caplog.text
    monkeypatch.setenv(probing.SWITCH, "")
    assert probing.asked() is None


def test_what_a_made_probe_says(tmp_path: Path) -> None:
    made: Any = probing.make(tmp_path / "w.json", [1], torch.device("cpu"), engine="e", model="m")
    assert made._about.gpu == ""
    assert set(made._about.versions) >= {"tierd", "torch"}
