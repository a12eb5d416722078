"""Never alarms: what a detector has to be better than, and a stand-in where none is wanted.

Source: the null detector of the Numenta Anomaly Benchmark, A. Lavin and S. Ahmad, Evaluating Real-Time Anomaly
Detection Algorithms, IEEE ICMLA (2015), 38-44.

score = 0.

Blind to: everything.
"""

import numpy as np

from detectors.detector import FloatArray, Verdict, checked


class Null:
    """Finds all n_series healthy in every frame."""

    name = "null"

    def __init__(self, n_series: int) -> None:
        self.n_series = n_series

    def update(self, frame: FloatArray, /) -> Verdict:
        """Take in one frame (n_series,) and find nothing; NaN, as everywhere, where there is no value."""
        values = checked(frame, self.n_series, self.name)
        return Verdict(np.where(np.isnan(values), np.nan, 0.0), np.zeros(self.n_series, np.int64))
