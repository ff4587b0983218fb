"""The window probe in SGLang: ``TIERD_PROBE=FILE``, for a run of its own.

A layer needs its rows where ``Engram`` or the PLE layer is called, so there it is delayed; a step
begins where its rows are kicked. Both are in the graphs that SGLang captures, and what they do is
read from memory at each replay. Steps are timed around ``ModelRunner.forward``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from tierd.hook import probing
from tierd.hook.sglang import tables

if TYPE_CHECKING:
    from torch import nn

    from tierd.hook.served import ServedTable


def patch(module: Any) -> None:
    """Patch ``sglang.srt.model_executor.model_runner``, if a probe is wanted."""
    if probing.asked() is None:
        return
    runner = module.ModelRunner
    stock = runner.forward

    @functools.wraps(stock)
    def forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(stock, self, forward_batch, *args, **kwargs)
        probe = getattr(self.model, "tierd_probe", None)
        if probe is None or not _is_timed(forward_batch.forward_mode):
            return run()
        return probe.step(int(forward_batch.batch_size), run)

    runner.forward = forward


def _is_timed(mode: Any) -> bool:
    """Steps of decode and target-verify, whose windows count; and none that is being captured."""
    if not (mode.is_decode() or mode.is_target_verify()):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def install(model: nn.Module, served: list[Any]) -> None:
    """Put delays before the layers that read tables, in the first rank of an engine.

    Args:
        model: the target model, loaded.
        served: the modules that stand in for its tables.

    Raises:
        HookError: there is no directory for the windows file.
    """
    out, rank = probing.asked(), tables.who()
    if out is None or rank.rank != 0:
        return
    found = tables.RANKS.all()[0].found
    first: ServedTable = min((module.tierd for module in served), key=_layer)
    probe = probing.make(
        out,
        [_layer(module.tierd) for module in served],
        first.device,
        engine=rank.engine,
        model=found.images[0].model,
    )
    for module in model.modules():
        for name in ("embed", "ple_embedding"):
            child: Any = getattr(module, name, None)
            child = getattr(child, "ngram_embedding", child)
            if any(child is one for one in served):
                probe.hook(module, _layer(child.tierd))
    first.begin = probe.begin
    # Not a submodule: an attribute that the runner's forward finds.
    model.tierd_probe = probe  # type: ignore[assignment]


def _layer(table: ServedTable) -> int:
    assert table.layer is not None
    return table.layer
