"""`tierd probe`: windows of a model's layers under transformers, written to a file."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import inspect
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tierd import __version__
from tierd.errors import HookError, TierdError
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PROMPT_TOKENS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What is probed.

    Attributes:
        model: a directory that transformers loads.
        name: the name under which the model's tables are staged.
        batches: batch sizes.
        layers: decoder layers, counted from 0; empty: all.
        device: cuda or cpu; None: a GPU if there is one.
        repeats: steps for each delay.
    """

    model: Path
    name: str
    batches: tuple[int, ...]
    layers: tuple[int, ...]
    device: str | None
    repeats: int


def probe(options: ProbeOptions, say: Callable[[str], None]) -> ProbedWindows:
    """Load the model, run decode steps with delays, fit.

    Raises:
        HookError: no transformers, no such model, or one without decoder layers.
    """
    try:
        import torch  # noqa: PLC0415 - heavy
        import transformers  # noqa: PLC0415 - heavy
    except ImportError as error:
        raise HookError(
            f"the probe runs models under transformers, and {error.name} is not installed; "
            "run: pip install 'tierd[hf]'"
        ) from None
    from tierd.gpu import probe as parts  # noqa: PLC0415 - needs torch

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(options.model), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise HookError(f"{options.model}: transformers cannot load it: {error}") from None
    model = model.to(device).eval()
    layers = parts.decoder_layers(model)
    chosen = options.layers or tuple(range(len(layers)))
    if outside := [layer for layer in chosen if not 0 <= layer < len(layers)]:
        raise HookError(f"layer {outside[0]} of {len(layers)} does not exist")
    delay = parts.DeviceDelay(device) if device.type == "cuda" else parts.HostDelay()
    hooks = parts.LayerHooks(layers, delay)
    steps: dict[int, float] = {}
    windows: dict[int, dict[int, float]] = {layer: {} for layer in chosen}
    try:
        for batch in options.batches:
            prober = parts.Prober(delay, decode_step(model, batch, device), repeats=options.repeats)
            steps[batch] = prober.step_s
            say(f"batch {batch}: a step takes {prober.step_s * 1e3:.2f} ms")
            for layer in chosen:
                found = prober.window(layer)
                windows[layer][batch] = found.window_s
                sign = "" if found.bounded else ">= "
                say(f"  layer {layer}: window {sign}{found.window_s * 1e3:.2f} ms")
    finally:
        hooks.remove()
    return ProbedWindows(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        engine=f"transformers {transformers.__version__}",
        model=options.name,
        versions={"tierd": __version__, "torch": torch.__version__, **_driver()},
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        step_s=steps,
        layers=windows,
    )


def decode_step(model: Any, batch: int, device: Any) -> Callable[[], float]:
    """Return what runs one decode step of a batch behind a short prompt, and times it.

    Every step starts from the prompt's cache, so that all are alike.
    """
    import torch  # noqa: PLC0415 - heavy

    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    shape = (batch, PROMPT_TOKENS + 1)
    ids = torch.randint(0, vocabulary, shape, generator=generator).to(device)
    # Renamed in the course of transformers 5; the output has whichever name the input has.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        prompt = getattr(model(input_ids=ids[:, :-1], use_cache=True), name)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def step() -> float:
        cache = {name: copy.deepcopy(prompt)}
        wait()
        began = time.perf_counter()
        with torch.no_grad():
            model(input_ids=ids[:, -1:], use_cache=True, **cache)
        wait()
        return time.perf_counter() - began

    return step


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Read a list such as ``1,8,64``.

    Raises:
        TierdError: not numbers.
    """
    parts: Sequence[str] = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise TierdError(f"{what} {text!r}: give numbers with commas between, such as 1,8,64")
    return tuple(int(part) for part in parts)


def _driver() -> dict[str, str]:
    found = {}
    for package in ("transformers", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
