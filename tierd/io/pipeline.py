"""Blocks of an image worked on by several threads, with the results in order.

Reading, hashing, packing and writing all release the interpreter's lock, so a few threads that
each carry a block through all of it keep processors and device busy at once, and memory stays
bounded by one set of buffers per thread.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import queue
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_THREADS_MAX = 12

State = TypeVar("State")
Item = TypeVar("Item")
Result = TypeVar("Result")


def thread_count() -> int:
    """Threads for one pass over an image: one more than processors, since some wait for I/O."""
    return min(_THREADS_MAX, len(os.sched_getaffinity(0)) + 1)


def in_order(
    work: Callable[[State, Item], Result], states: Sequence[State], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield work(state, item) for each item, in the items' order.

    Runs one thread per state; a state serves one call at a time. An error in a call is raised
    where its result would have come; then, and when the iteration is given up, no call that has
    not begun is made, and those that have are waited for.
    """
    idle: queue.SimpleQueue[State] = queue.SimpleQueue()
    for state in states:
        idle.put(state)

    def run(item: Item) -> Result:
        state = idle.get()
        try:
            return work(state, item)
        finally:
            idle.put(state)

    ahead = 2 * len(states)
    waiting: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(len(states), thread_name_prefix="tierd-block")
    try:
        for item in items:
            waiting.append(pool.submit(run, item))
            if len(waiting) == ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
