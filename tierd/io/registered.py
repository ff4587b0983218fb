"""Host memory that the GPU reads and writes: the channel, the dram image, fault blocks, KV pools.

Host memory is registered with CUDA once, before any graph is captured; then its address is valid
on the GPU too, and captured graphs hold it. On the CPU (Triton's interpreter) the same views are
plain tensors. Only engines import this module: it needs torch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from tierd.errors import HookError

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
