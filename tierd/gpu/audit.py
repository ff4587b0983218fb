"""The audit: every so many gathers, some of the rows that the engine got, compared with the image.

The oracle reads the image's pages from the devices itself, past cache, daemon and arenas, and
decodes them on the CPU. On a GPU a kernel behind the gather copies ids and rows to host memory, so
replays of a captured graph are audited like any other step; the thread that watches for faults
compares them, and ends the process if a row differs. It skips what comes while it still compares:
an audit never holds a step up.
"""

from __future__ import annotations

import bisect
import mmap
import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tierd.errors import RowError
from tierd.io import _core
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tierd.types import ImageInfo

ROWS = 32  # compared each time, spread over the gather
_PAGE = 4096
_WORDS = {1: torch.uint8, 2: torch.int16}  # numpy knows no bfloat16


class Audit(Protocol):
    """What observes a table's gathers."""

    def observe(self, ids: Any, out: Any) -> None:
        """Look at a gather that was enqueued (GPU) or is over (CPU)."""

    def close(self) -> None:
        """Observe no more."""


class ImageRows:
    """Stored rows of one image, read from its devices."""

    def __init__(self, info: ImageInfo, extents: Sequence[tuple[int, int, int, int]]) -> None:
        """Remember where the pages lie.

        Args:
            info: the image.
            extents: (first page, pages, device page, descriptor), in any order. Duplicates of the
                descriptors are kept until :meth:`close`.
        """
        self.info = info
        own = {fd: os.dup(fd) for fd in {extent[3] for extent in extents}}
        self._fds = list(own.values())
        self._extents = sorted((first, pages, at, own[fd]) for first, pages, at, fd in extents)
        self._starts = [extent[0] for extent in self._extents]
        self._page = mmap.mmap(-1, _PAGE)  # aligned, as O_DIRECT wants it

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return rows as stored, uint8 [n, row_bytes].

        Raises:
            RowError: a page that is not there, or is not the image's.
        """
        spec = self.info.table
        stride, per_page = int(_core.row_stride(spec.row_bytes)), self.info.rows_per_page
        out = np.empty((len(rows), spec.row_bytes), np.uint8)
        for index, row in enumerate(rows.tolist()):
            at = row % per_page * stride
            out[index] = self._read_page(row // per_page)[at : at + spec.row_bytes]
        return out

    def _read_page(self, page: int) -> NDArray[np.uint8]:
        info = self.info
        place = bisect.bisect_right(self._starts, page) - 1
        first, pages, device_page, fd = self._extents[place] if place >= 0 else (0, 0, 0, -1)
        if not first <= page < first + pages:
            raise RowError(f"{info.name}: the image map has no page {page}; run: tierd status")
        try:
            got = os.preadv(fd, [self._page], (device_page + page - first) * _PAGE)
        except OSError as error:
            raise RowError(f"{info.name}: page {page} cannot be read: {error.strerror}") from None
        data = np.frombuffer(self._page, np.uint8)
        faults = np.zeros(1, np.uint8)
        good = got == _PAGE and not _core.check_pages(
            data, info.table.row_bytes, info.table.rows, page, info.image_id, info.generation,
            True, True, faults,
        )  # fmt: skip
        if not good:
            raise RowError(f"{info.name}: the audit read a damaged page {page}; run: tierd verify")
        return data

    def close(self) -> None:
        """Let go of the descriptors."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def image_rows(info: ImageInfo, entry: Mapping[str, Any], fds: Mapping[str, int]) -> ImageRows:
    """Build from the image map of docs/protocol.md.

    Args:
        info: the image.
        entry: its entry of the map.
        fds: device UUID -> read-only descriptor.
    """
    extents = [
        (first, pages, at, fds[device["uuid"]])
        for device in entry["devices"]
        for first, pages, at in device["extents"]
    ]
    return ImageRows(info, extents)


