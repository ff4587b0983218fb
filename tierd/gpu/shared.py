"""Host memory that the GPU reads and writes: the channel, the dram image, fault blocks.

Host memory is registered with CUDA once, before any graph is captured; then its address is valid
on the GPU too, and captured graphs hold it. On the CPU (Triton's interpreter) the same views are
plain tensors.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tierd.errors import HookError
from tierd.io import _core

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TYPES = {torch.uint8: "|u1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8"}
_registered: dict[int, int] = {}  # address -> bytes, of this process


class _Memory:
    """Memory that belongs to somebody else, as CUDA's array interface describes it."""

    def __init__(self, address: int, count: int, dtype: torch.dtype, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": _TYPES[dtype],
            "data": (address, False),
            "version": 3,
        }


class HostBlock:
    """A block of host memory that device code may use.

    Attributes:
        device: where views of it live: a CUDA device, or the CPU for the interpreter.
    """

    def __init__(self, memory: NDArray[np.uint8], device: torch.device) -> None:
        """Register ``memory`` (uint8, contiguous, kept alive by this block) for ``device``.

        Raises:
            HookError: CUDA refused to register it.
        """
        self._memory = memory
        self.device = device
        if device.type == "cuda":
            _register(memory.ctypes.data, memory.nbytes, device)
            # Views keep the block alive; with the last of them the registration goes too, before
            # the memory does, or a later block at the same address would pass for registered.
            weakref.finalize(self, _unregister, memory.ctypes.data).atexit = False

    def view(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``count`` elements at a byte offset as a one-dimensional tensor."""
        size = torch.empty((), dtype=dtype).element_size()
        if offset < 0 or offset % size or offset + count * size > self._memory.nbytes:
            raise ValueError(f"{count} x {dtype} at {offset} lie outside the block")
        if self.device.type == "cuda":
            memory = _Memory(self._memory.ctypes.data + offset, count, dtype, self)
            return torch.as_tensor(memory, device=self.device)
        return torch.from_numpy(self._memory[offset : offset + count * size]).view(dtype)


def _register(address: int, size: int, device: torch.device) -> None:
    if _registered.get(address, 0) >= size:
        return
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    if code != 0:
        raise HookError(
            f"CUDA refused to register {size / 2**20:.0f} MiB of shared memory (error {code}); "
            "the process may lock too little memory; run: ulimit -l"
        )
    _registered[address] = size


def _unregister(address: int) -> None:
    if _registered.pop(address, 0):
        torch.cuda.cudart().cudaHostUnregister(address)


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
