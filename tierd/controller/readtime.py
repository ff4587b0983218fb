"""How long a device takes to read a layer's missing pages, fitted while it serves.

    T_l = a + b * (own pages and those submitted before) + c * (pages submitted later)

Contention is not symmetric: a layer waits behind everything submitted before it at the full price
of a page (b), while what is submitted later slows it only by sharing the device (c, about an eighth
of b on the paper's disk: a = 0.30 ms, b = 3.05 us, c = 0.37 us).

A table that lies on several devices is done when the slowest of them is. Random rows do not spread
evenly: the fullest of D devices gets about n/D + sqrt(2 n/D ln D) of n pages.

A layer that misses nothing rings no doorbell and waits for nothing; with n pages expected, a step
has one at all with probability 1 - exp(-n).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

# A fit follows a device's last few hundred observations.
FORGET = 0.99
# What a fit starts from weighs as much as this many observations.
PRIOR_WEIGHT = 1.0
# How many observations make the anchor that "slow" is judged against.
ANCHOR_AT = 100
SLOW_RATIO, WELL_RATIO = 1.5, 1.2
_SLOW_FORGET = 0.9


@dataclasses.dataclass(frozen=True, slots=True)
class ReadTime:
    """One device's model.

    Attributes:
        base_ms: a, the time of a burst however small.
        page_us: b, for each page of the layer and of those submitted before it.
        later_us: c, for each page submitted after it.
    """

    base_ms: float
    page_us: float
    later_us: float = 0.0

    def scaled(self, ratio: float) -> ReadTime:
        """Return the model of a device that takes ``ratio`` times as long."""
        return ReadTime(self.base_ms * ratio, self.page_us * ratio, self.later_us * ratio)


PAPER_DISK = ReadTime(0.30, 3.05, 0.37)
"""SlackTier, section 4.1: one NVMe disk as one of four ranks that share it sees it."""


def reads_ms(
    pages: ArrayLike, devices: tuple[ReadTime, ...], shares: ArrayLike
) -> NDArray[np.float64]:
    """Return each layer's read time.

    Args:
        pages: [..., layers], pages that a step reads for each layer, in the order of submission.
        devices: the devices' models.
        shares: [layers, devices], which share of a layer's pages lies on which device; a row of
            zeroes is a table that reads from none (dram).

    Returns:
        [..., layers].
    """
    wanted = np.asarray(pages, np.float64)
    spread = np.asarray(shares, np.float64)
    result = np.zeros_like(wanted)
    count = (spread > 0).sum(axis=1)
    uneven = 2.0 * np.log(np.maximum(count, 1))
    for number, device in enumerate(devices):
        own = wanted * spread[:, number]
        fullest = own + np.sqrt(own * uneven)
        before = np.cumsum(own, axis=-1) - own
        later = own.sum(axis=-1, keepdims=True) - before - own
        time = device.page_us * (fullest + before) + device.later_us * later
        busy = -np.expm1(-own) * (device.base_ms + time / 1000.0)
        np.maximum(result, busy, out=result)
    return result


@dataclasses.dataclass(frozen=True)
class ReadFit:
    """A model under observation: least squares that forget, held to sensible signs.

    Attributes:
        model: the present fit.
        seen: observations so far.
        anchor: the fit after the first ``ANCHOR_AT`` observations; what "slow" means.
        slowness: recent measured time over the anchor's prediction.
        slow: whether the device counts as slow now (above 1.5 until below 1.2 again).
    """

    model: ReadTime
    seen: int = 0
    anchor: ReadTime | None = None
    slowness: float = 1.0
    slow: bool = False
    _normal: NDArray[np.float64] | None = None
    _right: NDArray[np.float64] | None = None

    @classmethod
    def start(cls, model: ReadTime = PAPER_DISK) -> Self:
        """Begin with a model that some observations will outweigh."""
        return cls(model)

    def observed(self, *, own: float, before: float, later: float, read_ms: float) -> ReadFit:
        """Take in one layer's read of one step, or the means of some steps.

        Args:
            own: pages of the layer on this device, > 0.
            before: pages submitted before its own.
            later: pages submitted after its own.
            read_ms: measured, from submission to the last page. Values that are no times
                (negative, infinite) are left out.
        """
        if not (own > 0 and np.isfinite(read_ms) and read_ms >= 0):
            return self
        features = np.array([1.0, own + before, later])
        normal, right = self._sums()
        # A burst ten times as long as expected is a hiccup: it counts as one, not as ten.
        expected = float(features @ _weights(self.model))
        bounded = min(read_ms, 10.0 * max(expected, self.model.base_ms, 1e-3))
        normal = FORGET * normal + np.outer(features, features)
        right = FORGET * right + features * bounded
        model = _solve(normal, right, self.model)
        seen = self.seen + 1
        anchor = self.anchor or (model if seen >= ANCHOR_AT else None)
        slowness, slow = self._judge(features, read_ms, anchor)
        return ReadFit(model, seen, anchor, slowness, slow, normal, right)

    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if self._normal is not None and self._right is not None:
            return self._normal, self._right
        # The prior as observations of small bursts, alone and with company: a large one would
        # outweigh what is measured, as it has the longer lever.
        points = np.array([[1.0, 1, 0], [1, 16, 0], [1, 16, 16]])
        values = points @ _weights(self.model)
        weight = PRIOR_WEIGHT / len(points)
        return weight * points.T @ points, weight * points.T @ values

    def _judge(
        self, features: NDArray[np.float64], read_ms: float, anchor: ReadTime | None
    ) -> tuple[float, bool]:
        if anchor is None:
            return 1.0, False
        ratio = read_ms / max(float(features @ _weights(anchor)), 1e-6)
        slowness = _SLOW_FORGET * self.slowness + (1 - _SLOW_FORGET) * min(ratio, 100.0)
        return slowness, slowness > (WELL_RATIO if self.slow else SLOW_RATIO)


def _weights(model: ReadTime) -> NDArray[np.float64]:
    return np.array([model.base_ms, model.page_us / 1000.0, model.later_us / 1000.0])


def _solve(normal: NDArray[np.float64], right: NDArray[np.float64], last: ReadTime) -> ReadTime:
    """Solve for a, b, c >= 0: what comes out negative is dropped and the rest solved again.

    The fit leans a little on the last one (ridge), which decides where traffic never varied.
    """
    scale = np.sqrt(np.diag(normal)) + 1e-9
    lean = 1e-4
    used = np.ones(3, bool)
    found = np.zeros(3)
    for _ in range(3):
        index = np.flatnonzero(used)
        small = normal[np.ix_(index, index)] / np.outer(scale[index], scale[index])
        want = right[index] / scale[index] + lean * _weights(last)[index] * scale[index]
        found = np.zeros(3)
        found[index] = np.linalg.solve(small + lean * np.eye(len(index)), want) / scale[index]
        if (found >= 0).all() or len(index) == 1:
            break
        used &= found >= 0
    found = np.maximum(found, 0.0)
    return ReadTime(float(found[0]), float(found[1] * 1000), float(found[2] * 1000))
