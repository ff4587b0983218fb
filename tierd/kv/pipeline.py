"""The background: predict, select and move, each on its own stream, two events a layer.

    engine's stream, layer l of step t        background
    queries of both rows            ready --> score by the draft's query (predict), select (select)
    await_moved(l): of step t-1
    append, attention            attended --> write back, transfer (move), event `moved`
    the rest of the layer

Two of these events are the contract with the engine: `attended` lets transfers overwrite pages,
`moved` lets the next step's attention read them (section 4.2.2). The others order the background
within itself. Nothing waits for a whole step: a layer waits for its own transfer only.

Steps are replayed graphs. Either each half of a layer and each stage is a graph of its own, between
real events: layers then wait for their own transfers only. Or one graph holds a whole step, its
background joined at the end: that hides nothing across steps, but a small batch, whose steps are
shorter than some 250 launches, is better off.

What the background of step t reads of the tables must not change under it while step t+1 has
begun, so lengths and the step counter exist twice, for even and odd steps (`Steps`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.kv.layer import LayerState, Tables
    from tierd.kv.ops import Kernels

    Work = Callable[[], object]


# Predicting and selecting leave free multiprocessors to the engine's own kernels. Moving does not:
# where the link is the limit, a transfer that waits for room leaves it idle (16.1 ms a step at low
# priority, 14.2 ms at this).
MOVE_PRIORITY = -5


class Steps:
    """The tables of even and odd steps: the same memory but for length and step.

    `advance` makes the next step's values from this one's, on the engine's stream; by then every
    layer of the step before last has been waited for, so nobody reads what it overwrites.
    """

    def __init__(self, tables: Tables) -> None:
        other = dataclasses.replace(tables, length=tables.length.clone(), step=tables.step.clone())
        self.tables = (tables, other)

    def advance(self, parity: int, accepted: int | torch.Tensor = 1) -> None:
        """Write the tables of the step after one of this parity."""
        now, then = self.tables[parity], self.tables[1 - parity]
        torch.add(now.length, accepted, out=then.length)
        torch.add(now.step, 1, out=then.step)


@dataclasses.dataclass(slots=True)
class _Events:
    ready: torch.cuda.Event
    predicted: torch.cuda.Event
    selected: torch.cuda.Event
    attended: torch.cuda.Event
    moved: torch.cuda.Event


class Background:
    """Runs the three stages behind an engine's forward pass.

    Attributes:
        work: per layer, the three stages as callables; a replayed graph each, or the kernels.
    """

    def __init__(
        self, device: torch.device, work: list[tuple[Work, Work, Work]], *,
        one_graph: bool = False, move_priority: int = MOVE_PRIORITY,
    ) -> None:  # fmt: skip
        """Make streams and events.

        Args:
            device: the engine's GPU.
            work: per layer: predict, select, move (see `stages`).
            one_graph: it is captured into the engine's own graph; `join` ends each step.
            move_priority: of the stream that moves entries; lower numbers go first.
        """
        self.work = work
        self._one_graph = one_graph
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._measure = False
        self.predict, self.select = (torch.cuda.Stream(device, priority=0) for _ in range(2))
        self.move = torch.cuda.Stream(device, priority=move_priority)
        self._events = [_Events(*(torch.cuda.Event() for _ in range(5))) for _ in range(len(work))]
        if not one_graph:
            for event in self._events:
                event.moved.record(self.move)

    def ready(self, layer: int, stream: torch.cuda.Stream) -> None:
        """The layer's queries exist on `stream`: predict and select behind it."""
        events, work = self._events[layer], self.work[layer]
        events.ready.record(stream)
        self.predict.wait_event(events.ready)
        if not self._one_graph:
            # Its scores and its map are the last step's until then.
            self.predict.wait_event(events.moved)
        with torch.cuda.stream(self.predict):
            work[0]()
        events.predicted.record(self.predict)
        self.select.wait_event(events.predicted)
        with torch.cuda.stream(self.select):
            work[1]()
        events.selected.record(self.select)

    def await_moved(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait until the last step's transfer of this layer is done."""
        if self._one_graph:
            return
        if self._measure:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            stream.wait_event(self._events[layer].moved)
            after.record(stream)
            self._waits.append((before, after))
        else:
            stream.wait_event(self._events[layer].moved)

    def measure(self, on: bool) -> None:
        """Time the waits of the steps that follow; two more events a layer."""
        self._measure = on
        self._waits.clear()

    def stall_ms(self) -> float:
        """Return how long the engine's stream waited for transfers since `measure`."""
        torch.cuda.synchronize()
        return float(sum(before.elapsed_time(after) for before, after in self._waits))

    def attended(self, layer: int, stream: torch.cuda.Stream) -> None:
        """The layer's attention is on `stream`: behind it, pages may change."""
        events = self._events[layer]
        events.attended.record(stream)
        self.move.wait_event(events.selected)
        self.move.wait_event(events.attended)
        with torch.cuda.stream(self.move):
            self.work[layer][2]()
        events.moved.record(self.move)

    def join(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for everything behind it: the end of a step that is one graph."""
        for behind in (self.predict, self.select, self.move):
            stream.wait_stream(behind)


def stages(
    ops: Kernels, state: LayerState, tables: Tables, q: torch.Tensor, query_row: int
) -> tuple[Work, Work, Work]:
    """Return a layer's three stages as plain launches; each may be captured in a graph."""

    def move() -> None:
        ops.write_back(state, tables)
        ops.transfer(state, tables)

    return (
        lambda: ops.score(state, tables, q, query_row),
        lambda: ops.select(state, tables),
        move,
    )
