"""GPU tables in Triton's interpreter, over real pumps and over a server played by the test.

Import this before anything of tierd.gpu that holds kernels: whether these are interpreted is
decided when they are defined.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tierd.gpu import kernels_sync
from tierd.gpu.cache import GpuCache
from tierd.gpu.shared import ChannelMap
from tierd.gpu.table import GpuTable, TableImage
from tierd.io import _core
from tierd.types import RowFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from twin_rig import Image, Rig

assert kernels_sync.INTERPRET, "a test imported the kernels before gpu_rig"


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    # The interpreter patches triton.language again at every nested call, which is most of its
    # time. The kernel's launch has done that; what the library's own functions see is patched
    # below, once (the interpreter does not undo it either).
    return self.rewrite()(*args, **kwargs)


interpreter._patch_lang(tl.sum.fn)
interpreter.InterpretedFunction.__call__ = _call
# Hashes overflow on purpose; numpy warns of it for arrays of one element.
np.seterr(over="ignore")
assert triton.knobs.runtime.interpret


class GpuEngine:
    """One rank: a channel, a cache and a GpuTable per image, in the interpreter."""

    def __init__(
        self,
        rig: Rig | None,
        images: list[Image],
        *,
        sets: int = 2,
        rows_max: int = 16,
        arena_pages: int = 48,
        quota: int = 16,
        first_kick: int = 0,
        first_sequence: int = 0,
        **options: Any,
    ) -> None:
        self.rig = rig
        self.images = images
        flag = int(_core.protocol.RING_FLAG_GPU)
        rings = [(rows_max, arena_pages, table, flag) for table in range(len(images))]
        self.channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=rings)
        if first_sequence:
            for ring in range(len(images)):
                _core.RingClient(self.channel, ring, -1, first_sequence=first_sequence)
        self.attached: int | None = None
        if rig is not None:
            self.attached = rig.pump.add_channel(self.channel.fd)
            for ring, image in enumerate(images):
                rig.pump.add_ring(self.attached, ring, image.served)
        self.cache = GpuCache(
            sets=sets, row_bytes=images[0].row_bytes, device="cpu", first_kick=first_kick
        )
        self.map = ChannelMap(self.channel, self.cache.device)
        self.tables = [
            GpuTable(
                self.cache, self.map, ring=ring, quota=quota, first_sequence=first_sequence,
                image=view_of(image, ring, **options),
            )
            for ring, image in enumerate(images)
        ]  # fmt: skip

    def gather(self, table: int, ids: NDArray[Any] | torch.Tensor) -> NDArray[Any]:
        image = self.images[table]
        tensor = ids if isinstance(ids, torch.Tensor) else torch.from_numpy(ids)
        raw = image.row_format == "raw"
        # Not zeroes: an output that is left out must not pass for a row of zeroes.
        fill = 0xA5 if raw else -23131
        out = torch.full(
            (*tensor.shape, image.dim), fill, dtype=torch.uint8 if raw else torch.int16
        )
        self.tables[table].gather(tensor, out)
        return out.numpy() if raw else out.numpy().view(np.uint16)

    def step(self, table: int, ids: NDArray[Any]) -> None:
        """Kick and gather the same tensor, and compare."""
        tensor = torch.from_numpy(ids)
        self.tables[table].kick(tensor)
        got = self.gather(table, tensor)
        np.testing.assert_array_equal(got, self.images[table].decoded[ids])

    def held(self, table: int) -> int:
        """Directory words that name the table."""
        words = self.cache.words.numpy()
        return int(((words != 0) & ((words >> 58) & 63 == table)).sum())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.attached is not None:
            assert self.rig is not None
            self.rig.pump.remove_channel(self.attached)


def view_of(image: Image, number: int, **options: Any) -> TableImage:
    return TableImage(
        name=f"table {number}", number=number, image_id=image.image_id,
        generation=image.generation, rows=image.rows, dim=image.dim, row_bytes=image.row_bytes,
        row_format=RowFormat(image.row_format), **options,
    )  # fmt: skip
