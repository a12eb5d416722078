"""Has the level of a series risen, however little? The generalised likelihood ratio over all splits of what is held.

Source: D. Siegmund and E. S. Venkatraman, Using the generalized likelihood ratio statistic for sequential detection of
a change-point, Annals of Statistics 23 (1995), 255-271; that windows of limited length lose little, T. L. Lai,
Information bounds and quick detection of parameter changes in stochastic systems, IEEE Transactions on Information
Theory 44 (1998), 2917-2929; clipped scores, P. J. Huber, Robust Statistics (1981), 1.7.

For each k, the last k of n values are compared with the n - k before them. With z = clip((x - location) / scale) and
d(k) the difference of both means,
    t(k)^2 = d(k)^2 / (inflation (1/k + 1/(n - k))),    score(k) = (dof + 1) / 2 log(1 + t(k)^2 / dof),
which is t^2 / 2, the log likelihood ratio of a shift against none, where there are many values before, and less where
location and scale are known from a few only (Student). Location, scale (midmean and wide scale, see `robust`) and
inflation = (1 + rho) / (1 - rho), by the lag-1 correlation beyond what chance brings, are those of the values before
the split that a first pass with those of all values found; dof = 0.6 times as many values, as that scale is efficient.

No shift has to be named beforehand, and no threshold depends on its size: score is in units of evidence, so that a
shift of d standard deviations is found after about 2 threshold / d^2 values. Residuals of real jobs, scaled to 10 %,
pass 11 once in 10,000 values (benchmarks/quality/compare_series.py).

Blind to: what is not there for longer than `longest` values at once; levels that wander in larger steps than their
lag-1 correlation tells (ask for a least size, too); variance.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from detectors.detector import FloatArray, IntArray
from detectors.robust import midmean, wide_scale

LEAST_BEFORE = 10
_LEAST_AFTER = 2  # one value may be a spike
_CLIP = 3.0  # scales: of two spikes in a row the score stays below 9
_SCALE_FLOOR = 1e-3  # of log times: a simulated job may have no jitter at all
_EFFICIENCY = 0.6  # degrees of freedom that a value adds to what is known of the scale


@dataclass(frozen=True, slots=True)
class Split:
    """The split of most evidence: the last `length` values differ from those before by `log_ratio` or more."""

    length: int
    log_ratio: float  # above 0 has risen; of clipped values, so measure what is larger by `verify`
    score: float  # log likelihood ratio, never negative


def strongest_split(logs: FloatArray, *, least_log_ratio: float = 0.0, longest: int = 120) -> Split | None:
    """Return the split of log times (n,) that speaks most for a shift of at least `least_log_ratio`, up or down.

    None where there is no such split, or fewer than 12 values. Values must be finite.
    """
    n = len(logs)
    after = np.arange(_LEAST_AFTER, min(longest, n - LEAST_BEFORE) + 1, dtype=np.int64)
    if len(after) == 0:
        return None
    scale = max(float(wide_scale(logs)), _SCALE_FLOOR)
    first = _scores(_clipped(logs, float(np.median(logs)), scale), after, 1.0, n)
    before = logs[: n - int(after[np.argmax(first)])]
    location, scale = float(midmean(before)), max(float(wide_scale(before)), _SCALE_FLOOR)
    z = _clipped(logs, location, scale)
    score = _scores(z, after, _inflation(z[: len(before)]), _EFFICIENCY * len(before))
    # The size is looked at with wider bounds: three scales of a steady job are less than the least ratio.
    bound = max(_CLIP * scale, 2 * least_log_ratio)
    ratio = _differences(np.clip(logs - location, -bound, bound), after)
    score = np.where(np.abs(ratio) >= least_log_ratio, score, 0.0)
    best = int(np.argmax(score))
    if not score[best] > 0:
        return None
    return Split(int(after[best]), float(ratio[best]), float(score[best]))


def _clipped(logs: FloatArray, location: float, scale: float) -> FloatArray:
    clipped: FloatArray = np.clip((logs - location) / scale, -_CLIP, _CLIP)
    return clipped


def _differences(values: FloatArray, after: IntArray) -> FloatArray:
    """Return (n_splits,) the mean of the last `after` values less that of all before."""
    sums = np.cumsum(values[::-1])[after - 1]
    difference: FloatArray = sums / after - (values.sum() - sums) / (len(values) - after)
    return difference


def _scores(z: FloatArray, after: IntArray, inflation: float, dof: float) -> FloatArray:
    squared = _differences(z, after) ** 2 / (inflation * (1 / after + 1 / (len(z) - after)))
    score: FloatArray = (dof + 1) / 2 * np.log1p(squared / dof)
    return score


def _inflation(z: FloatArray) -> float:
    """Return by how much correlation inflates the variance of a mean."""
    centred = z - z.mean()
    energy = float(centred @ centred)
    rho = float(centred[:-1] @ centred[1:]) / energy if energy > 0 else 0.0
    rho = min(max(rho - 1 / sqrt(len(z)), 0.0), 0.9)
    return (1 + rho) / (1 - rho)
