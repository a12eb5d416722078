"""Is the job really slower than it was, and by how much at least? Two stretches of times, compared with a bound.

Source: verifying a change point before believing it, T. Wu et al., Greyhound: Hunting Fail-Slows in Hybrid-Parallel
Training at Scale, USENIX ATC (2025), section 4; the standard error of a median, M. G. Kendall and A. Stuart, The
Advanced Theory of Statistics vol. 1 (1977), 10.10; of a trimmed mean, P. J. Huber, Robust Statistics (1981), 3.3; the
quantile of Student's t, M. Abramowitz and I. Stegun, Handbook of Mathematical Functions (1964), 26.7.5.

On logarithms: log ratio = location(after) - location(before), with
    location = midmean (mean of the middle half) of eight values or more, median of three to seven; of an even number of
        fewer than eight, the one of both middle values that shows less change (of two: the least change that they both
        show), so that one spike confirms nothing;
    sigma = the wide scale of `before` (see `robust`), which sees a job that alternates between two speeds, but not
        spikes in one iteration of twenty;
    standard error = sigma sqrt(inflation) sqrt(c(after)^2 / n_after + c(before)^2 / n_before), c = 1.093 for the
        midmean, 1.253 for the median; of one or two values sigma itself; inflation = (1 + rho) / (1 - rho), rho the
        lag-1 correlation of `before`, with values clipped at three sigma and rho at [0, 0.9];
    bounds = log ratio -+ t(confidence, n_before - 1) standard error. What has happened before proves nothing, so a
        bound lies no further out than `after` stands clear of the highest (lowest) equally long stretch of `before`,
        and no further out than 0 if chance alone, at the rate at which `before` has such values, would put so many of
        `after` there with more probability than `chance`. (Such values: more than half of the way out to
        `after`, and beyond 3.3 sigma. This sign test, free of any distribution, keeps two spikes in a row from
        confirming where spikes are frequent.) Nor does it lie further out than 0 if the latest value is back by more
        than half: what is over needs no incident.

Blind to: a change that is already in `before`; a slow change, of which each `before` holds a part (compare with the
reference of `cusum` then); correlation over longer than the stretches it is given.
"""

from dataclasses import dataclass
from enum import Enum
from math import exp, lgamma, log, log1p, sqrt
from statistics import NormalDist

import numpy as np

from detectors.detector import BoolArray, FloatArray
from detectors.robust import MEDIAN_ERROR, MIDMEAN_ERROR, midmean, wide_scale

CONFIDENCE = 0.999
LEAST_BEFORE = 10
MOST_AFTER = 30
_MIDMEAN_FROM = 8
_SIGMA_FLOOR = 1e-3  # of the log times: a simulated job may have no jitter at all


@dataclass(frozen=True, slots=True)
class Shift:
    """How far times have moved. All of it is in logarithms: log(1.05) is 5 % slower."""

    log_ratio: float
    lower: float  # one-sided bound at the stated confidence
    upper: float  # the same on the other side
    n_before: int
    n_after: int

    @property
    def ratio(self) -> float:
        """Time after over time before."""
        return float(np.exp(self.log_ratio))


