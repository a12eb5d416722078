"""What is asked of a verified slowdown before anybody, or the whole job, is said to be slow."""

from dataclasses import dataclass, replace

import numpy as np

from detectors.verify import MOST_AFTER, Outcome, confirm, shift
from pipeline.changes import Change
from pipeline.history import History
from pipeline.judge_params import JudgeParams

QUICK = 2  # frames after which a plain change is known
SPELL_FRAMES = 4  # a slowdown that passes is as long at least: compilation, collected garbage, checkpoints take 1 to 3
_SPELLS_APART = 60  # frames from the end of one to the next: those that come more rarely cost little
_GAP_FRAMES = 3  # at the usual pace in between
_ALIKE = 2.0  # times as large as one another, at most


@dataclass(slots=True)
class Inquiry:
    """A verified slowdown whose component is looked for, until a frame."""

    change: Change
    deadline: int


def lasts(change: Change, history: History, params: JudgeParams) -> bool | None:
    """Whether a slowdown without a culprit is no passing one; None: not known yet.

    After so few frames that the job may still have been getting under way, it has to last for longer.
    """
    now = history.n_frames
    is_long = change.n_after >= params.inquiry_frames + params.transient_frames
    n_latest = params.window_frames if is_long else params.transient_frames
    latest_s = float(np.median(history.durations(now - n_latest, now)))
    if latest_s < float(np.sqrt(params.least_slowdown)) * change.before_s:
        return False
    if change.onset < params.reference_frames:
        return True if now - change.onset >= MOST_AFTER else None
    before = history.durations(change.reference_start, change.reference_stop)
    found = shift(before, history.durations(max(change.onset, now - MOST_AFTER), now))
    # Spikes at its beginning make a slowdown seem larger than what is left of it.
    is_slow_still = latest_s >= (1 + 0.25 * (found.ratio - 1)) * change.before_s and found.lower > 0
    return True if is_long or is_slow_still else None


def as_of_now(change: Change, history: History, params: JudgeParams) -> Change:
    """Return the change with the size that it has by now: its first frames may be spikes, or the foot of a ramp."""
    now = history.n_frames
    if now - change.onset < QUICK + params.transient_frames:
        return change
    latest_s = float(np.median(history.durations(max(change.onset, now - params.window_frames), now)))
    after_s = max(latest_s, params.least_slowdown * change.before_s)
    return replace(change, after_s=after_s, ratio=after_s / change.before_s)


@dataclass(frozen=True, slots=True)
class Spell:
    """A slowdown without a culprit that has passed; frames [onset, stop), seconds before and in it."""

    change: Change
    stop: int

    @classmethod
    def of(cls, change: Change, history: History) -> "Spell | None":
        """Return the spell that a passing change was; none if it was too short to be more than a pause."""
        is_slow = history.durations(change.onset, history.n_frames) > (change.before_s + change.after_s) / 2
        length = len(is_slow) if is_slow.all() else int(np.argmin(is_slow))
        return cls(change, change.onset + length) if length >= SPELL_FRAMES else None

    def recurs(self, history: History, params: JudgeParams) -> Change | None:
        """Return the slowdown since the first spell, once a second one of like size shows that it comes and goes.

        Both are compared with what was before the first: times that had spells in them already prove no further one.
        """
        now, start = history.n_frames, history.n_frames - SPELL_FRAMES
        first = self.change
        if not self.stop + _GAP_FRAMES <= start <= self.stop + _SPELLS_APART:
            return None
        halfway_s = (first.before_s + first.after_s) / 2
        if not (history.durations(start, now) > halfway_s).all():
            return None
        if np.count_nonzero(history.durations(self.stop, start) <= halfway_s) < _GAP_FRAMES:
            return None
        before = history.durations(first.reference_start, first.reference_stop)
        found = shift(before, history.durations(start, now))
        gained_s = (found.ratio - 1) * first.before_s
        is_alike = 1 / _ALIKE <= gained_s / (first.after_s - first.before_s) <= _ALIKE
        if not is_alike or confirm(found, params.least_slowdown).outcome is not Outcome.CONFIRMED:
            return None
        return replace(first, after_s=first.before_s + gained_s, ratio=found.ratio, n_after=now - first.onset)
