"""A table on the dram tier: rows straight from the node's shared image, over the link.

No directory and no doorbell: a CPU's copy of 4 KiB for a row of 264 B would lose to what the stock
engines do, which is this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierd.errors import RowError
from tierd.gpu import kernels_gather, state
from tierd.gpu.fault import WATCH, FaultBlock
from tierd.gpu.ids import layout_of
from tierd.gpu.shared import HostBlock, resolve_device
from tierd.gpu.table import FORMATS, GRACE_NS, TableImage, gather_rows, pow2
from tierd.io import _core
from tierd.types import RowFormat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DramTable:
    """A table whose image lies in host memory that this process has mapped.

    Has the methods of :class:`tierd.gpu.table.GpuTable` that an engine calls.
    """

    def __init__(
        self, pages: NDArray[np.uint8], image: TableImage, device: str | torch.device = "cuda"
    ) -> None:
        """Register the image.

        Args:
            pages: the image's pages in order, uint8, contiguous; kept alive and mapped by this.
            image: what the pages hold.
            device: a CUDA device; the CPU under Triton's interpreter.

        Raises:
            HookError: no such device, or CUDA refused to register the memory.
        """
        self.device = resolve_device(device)
        self.image = image
        self._block = HostBlock(pages, self.device)
        count = pages.nbytes // 4
        self._words = self._block.view(0, count, torch.int32)
        self._elements = self._block.view(0, pages.nbytes * image.per_word // 4, image.element)
        self._keys = _core.tag_key(image.image_id, image.generation)
        self._ring = torch.zeros(state.RING_WORDS, dtype=torch.int64, device=self.device)
        self._stats = torch.zeros(state.STATS_WORDS.value, dtype=torch.int64, device=self.device)
        self._fault = FaultBlock(image.name, int(_core.rows_per_page(image.row_bytes)))
        self._fault_block = HostBlock(self._fault.memory, self.device)
        self._fault_words = self._fault_block.view(0, state.FAULT_WORDS, torch.int64)
        if self.device.type == "cuda":
            WATCH.add(self._fault)

    def kick(self, ids: torch.Tensor, *, join: bool = False) -> None:
        """Do nothing: the gather reads the rows itself."""

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rows to ``out``; as :meth:`tierd.gpu.table.GpuTable.gather`.

        Raises:
            HookError: wrong ids or ``out``.
            RowError: in the interpreter, what a fault's reason says.
        """
        image = self.image
        layout = layout_of(ids, self.device, image.name)
        view = image.output_view(out, ids.shape)
        if layout.count == 0:
            return
        where = (
            ids, layout.cols, layout.stride0, layout.stride1, layout.count, image.row_lo,
            image.rows if image.row_hi is None else image.row_hi, image.checked_rows, self._words,
        )  # fmt: skip
        marks = (self._ring, self._fault_words, self._stats, *self._keys, GRACE_NS)
        rows = gather_rows(layout.count)
        options = {"ROWS": rows, "CANONICAL": image.canonical_zero, "DIM": image.dim}
        options |= image.geometry
        grid = (-(-layout.count // rows),)
        if image.row_format == RowFormat.E4M3_E8M0:
            del options["BLOCK"]
            kernels_gather.gather_dram_scaled[grid](
                *where, view, *marks, **options, GROUPS=max(4, pow2(image.dim // 32)),
                ZERO=image.zero_scale_bits, num_warps=1,
            )  # fmt: skip
        else:
            kernels_gather.gather_dram_plain[grid](
                *where, self._elements, view, *marks, **options, WIDTH=pow2(image.dim),
                FORMAT=FORMATS[image.row_format], PER_WORD=image.per_word, num_warps=1,
            )  # fmt: skip
        if self.device.type != "cuda":
            reason = self._fault.reason()
            if reason is not None:
                raise RowError(reason)

    def warm(self, ids: torch.Tensor) -> None:
        """Do nothing: this tier has no cache."""

    def stats(self) -> dict[str, int]:
        """Return RingStats' counters, of which this tier moves few; waits for the GPU."""
        return dict(zip(state.STAT_NAMES, self._stats.tolist(), strict=False))

    def close(self) -> None:
        """Stop watching; the GPU must be done with the table."""
        WATCH.remove(self._fault)
