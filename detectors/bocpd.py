"""Has this series just moved to another level? Bayesian online change point detection on every series at once.

Source: R. P. Adams and D. J. C. MacKay, Bayesian Online Changepoint Detection, arXiv:0710.3742 (2007), 1-7; the
conjugate update of the Normal-inverse-gamma model after K. P. Murphy, Conjugate Bayesian analysis of the Gaussian
distribution (2007), 16-19. The treatment of spikes is ours, in the spirit of Hampel's identifier (see `robust`).

For a hazard H and the run length r (values since the last change point, the newest included):
    P(r+1, x_1..t) = P(r, x_1..t-1) p(x_t | r) (1 - H);    P(0, x_1..t) = H sum_r P(r, x_1..t-1) p(x_t | r)
with p(x | r) the Student t of 2 alpha degrees of freedom, centre mu, scale^2 beta (kappa + 1) / (alpha kappa), and
    kappa' = kappa + 1,  alpha' = alpha + 1/2,
    mu' = mu + (x - mu) / kappa',  beta' = beta + kappa (x - mu)^2 / (2 kappa')  with every value.
Since beta'/beta = 1 + (x - mu)^2 kappa / (2 beta kappa'), that density is C(r) beta^alpha / beta'^(alpha + 1/2), where
C depends on r alone: one logarithm and one exponential per cell.

Under a constant hazard P(r = 0) is H at all times, whatever the data, so the published rule "P(r = 0) > 0.9" can never
fire. This one declares on the mass of short runs, P(1 <= r <= short) > threshold, and calls the likeliest of them the
run length. The run that was going on when the series began is no change point and never counts.

Blind to: what happened before the series began (a job slow from its first iteration); ramps and stairs whose steps lie
within the noise (see `cusum`); slow frames that never come in pairs (held to be spikes); everything while a series
is learnt. Reports recoveries as well as slowdowns: the caller compares the levels (see `verify`).
"""

from math import lgamma, pi

import numpy as np

from detectors.detector import AnyArray, BoolArray, FloatArray, IntArray, Verdict, checked
from detectors.robust import mad_scale

_BLOCK = 256  # rows whose working set stays in the second-level cache
_MAX_RUN = 2048  # a longer run weighs as many values as this, and forgets the oldest


Rows = slice | IntArray


class Bocpd:
    """Bayesian online change point detection of n_series independent series of log times.

    n_series: how many series a frame has.
    hazard: prior probability of a change point per frame.
    run_lengths: hypotheses kept per series, those of most posterior mass.
    short: run lengths up to this, in frames, are a recent change.
    threshold: posterior mass of short run lengths that is an alarm.
    warmup_frames: values of a series from which its level and scale are learnt.
    scale_floor: least scale, in log units, that a series or a new run begins with.
    spike_sigmas: a value further than this from the current run, in its predictive standard deviations, is held back
        until the next: it enters as it is if that lies out on the same side, else pulled in to this distance.
        Infinity lets every value in at once.
    mean_weight: weight of the learnt level in a new run, in values; small, since a new level may be anywhere.
    """

    name = "bocpd"

    def __init__(
        self,
        n_series: int,
        *,
        hazard: float = 1 / 250,
        run_lengths: int = 32,
        short: int = 20,
        threshold: float = 0.9,
        warmup_frames: int = 10,
        scale_floor: float = 1e-3,
        spike_sigmas: float = 3.5,
        mean_weight: float = 0.01,
    ) -> None:
        _check(hazard, run_lengths, short, threshold, warmup_frames, scale_floor, spike_sigmas, mean_weight)
        self.n_series = n_series
        self.short = short
        self.threshold = threshold
        self.warmup_frames = warmup_frames
        self.scale_floor = scale_floor
        self.spike_sigmas = spike_sigmas
        self._runs = RunLengths(n_series, run_lengths, hazard, mean_weight, short)
        self._warmup = np.empty((n_series, warmup_frames))
        self._seen = np.zeros(n_series, np.int64)
        self._held = np.full(n_series, np.nan)
        self._side = np.zeros(n_series, np.int8)  # of the previous value: out below (-1), in (0), out above (1)

    def update(self, frame: FloatArray, /) -> Verdict:
        """Take in the log times of one frame (n_series,) and say where the level has just changed."""
        values = checked(frame, self.n_series, self.name)
        present = ~np.isnan(values)
        learnt = self._seen >= self.warmup_frames
        self._advance(np.flatnonzero(present & learnt), values)
        self._learn(np.flatnonzero(present & ~learnt), values)
        self._seen[present] += 1
        return self._judge(present & learnt)

    @property
    def prediction(self) -> tuple[FloatArray, FloatArray]:
        """Centre and standard deviation, each (n_series,), of the next value as the likeliest run predicts it."""
        is_known = self._seen >= self.warmup_frames
        return np.where(is_known, self._runs.location, np.nan), np.where(is_known, self._runs.scale, np.nan)

    def _learn(self, rows: IntArray, values: FloatArray) -> None:
        self._warmup[rows, self._seen[rows]] = values[rows]
        complete = rows[self._seen[rows] == self.warmup_frames - 1]
        if len(complete):
            history = self._warmup[complete]
            scale = np.maximum(mad_scale(history), self.scale_floor)
            self._runs.begin(complete, np.median(history, axis=1), scale)
            for position in range(self.warmup_frames):
                self._advance(complete, self._warmup[:, position])

    def _advance(self, rows: IntArray, values: FloatArray) -> None:
        """Let the values of `rows` in, each spike one value later than it came."""
        if not len(rows):
            return
        runs, x = self._runs, values[rows]
        limit = self.spike_sigmas * runs.scale[rows]
        distance = x - runs.location[rows]
        side = np.sign(distance).astype(np.int8) * (np.abs(distance) > limit)
        held = self._held[rows]
        is_kept = ~np.isnan(held)
        repeats = side == self._side[rows]
        if is_kept.any():
            pulled_in = runs.location[rows] + np.clip(held - runs.location[rows], -limit, limit)
            entering = np.where(repeats, held, pulled_in)
            runs.advance(rows[is_kept], entering[is_kept])
        is_new = (side != 0) & ~repeats
        self._held[rows] = np.where(is_new, x, np.nan)
        self._side[rows] = side
        if is_new.any():
            runs.advance(rows[~is_new], x[~is_new])
        else:
            runs.advance(rows, x)

    def _judge(self, judged: BoolArray) -> Verdict:
        mass = self._runs.short_mass
        score = np.where(judged, mass / self.threshold, np.nan)
        run_length = np.zeros(self.n_series, np.int64)
        alarmed = np.flatnonzero(judged & (score >= 1.0))
        if len(alarmed):
            run_length[alarmed] = self._runs.likeliest_short(alarmed) + ~np.isnan(self._held[alarmed])
        return Verdict(score, run_length)


