"""The naive reading of collectives: the rank that spends most time in them is slow.

Source: folk rule, with the limit by which Greyhound suspects a communication group (Wu et al., USENIX ATC 2025): more
than 1.1 times the median, in a window. Greyhound compares groups among each other and then tests their hardware; told
of ranks, and believed without a test, it is the mistake that this baseline is here to show.

Cannot see: that in a synchronous job the one who comes last waits least. It leaves the culprit out and accuses the
victim that waits longest, or nobody where all victims wait alike; the reverse reading (the shortest collective is the
late comer) is that of Aegis (NSDI 2025).
"""

import numpy as np

from benchmarks.quality.baselines.baseline import WARM_UP, Detection, Input, Observed, newly_accused, per_rank
from schemas.table import BoolArray, FloatArray


class LongestCollective:
    """Medians over the last `window` iterations; the longest is accused if above `least_ratio` medians of all ranks."""

    name = "longest collective"
    needs = frozenset({Input.COMMUNICATION})
    is_online = True

    def __init__(self, *, window: int = 8, least_ratio: float = 1.1) -> None:
        self.window = window
        self.least_ratio = least_ratio

    def judges(self, observed: Observed) -> list[Detection]:
        """Return the rank of the longest collectives, once per spell."""
        busy_s = per_rank(observed.communication_s, Input.COMMUNICATION, self.name)
        looks = range(WARM_UP + self.window - 1, len(busy_s))
        return list(newly_accused(looks, (self._accused(busy_s[i + 1 - self.window : i + 1]) for i in looks)))

    def _accused(self, window_s: FloatArray) -> BoolArray:
        seen = np.isfinite(window_s).any(axis=0)
        level = np.full(window_s.shape[1], -np.inf)
        if seen.any():
            level[seen] = np.nanmedian(window_s[:, seen], axis=0)
        flags = np.zeros(len(level), np.bool_)
        if seen.any():
            longest = int(level.argmax())
            flags[longest] = level[longest] > self.least_ratio * float(np.median(level[seen]))
        return flags
