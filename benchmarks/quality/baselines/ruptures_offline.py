"""Offline segmentation by ruptures 1.1.10: an upper reference that sees the whole series before it speaks.

Source: C. Truong, L. Oudre and N. Vayatis, Selective review of offline change point detection methods, Signal
Processing 167 (2020), 107299; PELT, R. Killick, P. Fearnhead and I. A. Eckley, Journal of the American Statistical
Association 107 (2012), 1590-1598.

Least squares on log times with the package's advice for the penalty, sigma^2 log n for each change point; sigma is the
wide scale of successive differences over sqrt(2), which a shift does not move. PELT finds the best segmentation, Binseg
a greedy one. Defaults of the package otherwise: min_size=2, jump=5.

Cannot see: jobs slow from the start; who is slow. It is not online: `at` is the change point itself, so that its delay
means nothing, and it is to be read as how many changes could be told from noise with hindsight.
"""

from typing import Literal

import numpy as np

from benchmarks.quality.baselines.baseline import Detection, Input, Observed, known
from benchmarks.quality.baselines.packages import load
from detectors.robust import wide_scale


class RupturesOffline:
    """The job's iteration time as a whole; penalty in sigma^2 log n for each change point."""

    needs = frozenset({Input.DURATION})
    is_online = False

    def __init__(self, method: Literal["Pelt", "Binseg"] = "Pelt", *, penalty: float = 1.0) -> None:
        self.name = f"ruptures {method} (offline)"
        self.method = method
        self.penalty = penalty

    def judges(self, observed: Observed) -> list[Detection]:
        """Return the change points; a change is slower if the segment after it has the larger mean."""
        positions, times = known(observed.duration_s)
        logs = np.log(times)
        if len(logs) < 2:
            return []
        sigma = max(float(wide_scale(np.diff(logs))) / np.sqrt(2), 1e-3)
        search = getattr(load("ruptures"), self.method)(model="l2").fit(logs)
        ends = search.predict(pen=self.penalty * sigma**2 * np.log(len(logs)))
        edges = [0, *ends]
        found = []
        for left, change, right in zip(edges, edges[1:], edges[2:], strict=False):
            at = int(positions[change])
            is_slower = float(logs[change:right].mean()) > float(logs[left:change].mean())
            found.append(Detection(at=at, onset=at, is_slower=is_slower))
        return found
