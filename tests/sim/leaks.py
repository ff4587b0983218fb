"""What a run may not leave behind: descriptors, mappings, memory of the native core."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
from pathlib import Path

PERIOD = 50  # runs between two looks at memory
# Python's own small objects and its caches come and go within these; a leak of one request's
# pages, of one device or of one channel in each run would exceed them at the first look.
BYTES_PER_RUN_MAX = 4096
MAPPINGS_MAX = 8


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@dataclasses.dataclass(frozen=True)
class Held:
    """What the process holds.

    Attributes:
        heap_bytes: in use by malloc, the native core's and numpy's arrays.
        mappings: lines of /proc/self/maps that belong to a memfd or to nothing.
    """

    descriptors: int
    heap_bytes: int
    mappings: int


def held() -> Held:
    """Look, after a garbage collection."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    info = libc.mallinfo2()
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = sum("memfd:" in line for line in lines)
    return Held(descriptors(), info.uordblks + info.hblkhd, shared)


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


class Watch:
    """Looks every PERIOD runs of this process; the first look, when all is warm, is the measure."""

    def __init__(self) -> None:
        self._runs = 0
        self._first: Held | None = None

    def after_run(self) -> str:
        """Return what has leaked, or nothing."""
        self._runs += 1
        if self._runs % PERIOD:
            return ""
        now = held()
        if self._first is None:
            self._first = now
            return ""
        runs = self._runs - PERIOD
        grown = now.heap_bytes - self._first.heap_bytes
        if grown > BYTES_PER_RUN_MAX * runs:
            return f"{grown} bytes of memory were not given back in {runs} runs"
        if now.mappings - self._first.mappings > MAPPINGS_MAX:
            return f"{now.mappings - self._first.mappings} mappings were left in {runs} runs"
        return ""
