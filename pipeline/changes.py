"""Did this job get slower than it was? Change points of its iteration time, believed only once verified.

BOCPD proposes, and the sequential test of detectors.verify disposes: it knows within two or three iterations, where a
change is plain. What lies within the noise, grows slowly or comes in small steps is found by the evidence that has
added up since (detectors.evidence), and its size is an estimate then and no bound.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from math import exp, log

import numpy as np

from detectors.bocpd import Bocpd
from detectors.evidence import strongest_split
from detectors.verify import LEAST_BEFORE, MOST_AFTER, Outcome, confirm, shift
from pipeline.history import History
from pipeline.judge_params import JudgeParams
from pipeline.notes import NO_NOTES, Notes
from pipeline.suspect import FEWEST_REFERENCE, Span
from schemas.table import FloatArray

_LEVEL = 500  # frames of the present level that are remembered
_REFERENCE = 120  # frames of it that a proposed change is compared with: they tell how often spikes come
_CHANCE = 0.3  # times exp(-evidence), of spikes that look like a change: proposals are many where spikes are
_SETTLED = 20  # frames of a new level after which it is asked whether it is new
_REFINE = 6
_MANY = 8  # values that outvote spikes, however often those come


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A verified change: onset is a frame number, times are seconds; ratio above 1 is slower."""

    onset: int
    before_s: float
    after_s: float
    ratio: float
    reference_start: int  # the frames before it, for comparison
    reference_stop: int
    n_after: int  # frames since the onset when it was verified

    def span(self, start: int, stop: int) -> Span:
        """Return frames to look at, beside those before this change."""
        return Span(start=start, stop=stop, reference_start=self.reference_start, reference_stop=self.reference_stop)

    def since(self, first: "Change") -> "Change":
        """Return this change, which came soon after another one, compared with what was before that."""
        return replace(
            self,
            before_s=first.before_s,
            ratio=self.after_s / first.before_s,
            reference_start=first.reference_start,
            reference_stop=first.reference_stop,
        )


