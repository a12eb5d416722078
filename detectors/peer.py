"""Is this series slower than those that do the same work? Each against the median of its peers, frame by frame.

Source: ours, from parts. Leaving oneself out: J. W. Tukey, Exploratory Data Analysis (1977); the standard error of a
median, M. G. Kendall and A. Stuart, The Advanced Theory of Statistics vol. 1 (1977), 10.10; ratio floor instead of
mean + k sigma in small groups: among n values none can lie more than (n - 1) / sqrt(n) standard deviations out, which
is 1.5 for n = 4 (R. E. Shiffler, Maximum Z scores and outliers, American Statistician 42 (1988), 79-80).

r = x - median of the other peers' x (log times, so r is a log ratio);  excess = median of a series' last `window` r;
spread = the larger of the series' own 1.4826 MAD of those r and the median of that over its group;
error = 1.253 spread / sqrt(values in the window);
needed = the larger of log(least_ratio) + sigmas error and, for peers that differ lastingly, sigmas 1.4826 times the
median distance of the others' excess from their group's;
score = the smaller of excess / needed and log(P) / log(chance), and no opinion from fewer than `sustain_frames` values;
P is the probability that a member whose values exceed the floor as often as its peers' do (the median of their rates,
each remembered over some 64 frames and begun with one in the size of the group) has as many of them in its window.
Run length = frames since the sum of (r - log(least_ratio) / 2), kept above 0, was last zero (see `cusum`).

A rank that is always slow has an excess far above its spread. Where another rank is slow in each frame (sequences of
unequal length) spreads are wide and every excess is near zero; in a group of three or four such a turn can fall on one
rank five times of eight, and there P is what tells luck from a fault.

Blind to: everybody slowing down at once; half a group or more being slow, two of three or four included; groups of two
or one, where it has no opinion; a series that is slow in less than half of the frames.
"""

from math import log

import numpy as np

from detectors.detector import FloatArray, IntArray, Verdict, checked
from detectors.robust import MEDIAN_ERROR

_MAD_TO_SIGMA = 1.4826
_SMALLEST_GROUP = 3
_PRIOR_VALUES = 16  # how long the belief that members take turns outweighs what is seen
_FORGET = 1 - 1 / 64


class Peer:
    """Compares n_series log times with those of their peers.

    groups: (n_series,) any integer that peers share; a series without peers has one of its own.
    least_ratio: a series no slower than this, against the median of the others, is never an alarm.
    window: latest values per series that its excess is the median of.
    sustain_frames: values that a series needs before there is an opinion about it.
    sigmas: standard errors that an excess has to stand clear of the ratio floor.
    chance: probability, per window, at which turns of being slow are believed to be luck.
    """

    name = "peer"

    def __init__(
        self,
        groups: IntArray,
        *,
        least_ratio: float = 1.10,
        window: int = 8,
        sustain_frames: int = 5,
        sigmas: float = 4.0,
        chance: float = 3e-4,
    ) -> None:
        if not least_ratio > 1:
            raise ValueError(f"least_ratio must be above 1: {least_ratio}")
        if not 1 <= sustain_frames <= window:
            raise ValueError(f"need 1 <= sustain_frames <= window: sustain_frames={sustain_frames}, window={window}")
        if not sigmas > 0:
            raise ValueError(f"sigmas must be above 0: {sigmas}")
        if not 0 < chance < 1:
            raise ValueError(f"chance must lie between 0 and 1, both excluded: {chance}")
        self._peers = _Groups(np.asarray(groups))
        self.n_series = len(self._peers.of)
        self.floor = log(least_ratio)
        self.window = window
        self.sustain_frames = sustain_frames
        self.sigmas = sigmas
        self.chance = chance
        self._recent = np.full((self.n_series, window), np.nan)
        self._seen = np.zeros(self.n_series, np.int64)
        self._values = np.full(self.n_series, float(_PRIOR_VALUES))  # remembered, and how many of them were slow
        self._slow = _PRIOR_VALUES / self._peers.size
        self._sum = np.zeros(self.n_series)
        self._since_zero = np.zeros(self.n_series, np.int64)

    def update(self, frame: FloatArray, /) -> Verdict:
        """Take in the log times of one frame (n_series,) and say who has been slower than its peers."""
        values = checked(frame, self.n_series, self.name)
        ratio = values - self._peers.median_of_others(values)
        rows = np.flatnonzero(~np.isnan(ratio))
        self._take_in(rows, ratio[rows])
        score = np.full(self.n_series, np.nan)
        score[rows] = self._score()[rows]
        return Verdict(score, np.where(score >= 1.0, self._since_zero, 0))

    def excess(self) -> FloatArray:
        """Return (n_series,) the log ratio to the peers over the window; NaN where nothing is known yet."""
        return _median(self._recent)

    def _take_in(self, rows: IntArray, ratio: FloatArray) -> None:
        self._recent[rows, self._seen[rows] % self.window] = ratio
        self._seen[rows] += 1
        self._values[rows] = self._values[rows] * _FORGET + 1
        self._slow[rows] = self._slow[rows] * _FORGET + (ratio > self.floor)
        # Kept low so that a series that recovers and falls ill again has the later onset.
        total = np.clip(self._sum[rows] + ratio - self.floor / 2, 0.0, 8 * self.floor)
        self._sum[rows] = total
        self._since_zero[rows] = np.where(total > 0, self._since_zero[rows] + 1, 0)

    def _score(self) -> FloatArray:
        count = np.minimum(self._seen, self.window)
        excess = self.excess()
        own = _MAD_TO_SIGMA * _median(np.abs(self._recent - excess[:, None]))
        spread = np.fmax(own, self._peers.median(own))
        error = MEDIAN_ERROR * spread / np.sqrt(np.maximum(count, 1))
        # Around the median of the whole group: in a group of three, one slow member shifts the excess of both others.
        between = _MAD_TO_SIGMA * self._peers.median_of_others(np.abs(excess - self._peers.median(excess)))
        needed = np.fmax(self.floor + self.sigmas * error, self.sigmas * between)
        rate = np.clip(self._peers.median_of_others(self._slow / self._values), 0.001, 0.999)
        luck = _binomial_tail(np.count_nonzero(self._recent > self.floor, axis=1), count, rate)
        score = np.minimum(excess / needed, np.log(luck) / np.log(self.chance))
        return np.where(count >= self.sustain_frames, score, np.nan)


