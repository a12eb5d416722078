"""What is asked of a verified slowdown before anybody, or the whole job, is said to be slow."""

from dataclasses import dataclass, replace

import numpy as np

from detectors.verify import MOST_AFTER, shift
from pipeline.changes import Change
from pipeline.history import History
from pipeline.judge_params import JudgeParams

QUICK = 2  # frames after which a plain change is known


@dataclass(slots=True)
class Inquiry:
    """A verified slowdown whose component is looked for, until a frame."""

    change: Change
    deadline: int


def lasts(change: Change, history: History, params: JudgeParams) -> bool | None:
    """Whether a slowdown without a culprit is no passing one, nor the end of a fast start; None: not known yet."""
    now = history.n_frames
    if change.onset < params.reference_frames:
        return False
    if change.n_after >= params.inquiry_frames + params.transient_frames:
        return True
    before = history.durations(change.reference_start, change.reference_stop)
    found = shift(before, history.durations(max(change.onset, now - MOST_AFTER), now))
    latest_s = float(np.median(history.durations(now - params.transient_frames, now)))
    if latest_s >= (1 + 0.25 * (found.ratio - 1)) * change.before_s and found.lower > 0:
        return True
    # Spikes at its beginning make a slowdown seem larger than what is left of it.
    return False if latest_s < float(np.sqrt(params.least_slowdown)) * change.before_s else None


def as_of_now(change: Change, history: History, params: JudgeParams) -> Change:
    """Return the change with the size that it has by now: its first frames may be spikes, or the foot of a ramp."""
    now = history.n_frames
    if now - change.onset < QUICK + params.transient_frames:
        return change
    latest_s = float(np.median(history.durations(max(change.onset, now - params.window_frames), now)))
    after_s = max(latest_s, params.least_slowdown * change.before_s)
    return replace(change, after_s=after_s, ratio=after_s / change.before_s)