class RunLengths:
    """The posterior over run lengths of n_series series: the `kept` hypotheses of most mass of each.

    location, scale: (n_series,) centre and standard deviation of the likeliest run's prediction.
    short_mass: (n_series,) posterior mass of the run lengths 1 to `short`.
    """

    def __init__(self, n_series: int, kept: int, hazard: float, mean_weight: float, short: int) -> None:
        self._hazard = hazard
        self._short = short
        length = np.arange(_MAX_RUN)
        kappa, alpha = mean_weight + length, 1.0 + length / 2
        gammas = np.array([lgamma(a + 0.5) - lgamma(a) for a in alpha])
        self._constant = gammas - 0.5 * np.log(pi * (kappa + 1) / kappa)
        self._alpha = alpha
        self._gain = 1 / (kappa + 1)
        self._spread = (kappa + 1) / (2 * kappa * alpha)
        shape = (n_series, kept)
        self._mass, self._mean = np.zeros(shape), np.zeros(shape)
        self._beta = np.ones(shape)  # doubled
        self._mass[:, 0] = 1.0  # a series that has not begun advances with its block, and is put back
        self._evidence = np.zeros(shape)  # alpha log beta
        self._length = np.zeros(shape, np.int64)
        self._values = np.zeros(n_series, np.int64)
        self._prior_mean, self._prior_beta, self._prior_evidence = (
            np.zeros(n_series),
            np.ones(n_series),
            np.zeros(n_series),
        )
        self.location, self.scale, self.short_mass = np.zeros(n_series), np.ones(n_series), np.zeros(n_series)
        self._scratch = np.empty((2, _BLOCK, kept))

    @property
    def _state(self) -> tuple[AnyArray, ...]:
        """All that a value changes."""
        cells = self._mass, self._mean, self._beta, self._evidence, self._length
        return *cells, self._values, self.location, self.scale, self.short_mass

    def begin(self, rows: IntArray, location: FloatArray, scale: FloatArray) -> None:
        """Start the series `rows` with a run of no values around the given level."""
        self._prior_mean[rows], self._prior_beta[rows] = location, 2 * scale**2
        self._prior_evidence[rows] = np.log(2 * scale**2)  # alpha of a run of no values is 1
        self._mean[rows], self._beta[rows] = location[:, None], self._prior_beta[rows, None]
        self._evidence[rows] = self._prior_evidence[rows, None]
        self._mass[rows], self._mass[rows, 0] = 0.0, 1.0
        self._length[rows], self._values[rows] = 0, 0
        self.location[rows], self.scale[rows], self.short_mass[rows] = location, scale, 0.0

    def advance(self, rows: IntArray, x: FloatArray) -> None:
        """Take in one value of each of the series `rows` (ascending)."""
        last = 0
        for begin in range(0, len(self.location), _BLOCK):
            block = slice(begin, min(begin + _BLOCK, len(self.location)))
            first, last = last, int(np.searchsorted(rows, block.stop))
            if last > first:
                self._advance_some(block, rows[first:last] - begin, x[first:last])

    def _advance_some(self, block: slice, rows: IntArray, x: FloatArray) -> None:
        """Take in the values of some rows of a block, counted from its beginning."""
        size = block.stop - block.start
        if 2 * len(rows) < size:
            self._advance_block(rows + block.start, x)
            return
        # Cheaper than picking most rows out: let all rows advance in place, and put the others back.
        values = self.location[block].copy()
        values[rows] = x
        left_out = np.ones(size, np.bool_)
        left_out[rows] = False
        others = np.flatnonzero(left_out) + block.start
        before = [array[others] for array in self._state]
        self._advance_block(block, values)
        for array, content in zip(self._state, before, strict=True):
            array[others] = content

    def likeliest_short(self, rows: IntArray) -> IntArray:
        """Return (len(rows),) the run length of most mass among the short ones."""
        length = self._length[rows]
        # A run as long as the series has no change point at its beginning.
        longest = np.minimum(self._short, self._values[rows] - 1)[:, None]
        mass = np.where((length > 0) & (length <= longest), self._mass[rows], -1.0)
        likeliest: IntArray = length[np.arange(len(rows)), mass.argmax(axis=1)]
        return likeliest

    def _advance_block(self, rows: Rows, x: FloatArray) -> None:
        # With a slice these are views, changed in place; with an index array copies, written back at the end.
        mass, mean, beta = self._mass[rows], self._mean[rows], self._beta[rows]
        evidence, length = self._evidence[rows], self._length[rows]
        first, second = self._scratch[0, : len(x)], self._scratch[1, : len(x)]

        deviation = np.subtract(x[:, None], mean, out=first)
        moved = np.multiply(deviation, self._gain.take(length), out=second)
        mean += moved
        # kappa / kappa' is 1 - gain, so that this is twice what the formula adds: beta is kept doubled.
        np.subtract(deviation, moved, out=second)
        second *= deviation
        beta += second
        log_density = np.add(evidence, self._constant.take(length), out=first)
        length += 1
        np.log(beta, out=evidence)
        evidence *= self._alpha.take(length)
        log_density -= evidence
        # Cannot vanish altogether: the run of length 0 predicts with heavy tails, and always has the hazard's mass.
        mass *= np.exp(log_density, out=first)
        mass *= ((1 - self._hazard) / np.einsum("ij->i", mass))[:, None]

        self._values[rows] += 1
        if self._values[rows].max() >= _MAX_RUN - 1:
            self._forget(beta, evidence, length)
        is_short = length <= np.minimum(self._short, self._values[rows] - 1)[:, None]
        self.short_mass[rows] = np.einsum("ij->i", np.multiply(mass, is_short, out=first))
        each = np.arange(len(x))
        likeliest = each, mass.argmax(axis=1)
        self.location[rows] = mean[likeliest]
        self.scale[rows] = np.sqrt(beta[likeliest] * self._spread.take(length[likeliest]))
        least = each, mass.argmin(axis=1)
        mass[least], length[least], mean[least] = self._hazard, 0, self._prior_mean[rows]
        beta[least], evidence[least] = self._prior_beta[rows], self._prior_evidence[rows]
        if not isinstance(rows, slice):
            for array, content in zip(self._state, (mass, mean, beta, evidence, length), strict=False):
                array[rows] = content

    def _forget(self, beta: FloatArray, evidence: FloatArray, length: IntArray) -> None:
        """Keep runs one value short of the longest that the tables know, with the variance that they have."""
        full = np.nonzero(length == _MAX_RUN - 1)
        alpha = self._alpha[_MAX_RUN - 2]
        beta[full] *= alpha / self._alpha[_MAX_RUN - 1]
        evidence[full] = alpha * np.log(beta[full])
        length[full] = _MAX_RUN - 2


def _check(
    hazard: float,
    run_lengths: int,
    short: int,
    threshold: float,
    warmup_frames: int,
    scale_floor: float,
    spike_sigmas: float,
    mean_weight: float,
) -> None:
    if not 0 < hazard < 1:
        raise ValueError(f"hazard must lie between 0 and 1, both excluded: {hazard}")
    if not 1 <= short < run_lengths:
        raise ValueError(
            f"short must be at least 1 and less than run_lengths: short={short}, run_lengths={run_lengths}"
        )
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie between 0 and 1, both excluded: {threshold}")
    if warmup_frames < 3:
        raise ValueError(f"warmup_frames must be at least 3, to outvote one spike: {warmup_frames}")
    if not scale_floor > 0:
        raise ValueError(f"scale_floor must be above 0: {scale_floor}")
    if not spike_sigmas > 0:
        raise ValueError(f"spike_sigmas must be above 0: {spike_sigmas}")
    if not mean_weight > 0:
        raise ValueError(f"mean_weight must be above 0: {mean_weight}")
