"""An attached client's tables on a GPU: caches, rings and dram images, made once at attach.

Everything that a captured graph will hold is reserved and registered here, so that nothing is
allocated, registered or copied later.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierd.errors import AttachError, HookError, RowError
from tierd.gpu import caches
from tierd.gpu.cache import GpuCache
from tierd.gpu.dram import DramTable
from tierd.gpu.shared import ChannelMap, resolve_device
from tierd.gpu.table import GpuTable, image_of
from tierd.io import _core
from tierd.io.seen import is_wanted
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from numpy.typing import NDArray

    from tierd.gpu.audit import Audit
    from tierd.gpu.tables import TableOptions
    from tierd.types import ImageInfo


class DeviceTable:
    """One attached table whose ids and rows are tensors of a device. See tables.Table."""

    def __init__(
        self, info: ImageInfo, served: GpuTable | DramTable, *, audit: Audit | None
    ) -> None:
        self.info = info
        self._served: GpuTable | DramTable | None = served
        self._audit = audit
        self._seen: NDArray[np.uint8] | None = None

    @property
    def raw(self) -> bool:
        """Whether rows are served as bytes rather than as bf16."""
        return self.info.table.row_format == RowFormat.RAW

    @property
    def tier(self) -> str:
        """Where rows that are not cached come from: ``dram``, or ``server`` for disk and remote."""
        return "dram" if isinstance(self._open(), DramTable) else "server"

    def kick(self, ids: torch.Tensor, *, join: bool = False) -> None:
        """Start the lookups; see :meth:`tierd.gpu.table.GpuTable.kick`."""
        self._open().kick(ids, join=join)

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rows to ``out``; see :meth:`tierd.gpu.table.GpuTable.gather`."""
        self._open().gather(ids, out)
        if self._audit is not None:
            self._audit.observe(ids, out)

    def warm(self, ids: torch.Tensor) -> None:
        """Bring rows into the cache without using them."""
        self._open().warm(ids)

    def skip_unseen(self, bits: NDArray[np.uint8]) -> None:
        """Leave out, from now on, rows that a seen-set does not have: they are zero, not read.

        The audit ends with it: rows then differ from the image on purpose. A table on the dram
        tier stays exact: nothing is read there that could be left out.
        """
        served = self._open()
        if isinstance(served, DramTable):
            return
        served.skip_unseen(bits)
        self._seen = bits
        if self._audit is not None:
            self._audit.close()
            self._audit = None

    def is_read(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which rows [n] are served as they are stored: those that are not left out."""
        return np.ones(len(rows), np.bool_) if self._seen is None else is_wanted(self._seen, rows)

    def set_quota(self, ways: int) -> None:
        """Change how many ways of each set this table may hold; nothing is flushed."""
        served = self._open()
        if isinstance(served, DramTable):
            raise HookError(f"{self.info.name}: a table on the dram tier has no cache")
        served.set_quota(ways)

    @property
    def quota(self) -> int:
        """Ways of each set of its cache that it may hold, 0 without one; waits for the GPU."""
        served = self._open()
        return 0 if isinstance(served, DramTable) else served.quota

    def stats(self) -> dict[str, int]:
        """Return the counters of protocol.md's RingStats, exactly; waits for the GPU."""
        return self._open().stats()

    def close(self) -> None:
        """Refuse further use; the GPU must be done with the table and graphs that hold it gone."""
        if self._served is not None:
            self._served.close()
        if self._audit is not None:
            self._audit.close()
        self._served = None

    def _open(self) -> GpuTable | DramTable:
        if self._served is None:
            raise RowError(f"{self.info.name}: the client has been closed")
        return self._served


def check_device(device: str) -> torch.device:
    """Return the device, before anything is asked of the daemon.

    Raises:
        HookError: no such GPU, or a graph is being captured.
    """
    found = resolve_device(device)
    if found.type == "cuda":
        count, current = torch.cuda.device_count(), torch.cuda.current_device()
        if found.index >= count:
            raise HookError(f"{found} is not there: {count} GPUs are visible; run: nvidia-smi")
        if found.index != current:
            raise HookError(
                f"{found} is not this thread's device, which is cuda:{current}; call "
                "torch.cuda.set_device first"
            )
        if torch.cuda.is_current_stream_capturing():
            raise HookError(
                "attach came while a CUDA graph is captured, which may neither allocate nor "
                "register memory; attach before the first capture"
            )
    return found


def make_tables(
    images: tuple[ImageInfo, ...],
    channel: Any,
    device: torch.device,
    *,
    options: TableOptions,
    cache_rows: int,
    dram: Mapping[int, tuple[int, int]],
    audits: Mapping[int, Audit],
) -> dict[int, DeviceTable]:
    """Make the tables of a channel; image i is ring i.

    Args:
        images: in ring order.
        channel: ``_core.Channel`` whose rings carry RING_FLAG_GPU.
        device: as :func:`check_device` returned it.
        options: of the client.
        cache_rows: slots for the tables of each row size together.
        dram: index -> (descriptor, bytes) of images that lie in this node's memory; such a table
            takes no part in the caches.
        audits: index -> what audits the table.

    Raises:
        HookError: not enough GPU memory, or CUDA refused to register the channel or an image.
    """
    channel_map = ChannelMap(channel, device)
    made: dict[int, DeviceTable] = {}
    try:
        for index, (fd, size) in dram.items():
            pages = _map_image(images[index], fd, size)
            served = DramTable(pages, _view(images[index], index, options), device)
            made[index] = DeviceTable(images[index], served, audit=audits.get(index))
        cached = [index for index in range(len(images)) if index not in dram]
        for part in caches.plan([images[index].table for index in cached], cache_rows):
            cache = GpuCache(sets=part.sets, row_bytes=part.row_bytes, device=device)
            for place, quota in part.quotas.items():
                index = cached[place]
                table = GpuTable(
                    cache, channel_map, ring=index, quota=quota,
                    image=_view(images[index], index, options),
                )  # fmt: skip
                made[index] = DeviceTable(images[index], table, audit=audits.get(index))
    except BaseException:
        for one in made.values():
            one.close()
        raise
    return made


def _view(image: ImageInfo, index: int, options: TableOptions) -> Any:
    low, high = options.rows_of(image)
    return image_of(
        image, index, row_lo=low, row_hi=high, canonical_zero=options.canonical_zero,
        any_id=options.any_id, scale_zero=options.scale_zero,
    )  # fmt: skip


def _map_image(image: ImageInfo, fd: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map an image that the daemon keeps in memory.

    Raises:
        AttachError: the memory file is shorter than the image.
    """
    need = image.pages * int(_core.PAGE_BYTES)
    have = os.fstat(fd).st_size
    if size < need or have < size:
        raise AttachError(
            f"{image.name}: its image in memory has {min(size, have)} of {need} bytes; "
            "run: tierd status"
        )
    # Writable, since CUDA registers nothing else; the tags find whatever would write there.
    whole = mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(whole, np.uint8)[:need]
