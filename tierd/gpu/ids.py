"""Row numbers as an engine holds them: views with strides, read in place."""

from __future__ import annotations

import dataclasses

import torch

from tierd.errors import HookError


@dataclasses.dataclass(frozen=True, slots=True)
class IdLayout:
    """How element i of a tensor is found: ``(i // cols) * stride0 + (i % cols) * stride1``."""

    count: int
    cols: int
    stride0: int
    stride1: int

    def parts(self, ids: torch.Tensor, rows_max: int) -> list[tuple[torch.Tensor, IdLayout]]:
        """Cut into parts of at most ``rows_max`` elements, in order, without a copy."""
        if self.cols == self.count or self.stride0 == self.cols * self.stride1:
            flat = ids.as_strided((self.count,), (self.stride1,))
            return [
                (piece, IdLayout(piece.numel(), max(1, piece.numel()), 0, self.stride1))
                for piece in flat.split(rows_max)
            ]
        lines = max(1, rows_max // self.cols)
        if self.cols > rows_max:
            raise HookError(
                f"rows of {self.cols} numbers with strides exceed a request of {rows_max}; "
                "raise channel.rows_max"
            )
        table = ids.as_strided((self.count // self.cols, self.cols), (self.stride0, self.stride1))
        return [
            (piece, IdLayout(piece.numel(), self.cols, self.stride0, self.stride1))
            for piece in table.split(lines)
        ]


def layout_of(ids: torch.Tensor, device: torch.device, name: str) -> IdLayout:
    """Check row numbers and describe where they lie.

    Args:
        ids: int32 or int64, on ``device``, of any shape whose strides collapse to two dimensions.
        device: of the cache.
        name: of the table, for the error.

    Raises:
        HookError: another type, dtype or device, or strides that do not collapse.
    """
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
        kind = getattr(ids, "dtype", type(ids).__name__)
        raise HookError(f"{name}: row numbers must be int32 or int64 tensors, got {kind}")
    if ids.device != device:
        raise HookError(f"{name}: row numbers on {ids.device}, the cache is on {device}")
    count = ids.numel()
    dims: list[tuple[int, int]] = []  # (size, stride), outermost first
    for size, stride in zip(ids.shape, ids.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if count == 0:
        return IdLayout(0, 1, 0, 1)
    if len(dims) > 2:
        raise HookError(
            f"{name}: row numbers of shape {tuple(ids.shape)} and strides {ids.stride()} do not "
            "collapse to two dimensions; pass a contiguous tensor"
        )
    dims = [(1, 0)] * (2 - len(dims)) + dims
    (_, stride0), (cols, stride1) = dims
    return IdLayout(count, cols, stride0, stride1)
