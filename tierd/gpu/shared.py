"""The channel as device code sees it, and which devices there are."""

from __future__ import annotations

import os
from typing import Any

import torch

from tierd.errors import HookError
from tierd.io import _core
from tierd.io.registered import HostBlock

__all__ = ["ChannelMap", "HostBlock", "resolve_device"]


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device; a CUDA device that is not there is refused.

    Raises:
        HookError: no GPU, or the CPU without Triton's interpreter.
    """
    found = torch.device(device)
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise HookError(
                "no CUDA GPU is visible to this process; run: nvidia-smi, or use the CPU path"
            )
        index = torch.cuda.current_device() if found.index is None else found.index
        return torch.device("cuda", index)
    if not os.environ.get("TRITON_INTERPRET"):
        raise HookError(
            f"device {found} has no GPU path: Triton's kernels run on the CPU only with "
            "TRITON_INTERPRET=1; CPU tables use the CPU twin"
        )
    return found


class ChannelMap:
    """A channel as device code sees it: one registration, and where each ring's parts lie."""

    def __init__(self, channel: Any, device: torch.device) -> None:
        """Map the channel (``_core.Channel``) for ``device``.

        Raises:
            HookError: the channel belongs to another process, or is not one of this ABI.
        """
        self._buffer = channel.buffer()
        head = self._buffer[:64].view("<u4")
        protocol = _core.protocol
        if head[0] != protocol.CHANNEL_MAGIC or head[1] != protocol.CHANNEL_ABI:
            raise HookError(
                f"the channel has ABI {head[1]}, this tierd speaks {protocol.CHANNEL_ABI}; "
                "attach again"
            )
        if head[7] != os.getpid():
            raise HookError(
                f"the channel was made by process {head[7]} and this is process {os.getpid()}: "
                "a channel does not survive a fork or a restart; attach in this process"
            )
        self.ring_count = int(head[4])
        self.block = HostBlock(self._buffer, device)

    def entry(self, ring: int) -> dict[str, int]:
        """Return the offsets and sizes of a ring (RingEntry of protocol.h)."""
        if not 0 <= ring < self.ring_count:
            raise HookError(f"ring {ring}: the channel has {self.ring_count} rings")
        at = _core.protocol.OFFSET_RINGS + ring * _core.protocol.RING_ENTRY_BYTES
        offsets = self._buffer[at : at + 48].view("<u8")
        sizes = self._buffer[at + 48 : at + 64].view("<u4")
        names = ("control", "descriptors", "arena_d", "arena_g", "stats", "samples")
        found = dict(zip(names, map(int, offsets), strict=True))
        found |= zip(("rows_max", "arena_pages", "table", "flags"), map(int, sizes), strict=True)
        return found

    def sample_threshold(self, ring: int) -> int:
        """Return SampleHeader.threshold of a ring."""
        at = self.entry(ring)["samples"] + 12
        return int(self._buffer[at : at + 4].view("<u4")[0])
