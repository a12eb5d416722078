"""Megatron-LM's straggler report: the fastest and the slowest rank of each logging interval, by name.

Source: Megatron-LM (https://github.com/NVIDIA/Megatron-LM), megatron/core/utils.py, `StragglerDetector`, switched on by
`--log-straggler` (README_STRAGGLER.md beside it): at each `--log-interval` (100 iterations) the least and the greatest
elapsed time over all ranks with the rank of each; the same for temperature, power, utilisation and clock.

It gives no verdict: a person reads it. As a rule for a machine that is "the slowest rank of each interval", always one,
which is what `least_ratio` 1 does; a larger one asks that the slowest take so many times the fastest.

Here the mean computation time of a rank stands for the elapsed time between its timing events.

Cannot see: whether anything is wrong; the whole job slower; what differs for good reason, such as pipeline stages.
"""

import numpy as np

from benchmarks.quality.baselines.baseline import WARM_UP, Detection, Input, Observed, per_rank


class MegatronReport:
    """One line per interval of iterations."""

    name = "Megatron-LM min/max report"
    needs = frozenset({Input.COMPUTE})
    is_online = True

    def __init__(self, *, interval: int = 100, least_ratio: float = 1.0) -> None:
        self.interval = interval
        self.least_ratio = least_ratio

    def judges(self, observed: Observed) -> list[Detection]:
        """Return the slowest rank of each complete interval."""
        compute_s = per_rank(observed.compute_s, Input.COMPUTE, self.name)
        found = []
        for start in range(WARM_UP, len(compute_s) - self.interval + 1, self.interval):
            window = compute_s[start : start + self.interval]
            seen = np.isfinite(window)
            counts = seen.sum(axis=0)
            means = np.where(counts, np.where(seen, window, 0.0).sum(axis=0) / np.maximum(counts, 1), np.nan)
            if counts.any() and np.nanmax(means) >= self.least_ratio * np.nanmin(means):
                rank = int(np.nanargmax(means))
                found.append(Detection(at=start + self.interval - 1, onset=start, rank=rank))
        return found
