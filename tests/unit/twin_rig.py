"""Images in a temporary file, a real pump, and oracles in numpy and torch for the twin's tests.

Pages are packed here a second time, by the format's description alone, so that a mistake in the
core's packing cannot hide one in its fill.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from tierd.io import _core

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

U32 = np.uint32
MASK64 = (1 << 64) - 1


def tag_keys(image_id: int, generation: int) -> tuple[int, int]:
    z = image_id ^ (generation * 0x9E3779B97F4A7C15 & MASK64)
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK64
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = x ^ (x >> U32(16))
    x = x * U32(0x85EBCA6B)
    x = x ^ (x >> U32(13))
    x = x * U32(0xC2B2AE35)
    return x ^ (x >> U32(16))


def tags_of(
    padded: NDArray[np.uint8], numbers: NDArray[np.uint64], image_id: int, generation: int
) -> NDArray[np.uint32]:
    key0, key1 = tag_keys(image_id, generation)
    low, high = numbers.astype(U32), (numbers >> np.uint64(32)).astype(U32)
    seed = mix32(low ^ U32(key0)) + mix32(high ^ U32(key1))
    words = np.ascontiguousarray(padded).view("<u4")
    offsets = np.arange(words.shape[1], dtype=U32) * U32(0x9E3779B1)
    x = (words ^ (offsets[None, :] + seed[:, None])) * U32(0x85EBCA6B)
    x = (x ^ (x >> U32(13))) * U32(0xC2B2AE35)
    x = x ^ (x >> U32(16))
    return mix32(np.bitwise_xor.reduce(x, axis=1) ^ seed)


def pack(rows: NDArray[np.uint8], image_id: int, generation: int) -> NDArray[np.uint8]:
    """Rows [n, row_bytes] as pages [p, 4096]."""
    count, row_bytes = rows.shape
    stride = -(-row_bytes // 4) * 4
    fit = (4096 - 32) // (stride + 4)
    pages = -(-count // fit)
    padded = np.zeros((pages * fit, stride), np.uint8)
    padded[:count, :row_bytes] = rows
    tags = tags_of(padded, np.arange(pages * fit, dtype=np.uint64), image_id, generation)
    tags[count:] = 0
    out = np.zeros((pages, 4096), np.uint8)
    out[:, : fit * stride] = padded.reshape(pages, fit * stride)
    out[:, fit * stride : fit * (stride + 4)] = tags.reshape(pages, fit).view(np.uint8)
    for page in range(pages):
        here = min(fit, count - page * fit)
        trailer = np.zeros(32, np.uint8)
        trailer[0:4].view("<u4")[0] = 0x50445254
        trailer[4:6].view("<u2")[0] = 1
        trailer[6:8].view("<u2")[0] = here
        trailer[8:16].view("<u8")[0] = image_id
        trailer[16:24].view("<u8")[0] = page
        trailer[24:28].view("<u4")[0] = generation
        out[page, 4064:] = trailer
        out[page, 4092:].view("<u4")[0] = _core.crc32c(out[page, :4092])
    return out


def decode_e4m3_e8m0(rows: NDArray[np.uint8], dim: int) -> NDArray[np.uint16]:
    """The engines' arithmetic, by torch: fp32(e4m3) * 2^(scale - 127), rounded once to bf16."""
    raw = torch.from_numpy(np.ascontiguousarray(rows))
    payload = raw[..., :dim].contiguous().view(torch.float8_e4m3fn).float()
    exponent = raw[..., dim:].int()
    scale = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)
    product = payload.unflatten(-1, (-1, 32)) * scale[..., None]
    return product.flatten(-2).bfloat16().view(torch.uint16).numpy()


def expected(rows: NDArray[np.uint8], dim: int, row_format: str) -> NDArray[Any]:
    """What a gather of stored rows [..., row_bytes] must give."""
    if row_format == "e4m3_e8m0":
        return decode_e4m3_e8m0(rows, dim)
    if row_format == "e4m3":
        values = torch.from_numpy(np.ascontiguousarray(rows)).view(torch.float8_e4m3fn)
        return values.bfloat16().view(torch.uint16).numpy()
    if row_format == "bf16":
        return np.ascontiguousarray(rows).view(np.uint16)
    return rows


