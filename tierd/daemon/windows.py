"""The probe's windows file: read, checked against what it is used for, scaled to a batch."""

from __future__ import annotations

import json
from pathlib import Path

from tierd.controller.exposure import window_at
from tierd.errors import WindowsForeignError, WindowsMissingError
from tierd.types import ProbedWindows

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def load_windows(
    path: Path, *, model: str | None = None, gpu: str | None = None, engine: str | None = None
) -> ProbedWindows:
    """Read a windows file and hold it to what is asked.

    Args:
        path: written by the probe.
        model: the tables' model; None accepts any.
        gpu: the GPU's name; None: this machine's, where it has one.
        engine: name and version; None accepts any.

    Raises:
        WindowsMissingError: no such file, or not one of the probe's.
        WindowsForeignError: measured for another model, GPU or engine version.
    """
    try:
        found = ProbedWindows.from_json(json.loads(path.read_text()))
    except OSError as error:
        raise WindowsMissingError(f"{path}: no windows there ({error.strerror}){_HOW}") from None
    except _NONSENSE as error:
        text = f"{path}: not a windows file of the probe ({type(error).__name__}: {error})"
        raise WindowsMissingError(text + _HOW) from None
    for what, measured, wanted in (
        ("model", found.model, model),
        ("GPU", found.gpu, gpu or gpu_here()),
        ("engine", found.engine, engine),
    ):
        if wanted and measured and measured != wanted:
            raise WindowsForeignError(
                f"{path}: measured for {what} {measured}, not {wanted}: its windows say nothing "
                f"here{_HOW}"
            )
    return found


# What a file of nonsense raises; the last two are numbers and nesting without end.
_NONSENSE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
_HOW = "; measure them here; run: tierd probe"


def window_ms_of(probed: ProbedWindows, layer: int, batch: int | None, where: str) -> float:
    """Return a layer's window in ms at a batch size, scaled from the nearest batch probed.

    Args:
        probed: the windows.
        layer: the decoder layer.
        batch: None: the largest that was probed, which has the most pages to read.
        where: the file, for the message.

    Raises:
        WindowsMissingError: the layer was not probed.
    """
    measured = probed.layers.get(layer)
    if not measured:
        known = ", ".join(str(number) for number in sorted(probed.layers)) or "none"
        raise WindowsMissingError(f"{where}: no window of layer {layer} (it has: {known}){_HOW}")
    if batch is None:
        batch = max(measured)
    near = min(measured, key=lambda size: abs(size - batch))
    window = measured[near] * 1000
    if near == batch:
        return window
    # Layers keep their share of the step, so a window grows as the step does.
    step = probed.step_s.get(batch, 0.0) or probed.step_s.get(near, 0.0)
    return window_at(
        window, measured_step_ms=probed.step_s.get(near, 0.0) * 1000, step_ms=step * 1000
    )


def gpu_here() -> str:
    """Return the name of this machine's first NVIDIA GPU, "" where there is none."""
    for path in sorted(_NVIDIA.glob("*/information")):
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                return value.strip()
    return ""
