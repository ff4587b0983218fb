"""The size: what the next MiB of HBM would save, and whether a cache pays at all."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tierd.controller.load import predict
from tierd.controller.split import WAYS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierd.controller.load import NodeLoad

MIB = 1 << 20
DIRECTORY_BYTES = 8  # a slot's word
PAYS_MS = 0.05
"""A cache that saves a step less than this is not worth its HBM."""
_GROWTH = 1 / 8


@dataclasses.dataclass(frozen=True, slots=True)
class SizeAdvice:
    """What the cache costs and saves.

    Attributes:
        cache_mib: HBM that it takes now.
        growth_ms: predicted growth of the step now.
        without_ms: with no cache at all.
        next_mib_us: what each of the next MiB would take off a step, in us.
        last_mib_us: what each of the last MiB takes off now.
        pays: whether the cache saves anything worth having.
        text: one sentence for people.
    """

    cache_mib: float
    growth_ms: float
    without_ms: float
    next_mib_us: float
    last_mib_us: float
    pays: bool
    text: str


def best_ways(load: NodeLoad, sets: int, ways: tuple[int, ...]) -> tuple[int, ...]:
    """Return the best split from here on, one way at a time, by the model alone."""
    now = np.array(ways, np.int64)
    tables = len(ways)
    for _ in range(WAYS * tables):
        pairs = [(g, r) for g in range(tables) for r in range(tables) if g != r and now[g]]
        splits = np.array([now, *(_moved(now, giver, receiver) for giver, receiver in pairs)])
        growth = predict(load, splits * float(sets)).growth_ms
        best = int(np.argmin(growth))
        if growth[best] >= growth[0] - 1e-9:
            break
        now = splits[best]
    return tuple(int(way) for way in now)


def _moved(ways: NDArray[np.int64], giver: int, receiver: int) -> NDArray[np.int64]:
    split = ways.copy()
    split[giver] -= 1
    split[receiver] += 1
    return split


def advise(
    load: NodeLoad, ways: tuple[int, ...], sets: int, row_bytes: int, step_ms: float
) -> SizeAdvice:
    """Say what more or less cache would do, split as it is split now.

    Args:
        load: tables with their curves.
        ways: the split in force.
        sets: sets in use.
        row_bytes: bytes of a row; a slot takes 8 more for its directory word.
        step_ms: the step, to say shares of it; 0 when unknown.
    """
    slot = row_bytes + DIRECTORY_BYTES
    mib = sum(ways) * sets * slot / MIB
    sizes = np.array([0.0, 1 - _GROWTH, 1.0, 1 + _GROWTH])
    rows = sizes[:, None] * np.array(ways, np.float64) * sets
    without, less, now, more = (float(x) for x in predict(load, rows).growth_ms)
    part = max(mib * _GROWTH, 1e-9)
    next_us, last_us = (now - more) * 1000 / part, (less - now) * 1000 / part
    saved = without - now
    pays = saved >= PAYS_MS
    share = f" ({100 * saved / step_ms:.1f} % of a step)" if step_ms > 0 else ""
    if not mib:
        text = f"there is no cache; steps grow by {now:.2f} ms"
    elif without < PAYS_MS:
        text = (
            f"a cache does not pay: without any, every read fits its window (growth "
            f"{without:.2f} ms); give the {mib:.0f} MiB back"
        )
    elif not pays:
        text = (
            f"a cache does not pay: {mib:.0f} MiB save {saved:.3f} ms of {without:.2f} ms; what "
            "misses is seen for the first time. A faster tier would help"
        )
    else:
        text = (
            f"{mib:.0f} MiB save {saved:.2f} ms of {without:.2f} ms{share}; the next MiB would "
            f"save {next_us:.2f} us, the last saves {last_us:.2f} us"
        )
    return SizeAdvice(mib, now, without, next_us, last_us, pays, text)
