"""How much of a slow link a job can feel at most: what takes as long anyway absorbs the rest."""

from dataclasses import dataclass

import numpy as np

from pipeline.groups import quiet_median
from pipeline.history import History
from pipeline.structure import Structure
from pipeline.suspect import Span
from pipeline.topology import Topology
from schemas.table import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Slack:
    """What is known of the time in which a job's ranks have to wait whatever its links do."""

    history: History
    topology: Topology
    structure: Structure

    def most_felt(self, span: Span, healthy_s: FloatArray) -> float:
        """Return by how many seconds iterations are longer than transfers of healthy_s (n_series,) would let them be.

        No rank is done before it has computed and transferred, and a pipeline has to be filled and emptied. Waits
        beyond that are what a slow link, or anything else, has caused. Infinite where computation is not seen.
        """
        compute = quiet_median(self.history.compute(span.start, span.stop))
        if not np.isfinite(compute).any():
            return float("inf")
        transfer_s = np.nan_to_num(healthy_s) * self.structure.paths.calls
        busy = compute.copy()
        for rank, own in self.topology.series_by_rank.items():
            busy[rank] += transfer_s[list(own)].sum()
        lasted_s = float(np.median(self.history.durations(span.start, span.stop)))
        return lasted_s - float(np.nanmax(busy)) - self._filling_s(compute)

    def _filling_s(self, compute: FloatArray) -> float:
        """Return how long the longest stage waits for its first micro-batch and for the last one's way back.

        That is the work of every other stage on one micro-batch. Of interleaved stages the pieces are smaller, and the
        calls more, by the same factor.
        """
        calls = [one.calls for one in self.topology.series if one.is_point_to_point]
        if not calls:
            return 0.0
        stages = self.structure.stages
        by_stage = np.array([quiet_median(compute[stages == stage, None])[0] for stage in np.unique(stages)])
        return float(np.nansum(by_stage) - np.nanmax(by_stage)) / max(min(calls), 1)