def random_rows(
    count: int, dim: int, row_format: str, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Rows as stored, of every payload and scale that a staged table may hold."""
    size = {"e4m3_e8m0": dim + dim // 32, "e4m3": dim, "bf16": 2 * dim, "raw": dim}[row_format]
    rows = rng.integers(0, 256, (count, size), dtype=np.uint8)
    if row_format in ("e4m3_e8m0", "e4m3"):
        payload = rows[:, :dim]
        payload[(payload & 0x7F) == 0x7F] = 0x40  # NaN is refused when a table is staged
        rows[:, dim:][rows[:, dim:] == 255] = 127
    return rows


@dataclasses.dataclass
class Image:
    """One table in the rig's file."""

    image_id: int
    generation: int
    dim: int
    row_format: str
    stored: NDArray[np.uint8]
    decoded: NDArray[Any]
    first_page: int  # in the file
    pages: int
    served: int  # the pump's number of it

    @property
    def rows(self) -> int:
        return self.stored.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.stored.shape[1]


class Rig:
    """A file of images and a pump that serves them."""

    def __init__(self, path: Path, shapes: list[tuple[int, int, str]], **options: Any) -> None:
        """Pack one image per (rows, dim, row_format) into `path` and start a pump over it."""
        rng = np.random.default_rng(20)
        self.pump = _core.Pump(park_us=1000, spin_us=0, **options)
        self.images: list[Image] = []
        packed: list[NDArray[np.uint8]] = []
        at = 0
        for number, (rows, dim, row_format) in enumerate(shapes):
            stored = random_rows(rows, dim, row_format, rng)
            image_id, generation = int(rng.integers(1 << 63)), 1 + number
            pages = pack(stored, image_id, generation)
            decoded = expected(stored, dim, row_format)
            self.images.append(
                Image(image_id, generation, dim, row_format, stored, decoded, at, len(pages), -1)
            )
            packed.append(pages)
            at += len(pages)
        path.write_bytes(np.concatenate(packed).tobytes())
        self.fd = os.open(path, os.O_RDWR)
        device = self.pump.add_device(self.fd)
        for image in self.images:
            extents = np.array([[0, image.pages, device, image.first_page]], np.uint64)
            image.served = self.pump.add_table(
                image_id=image.image_id, generation=image.generation, row_bytes=image.row_bytes,
                rows=image.rows, window_ns=0, extents=extents,
            )  # fmt: skip
        self.pump.start()

    def close(self) -> None:
        self.pump.stop()
        os.close(self.fd)

    def offset_of(self, image: Image, row: int) -> int:
        """Where a row's bytes lie in the file."""
        stride = _core.row_stride(image.row_bytes)
        fit = _core.rows_per_page(image.row_bytes)
        return (image.first_page + row // fit) * 4096 + row % fit * stride


class Engine:
    """One client of a rig: a channel, a cache and one TwinTable per image named."""

    def __init__(
        self,
        rig: Rig,
        images: list[Image],
        *,
        sets: int = 4,
        rows_max: int = 16,
        arena_pages: int = 48,
        quota: int = 16,
        first_stamp: int = 0,
        first_sequence: int = 0,
        serve: bool = True,
        **options: Any,
    ) -> None:
        self.rig = rig
        self.images = images
        rings = [(rows_max, arena_pages, table, 0) for table in range(len(images))]
        self.channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=rings)
        self.cache = _core.RowCache(
            sets=sets, row_bytes=images[0].row_bytes, first_stamp=first_stamp
        )
        if first_sequence:
            for ring in range(len(images)):
                _core.RingClient(
                    self.channel, ring, -1, first_sequence=first_sequence
                )  # leaves the levels there
        self.attached: int | None = None
        if serve:
            self.attach()
        self.tables = [
            _core.TwinTable(
                self.cache, self.channel, ring, rig.pump.wake_fd, table=ring,
                image_id=image.image_id, generation=image.generation, rows=image.rows,
                dim=image.dim, row_format=image.row_format, quota=quota, spin_us=0, **options,
            )
            for ring, image in enumerate(images)
        ]  # fmt: skip

    def attach(self) -> None:
        self.attached = self.rig.pump.add_channel(self.channel.fd)
        for ring, image in enumerate(self.images):
            self.rig.pump.add_ring(self.attached, ring, image.served)

    def control_word(self, ring: int, offset: int) -> int:
        """A 32-bit word of a ring's control, by its offset."""
        return int(self.channel.control(ring)[offset : offset + 4].view(np.uint32)[0])

    def wish(self, ring: int, word: int) -> None:
        """Write what a daemon wants of a ring's client: 1 + its table's ways, or nonsense."""
        at = int(_core.protocol.OFFSET_QUOTA)
        self.channel.control(ring)[at : at + 4].view(np.uint32)[0] = word

    def gather(self, table: int, ids: NDArray[Any]) -> NDArray[Any]:
        image = self.images[table]
        dtype = np.uint8 if image.row_format == "raw" else np.uint16
        # Not zeroes: an output that is left out must not pass for a row of zeroes.
        out = np.full((*ids.shape, image.dim), 0xA5, dtype)
        self.tables[table].gather(ids, out)
        return out

    def check(self, table: int, ids: NDArray[Any]) -> None:
        got = self.gather(table, ids)
        np.testing.assert_array_equal(got, self.images[table].decoded[ids])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.attached is not None:
            self.rig.pump.remove_channel(self.attached)
