"""RDMA objects that the kernel has, to see that nothing is left behind."""

from __future__ import annotations

import subprocess


def objects() -> dict[str, int]:
    """How many there are, by kind, of all devices together."""
    words = ["rdma", "resource", "show"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found: dict[str, int] = {}
    for line in shown.splitlines():
        pairs = line.split()[2:]  # behind the device's number and name
        for kind, count in zip(pairs[::2], pairs[1::2], strict=True):
            found[kind] = found.get(kind, 0) + int(count)
    return found
