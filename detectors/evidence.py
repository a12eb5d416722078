"""Has the level of a series risen, however little? A likelihood ratio of ranks over all splits of what is held.

Source: F. Wilcoxon, Individual comparisons by ranking methods, Biometrics Bulletin 1 (1945), 80-83; over all splits,
D. Siegmund and E. S. Venkatraman, Using the generalized likelihood ratio statistic for sequential detection of a
change-point, Annals of Statistics 23 (1995), 255-271; that windows of limited length lose little, T. L. Lai,
Information bounds and quick detection of parameter changes in stochastic systems, IEEE Transactions on Information
Theory 44 (1998), 2917-2929.

For each k, the last k of n values are compared with the n - k before them. z is the rank of a value among those before
the split, spread evenly over a distribution of mean 0 and variance 1, d(k) the difference of both means of z,
    t(k)^2 = d(k)^2 / (inflation (1/k + 1/(n - k))),    score(k) = (dof + 1) / 2 log(1 + t(k)^2 / dof),
which is t^2 / 2, the log likelihood ratio of a shift against none, where there are many values before, and less where
there are few (Student, dof = values before). inflation = (1 + rho) / (1 - rho), rho the lag-1 correlation of z beyond
what chance brings. Which values are before the split is found in a first pass, with clipped values in place of ranks.

No shift has to be named beforehand, and no threshold depends on its size or on the noise: score is in units of
evidence. Ranks need 5 % more Gaussian values than means do, and far fewer of real iteration times, whose bulk is narrow
beside their spikes. Of 10,000 healthy values, none to two pass 8, Gaussian or residuals of real jobs.

Blind to: what is not there for longer than `longest` values at once; how far out values lie, so that fewer than six
never pass 8 (plain changes are for `verify`); levels that wander in larger steps than their lag-1 correlation tells
(ask for a least size, too); variance.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from detectors.detector import FloatArray, IntArray
from detectors.robust import midmean, wide_scale

LEAST_BEFORE = 10
_LEAST_AFTER = 2  # one value may be a spike
_CLIP = 3.0  # scales, of the first pass and of sizes
_SCALE_FLOOR = 1e-3  # of log times: a simulated job may have no jitter at all


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
    before = logs[: n - _first_pass(logs, after)]
    z = _normed_ranks(logs, before)
    score = _scores(z, after, _inflation(z[: len(before)]), len(before))
    # The size is looked at with wide bounds: three scales of a steady job are less than the least ratio.
    location, scale = float(midmean(before)), max(float(wide_scale(before)), _SCALE_FLOOR)
    bound = max(_CLIP * scale, 2 * least_log_ratio)
    ratio = _differences(np.clip(logs - location, -bound, bound), after)
    score = np.where(np.abs(ratio) >= least_log_ratio, score, 0.0)
    best = int(np.argmax(score))
    if not score[best] > 0:
        return None
    return Split(int(after[best]), float(ratio[best]), float(score[best]))


def _first_pass(logs: FloatArray, after: IntArray) -> int:
    """Return after how many values, counted from the end, the level seems to have moved."""
    scale = max(float(wide_scale(logs)), _SCALE_FLOOR)
    z = np.clip((logs - np.median(logs)) / scale, -_CLIP, _CLIP)
    return int(after[np.argmax(_scores(z, after, 1.0, len(logs)))])


def _normed_ranks(values: FloatArray, among: FloatArray) -> FloatArray:
    """Return the middle rank of values (n,) among others (m,), of mean 0 and variance 1 where both are alike."""
    ordered = np.sort(among)
    ranks = (np.searchsorted(ordered, values, side="left") + np.searchsorted(ordered, values, side="right")) / 2
    normed: FloatArray = ((ranks + 0.5) / (len(among) + 1) - 0.5) * sqrt(12)
    return normed


def _differences(values: FloatArray, after: IntArray) -> FloatArray:
    """Return (n_splits,) the mean of the last `after` values less that of all before."""
    sums = np.cumsum(values[::-1])[after - 1]
    difference: FloatArray = sums / after - (values.sum() - sums) / (len(values) - after)
    return difference


def _scores(z: FloatArray, after: IntArray, inflation: float, dof: int) -> FloatArray:
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
