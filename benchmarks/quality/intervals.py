"""Confidence intervals, 95 % all of them.

Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, Journal of the American
Statistical Association 22 (1927), 209-212; B. Efron, Bootstrap methods: another look at the jackknife, Annals of
Statistics 7 (1979), 1-26, percentiles of resamples.
"""

from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np

from schemas.table import FloatArray

Interval = tuple[float, float]
_Z = 1.959964
_RESAMPLES = 1000
_SEED = 20240607


def wilson(hits: float, n: float) -> Interval:
    """Return the interval of a share of `hits` among `n`; both may be effective numbers of weighted cases."""
    if n == 0:
        return 0.0, 1.0
    share, square = hits / n, _Z**2 / n
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * sqrt(share * (1 - share) / n + square / (4 * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def poisson(count: float, exposure: float) -> Interval:
    """Return the interval of a rate of `count` events in `exposure`, by inverting the score test."""
    if exposure == 0:
        return float("nan"), float("nan")
    middle, half = count + _Z**2 / 2, _Z * sqrt(count + _Z**2 / 4)
    return max(middle - half, 0.0) / exposure, (middle + half) / exposure


def bootstrap(values: Sequence[float], statistic: Callable[[FloatArray], float]) -> Interval:
    """Return the interval of a statistic of independent values; NaNs where there are none."""
    if len(values) == 0:
        return float("nan"), float("nan")
    given, random = np.array(values, np.float64), np.random.default_rng(_SEED)
    found = [statistic(random.choice(given, len(given))) for _ in range(_RESAMPLES)]
    return float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975))


def bootstrap_rate(counts: Sequence[int], exposures: Sequence[int]) -> Interval:
    """Return the interval of sum(counts) / sum(exposures) over independent episodes.

    Where nothing was counted the upper bound is the rule of three: at more, so much exposure would have shown one.
    """
    total = sum(exposures)
    if total == 0:
        return float("nan"), float("nan")
    if sum(counts) == 0:
        return 0.0, 3.0 / total
    count, exposure = np.array(counts, np.float64), np.array(exposures, np.float64)
    random = np.random.default_rng(_SEED)
    picked = random.integers(0, len(count), (_RESAMPLES, len(count)))
    rates = count[picked].sum(axis=1) / np.maximum(exposure[picked].sum(axis=1), 1.0)
    return float(np.quantile(rates, 0.025)), float(np.quantile(rates, 0.975))
