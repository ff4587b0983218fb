"""How long a device's random 4 KiB reads take, with the readers that pumps use."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tierd.errors import DeviceError
from tierd.io import _core

PAGE_BYTES = 4096
DEPTHS = (1, 64)
SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReadTimes:
    """What a probe found at one queue depth.

    Attributes:
        depth: reads in flight.
        reads_per_s: finished reads a second.
        p50_us: median time of a read; ``p99_us`` the time that one in a hundred exceeded.
        errors: reads that failed; they count nowhere else.
        transport: io_uring or threads; ``reason`` says why not io_uring.
    """

    depth: int
    reads_per_s: float
    p50_us: float
    p99_us: float
    errors: int
    transport: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return dataclasses.asdict(self)


def read_randomly(
    fd: int, size: int, *, depth: int, seconds: float = SECONDS, path: str = "the device"
) -> ReadTimes:
    """Probe a device.

    Args:
        fd: open for reading, with O_DIRECT where the device has it.
        size: bytes of the device; reads fall anywhere.
        depth: reads in flight.
        seconds: how long.
        path: for the error's text.

    Raises:
        DeviceError: not one read succeeded.
    """
    seed = int.from_bytes(os.urandom(8), "little")
    pages = size // PAGE_BYTES
    found = _core.probe_reads(fd, pages=pages, depth=depth, seconds=seconds, seed=seed)
    if not found["reads"]:
        why = os.strerror(found["first_error"]) if found["first_error"] else "short reads"
        raise DeviceError(f"{path}: no read succeeded: {why}; the kernel may know more; run: dmesg")
    return ReadTimes(
        depth=depth,
        reads_per_s=round(found["reads"] / found["seconds"], 1),
        p50_us=round(found["p50_us"], 1),
        p99_us=round(found["p99_us"], 1),
        errors=found["errors"],
        transport=found["transport"],
        reason=found["reason"],
    )
