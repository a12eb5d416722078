"""Have small excesses been adding up? The cumulative sum of what lies above a learnt reference.

Source: E. S. Page, Continuous inspection schemes, Biometrika 41 (1954), 100-115; that no rule of the same false alarm
rate is quicker for a shift of twice the slack, G. V. Moustakides, Optimal stopping times for detecting changes in
distributions, Annals of Statistics 14 (1986), 1379-1387.

z = (x - location) / scale, the midmean and wide scale (see `robust`) of the first m values;
S' = max(0, S + min(z, clip) - slack - 0.6 / sqrt(m));  score = S / threshold;  run length = frames since S was zero.
The last term, about half a standard error, allows for the error of the reference, which would add up like a shift. The
reference is learnt from the first warmup_frames values and again from twice and four times as many, as long as S is
below half of the threshold.

Finds what no single frame shows: stairs of steps below 10 %, slow ramps, shifts within the noise. With the default
slack of 0.5 a lasting shift of d standard deviations is found after about 8 / (min(d, 3) - 0.5) frames.

Blind to: shifts of less than the slack; recoveries (its sum falls back, but it does not announce them); whatever was
already there while the reference was learnt. Once that is done the reference never changes: a new normal stays an
alarm until a new detector is made.
"""

from math import sqrt

import numpy as np

from detectors.detector import FloatArray, IntArray, Verdict, checked
from detectors.robust import midmean, wide_scale

_LEARNT = 1, 2, 4  # warm-ups after which the reference is learnt
_REFERENCE_ERROR = 0.6  # allowed for, in scales of one value


class Cusum:
    """One-sided upper cumulative sum of n_series independent series of log times.

    warmup_frames: values of a series from which its reference is first learnt.
    slack: excess that is forgiven in every frame, in scales of the reference.
    threshold: sum that is an alarm, in scales.
    clip: the most that one frame can weigh, in scales; at the default three spikes in close succession cannot alarm.
    scale_floor: least scale, in log units, that a series is believed to have.
    """

    name = "cusum"

    def __init__(
        self,
        n_series: int,
        *,
        warmup_frames: int = 30,
        slack: float = 0.5,
        threshold: float = 8.0,
        clip: float = 3.0,
        scale_floor: float = 0.01,
    ) -> None:
        if warmup_frames < 3:
            raise ValueError(f"warmup_frames must be at least 3, to outvote one spike: {warmup_frames}")
        if not 0 <= slack < clip < threshold:
            raise ValueError(f"need 0 <= slack < clip < threshold: slack={slack}, clip={clip}, threshold={threshold}")
        if not scale_floor > 0:
            raise ValueError(f"scale_floor must be above 0: {scale_floor}")
        self.n_series = n_series
        self.warmup_frames = warmup_frames
        self.slack = slack
        self.threshold = threshold
        self.clip = clip
        self.scale_floor = scale_floor
        self._first = np.empty((n_series, _LEARNT[-1] * warmup_frames))
        self._seen = np.zeros(n_series, np.int64)
        self._location = np.full(n_series, np.nan)
        self._scale = np.full(n_series, np.nan)
        self._allowance = np.full(n_series, np.nan)
        self._sum = np.zeros(n_series)
        self._since_zero = np.zeros(n_series, np.int64)

    @property
    def reference(self) -> FloatArray:
        """(n_series,) log time that each series is held against; NaN while it is learnt."""
        return self._location.copy()

    def update(self, frame: FloatArray, /) -> Verdict:
        """Take in the log times of one frame (n_series,) and say where excess has piled up."""
        values = checked(frame, self.n_series, self.name)
        present = ~np.isnan(values)
        judged = present & (self._seen >= self.warmup_frames)
        z = np.clip((values[judged] - self._location[judged]) / self._scale[judged], -self.clip, self.clip)
        # The sum is kept to twice the threshold so that the alarm ends soon after its reason has.
        total = np.clip(self._sum[judged] + z - self._allowance[judged], 0.0, 2 * self.threshold)
        self._sum[judged] = total
        self._since_zero[judged] = np.where(total > 0, self._since_zero[judged] + 1, 0)
        self._learn(np.flatnonzero(present), values)
        score = np.where(judged, self._sum / self.threshold, np.nan)
        return Verdict(score, np.where(judged & (score >= 1.0), self._since_zero, 0))

    def _learn(self, rows: IntArray, values: FloatArray) -> None:
        remembered = rows[self._seen[rows] < self._first.shape[1]]
        self._first[remembered, self._seen[remembered]] = values[remembered]
        self._seen[rows] += 1
        for warmups in _LEARNT:
            m = warmups * self.warmup_frames
            due = remembered[(self._seen[remembered] == m) & (self._sum[remembered] < self.threshold / 2)]
            if len(due):
                history = self._first[due, :m]
                self._location[due] = midmean(history)
                self._scale[due] = np.maximum(wide_scale(history), self.scale_floor)
                self._allowance[due] = self.slack + _REFERENCE_ERROR / sqrt(m)
