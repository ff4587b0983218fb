"""Bare NIXL and our adapter with the same pages, in turns."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.unit.pump_rig import PAGE, Image
from tierd.daemon import by_nixl
from tierd.io import _core
from tierd.io.device import aligned_buffer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TABLE_PAGES = 4096
WARM_UP = 3


def export(connection: Connection) -> None:
    """The other process: offer an image's pages until told to end."""
    agent = by_nixl.make_agent()
    data = Image.make(TABLE_PAGES).data.reshape(-1)
    memory = aligned_buffer(data.size)
    memory[:] = data
    registered = agent.register_memory([(memory.ctypes.data, memory.size, 0, "")], "DRAM")
    connection.send((agent.get_agent_metadata(), memory.ctypes.data))
    connection.recv()
    agent.deregister_memory(registered)
    connection.send(None)


@dataclasses.dataclass(frozen=True)
class Compared:
    """Microseconds for one batch of pages, of each turn.

    Attributes:
        bare_us: NIXL alone.
        ours_us: through the adapter.
        work_us: CPU time of what the adapter adds, without NIXL.
    """

    bare_us: list[float] = dataclasses.field(default_factory=list)
    ours_us: list[float] = dataclasses.field(default_factory=list)
    work_us: list[float] = dataclasses.field(default_factory=list)


def compare(*, pages: int, repeats: int) -> Compared:
    """Read the same pages by bare NIXL and through the adapter, in turns.

    Both move the same pages in the same transfers of the same size through the same agent; the
    adapter adds its queue, the indices and the copy.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=export, args=(there,), daemon=True)
    process.start()
    try:
        metadata, address = here.recv()
        return _compare(metadata, address, pages, repeats)
    finally:
        here.send(None)
        here.recv()
        process.join(10)


def _compare(metadata: bytes, address: int, pages: int, repeats: int) -> Compared:
    rig, out = Adapter(metadata, address, pages), Compared()
    rng = np.random.default_rng(1)
    try:
        for turn in range(-WARM_UP, repeats):
            numbers = rng.integers(0, TABLE_PAGES, pages).astype(np.int32)
            took = rig.bare(numbers), rig.ours(numbers), rig.work(numbers)
            if turn >= 0:
                for times, one in zip((out.bare_us, out.ours_us, out.work_us), took, strict=True):
                    times.append(one)
    finally:
        rig.close()
    return out


class Adapter:
    """A link with its mover, driven without a pump."""

    def __init__(self, metadata: bytes, address: int, pages: int) -> None:
        self.link = _core.QueueLink(pages, 60_000_000_000)
        self.mover: Any = by_nixl.Mover(self.link)
        self.mover.connect(metadata)
        self.mover.prepare([(address, TABLE_PAGES)])
        self.target = aligned_buffer(pages * PAGE)
        self.expected = Image.make(TABLE_PAGES).data

    def bare(self, numbers: Any) -> float:
        """NIXL alone, in transfers of the adapter's size, as many at once."""
        slots = np.arange(len(numbers), dtype=np.int32)
        started = time.perf_counter()
        handles = []
        at = 0
        while at < len(numbers) or handles:
            while at < len(numbers) and len(handles) < by_nixl.TRANSFERS_MAX:
                part = slice(at, at + by_nixl.BATCH)
                handles.append(self.mover.begin(slots[part], numbers[part]))
                at += by_nixl.BATCH
            handles = [one for one in handles if self.mover.state(one) == "PROC"]
        return (time.perf_counter() - started) * 1e6

    def ours(self, numbers: Any) -> float:
        """The same pages as a pump would have them read."""
        started = time.perf_counter()
        self.link.post(numbers, self.target)
        came = 0
        while came < len(numbers):
            self.mover.turn()
            came += self.link.poll()
        took = (time.perf_counter() - started) * 1e6
        assert np.array_equal(self.target.reshape(-1, PAGE), self.expected[numbers])
        return took

    def work(self, numbers: Any) -> float:
        """All that the adapter does for a batch but what NIXL does."""
        started = time.thread_time()
        self.link.post(numbers, self.target)
        for _ in range(0, len(numbers), by_nixl.BATCH):
            slots, _pages = self.link.take(by_nixl.BATCH)
            self.link.finish(slots, True)
        assert self.link.poll() == len(numbers)
        return (time.thread_time() - started) * 1e6

    def close(self) -> None:
        """End the agent."""
        self.mover.close()
