"""Which faults a run has: each seed switches some kinds on, with rates and limits of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierd.io import _core

if TYPE_CHECKING:
    import random

KINDS = tuple(kind.name for kind in _core.SimFault)
ZONES = tuple(zone.name for zone in _core.SimZone)
WRITES = frozenset({"write_error", "lost_write", "torn_write", "misdirected_write", "flush_error"})
PASSING = frozenset({"short_read", "read_error", "misdirected_read", "stale_read", "flipped_read"})
MARKING = frozenset(
    {"dead_page", "rotten_page", "write_error", "lost_write", "torn_write", "misdirected_write"}
)
# Millionths of a zone's operations, low and high. A run has hundreds of reads of data, and a few
# tens of any other operation.
RATES = {"data reads": (2_000, 100_000), "others": (20_000, 300_000)}
DATA_LIMIT = 4  # of one kind, on one device
META_LIMIT = 1  # of one kind in roots, and one in tables
META_READS_MAX = 3  # kinds of passing faults in each; the store reads again more often than that
QUIET_SHARE = 0.1  # runs with power cuts only
DATA_SHARE, META_SHARE = 0.3, 0.15  # how likely a kind is on
FOCUS_SHARE = 0.35  # devices on which one kind of fault in the data is frequent
FOCUS_RATE, FOCUS_LIMIT = (20_000, 100_000), 40


def arm(native: Any, chance: random.Random, *, alone: bool) -> None:
    """Set a device's faults for this run.

    Those that leave a mark in roots or tables are for a device that shares images with no other:
    what then comes back is one device's older state, and the model follows that.
    """
    if chance.random() < QUIET_SHARE:
        return
    focus = chance.choice(KINDS) if chance.random() < FOCUS_SHARE else None
    if focus == "misdirected_write" and not alone:
        focus = None
    passing = dict.fromkeys(ZONES, 0)
    for kind in chance.sample(KINDS, len(KINDS)):
        for zone in ZONES:
            if chance.random() >= (DATA_SHARE if zone == "data" else META_SHARE):
                continue
            if not alone and (kind == "misdirected_write" or (zone != "data" and kind in MARKING)):
                continue
            if zone != "data" and kind in PASSING:
                passing[zone] += 1
                if passing[zone] > META_READS_MAX:
                    continue
            reads = kind not in WRITES and zone == "data"
            low, high = RATES["data reads" if reads else "others"]
            rate = round(low * (high / low) ** chance.random())
            limit = chance.randint(1, DATA_LIMIT) if zone == "data" else META_LIMIT
            native.set_fault(_core.SimFault[kind], _core.SimZone[zone], rate, limit)
    if focus is not None:
        rate = chance.randint(*FOCUS_RATE)
        native.set_fault(_core.SimFault[focus], _core.SimZone.data, rate, FOCUS_LIMIT)


def reached(native: Any) -> dict[tuple[str, str], int]:
    """How often each (kind, zone) happened on a device."""
    counts: dict[str, tuple[int, int, int]] = native.counts()
    return {
        (kind, zone): numbers[index]
        for kind, numbers in counts.items()
        for index, zone in enumerate(ZONES)
    }


def total(natives: list[Any]) -> int:
    """Faults of all kinds on all devices, slow reads aside: those change nothing but time."""
    return sum(
        sum(numbers)
        for native in natives
        for kind, numbers in native.counts().items()
        if kind != "slow_read"
    )


def marks(native: Any) -> int:
    """Scars in roots and tables."""
    return int(native.scars(_core.SimZone.roots)) + int(native.scars(_core.SimZone.tables))
