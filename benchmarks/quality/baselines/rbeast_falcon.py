"""Change points by Rbeast 0.1.25, found and verified as the artefact of FALCON (Greyhound) does it.

Source: T. Wu et al., Greyhound: Hunting Fail-Slows in Hybrid-Parallel Training at Scale, USENIX ATC (2025), and its
published artefact; the method, K. Zhao et al., Remote Sensing of Environment 232 (2019), 111181. The paper describes
Bayesian online change point detection; what the artefact runs is this.

Every 5 s, on all iteration times since the buffer was last cleared: values with |z| > 3 over the whole buffer are
dropped; beast(season='none', hasOutlier=True); as many change points as the mode of their number says, of those whose
probability exceeds 0.8; in order, only those more than 10 values after the one before and not within the first 10; and
only where the means of the segments beside it differ by more than a tenth of the larger. After a report the buffer is
cleared, as the artefact does once it has profiled. Changes to faster are reported as well.

Differences: the Markov chain has a fixed seed, so that a run repeats; no look at fewer than 20 values; where a chain
ends in NaN (about 6 % do with outliers switched on) it is tried again with another seed, as the artefact does not.

Cannot see: jobs slow from the start; stairs and ramps of steps below a tenth; who is slow. A severe but short fault is
taken for outliers. About 0.2 s of computation a look.
"""

from typing import Any

import numpy as np

from benchmarks.quality.baselines.baseline import Detection, Input, Observed, known
from benchmarks.quality.baselines.packages import load
from schemas.table import FloatArray, IntArray

_FEWEST = 20
_SEEDS = 1, 2, 3


class RbeastFalcon:
    """The job's iteration time, looked at anew every `round_s` seconds of the job.

    least_probability of a change point; least_change between segments, over the larger mean; least_length in values.
    """

    name = "FALCON artefact (Rbeast)"
    needs = frozenset({Input.DURATION})
    is_online = True

    def __init__(
        self,
        *,
        round_s: float = 5.0,
        least_probability: float = 0.8,
        least_change: float = 0.1,
        least_length: int = 10,
    ) -> None:
        self.round_s = round_s
        self.least_probability = least_probability
        self.least_change = least_change
        self.least_length = least_length

    def judges(self, observed: Observed) -> list[Detection]:
        """Return the verified change points, each when the first look shows it."""
        positions, times = known(observed.duration_s)
        package = load("Rbeast")
        found: list[Detection] = []
        start, next_look_s, now_s = 0, self.round_s, 0.0
        for index, duration_s in enumerate(times.tolist()):
            now_s += duration_s
            if now_s < next_look_s:
                continue
            next_look_s = now_s + self.round_s
            if index + 1 - start < _FEWEST:
                continue
            verified = self._look(package, times[start : index + 1])
            for change, is_slower in verified:
                onset = int(positions[start + change])
                found.append(Detection(at=int(positions[index]), onset=onset, is_slower=is_slower))
            if verified:
                start = index + 1
        return found

    def _look(self, package: Any, buffer: FloatArray) -> list[tuple[int, bool]]:
        """Return verified change points of the buffer: position, and whether the job got slower."""
        spread = float(buffer.std())
        is_kept = np.abs(buffer - buffer.mean()) <= 3 * spread if spread > 0 else np.ones(len(buffer), np.bool_)
        kept = np.flatnonzero(is_kept)
        values = buffer[kept]
        trend = _trend(package, values)
        number = 0 if trend is None else int(trend.ncp_mode[0])
        if trend is None or number == 0:
            return []
        places, probabilities = np.atleast_1d(trend.cp)[:number], np.atleast_1d(trend.cpPr)[:number]
        is_likely = np.isfinite(places) & (probabilities > self.least_probability)
        # Rbeast numbers times from 1; the artefact takes them as positions from 0, and so one value late.
        changes = np.sort(places[is_likely].astype(np.int64))
        changes = changes[changes < len(values)]
        return [(int(kept[c]), is_slower) for c, is_slower in self._verified(values, changes)]

    def _verified(self, values: FloatArray, changes: IntArray) -> list[tuple[int, bool]]:
        is_apart = np.diff(changes, prepend=0) > self.least_length
        is_apart[:1] = changes[:1] >= self.least_length
        changes = changes[is_apart]
        edges = [0, *changes.tolist(), len(values) - 1]
        found = []
        for left, change, right in zip(edges, edges[1:], edges[2:], strict=False):
            if change >= right:
                continue
            before, after = float(values[left:change].mean()), float(values[change:right].mean())
            if abs(before - after) / max(before, after) > self.least_change:
                found.append((change, after > before))
        return found


def _trend(package: Any, values: FloatArray) -> Any:
    """Return what Rbeast says of the trend; None where no chain came to an end."""
    for seed in _SEEDS:
        result = package.beast(
            values,
            season="none",
            hasOutlier=True,
            print_param=False,
            print_progress=False,
            quiet=True,
            mcmc_seed=seed,
        )
        if np.isfinite(result.trend.ncp_mode[0]):
            return result.trend
    return None