class _Groups:
    """Medians within groups of any sizes, by sorting once: no loop over series or groups."""

    def __init__(self, groups: IntArray) -> None:
        if groups.ndim != 1 or groups.dtype.kind not in "iu":
            raise ValueError(f"groups must be one integer per series: shape {groups.shape}, dtype {groups.dtype}")
        _, self.of = np.unique(groups, return_inverse=True)
        sizes = np.bincount(self.of)
        self.size = sizes[self.of]
        self._first = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)

    def median(self, values: FloatArray) -> FloatArray:
        """Return (n_series,) the median over the group of each series, missing values left out."""
        order, count = self._sorted(values)
        n, first = count[self.of], self._first[self.of]
        ranked = values[order]
        low, high = first + np.maximum(n - 1, 0) // 2, first + np.minimum(n // 2, np.maximum(n - 1, 0))
        return np.where(n > 0, (ranked[low] + ranked[high]) / 2, np.nan)

    def median_of_others(self, values: FloatArray) -> FloatArray:
        """Return (n_series,) the median over the *other* members of the group that have a value.

        NaN where the series itself has none, or where fewer than three of the group have one.
        """
        order, count = self._sorted(values)
        n, first = count[self.of], self._first[self.of]
        place = np.empty(len(values), np.int64)
        place[order] = np.arange(len(values))
        place -= first
        ranked = values[order]
        known = (n >= _SMALLEST_GROUP) & ~np.isnan(values)
        n = np.where(known, n, _SMALLEST_GROUP)
        # Of the n - 1 others, counted without the series itself: those at or behind its place lie one further.
        low, high = (n - 2) // 2, (n - 1) // 2
        low, high = low + (low >= place), high + (high >= place)
        last = len(values) - 1
        middle = ranked[np.minimum(first + low, last)] + ranked[np.minimum(first + high, last)]
        return np.where(known, middle / 2, np.nan)

    def _sorted(self, values: FloatArray) -> tuple[IntArray, IntArray]:
        """Return the order by group and value, missing values last in each group, and each group's number of values."""
        order = np.lexsort((values, self.of))
        return order, np.bincount(self.of, weights=~np.isnan(values)).astype(np.int64)


def _binomial_tail(hits: IntArray, trials: IntArray, rate: FloatArray) -> FloatArray:
    """Return (n,) the probability of so many hits or more; each rate lies between 0 and 1, both excluded, or is NaN."""
    most = int(trials.max(initial=0))
    tail = np.zeros(len(hits))
    term = (1 - rate) ** trials
    for k in range(most + 1):
        tail += np.where((k >= hits) & (k <= trials), term, 0.0)
        term = term * (trials - k) / (k + 1) * rate / (1 - rate)
    return np.minimum(tail, 1.0)


def _median(values: FloatArray) -> FloatArray:
    """Return (n,) the medians of values (n, m) along their last axis, missing values left out; NaN if all are."""
    ranked = np.sort(values, axis=1)
    count = np.count_nonzero(~np.isnan(values), axis=1)
    each = np.arange(len(values))
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, np.maximum(count - 1, 0))
    middle: FloatArray = (ranked[each, low] + ranked[each, high]) / 2
    return middle