class Outcome(Enum):
    """What follows from a shift."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNDECIDED = "undecided"


class Reason(Enum):
    """Why; a label for metrics and a column in replays."""

    LOWER_BOUND_CLEAR = "even the lower bound exceeds the least ratio"
    UPPER_BOUND_BELOW = "even the upper bound stays below the least ratio"
    STILL_OPEN = "the least ratio lies between the bounds, and there is time to look further"
    NEVER_CLEAR = "the least ratio lies between the bounds after the last look"
    REFERENCE_SHORT = "too few values before the change to compare with"
    AFTER_SHORT = "so few values after the change may be a spike"


@dataclass(frozen=True, slots=True)
class Decision:
    """An outcome and its reason."""

    outcome: Outcome
    reason: Reason


def shift(
    before: FloatArray, after: FloatArray, *, confidence: float = CONFIDENCE, chance: float = 1 - CONFIDENCE
) -> Shift:
    """Compare the times `after` (m,) a suspected change with those `before` (n,) it, in any one unit, all above 0.

    Missing values (NaN) are left out. `confidence` is that of each bound alone, of this one look; `chance` is the
    probability of as many values as far out at which the sign test still believes in a change. With fewer than three
    values before or none after nothing is known: the bounds are infinite and the ratio is NaN.
    Raises ValueError on a time that is not above 0.
    """
    reference, recent = _logs(before, "before"), _logs(after, "after")
    n, m = len(reference), len(recent)
    if n < 3 or m == 0:
        return Shift(float("nan"), -float("inf"), float("inf"), n, m)
    sigma, inflation = _jitter(reference)
    level = _location(reference)
    low, high = _span(recent)
    error = sigma * sqrt(inflation * (_variance(m) + _variance(n)))
    margin = student_quantile(confidence, n - 1) * error
    stretch_low, stretch_high = _stretches(reference, m)
    lower = min(low - level - margin, low - stretch_high)
    upper = max(high - level + margin, high - stretch_low)
    beyond = min(low, max(level + 3.3 * sigma, (level + low) / 2))
    if recent[-1] < (level + low) / 2 or _chance_of(reference >= beyond, recent >= beyond) > chance:
        lower = min(lower, 0.0)
    beyond = max(high, min(level - 3.3 * sigma, (level + high) / 2))
    if recent[-1] > (level + high) / 2 or _chance_of(reference <= beyond, recent <= beyond) > chance:
        upper = max(upper, 0.0)
    log_ratio = min(max(0.0, low - level), high - level)
    return Shift(log_ratio, lower, upper, n, m)


def confirm(found: Shift, least_ratio: float = 1.05, *, least_after: int = 2) -> Decision:
    """Decide whether a shift is at least `least_ratio`; ask again after each iteration until it is no longer undecided.

    A `least_ratio` below 1 asks whether times have fallen to that ratio, which verifies a recovery.
    Needs 10 values before; the first of the looks that can decide has `least_after` values after, the last has 30.
    Real jobs have slow spells of two or three iterations that are over before anybody could act: a larger
    `least_after` leaves those alone, at the price of as many iterations of delay.
    """
    if not least_ratio > 0 or least_ratio == 1.0:
        raise ValueError(f"least_ratio must be above 0 and not 1, such as 1.05: {least_ratio}")
    if found.n_before < LEAST_BEFORE:
        return Decision(Outcome.UNDECIDED, Reason.REFERENCE_SHORT)
    if found.n_after < max(least_after, 2):
        return Decision(Outcome.UNDECIDED, Reason.AFTER_SHORT)
    least = log(least_ratio)
    near, far = (found.lower, found.upper) if least > 0 else (-found.upper, -found.lower)
    if near > abs(least):
        return Decision(Outcome.CONFIRMED, Reason.LOWER_BOUND_CLEAR)
    if far < abs(least):
        return Decision(Outcome.REFUTED, Reason.UPPER_BOUND_BELOW)
    if found.n_after >= MOST_AFTER:
        return Decision(Outcome.REFUTED, Reason.NEVER_CLEAR)
    return Decision(Outcome.UNDECIDED, Reason.STILL_OPEN)


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t, by an expansion that is good to 1 % from 9 degrees of freedom on at 0.999."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / degrees**power for power, term in enumerate(terms)))


def _logs(times: FloatArray, name: str) -> FloatArray:
    values = np.asarray(times, dtype=np.float64)
    values = values[~np.isnan(values)]
    if not (values > 0).all() or np.isinf(values).any():
        raise ValueError(f"{name}: times must be finite and above 0; pass NaN for a missing one")
    return np.log(values)


def _location(values: FloatArray) -> float:
    if len(values) < _MIDMEAN_FROM:
        return float(np.median(values))
    return float(midmean(values))


def _span(values: FloatArray) -> tuple[float, float]:
    """Return the least and the greatest location that the values after the change allow."""
    if len(values) < _MIDMEAN_FROM:
        ranked = np.sort(values)
        return float(ranked[(len(values) - 1) // 2]), float(ranked[len(values) // 2])
    location = _location(values)
    return location, location


def _variance(n: int) -> float:
    """Return the variance of the location of n Gaussian values, in units of theirs."""
    if n < 3:
        return 1.0
    return (MIDMEAN_ERROR if n >= _MIDMEAN_FROM else MEDIAN_ERROR) ** 2 / n


def _jitter(values: FloatArray) -> tuple[float, float]:
    """Return the robust standard deviation of the values, and how much their correlation inflates a variance."""
    sigma = max(float(wide_scale(values)), _SIGMA_FLOOR)
    clipped = np.clip(values - np.median(values), -3 * sigma, 3 * sigma)
    clipped = clipped - clipped.mean()
    energy = float(clipped @ clipped)
    rho = float(clipped[:-1] @ clipped[1:]) / energy if energy > 0 else 0.0
    rho = min(max(rho, 0.0), 0.9)
    return sigma, (1 + rho) / (1 - rho)


def _chance_of(before: BoolArray, after: BoolArray) -> float:
    """Return the probability of so many hits after the change, or more, at the rate of hits before it."""
    # A quarter of a hit is added: that something was never seen in n values does not make it impossible.
    rate = (np.count_nonzero(before) + 0.25) / (len(before) + 0.5)
    m = len(after)
    total = 0.0
    for hits in range(np.count_nonzero(after), m + 1):
        ways = lgamma(m + 1) - lgamma(hits + 1) - lgamma(m - hits + 1)
        total += exp(ways + hits * log(rate) + (m - hits) * log1p(-rate))
    return total


def _stretches(values: FloatArray, length: int) -> tuple[float, float]:
    """Return the lowest and highest location of any stretch of `length` values, or a third of all if less."""
    length = min(length, len(values) // 3)
    windows = np.lib.stride_tricks.sliding_window_view(values, length)
    if length < 3:
        return float(windows.max(axis=1).min()), float(windows.min(axis=1).max())
    medians = np.median(windows, axis=1)
    return float(medians.min()), float(medians.max())