@dataclass(slots=True)
class ChangeSearch:
    """Follows one job's iteration time."""

    params: JudgeParams
    level_start: int = 0  # the frame from which on the present level holds
    notes: Notes = NO_NOTES
    _bocpd: Bocpd = field(default_factory=lambda: Bocpd(1))
    _candidate: int | None = None
    _level: deque[float] = field(default_factory=lambda: deque(maxlen=_LEVEL))  # seconds, of the level that holds
    _last_level: FloatArray = field(default_factory=lambda: np.empty(0))  # of the level before

    def update(self, history: History) -> Change | None:
        """Take in the latest frame."""
        duration_s = float(history.durations(history.n_frames - 1, history.n_frames)[0])
        if not np.isfinite(duration_s):
            return None
        self._level.append(duration_s)
        if len(self._level) >= _SETTLED and self._is_level_before_last(np.array(self._level)):
            self.retract()
        verdict = self._bocpd.update(np.array([np.log(duration_s)]))
        if self._candidate is None and verdict.score[0] >= 1.0 and verdict.run_length[0] >= 1:
            proposed = history.n_frames - int(verdict.run_length[0])
            if proposed > self.level_start:
                self._candidate = proposed
        return self._verify(history) or self._add_up(history)

    def retract(self) -> None:
        """Take the last change for none: the level before it goes on."""
        self._level = deque([*self._last_level.tolist(), *self._level], maxlen=_LEVEL)
        self.level_start = max(0, self.level_start - len(self._last_level))
        self._last_level = np.empty(0)

    def _is_level_before_last(self, times_s: FloatArray) -> bool:
        """Whether times are nearer to those before the last change than any change worth telling is."""
        if not len(self._last_level):
            return False
        ratio = float(np.median(times_s) / np.median(self._last_level))
        return abs(log(ratio)) < log(self.params.least_slowdown) / 2

    def _add_up(self, history: History) -> Change | None:
        """Look at the evidence of all splits of the present level."""
        times_s = np.array(self._level)
        found = strongest_split(np.log(times_s), least_log_ratio=log(self.params.least_slowdown))
        if found is None or found.score < self.params.evidence:
            return None
        before, after = times_s[: -found.length], times_s[-found.length :]
        moved = shift(before, after)
        # Of a level that was returned to, the frames in between are no part.
        onset = max(history.n_frames - found.length, self.level_start)
        self.notes.compared(moved, onset, evidence=found.score)
        is_clear = moved.lower > 0 if found.log_ratio > 0 else moved.upper < 0
        if found.length < _MANY and not is_clear:
            return None
        if found.log_ratio > 0:  # of a ramp, the split is where it has become plain, and not where it began
            began = self._left_reference(history, float(np.median(before)), moved.ratio)
            onset = min(onset, max(began, self.level_start + LEAST_BEFORE))
        return self._settled(history, onset, before, after, moved.ratio)

    def _verify(self, history: History) -> Change | None:
        if self._candidate is None:
            return None
        onset = self._refined(history, self._candidate)
        before = self._before(history, onset)
        after = history.durations(onset, history.n_frames)[:MOST_AFTER]
        slower = shift(before, after, chance=_CHANCE * exp(-self.params.evidence))
        self.notes.compared(slower, onset)
        if onset - self.level_start < LEAST_BEFORE and self._is_of_present_level(history, onset, after):
            self._candidate = None
            return None
        outcomes = [
            (confirm(slower, self.params.least_slowdown).outcome),
            (confirm(slower, 1 / self.params.least_slowdown).outcome),
        ]
        if Outcome.CONFIRMED in outcomes:
            return self._settled(history, onset, before, after, slower.ratio)
        if Outcome.UNDECIDED not in outcomes or len(after) > _MANY:  # what is not plain by then is for the evidence
            self._candidate = None
        return None

    def _before(self, history: History, onset: int) -> FloatArray:
        """Return the times before an onset; a level that has held too briefly takes from those before."""
        times_s = np.array(self._level)[: onset - history.n_frames][-_REFERENCE:]
        return times_s if len(times_s) >= LEAST_BEFORE else history.durations(onset - LEAST_BEFORE, onset)

    def _is_of_present_level(self, history: History, onset: int, after: FloatArray) -> bool:
        """Whether times are those since the last change, which has been told already."""
        if onset - self.level_start < 2:
            return True
        ratio = float(np.median(after) / np.median(history.durations(self.level_start, onset)))
        return 1 / self.params.least_slowdown < ratio < self.params.least_slowdown

    def _refined(self, history: History, proposed: int) -> int:
        """Return the split near the proposed one that separates the two levels best (least squares, clipped logs)."""
        start = max(self.level_start, proposed - self.params.reference_frames, history.first)
        logs = np.log(history.durations(start, history.n_frames))
        middle, spread = np.median(logs), np.quantile(logs, 0.9) - np.quantile(logs, 0.1) + 1e-9
        logs = np.clip(logs, middle - 2 * spread, middle + 2 * spread)
        best, best_gain = proposed, -1.0
        for split in range(max(start + 2, proposed - _REFINE), min(history.n_frames - 1, proposed + _REFINE) + 1):
            left, right = logs[: split - start], logs[split - start :]
            gain = (left.mean() - right.mean()) ** 2 * len(left) * len(right) / len(logs)
            if gain > best_gain:
                best, best_gain = split, float(gain)
        return best

    def _settled(self, history: History, onset: int, before: FloatArray, after: FloatArray, ratio: float) -> Change:
        """Begin a new level, or return to the one before the last: then all that is known of that one counts again."""
        before_s, after_s = float(np.median(before)), float(np.median(after))
        times_s = np.array(self._level)
        n_after = history.n_frames - onset
        earlier, since = times_s[:-n_after], times_s[-n_after:]
        reference_start = max(history.first, self.level_start, onset - self.params.reference_frames)
        if onset - reference_start < FEWEST_REFERENCE:
            reference_start = max(history.first, onset - LEAST_BEFORE)
        kept = np.concatenate([self._last_level, since]) if self._is_level_before_last(after) else since
        self._level = deque(kept.tolist(), maxlen=_LEVEL)
        self._last_level = earlier
        self._candidate = None
        self.level_start = onset
        return Change(
            onset=onset,
            before_s=before_s,
            after_s=after_s,
            ratio=ratio,
            reference_start=reference_start,
            reference_stop=onset,
            n_after=n_after,
        )

    def _left_reference(self, history: History, reference_s: float, ratio: float) -> int:
        """Return the frame after the last one in which the job was nearer to its reference than to now."""
        held = history.durations(history.first, history.n_frames)
        smooth = np.array([np.median(held[max(0, i - 2) : i + 3]) for i in range(len(held))])
        below = np.flatnonzero(smooth < reference_s * (1 + (ratio - 1) / 4))
        return history.first + (int(below[-1]) + 1 if len(below) else 0)
