"""Did this job get slower than it was? Change points of its iteration time, believed only once verified.

BOCPD and CUSUM propose; the sequential test of detectors.verify disposes. A third question needs no proposal: whether
the last iterations are slower than the job's own long reference, which finds ramps and stairs of small steps.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from detectors.bocpd import Bocpd
from detectors.cusum import Cusum
from detectors.verify import LEAST_BEFORE, MOST_AFTER, Outcome, confirm, shift
from pipeline.history import History
from pipeline.judge_params import JudgeParams
from schemas.table import FloatArray

_LONG_REFERENCE = 256
_LAG = 24  # frames that the long reference stays behind, so that a ramp does not drag it along
_RECENT = 12
_REFINE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A verified change: onset is a frame number, times are seconds; ratio above 1 is slower."""

    onset: int
    before_s: float
    after_s: float
    ratio: float
    reference_start: int  # the frames before it, for comparison
    reference_stop: int

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
    _bocpd: Bocpd = field(default_factory=lambda: Bocpd(1))
    _cusum: Cusum = field(default_factory=lambda: Cusum(1))
    _candidate: int | None = None
    _quiet: int = 0  # frames since an incident was open
    _long: deque[float] = field(default_factory=lambda: deque(maxlen=_LONG_REFERENCE + _LAG))

    def update(self, history: History, *, disturbed: bool) -> Change | None:
        """Take in the latest frame; `disturbed` while an incident is open, when the long reference stands still."""
        duration_s = float(history.durations(history.n_frames - 1, history.n_frames)[0])
        if not np.isfinite(duration_s):
            return None
        log_time = np.array([np.log(duration_s)])
        verdicts = (self._bocpd.update(log_time), self._cusum.update(log_time))
        self._quiet = 0 if disturbed else self._quiet + 1
        if not disturbed:
            self._long.append(duration_s)
        if self._candidate is None:
            for verdict in verdicts:
                if verdict.score[0] >= 1.0 and verdict.run_length[0] >= 1:
                    proposed = history.n_frames - int(verdict.run_length[0])
                    if proposed > self.level_start:
                        self._candidate = proposed
                        break
        change = self._verify(history)
        settled = min(self._quiet, history.n_frames - self.level_start)
        if change is None and self._candidate is None and settled >= _RECENT:
            change = self._drift(history)
        return change

    def _verify(self, history: History) -> Change | None:
        if self._candidate is None:
            return None
        onset = self._refined(history, self._candidate)
        start = self._reference_start(history, onset)
        before = history.durations(start, onset)
        after = history.durations(onset, history.n_frames)[:MOST_AFTER]
        slower = shift(before, after)
        if start < self.level_start and self._is_of_present_level(history, onset, after):
            self._candidate = None
            return None
        outcomes = [
            (confirm(slower, self.params.least_slowdown).outcome),
            (confirm(slower, 1 / self.params.least_slowdown).outcome),
        ]
        if Outcome.CONFIRMED in outcomes:
            self._settle(onset)
            return Change(
                onset=onset,
                before_s=float(np.median(before)),
                after_s=float(np.median(after)),
                ratio=slower.ratio,
                reference_start=start,
                reference_stop=onset,
            )
        if Outcome.UNDECIDED not in outcomes or history.n_frames - self._candidate > MOST_AFTER:
            self._candidate = None
        return None

    def _reference_start(self, history: History, onset: int) -> int:
        """Return from where on frames are compared with: a level that has held too briefly takes from those before."""
        start = max(self.level_start, onset - self.params.reference_frames)
        return min(start, max(history.first, onset - LEAST_BEFORE))

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

    def _settle(self, onset: int) -> None:
        self._candidate = None
        self.level_start = onset
        self._cusum = Cusum(1)

    def _drift(self, history: History) -> Change | None:
        """Compare the last iterations with the long reference."""
        reference = np.array(self._long)[:-_LAG] if len(self._long) > _LAG else np.empty(0)
        if len(reference) < self.params.reference_frames:
            return None
        after = history.durations(history.n_frames - _RECENT, history.n_frames)
        found = shift(reference, after)
        if confirm(found, self.params.least_slowdown).outcome is not Outcome.CONFIRMED:
            return None
        onset = self._left_reference(history, reference, found.ratio)
        self._settle(onset)
        return Change(
            onset=onset,
            before_s=float(np.median(reference)),
            after_s=float(np.median(after)),
            ratio=found.ratio,
            reference_start=max(history.first, onset - self.params.reference_frames),
            reference_stop=onset,
        )

    def _left_reference(self, history: History, reference: FloatArray, ratio: float) -> int:
        """Return the frame after the last one in which the job was nearer to its reference than to now."""
        held = history.durations(history.first, history.n_frames)
        smooth = np.array([np.median(held[max(0, i - 2) : i + 3]) for i in range(len(held))])
        below = np.flatnonzero(smooth < np.median(reference) * (1 + (ratio - 1) / 4))
        onset = history.first + (int(below[-1]) + 1 if len(below) else 0)
        return min(onset, history.n_frames - _RECENT // 2)
