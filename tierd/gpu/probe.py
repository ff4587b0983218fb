"""The window probe: how long after a step's start a layer still needs nothing (SlackTier 6.3).

Before each decoder layer a hook waits until X after the step began, if that layer is the one to be
delayed, and looks on otherwise. As long as X is below the layer's window the step is as long as
ever; beyond it the step grows by what exceeds it. So the window is X minus the growth, at the first
X whose growth stands out of the noise (appendix B). On a GPU the wait is a kernel that reads layer
and X from device memory: one captured graph serves every pair.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tierd.errors import HookError, TierdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch import nn

    from tierd.types import ProbedWindows

T = TypeVar("T")
# What wants steps, one after the other, and is sent their lengths: whoever runs them, when it can.
Trials = Generator[tuple[int, float], float, T]
NO_DELAY = (-1, 0.0)
NOISE_S = 0.3e-3  # a growth below it is noise, as in the paper
NOISE_SIGMAS = 3.0
NOISE_SHARE = 0.01  # of the step, on machines whose steps wander
STEPS_MAX = 40  # delays tried for one layer
GROWTH = 1.35  # from one delay to the next


class Delay(Protocol):
    """Waits before layers."""

    def begin(self) -> None:
        """A step begins: called before the first layer."""

    def wait(self, layer: int) -> None:
        """Called before every layer."""

    def set(self, layer: int, seconds: float) -> None:
        """Delay this layer until so long after the step's start; layer -1: none."""


class HostDelay:
    """Waits on the CPU, for models whose layers run there."""

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self._start = 0.0
        self._layer, self._seconds = -1, 0.0

    def begin(self) -> None:
        """Note when the step began."""
        self._start = self._now()

    def wait(self, layer: int) -> None:
        """Sleep if this is the layer."""
        if layer == self._layer:
            left = self._start + self._seconds - self._now()
            if left > 0:
                self._sleep(left)

    def set(self, layer: int, seconds: float) -> None:
        """Delay this layer from the next step on."""
        self._layer, self._seconds = layer, seconds


class DeviceDelay:
    """Waits on a GPU's current stream, eagerly or in a captured graph."""

    def __init__(self, device: torch.device) -> None:
        from tierd.gpu import kernels_probe  # noqa: PLC0415 - models on a CPU need no triton

        self._kernels = kernels_probe
        self._state = torch.zeros(3, dtype=torch.int64, device=device)
        self.set(-1, 0.0)

    def begin(self) -> None:
        """Enqueue the step's time stamp."""
        self._kernels.begin_step[(1,)](self._state, num_warps=1)

    def wait(self, layer: int) -> None:
        """Enqueue a layer's wait."""
        self._kernels.delay_layer[(1,)](self._state, layer, num_warps=1)

    def set(self, layer: int, seconds: float) -> None:
        """Delay this layer in all steps enqueued or replayed from now on."""
        self._state[1:] = torch.tensor([layer, int(seconds * 1e9)], device=self._state.device)


