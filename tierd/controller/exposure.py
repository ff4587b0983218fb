"""The exposure model: what reads that miss their windows add to a step (SlackTier, equation 1).

All lookups of a step are issued at its start, and all times are on that one clock. A layer stalls
for what its read exceeds its window, less the stalls of the layers before it, which moved its own
deadline back by as much:

    d_l = max(0, s + T_l - W_l - sum of d_k over k before l);   growth = sum of d_l + kappa

Worked example (the paper's table 3): W = 0.27 and 9.35 ms, reads of 1.5 and 12 ms. The first layer
stalls 1.23 ms, the second 12 - 9.35 - 1.23 = 1.42 ms: the step grows by 2.65 ms, not by the 3.88
ms that the sum of both excesses would say (measured: 2.51 ms).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def stalls_ms(
    reads_ms: ArrayLike, windows_ms: ArrayLike, resolve_ms: ArrayLike = 0.0
) -> NDArray[np.float64]:
    """Return how long each layer makes the step wait.

    Args:
        reads_ms: [..., layers], T: from the end of resolving to the last row; layers in the order
            in which a step reaches them.
        windows_ms: [..., layers], W: from step start until the layer needs its rows.
        resolve_ms: [...], s: from step start until the step's ids are resolved.

    Returns:
        [..., layers], all >= 0. Their sum is ``max over l of (s + T_l - W_l)``, or 0: a later
        layer stalls only for what it exceeds its window by more than every layer before it.
    """
    late = np.asarray(reads_ms, np.float64) - np.asarray(windows_ms, np.float64)
    late = late + np.asarray(resolve_ms, np.float64)[..., None]
    reached = np.maximum.accumulate(np.maximum(late, 0.0), axis=-1)
    stalls = reached.copy()
    stalls[..., 1:] -= reached[..., :-1]
    return stalls


def growth_ms(
    reads_ms: ArrayLike,
    windows_ms: ArrayLike,
    *,
    resolve_ms: ArrayLike = 0.0,
    kappa_ms: float = 0.0,
) -> NDArray[np.float64]:
    """Return what a step costs beyond one whose rows are all in HBM, [...]; see :func:`stalls_ms`.

    Args:
        reads_ms: [..., layers].
        windows_ms: [..., layers].
        resolve_ms: [...].
        kappa_ms: the fixed cost of a step that has lookups at all.
    """
    stalls = stalls_ms(reads_ms, windows_ms, resolve_ms)
    return np.asarray(stalls.sum(axis=-1) + kappa_ms, np.float64)


def window_at(window_ms: float, *, measured_step_ms: float, step_ms: float) -> float:
    """Scale a window to a batch of another step time: layers keep their share of a step.

    Args:
        window_ms: as the probe measured it.
        measured_step_ms: the step at which it was measured.
        step_ms: the step of the batch in question, tables in HBM or DRAM.
    """
    if measured_step_ms <= 0:
        return window_ms
    return window_ms * step_ms / measured_step_ms


def fit_kappa(measured_ms: ArrayLike, predicted_ms: ArrayLike) -> float:
    """Return the fixed cost per step from early runs: the median of what prediction lacks.

    The median, because one run disturbed by something else would move a mean.

    Args:
        measured_ms: [runs], growth of the step.
        predicted_ms: [runs], by :func:`growth_ms` with no kappa.
    """
    rest = np.asarray(measured_ms, np.float64) - np.asarray(predicted_ms, np.float64)
    return float(np.median(rest)) if rest.size else 0.0
