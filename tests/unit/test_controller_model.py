"""Exposure and read times against the paper's numbers, and what must hold for any."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.controller.exposure import fit_kappa, growth_ms, stalls_ms, window_at
from tierd.controller.readtime import PAPER_DISK, ReadFit, ReadTime, reads_ms

WINDOWS = (0.27, 9.35)
# SlackTier, table 3: delays of layer 1 and 14, measured growth, equation 1, sum of excesses.
TABLE_3 = [
    (0.4, 9.0, 0.12, 0.13, 0.13),
    (0.9, 9.0, 0.64, 0.63, 0.63),
    (0.9, 12.0, 2.52, 2.65, 3.28),
    (1.5, 12.0, 2.51, 2.65, 3.88),
    (1.5, 15.0, 5.46, 5.65, 6.88),
    (2.5, 15.0, 5.54, 5.65, 7.88),
]
times = st.floats(0, 30)


def test_the_papers_table_3() -> None:
    delays = np.array([row[:2] for row in TABLE_3])
    predicted = growth_ms(delays, WINDOWS)
    np.testing.assert_allclose(predicted, [row[3] for row in TABLE_3], atol=0.005)
    excesses = np.maximum(delays - WINDOWS, 0).sum(axis=1)
    np.testing.assert_allclose(excesses, [row[4] for row in TABLE_3], atol=0.005)
    measured = np.array([row[2] for row in TABLE_3])
    assert np.sqrt(np.mean((predicted - measured) ** 2)) < 0.125  # the paper says 0.12
    assert np.sqrt(np.mean((excesses - measured) ** 2)) > 1.2  # and 1.29


def test_the_papers_fit_of_a_read() -> None:
    pages = np.array([[740.0, 0], [600, 600], [90, 90]])
    found = reads_ms(pages, (PAPER_DISK,), np.ones((2, 1)))
    # T1 = 0.30 ms + 3.05 us P1 + 0.37 us P14; layer 14 waits behind layer 1 at the full price.
    np.testing.assert_allclose(found[:, 0], [2.557, 2.352, 0.6078], atol=1e-3)
    assert found[0, 1] == 0
    np.testing.assert_allclose(found[1:, 1], [3.96, 0.849], atol=1e-3)
    # Figure 1 measured 2.34 uncached and 0.69 with the split cache.
    np.testing.assert_allclose(found[1:, 0], [2.34, 0.69], atol=0.1)


def test_growth_of_the_papers_table_2_with_one_constant() -> None:
    reads = np.array([[2.34, 3.57], [0.69, 1.0]])  # figure 1; both on one disk, uncached and split
    measured = np.array([0.064, 0.012]) * 29.41
    kappa = fit_kappa(measured, growth_ms(reads, WINDOWS))
    predicted = growth_ms(reads, WINDOWS, kappa_ms=kappa)
    assert np.sqrt(np.mean((predicted - measured) ** 2)) < 0.22


@settings(deadline=None)
@given(st.lists(st.tuples(times, times), min_size=1, max_size=6), times)
def test_stalls_add_up_to_the_latest_layer(pairs: list[tuple[float, float]], s: float) -> None:
    reads, windows = np.array(pairs).T
    windows = np.sort(windows)
    stalls = stalls_ms(reads, windows, s)
    assert (stalls >= 0).all()
    assert stalls.sum() == pytest.approx(max(0.0, (s + reads - windows).max()))
    # Equation 1, layer by layer.
    gone = 0.0
    for read, window, stall in zip(reads, windows, stalls, strict=True):
        assert stall == pytest.approx(max(0.0, s + read - window - gone), abs=1e-9)
        gone += stall
    # A faster read never makes a step longer.
    assert stalls_ms(reads * 0.5, windows, s).sum() <= stalls.sum() + 1e-9


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.floats(0, 2000), min_size=1, max_size=5))
def test_more_devices_and_fewer_pages_never_take_longer(devices: int, pages: list[float]) -> None:
    wanted = np.array(pages)

    def on(count: int, scale: float = 1.0) -> np.ndarray:
        shares = np.full((len(wanted), count), 1 / count)
        return reads_ms(wanted * scale, (PAPER_DISK,) * count, shares)

    alone = on(1)
    assert (on(1, 0.5) <= alone + 1e-9).all()
    assert (alone >= 0).all()
    # Striping wins where there is anything to spread.
    assert (on(devices) <= alone * 1.05 + 0.02).all()


def test_windows_scale_with_the_step() -> None:
    assert window_at(9.35, measured_step_ms=29.4, step_ms=11.0) == pytest.approx(3.498, abs=1e-3)
    assert window_at(0.3, measured_step_ms=0.0, step_ms=11.0) == 0.3


@settings(max_examples=6, deadline=None)
@given(st.floats(0.01, 1.0), st.floats(0.1, 10.0), st.floats(0.0, 2.0), st.integers(0, 1000))
def test_a_fit_finds_the_device(base: float, page: float, later: float, seed: int) -> None:
    truth, fit = ReadTime(base, page, later), ReadFit.start()
    rng = np.random.default_rng(seed)
    for _ in range(400):
        own, before, after = rng.uniform(1, 300, 3) * (1, rng.random() < 0.5, rng.random() < 0.5)
        read = base + (page * (own + before) + later * after) / 1000
        fit = fit.observed(own=own, before=before, later=after, read_ms=read * rng.normal(1, 0.03))
    for own, before, after in ((50, 0, 0), (200, 100, 0), (100, 0, 300)):
        pages = np.array([1.0, own + before, after])
        want = pages @ (truth.base_ms, truth.page_us / 1000, truth.later_us / 1000)
        got = pages @ (fit.model.base_ms, fit.model.page_us / 1000, fit.model.later_us / 1000)
        assert got == pytest.approx(want, rel=0.06)
    assert not fit.slow


def test_a_device_that_becomes_slow_is_told_and_forgiven() -> None:
    fit, slow_at = ReadFit.start(), []
    for at in range(500):
        factor = 3.0 if 200 <= at < 300 else 1.0
        fit = fit.observed(own=100, before=0, later=0, read_ms=0.605 * factor)
        if fit.slow:
            slow_at.append(at)
    assert 200 < slow_at[0] < 215
    assert 300 <= slow_at[-1] < 340
    assert slow_at == list(range(slow_at[0], slow_at[-1] + 1))


@pytest.mark.parametrize(
    ("own", "read"), [(0, 1.0), (5, -1.0), (5, float("nan")), (5, float("inf"))]
)
def test_what_is_no_observation_is_left_out(own: float, read: float) -> None:
    fit = ReadFit.start()
    assert fit.observed(own=own, before=0, later=0, read_ms=read) is fit
