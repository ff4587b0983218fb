"""The window probe on a step whose windows are known: 12 layers of fixed-time kernels, captured."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.gpu_rig import graph_of
from bench.gpu_step import once, work
from tierd.gpu.probe import DeviceDelay, LayerHooks, Prober, decoder_layers

LAYERS, LAYER_US = 12, 400.0


class Layer(nn.Module):
    """So many microseconds of compute."""

    def __init__(self, sink: torch.Tensor) -> None:
        super().__init__()
        self.sink = sink

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work[(1,)](int(LAYER_US * 1000), self.sink, num_warps=1)
        return x


class Model(nn.Module):
    """A list of layers, as engines' decoders are."""

    def __init__(self) -> None:
        super().__init__()
        sink = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.layers = nn.ModuleList([Layer(sink) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def probed() -> dict[str, Any]:
    """Windows found in one captured graph, beside the true ones (k layers of compute)."""
    model, x = Model(), torch.zeros(1, device="cuda")
    delay = DeviceDelay(torch.device("cuda", torch.cuda.current_device()))
    hooks = LayerHooks(decoder_layers(model), delay)
    graph = graph_of(lambda: model(x))
    prober = Prober(delay, lambda: once(graph) / 1e6, repeats=3, floor_s=50e-6)
    found = {k: prober.window(k) for k in (0, 1, 4, 8, 11)}
    hooks.remove()
    errors = {k: one.window_s * 1e6 - k * LAYER_US for k, one in found.items()}
    return {
        "step_us": prober.step_s * 1e6,
        "noise_us": prober.noise_s * 1e6,
        "windows_us": {k: round(one.window_s * 1e6, 1) for k, one in found.items()},
        "worst_error_us": max(map(abs, errors.values())),
    }
