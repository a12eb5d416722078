"""What every detector promises: one frame of numbers in, one verdict per series out.

A *series* is one quantity of one thing, such as the iteration time of rank 5. A *frame* holds the values of all series
for one iteration; frames arrive in order, one call of `update` each. A detector owns the state of all its series as
arrays, so that a job of 10,000 ranks costs a handful of numpy calls and not 10,000 objects.

Frames hold the natural *logarithm* of times: a slowdown by a factor is then a shift by a constant, jitter that grows
with the time is even, and adding one constant to all frames (another unit of time) changes no verdict. Larger is
slower.

Missing values are NaN. A series without a value keeps its state exactly as it is, and has no opinion about that frame.
Nothing here reads a clock, draws a random number or knows what a rank is: equal frames give equal verdicts, a deep copy
goes on where its original stood, and the order of the series does not matter.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """One detector's opinion of one frame.

    score: (n_series,) evidence in units of the detector's own threshold: 1.0 and above is an alarm, NaN is no opinion
        (the series is still being learnt, has no peers, or has no value in this frame).
    run_length: (n_series,) frames since the estimated change point, this one included, counting only frames in which
        the series had a value; 0 where there is no alarm.
    """

    score: FloatArray
    run_length: IntArray

    @property
    def alarm(self) -> BoolArray:
        """(n_series,) where the score has reached the detector's threshold."""
        return np.greater_equal(self.score, 1.0)


class Detector(Protocol):
    """Judges frames, one after the other."""

    @property
    def name(self) -> str:
        """What evidence and metrics call it."""
        ...

    def update(self, frame: FloatArray, /) -> Verdict:
        """Take in frame (n_series,), NaN where a series has no value, and judge it.

        Raises ValueError if the frame has another shape than the detector was built for, or holds an infinite value.
        """
        ...


def checked(frame: FloatArray, n_series: int, name: str) -> FloatArray:
    """Return the frame as float64 of shape (n_series,); raise ValueError, naming the detector, if it cannot be one."""
    values = np.asarray(frame, dtype=np.float64)
    if values.shape != (n_series,):
        raise ValueError(f"{name}: the frame has shape {values.shape}, expected ({n_series},)")
    if np.isinf(values).any():
        raise ValueError(f"{name}: the frame holds an infinite value; pass NaN for a missing one, and log of times > 0")
    return values
