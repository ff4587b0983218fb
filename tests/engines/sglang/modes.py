"""The ways in which SGLang runs a step, as far as they can run without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.engines.sglang import models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK = 96
STEP_S = 0.010  # of the probe's clock, before each layer


def run(mine: Any, theirs: Any, scratch: Path) -> dict[str, Any]:
    """Every mode on a served and a stock model whose histories agree."""
    return {
        "overlap": overlapped(mine, theirs),
        "breakable": breakable(mine, theirs),
        "odd": odd_sizes(mine, theirs),
        "hints": hinted(mine, theirs),
        "probe": probed(mine, scratch / "windows.json"),
    }


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def both(mine: Any, theirs: Any, tokens: torch.Tensor, batch: Any) -> int:
    """Differing outputs of one forward of both models."""
    pairs = zip(mine(tokens, batch), theirs(tokens, batch), strict=True)
    return sum(models.differing_rows(a, b) for a, b in pairs)


# --- the overlap schedule ------------------------------------------------------------------------


def overlapped(mine: Any, theirs: Any) -> dict[str, int]:
    """Decode with the scheduler a step behind: what a step reads, only the relay knows."""
    from sglang.srt.managers.overlap_utils import FutureMap, resolve_forward_inputs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    plain = SpeculativeAlgorithm.NONE
    pool = SimpleNamespace(req_to_token=torch.zeros(models.SLOTS, 8, dtype=torch.int32))
    relay: Any = FutureMap(torch.device("cpu"), plain, pool)
    slots, differing, generator = torch.tensor([1, 3, 5]), 0, seeded(21)
    for step in range(5):
        relay.stash_bonus_tokens(slots, torch.randint(129_280, (3,), generator=generator))
        scheduled: Any = SimpleNamespace(
            prefill_input_ids_cpu=None, mix_running_indices=None, input_ids=None, device="cpu",
            req_pool_indices=slots, enable_overlap=True, spec_algorithm=plain,
        )  # fmt: skip
        resolve_forward_inputs(scheduled, relay)
        batch = models.decode(slots.tolist(), [800 + step, 850 + step, 40 + step])
        differing += both(mine, theirs, scheduled.input_ids, batch)
    return {"steps": 5, "differing": differing}


# --- breakable prefill graphs --------------------------------------------------------------------


class Segments:
    """Stands for the capture of a breakable graph, which needs CUDA: keeps what is between."""

    def __init__(self) -> None:
        self.cuda_graph = SimpleNamespace(_break_fns=[])
        self._barrier_fn = None
        self.begun = 0

    def _end_current_segment(self) -> None:
        pass

    def _begin_new_segment(self) -> None:
        self.begun += 1


@contextlib.contextmanager
def capturing() -> Iterator[Segments]:
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph,
        context,
    )

    segments = Segments()
    token = breakable_cuda_graph._current_capture_var.set(segments)
    try:
        with context.enable_breakable_cuda_graph():
            yield segments
    finally:
        breakable_cuda_graph._current_capture_var.reset(token)


def breakable(mine: Any, theirs: Any) -> dict[str, int]:
    """Capture a prefill's lookups, then replay them with other ids in the same memory."""
    layers = [model.layers.values() for model in (mine, theirs)]
    embeds = [(a["engram"].embed, b["engram"].embed) for a, b in zip(*layers, strict=True)]
    rows = min(embed.rows for embed, _ in embeds)
    ids = torch.randint(rows, (37, len(embeds), 24), generator=seeded(22))
    with capturing() as segments:
        outputs = [embed._owned_rows(ids[:, i]) for i, (embed, _) in enumerate(embeds)]
    found = {"breaks": segments.begun, "rows": 0, "differing": 0}
    for seed in (23, 24):
        ids.copy_(torch.randint(rows, ids.shape, generator=seeded(seed)))
        for replay in segments.cuda_graph._break_fns:
            replay()
        for i, (_, stock) in enumerate(embeds):
            found["rows"] += ids[:, i].numel()
            found["differing"] += models.differing_rows(outputs[i], stock._owned_rows(ids[:, i]))
    return found


def odd_sizes(mine: Any, theirs: Any) -> dict[str, Any]:
    """Lookups of no rows, one, and more than one request lists."""
    pair = [model.layers["14"]["engram"].embed for model in (mine, theirs)]
    sizes, differing = [0, 1, 700], 0
    for size in sizes:
        ids = torch.randint(pair[0].rows, (size, 24), generator=seeded(26))
        a, b = (embed._owned_rows(ids) for embed in pair)
        assert a.shape == b.shape
        differing += models.differing_rows(a, b)
    return {"sizes": sizes, "differing": differing}


# --- hints ---------------------------------------------------------------------------------------


