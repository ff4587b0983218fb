"""Where the simulator takes the place of the machine: devices, chance, time and threads.

Sizes are small, so that a run is short and every structure has several parts: units of 32 KiB
instead of 2 MiB make images of several extents, blocks of 8 pages make passes of several blocks.
Everything else is the code that is shipped.
"""

from __future__ import annotations

import contextlib
import sys
import types
import uuid
from typing import TYPE_CHECKING, Any

from tests.patched import replaced
from tierd.io import formatting, staging, store, walker
from tierd.io import scrub as _scrub  # noqa: F401 - its sizes shrink too, whoever imports it

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tierd.io.simulated import SimulatedHost

UNIT_PAGES = 8
SIZES = {
    "RESERVED_BYTES": 128 << 10,
    "TABLE_AREA_MIN": 64 << 10,
    "TAIL_BYTES": 32 << 10,
    "UNIT_PAGES": UNIT_PAGES,
    "UNIT_BYTES": UNIT_PAGES * 4096,
    "BLOCK_PAGES": 8,
    "PIECE_PAGES": 4,
    "_WIPE_BYTES": 64 << 10,
}


def in_order(
    work: Callable[[Any, Any], Any], states: Sequence[Any], items: Iterable[Any]
) -> Iterator[Any]:
    """Stand in for :func:`tierd.io.pipeline.in_order`: one block after another."""
    for item in items:
        yield work(states[0], item)


@contextlib.contextmanager
def small_sizes() -> Iterator[None]:
    """Shrink every size of the storage modules; each name must exist somewhere."""
    with contextlib.ExitStack() as stack:
        for name, value in SIZES.items():
            modules = [m for m in _storage_modules() if hasattr(m, name)]
            assert modules, f"no module of tierd.io has {name} any more"
            for module in modules:
                stack.enter_context(replaced(module, name, value))
        yield


@contextlib.contextmanager
def simulated_machine(host: SimulatedHost, chance: random.Random) -> Iterator[None]:
    """Run storage code on ``host``'s devices, with ``chance`` for everything it draws."""
    secrets = types.SimpleNamespace(randbits=chance.getrandbits)
    identifiers = types.SimpleNamespace(
        uuid4=lambda: uuid.UUID(int=chance.getrandbits(128), version=4), UUID=uuid.UUID
    )
    clock = types.SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 0.0)
    patches: list[tuple[Any, str, Any]] = [
        (store, "Device", host),
        (store, "secrets", secrets),
        (formatting, "uuid", identifiers),
        (walker, "secrets", secrets),
        (walker, "time", clock),
        (walker, "in_order", in_order),
        (walker, "thread_count", lambda: 1),
        (staging, "time", clock),
        (staging, "in_order", in_order),
        (staging, "thread_count", lambda: 1),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_sizes())
        for module, name, value in patches:
            stack.enter_context(replaced(module, name, value))
        yield


def _storage_modules() -> list[Any]:
    return [m for name, m in sorted(sys.modules.items()) if name.startswith("tierd.io.")]
