"""What the audit expects of engines that decode otherwise than the format says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tierd.gpu.audit import RowJudge, times_zero
from tierd.types import RowFormat

DIM, BLOCK, ROWS = 64, 32, 40


def as_vllm_decodes(stored: np.ndarray) -> np.ndarray:
    """Its lookup kernel, in torch: the exponent is shifted into place, so a byte of 0 is 0.0."""
    payload = torch.from_numpy(stored[:, :DIM].copy()).view(torch.float8_e4m3fn).float()
    exponents = torch.from_numpy(stored[:, DIM:].astype(np.int32)) << 23
    scales = exponents.view(torch.float32).repeat_interleave(BLOCK, dim=1)
    return (payload * scales).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("canonical", [False, True])
def test_a_scale_of_zero_is_zero_where_the_engine_says_so(canonical: bool) -> None:
    rng = np.random.default_rng(1)
    stored = rng.integers(0, 256, (ROWS, DIM + DIM // BLOCK), np.uint8)
    stored[(stored & 0x7F) == 0x7F] = 0x80  # -0 for NaN, whose bits torch has otherwise
    stored[:, DIM:] = rng.integers(100, 140, (ROWS, DIM // BLOCK))
    stored[::3, DIM] = 0
    served = as_vllm_decodes(stored)
    if canonical:
        served = np.where(served == 0x8000, 0, served).astype(np.uint16)
    table = SimpleNamespace(dim=DIM, row_format=RowFormat.E4M3_E8M0)
    info: Any = SimpleNamespace(name="v41/layers.1.engram", table=table)

    def reason(scale_zero: bool) -> str | None:
        judge = RowJudge(
            info, lambda rows: stored[rows], owned=(0, ROWS), canonical_zero=canonical,
            scale_zero=scale_zero,
        )  # fmt: skip
        return judge.differing(np.arange(ROWS), served)

    assert reason(scale_zero=True) is None
    assert f"{-(-ROWS // 3)} of {ROWS} rows that differ" in str(reason(scale_zero=False))


def test_nothing_times_nan_is_nan() -> None:
    values = np.array([[0x7FFF, 0xFFFF, 0x3F80, 0xBF80] * 16], np.uint16)
    got = times_zero(values, np.array([[True, False]]), canonical=False)
    assert (got[0, :4] == [0x7FFF, 0xFFFF, 0, 0x8000]).all()
    assert (got[0, 32:] == values[0, 32:]).all()