class LayerHooks:
    """Puts a delay before every decoder layer of a model."""

    def __init__(self, layers: Sequence[nn.Module], delay: Delay) -> None:
        """Hook the layers; undone by :meth:`remove`.

        Args:
            layers: in the order in which a step runs them.
            delay: shared by all.
        """
        if not layers:
            raise HookError("the window probe needs a model with decoder layers; it found none")
        self.delay = delay
        self._handles: list[Any] = []
        for number, layer in enumerate(layers):
            self._handles.append(layer.register_forward_pre_hook(self._hook(number)))

    def _hook(self, number: int) -> Callable[..., None]:
        def before(module: nn.Module, arguments: Any) -> None:
            del module, arguments
            if number == 0:
                self.delay.begin()
            self.delay.wait(number)

        return before

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers: the longest list of modules of one class.

    Raises:
        HookError: the model has no such list.
    """
    best: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, torch.nn.ModuleList):
            continue
        layers = list(module)
        kinds = {type(layer) for layer in layers}
        if len(kinds) == 1 and len(layers) > len(best):
            best = layers
    if not best:
        raise HookError(f"{type(model).__name__} has no list of decoder layers to probe")
    return best


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWindow:
    """What the probe found for one layer, seconds.

    Attributes:
        window_s: of the fit; the longest delay tried, if no growth stood out.
        bounded: whether a growth stood out; else the window is a lower bound.
        points: (delay, growth) of everything tried.
    """

    window_s: float
    bounded: bool
    points: tuple[tuple[float, float], ...]


def noise_of(baseline: Sequence[float], floor_s: float = NOISE_S) -> float:
    """Return the growth below which a step has not grown: the paper's rule for noisy machines.

    Args:
        baseline: lengths of undelayed steps, seconds.
        floor_s: the least that counts as growth.
    """
    spread = statistics.stdev(baseline) if len(baseline) > 1 else 0.0
    return max(floor_s, NOISE_SIGMAS * spread, NOISE_SHARE * statistics.fmean(baseline))


def fit_window(points: Iterable[tuple[float, float]], noise_s: float) -> LayerWindow:
    """Return X minus the growth at the first delay X whose growth exceeds the noise.

    Args:
        points: (delay, growth of the step), seconds.
        noise_s: see :func:`noise_of`.

    Source: SlackTier, appendix B.
    """
    ordered = tuple(sorted(points))
    for delay, growth in ordered:
        if growth > noise_s:
            return LayerWindow(max(0.0, delay - growth), True, ordered)
    return LayerWindow(ordered[-1][0] if ordered else 0.0, False, ordered)


def measured_step(repeats: int, floor_s: float = NOISE_S) -> Trials[tuple[float, float]]:
    """Measure undelayed steps.

    Yields:
        (layer, seconds) of every step that is wanted; its length is to be sent.

    Returns:
        A step's length and the growth below which it has not grown, seconds.
    """
    yield NO_DELAY
    baseline: list[float] = []
    while len(baseline) < max(5, 2 * repeats):
        baseline += [(yield NO_DELAY)]
    return statistics.median(baseline), noise_of(baseline, floor_s)


def measured_growth(layer: int, seconds: float, repeats: int) -> Trials[float]:
    """Measure how much longer a step is with one layer delayed; undelayed steps in between."""
    plain, delayed = [], []
    for _ in range(repeats):
        plain.append((yield NO_DELAY))
        delayed.append((yield layer, seconds))
    return statistics.median(delayed) - statistics.median(plain)


def measured_window(layer: int, step_s: float, noise_s: float, repeats: int) -> Trials[LayerWindow]:
    """Try longer and longer delays until the step grows, at most to twice its length."""
    points: list[tuple[float, float]] = []
    delay = noise_s
    while len(points) < STEPS_MAX and delay < 2 * step_s + 4 * noise_s:
        growth = yield from measured_growth(layer, delay, repeats)
        points.append((delay, growth))
        if growth > noise_s:
            break
        delay = max(delay * GROWTH, delay + noise_s)
    return fit_window(points, noise_s)


class Prober:
    """Runs steps with delays and fits windows."""

    def __init__(
        self, delay: Delay, step: Callable[[], float], *, repeats: int = 5, floor_s: float = NOISE_S
    ) -> None:
        """Measure undelayed steps.

        Args:
            delay: what the hooks wait for.
            step: runs one step to its end and returns its length, seconds.
            repeats: steps for each delay; the median counts.
            floor_s: the least that counts as growth.
        """
        self._delay, self._step, self._repeats = delay, step, repeats
        self.step_s, self.noise_s = self._run(measured_step(repeats, floor_s))

    def growth(self, layer: int, seconds: float) -> float:
        """Return how much longer a step is with one layer delayed."""
        return self._run(measured_growth(layer, seconds, self._repeats))

    def window(self, layer: int) -> LayerWindow:
        """Try longer and longer delays until the step grows, at most to twice its length."""
        return self._run(measured_window(layer, self.step_s, self.noise_s, self._repeats))

    def _run(self, trials: Trials[T]) -> T:
        try:
            wanted = next(trials)
            while True:
                self._delay.set(*wanted)
                wanted = trials.send(self._step())
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            self._delay.set(*NO_DELAY)


def write(windows: ProbedWindows, path: Path) -> None:
    """Replace a windows file in one step.

    Raises:
        TierdError: the file cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(windows.to_json(), indent=1) + "\n")
        os.replace(part, path)
    except OSError as error:
        raise TierdError(f"{path}: cannot be written: {error.strerror}") from None
