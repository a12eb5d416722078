"""Operating curves: recall against extra alarms over the settings of a method, and what two methods differ by.

A method is offered at many settings. Its curve is the best recall of any setting with no more extra alarms, straight
between settings (which a coin that chooses between two of them attains). Intervals are 95 % percentiles over resampled
splices; both methods are resampled alike, so that a difference is paired, and the curves are made anew from each
resample, so that the choice of the best settings is part of the interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.quality.baselines.baseline import Detection
from benchmarks.quality.splices import Splice
from schemas.table import FloatArray

RESAMPLES = 2000
_TOO_EARLY = 10  # iterations
PER = 10_000  # iterations that rates of alarms are told for


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One setting on one splice: extra alarms before and after the onset, and the delay, NaN where it was missed.

    is_information: it was found, and told as information only.
    """

    before: int
    after: int
    delay: float
    iterations: int
    is_information: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outcomes:
    """One setting on all splices (n,): delays count the first slow iteration as 1."""

    setting: str
    before: FloatArray
    after: FloatArray
    delay: FloatArray
    iterations: FloatArray
    is_information: FloatArray

    @classmethod
    def of(cls, setting: str, scored: Sequence[Scored]) -> "Outcomes":
        """Put the splices together."""
        columns = {name: np.array([getattr(s, name) for s in scored], np.float64) for name in Scored.__slots__}
        return cls(setting=setting, **columns)

    @property
    def found(self) -> FloatArray:
        """(n,) 1 where the shift was found."""
        return np.isfinite(self.delay).astype(np.float64)

    @property
    def extra(self) -> FloatArray:
        """(n,) all alarms but the one that finds the shift."""
        return self.before + self.after


def score(detections: Sequence[Detection], splice: Splice, *, is_online: bool = True) -> Scored:
    """Score slower-going statements: the first at or after the onset finds the shift, any other is an extra alarm.

    One that is told with hindsight may date the change a little too early.
    """
    said = [d for d in detections if d.is_slower]
    earliest = splice.onset - (0 if is_online else _TOO_EARLY)
    hits = [d for d in said if d.at >= earliest]
    return Scored(
        before=len(said) - len(hits),
        after=max(len(hits) - 1, 0),
        delay=max(hits[0].at - splice.onset + 1.0, 1.0) if hits else float("nan"),
        iterations=len(splice.duration_s),
        is_information=bool(hits) and hits[0].is_information,
    )


def resampled(n: int, seed: int) -> FloatArray:
    """Return weights (RESAMPLES + 1, n): how often each splice was drawn; the first row is the splices as they are."""
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    return np.vstack([np.ones(n), drawn]).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Extra alarms per 10,000 iterations and recall, each (RESAMPLES + 1, n_settings)."""

    extra: FloatArray
    recall: FloatArray

    @classmethod
    def of(cls, settings: Sequence[Outcomes], weights: FloatArray) -> "Curve":
        """Return the curve of a method's settings on resampled splices."""
        extra = np.stack([weights @ s.extra / (weights @ s.iterations) for s in settings], axis=1)
        recall = np.stack([weights @ s.found / weights.sum(axis=1) for s in settings], axis=1)
        return cls(PER * extra, recall)

    def recall_at(self, extra: float) -> FloatArray:
        """Return (RESAMPLES + 1,) the recall at a rate of extra alarms."""
        return np.array([np.interp(extra, *_hull(e, r)) for e, r in zip(self.extra, self.recall, strict=True)])

    def extra_at(self, recall: float) -> FloatArray:
        """Return (RESAMPLES + 1,) the rate of extra alarms at a recall; infinite where no setting reaches it."""
        found = []
        for extra, recalls in zip(self.extra, self.recall, strict=True):
            rates, reached = _hull(extra, recalls)
            first = np.concatenate([[True], np.diff(reached) > 0])
            found.append(np.interp(recall, reached[first], rates[first], right=np.inf))
        return np.array(found)


def _hull(extra: FloatArray, recall: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return rates in ascending order and the best recall up to each; nothing is found with no alarm at all."""
    order = np.lexsort((-recall, extra))
    best = np.maximum.accumulate(recall[order])
    is_free = extra[order] == 0
    start = float(best[is_free].max()) if is_free.any() else 0.0
    return np.concatenate([[0.0], extra[order][~is_free]]), np.concatenate([[start], best[~is_free]])


def interval(values: FloatArray) -> tuple[float, float, float]:
    """Return the value as observed (the first) and the 95 % interval of the resamples after it."""
    low, high = np.quantile(values[1:], (0.025, 0.975), method="nearest")
    return float(values[0]), float(low), float(high)