class RowJudge:
    """Compares rows that an engine got with what is stored."""

    def __init__(
        self,
        info: ImageInfo,
        read: Callable[[NDArray[np.int64]], NDArray[np.uint8]],
        *,
        owned: tuple[int, int],
        canonical_zero: bool,
        scale_zero: bool = False,
    ) -> None:
        """Bind an oracle.

        Args:
            info: the image.
            read: rows [n] -> uint8 [n, row_bytes] as stored: :meth:`ImageRows.read`, or a
                checkpoint's rows.
            owned: rows of this rank, (first, end); others are +0.
            canonical_zero: whether -0 was served as +0.
            scale_zero: whether an e8m0 scale of 0 was served as 0, rather than as 2^-127.
        """
        self.info = info
        self._read = read
        self._owned = owned
        self._canonical, self._scale_zero = canonical_zero, scale_zero
        self.compared = 0

    def differing(self, ids: NDArray[np.int64], values: NDArray[Any]) -> str | None:
        """Return why a row is wrong, in one line, or None.

        Args:
            ids: int64 [n].
            values: [n, dim] as served: 16-bit words of bf16, or bytes of raw tables.
        """
        spec = self.info.table
        mine = (ids >= self._owned[0]) & (ids < self._owned[1])
        raw = spec.row_format == RowFormat.RAW
        want = np.zeros((len(ids), spec.dim), np.uint8 if raw else np.uint16)
        try:
            stored = self._read(ids[mine])
        except RowError as error:
            return str(error)
        decoded = _core.decode_rows(
            stored, spec.dim, spec.row_format.value, canonical_zero=self._canonical
        )
        if self._scale_zero and spec.row_format == RowFormat.E4M3_E8M0:
            decoded = times_zero(decoded, stored[:, spec.dim :] == 0, canonical=self._canonical)
        want[mine] = decoded
        self.compared += len(ids)
        wrong = np.flatnonzero((want != values.view(want.dtype)).any(axis=1))
        if not len(wrong):
            return None
        row = int(ids[wrong[0]])
        return (
            f"{self.info.name}: the audit found {len(wrong)} of {len(ids)} rows that differ from "
            f"the image, row {row} among them; run: tierd verify"
        )


def times_zero(
    values: NDArray[np.uint16], zero: NDArray[np.bool_], *, canonical: bool
) -> NDArray[np.uint16]:
    """Multiply blocks of values by 0, as who takes an e8m0 scale of 0 for 0 does.

    Args:
        values: bf16 bits [n, dim].
        zero: [n, dim / 32], which blocks.
        canonical: whether -0 is +0.

    Returns:
        bf16 bits [n, dim]: in such blocks zeroes of the values' signs, and NaN where NaN was.
    """
    wide = np.repeat(zero, values.shape[1] // zero.shape[1], axis=1)
    is_nan = (values & 0x7FFF) > 0x7F80
    zeroes = values & np.uint16(0 if canonical else 0x8000)
    return np.where(wide & ~is_nan, zeroes, values)


class HostAudit:
    """The audit of a table whose ids and rows are host memory."""

    def __init__(self, judge: RowJudge, every: int, close: Callable[[], None]) -> None:
        self.judge = judge
        self._every = every
        self._close = close
        self._gathers = 0

    def observe(self, ids: Any, out: Any) -> None:
        """Compare, every so many calls.

        Raises:
            RowError: a row differs.
        """
        self._gathers += 1
        if self._gathers % self._every:
            return
        numbers = np.asarray(ids).reshape(-1).astype(np.int64)
        if not len(numbers):
            return
        words = out.view(_WORDS[out.element_size()]) if isinstance(out, torch.Tensor) else out
        chosen = spread(len(numbers), self._gathers)
        values = np.ascontiguousarray(np.asarray(words).reshape(len(numbers), -1)[chosen])
        reason = self.judge.differing(numbers[chosen], values)
        if reason is not None:
            raise RowError(reason)

    def close(self) -> None:
        """Let go of the oracle."""
        self._close()


def spread(count: int, turn: int) -> NDArray[np.int64]:
    """Return up to ROWS places among ``count``, others every turn."""
    step = max(1, count // ROWS)
    return (np.arange(0, count, step)[:ROWS] + turn * 7) % max(1, count)
