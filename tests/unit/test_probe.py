"""The window probe: hooks, fit and file, on a clock that only the probe and the layers move."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit import gpu_rig  # noqa: F401 - the interpreter, before any kernel is defined
from tierd.errors import HookError, TierdError
from tierd.gpu import kernels_probe
from tierd.gpu.probe import (
    DeviceDelay,
    HostDelay,
    LayerHooks,
    Prober,
    decoder_layers,
    fit_window,
    noise_of,
    write,
)
from tierd.tools import probe as tool
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from pathlib import Path

LAYER_S = 0.002


class Clock:
    """Time that passes only where somebody works or waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def read(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class Layer(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.pass_by(LAYER_S)
        return x


class Model(nn.Module):
    """Layers on a clock, beside shorter and mixed lists that are no decoder."""

    def __init__(self, clock: Clock, layers: int = 10) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(1, 1) for _ in range(layers - 1)])
        self.mixed = nn.ModuleList([nn.Linear(1, 1), *[nn.ReLU() for _ in range(layers)]])
        self.layers = nn.ModuleList([Layer(clock) for _ in range(layers)])
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.pass_by(0.0001)  # before the first layer nothing counts
        for layer in self.layers:
            x = layer(x)
        return x


def test_windows_are_the_layers_own_starts() -> None:
    clock = Clock()
    model, x = Model(clock), torch.zeros(1)
    delay = HostDelay(clock.read, clock.pass_by)
    hooks = LayerHooks(decoder_layers(model), delay)

    def step() -> float:
        began = clock.now
        model(x)
        return clock.now - began

    prober = Prober(delay, step, repeats=1)
    for layer in (0, 1, 5, 9):
        found = prober.window(layer)
        assert found.bounded
        assert found.window_s == pytest.approx(layer * LAYER_S, abs=1e-9)
    hooks.remove()
    delay.set(3, 1.0)
    assert step() == pytest.approx(10 * LAYER_S + 0.0001)


def test_a_layer_that_never_holds_the_step_up_has_a_lower_bound() -> None:
    prober = Prober(HostDelay(), lambda: 0.01, repeats=1)
    found = prober.window(1)
    assert not found.bounded
    assert found.window_s > 0.013


@given(
    window=st.floats(0, 0.02), noise=st.floats(1e-5, 1e-3), step=st.floats(1e-4, 5e-3),
)  # fmt: skip
def test_the_fit_is_the_paper_s(window: float, noise: float, step: float) -> None:
    points = [(k * step, max(0.0, k * step - window)) for k in range(1, 400)]
    found = fit_window(reversed(points), noise)
    if found.bounded:
        assert found.window_s == pytest.approx(window, abs=1e-9)
    else:
        assert max(growth for _, growth in points) <= noise


def test_noise_is_the_largest_of_three() -> None:
    assert noise_of([0.01] * 9) == pytest.approx(0.3e-3)
    assert noise_of([0.1] * 9) == pytest.approx(1e-3)
    assert noise_of([0.010, 0.012], floor_s=0) == pytest.approx(3 * 0.001414, rel=1e-3)


def test_the_device_waits_for_the_chosen_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, with the GPU's clock replaced by one that every look moves on."""
    looks = iter(range(10**9, 2 * 10**9, 1000))
    monkeypatch.setattr(kernels_probe, "now_ns", lambda: next(looks))
    monkeypatch.setattr(kernels_probe, "pause", lambda: None)
    delay = DeviceDelay(torch.device("cpu"))
    delay.set(2, 50e-6)
    delay.begin()
    before = next(looks)
    for layer in (0, 1, 3):
        delay.wait(layer)
    assert next(looks) == before + 1000
    delay.wait(2)
    assert next(looks) - before >= 50_000


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(HookError, match="no list of decoder layers"):
        decoder_layers(nn.Linear(2, 2))
    with pytest.raises(HookError, match="found none"):
        LayerHooks([], HostDelay())


def options(path: Path, **more: Any) -> tool.ProbeOptions:
    given: dict[str, Any] = {
        "model": path, "name": "tiny", "batches": (1, 2), "layers": (1,), "device": "cpu",
        "repeats": 1, **more,
    }  # fmt: skip
    return tool.ProbeOptions(**given)


def test_a_transformers_model_is_probed_and_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    said: list[str] = []
    found = tool.probe(options(tmp_path / "tiny"), said.append)
    assert set(found.layers) == {1}
    assert set(found.layers[1]) == set(found.step_s) == {1, 2}
    assert found.engine == f"transformers {transformers.__version__}"
    assert len(said) == 4
    write(found, tmp_path / "windows.json")
    again = json.loads((tmp_path / "windows.json").read_text())
    assert ProbedWindows.from_json(again) == found
    with pytest.raises(HookError, match="layer 7 of 2"):
        tool.probe(options(tmp_path / "tiny", layers=(7,)), said.append)


def test_what_cannot_be_probed(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="cannot load it"):
        tool.probe(options(tmp_path / "nothing"), lambda _: None)
    with pytest.raises(TierdError, match="such as 1,8,64"):
        tool.numbers("1;2", "--batch")
    windows = ProbedWindows("", "e", "m", {}, "d", {}, {})
    with pytest.raises(TierdError, match="cannot be written"):
        write(windows, tmp_path / "no" / "windows.json")
