"""Row arithmetic: bit for bit what torch computes, over every payload and scale there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.twin_rig import decode_e4m3_e8m0
from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BOTH = pytest.mark.parametrize("portable", [False, True])


def all_pairs() -> NDArray[np.uint8]:
    """[256 scales, 8 blocks of 32 payloads and 8 scales]: each payload under each scale."""
    rows = np.zeros((256, 264), np.uint8)
    rows[:, :256] = np.arange(256)
    rows[:, 256:] = np.arange(256)[:, None]
    return rows


def is_nan(bits: NDArray[np.uint16]) -> NDArray[np.bool_]:
    return (bits & 0x7FFF) > 0x7F80


@pytest.fixture
def flushed_denormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    yield
    torch.set_flush_denormal(False)


@BOTH
def test_every_payload_and_scale_is_exact(portable: bool) -> None:
    rows = all_pairs()
    want = decode_e4m3_e8m0(rows, 256)
    got = _core.decode_rows(rows, 256, "e4m3_e8m0", portable=portable)
    defined = np.broadcast_to((np.arange(256) & 0x7F) != 0x7F, (256, 256)).copy()
    defined[255] = False  # a scale of 255 never gets past staging
    np.testing.assert_array_equal(got[defined], want[defined])
    # What staging refuses must not look like a number.
    assert is_nan(got[~defined]).all()
    # The oracle has what makes this hard: subnormals, rounding, overflow, both zeroes.
    magnitude = want & 0x7FFF
    assert ((magnitude > 0) & (magnitude < 0x80)).sum() > 100
    assert (magnitude == 0x7F80).any()
    assert (want == 0x8000).any()
    assert (want == 0).any()


@BOTH
@pytest.mark.usefixtures("flushed_denormals")
def test_flush_to_zero_changes_nothing(portable: bool) -> None:
    rows = all_pairs()[:255]
    got = _core.decode_rows(rows, 256, "e4m3_e8m0", portable=portable)
    assert torch.tensor(1e-40, dtype=torch.float32).mul(1.0).item() == 0.0  # the mode is on
    torch.set_flush_denormal(False)
    want = decode_e4m3_e8m0(rows, 256)
    defined = np.broadcast_to((np.arange(256) & 0x7F) != 0x7F, want.shape)
    np.testing.assert_array_equal(got[defined], want[defined])


@BOTH
def test_canonical_zero_clears_the_sign_of_zero_alone(portable: bool) -> None:
    rows = all_pairs()
    kept = _core.decode_rows(rows, 256, "e4m3_e8m0", portable=portable)
    cleared = _core.decode_rows(rows, 256, "e4m3_e8m0", canonical_zero=True, portable=portable)
    assert (kept == 0x8000).sum() > 256  # -0 itself, and negative products that round to zero
    np.testing.assert_array_equal(cleared, np.where(kept == 0x8000, 0, kept))


@BOTH
def test_scales_belong_to_their_blocks(portable: bool) -> None:
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 255, (200, 264), dtype=np.uint8)
    rows[:, :256][(rows[:, :256] & 0x7F) == 0x7F] = 1
    got = _core.decode_rows(rows, 256, "e4m3_e8m0", portable=portable)
    np.testing.assert_array_equal(got, decode_e4m3_e8m0(rows, 256))


@BOTH
@pytest.mark.parametrize("dim", [1, 31, 160, 256, 300])
def test_e4m3_alone(portable: bool, dim: int) -> None:
    rows = np.arange(256 * dim, dtype=np.uint64).astype(np.uint8).reshape(256, dim)
    values = torch.from_numpy(rows).view(torch.float8_e4m3fn).bfloat16()
    want = values.view(torch.uint16).numpy()
    got = _core.decode_rows(rows, dim, "e4m3", portable=portable)
    number = ~is_nan(want)
    np.testing.assert_array_equal(got[number], want[number])
    assert is_nan(got[~number]).all()
    cleared = _core.decode_rows(rows, dim, "e4m3", canonical_zero=True, portable=portable)
    np.testing.assert_array_equal(cleared[number], np.where(want == 0x8000, 0, want)[number])


def test_bf16_and_raw_are_copies() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    rows = bits.view(np.uint8)
    np.testing.assert_array_equal(_core.decode_rows(rows, 256, "bf16"), bits)
    cleared = _core.decode_rows(rows, 256, "bf16", canonical_zero=True)
    np.testing.assert_array_equal(cleared, np.where(bits == 0x8000, 0, bits))
    raw = _core.decode_rows(rows, 512, "raw", canonical_zero=True)
    assert raw.dtype == np.uint8
    np.testing.assert_array_equal(raw, rows)


def test_leading_dimensions_are_kept() -> None:
    rows = np.zeros((2, 3, 5, 264), np.uint8)
    assert _core.decode_rows(rows, 256, "e4m3_e8m0").shape == (2, 3, 5, 256)
    assert _core.decode_rows(rows[0, 0, 0], 256, "e4m3_e8m0").shape == (256,)
    assert _core.decode_rows(rows[:, :0], 256, "e4m3_e8m0").shape == (2, 0, 5, 256)


@pytest.mark.parametrize(
    ("dim", "row_format", "row_bytes", "message"),
    [
        (48, "e4m3_e8m0", 49, "multiple of 32"),
        (256, "e4m3_e8m0", 256, "last dimension of 264"),
        (256, "fp4", 128, "row_format"),
        (0, "raw", 1, "dim must be"),
        (4000, "bf16", 8000, "does not fit a page"),
    ],
)
def test_refusals(dim: int, row_format: str, row_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.decode_rows(np.zeros((4, row_bytes), np.uint8), dim, row_format)
