"""The window probe inside an engine: it uses the steps that the engine runs anyway.

``tierd probe`` runs steps of its own; an engine runs them when it has something to do, with
whatever batch it has. So here each batch size keeps a list of what it still wants to see
(:mod:`tierd.gpu.probe`), and a step of that size is delayed accordingly and timed. The length of a
step is known only when the GPU is through with it; until then steps go by undelayed and unseen.

Only one rank of an engine delays: the others wait for it in the next collective, so the step is as
long as if all had been delayed, and no rank has to know what the others do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
import os
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tierd import __version__
from tierd.errors import HookError, TierdError
from tierd.gpu import probe
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

log = logging.getLogger("tierd")
SWITCH = "TIERD_PROBE"
SIZES_MAX = 16  # batch sizes; each wants some hundred steps
REPEATS = 5
R = TypeVar("R")


class Timer(Protocol):
    """Measures what runs between two marks."""

    def mark(self) -> Any:
        """Return a mark of now, in the order of what the engine enqueues."""

    def between(self, first: Any, last: Any) -> float | None:
        """Return the seconds between two marks; None while the last has not been reached."""


class HostTimer:
    """For models on a CPU."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """Return the time."""
        return self._now()

    def between(self, first: float, last: float) -> float | None:
        """Return the difference."""
        return last - first


class DeviceTimer:
    """For models on a GPU: the current stream's time."""

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float | None:
        """Return the time between two events, once both have been reached."""
        reached: bool = last.query()  # type: ignore[no-untyped-call]
        return first.elapsed_time(last) / 1e3 if reached else None


class _Size:
    """What one batch size still wants, and what it has found."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.step_s = 0.0
        self.windows: dict[int, probe.LayerWindow] = {}
        self.done = False
        self._trials = self._all(layers)
        self.wanted = next(self._trials)

    def _all(self, layers: Sequence[int]) -> probe.Trials[None]:
        self.step_s, noise_s = yield from probe.measured_step(REPEATS)
        for layer in layers:
            self.windows[layer] = yield from probe.measured_window(
                layer, self.step_s, noise_s, REPEATS
            )

    def take(self, seconds: float) -> None:
        """Take the length of the step that was wanted."""
        try:
            self.wanted = self._trials.send(seconds)
        except StopIteration:
            self.done = True


class EngineProbe:
    """Probes the layers that read tables while an engine serves.

    Attributes:
        delay: what the layers wait for.
    """

    def __init__(
        self, layers: Sequence[int], delay: probe.Delay, timer: Timer, out: Path, about: About
    ) -> None:
        """Prepare.

        Args:
            layers: those that read tables.
            delay: of this device.
            timer: of this device.
            out: the windows file.
            about: what the file says beside the windows.

        Raises:
            HookError: there is no directory for the file.
        """
        if not out.parent.is_dir():
            raise HookError(
                f"{SWITCH}={out}: {out.parent} is no directory, so no windows can be written there"
            )
        self.delay = delay
        self._layers, self._timer = tuple(sorted(layers)), timer
        self._out, self._about = out, about
        self._sizes: dict[int, _Size] = {}
        self._set = probe.NO_DELAY
        self._pending: tuple[_Size, Any, Any] | None = None

    def hook(self, module: nn.Module, layer: int) -> Any:
        """Let a module that reads a layer's rows wait, if the layer is the one to delay."""

        def before(_module: nn.Module, _arguments: Any) -> None:
            self.delay.wait(layer)

        return module.register_forward_pre_hook(before)

    def begin(self) -> None:
        """A step begins: called where its row numbers are known."""
        self.delay.begin()

    def step(self, size: int, run: Callable[[], R]) -> R:
        """Run a step of this batch size, delayed and timed if one is wanted."""
        self._collect()
        found = self._size(size)
        if found is None or found.done or self._pending is not None:
            self._delay(probe.NO_DELAY)
            return run()
        self._delay(found.wanted)
        first = self._timer.mark()
        result = run()
        self._pending = found, first, self._timer.mark()
        return result

    def _size(self, size: int) -> _Size | None:
        if size not in self._sizes and len(self._sizes) < SIZES_MAX:
            self._sizes[size] = _Size(self._layers)
        return self._sizes.get(size)

    def _delay(self, wanted: tuple[int, float]) -> None:
        if wanted != self._set:
            self.delay.set(*wanted)
            self._set = wanted

    def _collect(self) -> None:
        if self._pending is None:
            return
        found, first, last = self._pending
        seconds = self._timer.between(first, last)
        if seconds is None:
            return
        self._pending = None
        found.take(seconds)
        if found.done:
            self._write()

    def _write(self) -> None:
        done = {size: one for size, one in self._sizes.items() if one.done}
        windows = ProbedWindows(
            gpu=self._about.gpu,
            engine=self._about.engine,
            model=self._about.model,
            versions=self._about.versions,
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            step_s={size: one.step_s for size, one in sorted(done.items())},
            layers={
                layer: {size: one.windows[layer].window_s for size, one in sorted(done.items())}
                for layer in self._layers
            },
        )
        try:
            probe.write(windows, self._out)
        except TierdError as error:
            log.warning("%s", error)  # the engine goes on
            return
        sizes = ", ".join(map(str, sorted(done)))
        log.info("windows of batch sizes %s are in %s", sizes, self._out)


@dataclasses.dataclass(frozen=True, slots=True)
class About:
    """What a windows file says beside the windows; see ``ProbedWindows``."""

    gpu: str
    engine: str
    model: str
    versions: dict[str, str]


def asked() -> Path | None:
    """Return where ``TIERD_PROBE`` wants the windows; None if it is not set."""
    text = os.environ.get(SWITCH)
    return Path(text) if text else None


def make(
    out: Path, layers: Sequence[int], device: torch.device, *, engine: str, model: str
) -> EngineProbe:
    """Make the probe of an engine rank.

    Args:
        out: the windows file.
        layers: those that read tables.
        device: where the model runs.
        engine: name and version, as at attach: the controller compares them.
        model: the name under which the tables are staged.

    Raises:
        HookError: there is no directory for the file.
    """
    on_gpu = device.type == "cuda"
    versions = {"tierd": __version__, "torch": torch.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["triton"] = metadata.version("triton")
    about = About(torch.cuda.get_device_name(device) if on_gpu else "", engine, model, versions)
    if on_gpu:
        return EngineProbe(layers, probe.DeviceDelay(device), DeviceTimer(), out, about)
    return EngineProbe(layers, probe.HostDelay(), HostTimer(), out, about)
