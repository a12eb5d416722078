"""River's detectors, which follow one series each, behind the protocol for many.

Source: J. Montiel et al., River: machine learning for streaming data in Python, Journal of Machine Learning Research 22
(2021), 1-8.

score = 1 in the frames in which River says so, else 0: its detectors answer yes or no.

Blind to: what its detector is blind to. One Python object and call per series and frame makes it slow for large jobs.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from detectors.detector import FloatArray, Verdict, checked


class DriftDetector(Protocol):
    """What is used of River's drift detectors."""

    @property
    def drift_detected(self) -> bool:
        """Whether the latest value was an alarm."""
        ...

    def update(self, x: float) -> None:
        """Take in one value."""
        ...


class PerSeries:
    """One River drift detector for each of n_series series."""

    def __init__(self, name: str, n_series: int, make: Callable[[], DriftDetector]) -> None:
        self.name = name
        self.n_series = n_series
        self._detectors = [make() for _ in range(n_series)]

    def update(self, frame: FloatArray, /) -> Verdict:
        """Take in the log times of one frame (n_series,) and say which detectors have just fired."""
        values = checked(frame, self.n_series, self.name)
        score = np.full(self.n_series, np.nan)
        run_length = np.zeros(self.n_series, np.int64)
        for series in np.flatnonzero(~np.isnan(values)).tolist():
            detector = self._detectors[series]
            detector.update(float(values[series]))
            score[series] = float(detector.drift_detected)
            if detector.drift_detected:
                run_length[series] = self._run_length(detector)
        return Verdict(score, run_length)

    def _run_length(self, detector: DriftDetector) -> int:  # noqa: ARG002  for those who estimate a change point
        return 1
