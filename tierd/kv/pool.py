"""The host pool as the layers see it: tensors over a lease, on the CPU or registered for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierd.io.pool import HEADER_BYTES
from tierd.io.registered import HostBlock

if TYPE_CHECKING:
    from tierd.io.pool import PoolView
    from tierd.kv.shape import KvShape

_BITS = {2: torch.int16, 4: torch.int32}


class KvPool:
    """Views of a lease's pages and owner headers, layer by layer.

    Attributes:
        pages: host pages of each layer.
    """

    def __init__(self, view: PoolView, shape: KvShape, device: torch.device | str) -> None:
        """Register the lease for a device.

        Raises:
            HookError: CUDA refused to register it.
        """
        self.view = view
        self.pages = view.layout.pages
        self._shape = shape
        self._block = HostBlock(view.memory, torch.device(device))

    def host(self, layer: int) -> torch.Tensor:
        """Return a layer's pages, [pages, kv_heads, 2, block, head_dim]."""
        shape, layout = self._shape, self.view.layout
        elements = self.pages * layout.block_bytes // shape.dtype.itemsize
        flat = self._block.view(layout.layer_at(layer), elements, _BITS[shape.dtype.itemsize])
        size = (self.pages, shape.kv_heads, 2, shape.block, shape.head_dim)
        return flat.view(shape.dtype).view(size)

    def headers(self, layer: int) -> torch.Tensor:
        """Return a layer's owner headers, int32 [pages, 4]."""
        at = self.view.layout.headers_at(layer)
        words = self.pages * HEADER_BYTES // 4
        return self._block.view(at, words, torch.int32).view(self.pages, -1)