def hinted(mine: Any, theirs: Any) -> dict[str, Any]:
    """A prompt in chunks: what is hinted is what the chunks then look up, each row once."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components.ngram_embedding_manager import (
        NgramEmbeddingManager,
    )
    from sglang.srt.runtime_context import get_context

    hasher = mine.engram_hasher
    hints = hasher.tierd_hints
    given: list[torch.Tensor] = []
    rows_of = hints.rows
    hints.rows = lambda parts: given.append(rows_of(parts)) or given[-1]
    manager = NgramEmbeddingManager(enabled=False, table=None, n=0, engram_hasher=hasher)
    prompt = torch.randint(129_280, (250,), generator=seeded(25)).tolist()
    request = SimpleNamespace(full_untruncated_fill_ids=prompt)
    looked_up, differing, start = [], 0, 0
    with get_context().override_server_args(chunked_prefill_size=CHUNK):
        while start < len(prompt):
            count = min(CHUNK, len(prompt) - start)
            scheduled: Any = SimpleNamespace(
                forward_mode=ForwardMode.EXTEND, reqs=[request], prefix_lens=[start],
                extend_lens=[count], encoder_swa_reset=None,
            )  # fmt: skip
            last = start + count == len(prompt)
            manager.prepare_for_forward(scheduled, chunked_req=None if last else request)
            hints.wait()
            batch = models.extend([count], [7], [start])
            batch.engram_history = scheduled.engram_history
            tokens = torch.tensor(prompt[start : start + count])
            looked_up.append(_rows(hasher, tokens, batch))
            differing += both(mine, theirs, tokens, batch)
            start += count
    hints.rows = rows_of
    told, read = torch.cat(given), torch.cat(looked_up)
    return {
        "tokens": len(told),
        "same": told.shape == read.shape and bool((told == read).all()),
        "differing": differing,
        "given": hints.given,
        "calls": len(given),
        "skipped": hints.skipped,
    }


def _rows(hasher: Any, tokens: torch.Tensor, batch: Any) -> torch.Tensor:
    """The rows of a chunk by the hasher's stock forward, its history as before."""
    history = hasher.history.clone()
    ids = type(hasher).forward.__wrapped__(hasher, tokens, batch)
    hasher.history.copy_(history)
    return ids


# --- the window probe ----------------------------------------------------------------------------


class Clock:
    """Passes only where somebody works or waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def probed(mine: Any, out: Path) -> dict[str, Any]:
    """The probe on the real modules; before each Engram layer one STEP_S of other work."""
    from tierd.gpu.probe import HostDelay
    from tierd.hook import probing
    from tierd.hook.sglang import loaded, probe

    class Runner:
        def __init__(self) -> None:
            self.model = mine
            self.step = 0

        def forward(self, forward_batch: Any) -> Any:
            self.step += 1
            return mine(torch.tensor([self.step, 2 * self.step]), forward_batch)

    clock, history = Clock(), mine.engram_hasher.history.clone()
    handles = [
        layer["engram"].register_forward_pre_hook(lambda _m, _i: clock.pass_by(STEP_S))
        for layer in mine.layers.values()
    ]
    make = probing.make

    def on_clock(out: Path, layers: Any, device: Any, **about: Any) -> Any:
        made = make(out, layers, device, **about)
        made.delay = HostDelay(clock.read, clock.pass_by)
        made._timer = probing.HostTimer(clock.read)
        return made

    os.environ[probing.SWITCH] = str(out)
    probing.make = on_clock
    try:
        probe.patch(SimpleNamespace(ModelRunner=Runner))
        loaded.take(mine)
        runner = Runner()
        for step in range(400):
            runner.forward(models.decode([1, 3], [step, step]))
            if out.exists():
                break
        else:
            raise AssertionError("400 steps were not enough")
        found = json.loads(out.read_text())
        # A prefill goes by unseen.
        before = mine.tierd_probe._pending
        runner.forward(models.extend([2], [9]))
        assert mine.tierd_probe._pending is before
    finally:
        probing.make = make
        del os.environ[probing.SWITCH], mine.tierd_probe
        for handle in handles:
            handle.remove()
    for layer in mine.layers.values():
        layer["engram"].embed.tierd.begin = None
    mine.engram_hasher.history.copy_(history)
    return {key: found[key] for key in ("engine", "model", "step_s", "layers")}


def ple_probed(mine: Any, out: Path) -> bool:
    """Whether a PLE layer is delayed where it is called, and its gather begins a step."""
    from tierd.hook import probing
    from tierd.hook.sglang import loaded

    os.environ[probing.SWITCH] = str(out)
    try:
        loaded.take(mine)
        hooked = [name for name, module in mine.named_modules() if module._forward_pre_hooks]
        return hooked == ["layers.1.ple"] and mine.table.tierd.begin == mine.tierd_probe.begin
    finally:
        mine.table.tierd.begin = None
        del os.environ[probing.SWITCH], mine.tierd_probe
