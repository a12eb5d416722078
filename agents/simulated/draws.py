"""The random numbers of one pass of the job: always the same ones in the same order, whatever the faults.

So two runs of a scenario that differ in their faults alone differ in nothing else, and their difference is the fault's.
"""

import numpy as np

from agents.simulated.benign import DataStalls, GcPauses, VariableSequenceLength
from agents.simulated.conditions import Factors, Paths
from agents.simulated.layout import Axis
from agents.simulated.program import Program
from agents.simulated.scenario import Scenario
from schemas.table import AnyArray, FloatArray

_RING_CHUNKS = 16  # a ring's time is the sum of so many transfers, its jitter smaller by the root


def lognormal(random: np.random.Generator, shape: tuple[int, ...], cv: float | FloatArray) -> FloatArray:
    """Return positive factors of mean 1 and coefficient of variation `cv` (scalar, or to broadcast to `shape`)."""
    variance = np.log1p(np.square(cv))
    factors: FloatArray = np.exp(random.standard_normal(shape) * np.sqrt(variance) - variance / 2)
    return factors


class Draws:
    """What chance decides in one pass; methods have to be called in the same order in every run."""

    def __init__(
        self, scenario: Scenario, paths: Paths, factors: Factors, program: Program, random: np.random.Generator
    ) -> None:
        self.scenario = scenario
        self.factors = factors
        self.random = random
        self._paths = paths
        jitter = scenario.jitter
        self.common = float(lognormal(random, (), jitter.iteration_cv))
        variable = scenario.find(VariableSequenceLength)
        shape = (program.micro_batches, scenario.layout.dp)
        self.length = lognormal(random, shape, variable.cv) if variable else np.ones(shape)
        cv = np.where(paths.p2p_is_between, jitter.rdma_cv, jitter.within_node_cv)
        # (2, micro-batches, pp - 1, dp, tp): back and forward.
        self.p2p_s = paths.p2p_s * factors.p2p * lognormal(random, (2, program.micro_batches, *cv.shape), cv)

        stalls = scenario.find(DataStalls)
        self.shared_stall_s = 0.0
        if stalls and stalls.is_shared:
            hit, share = random.random(), random.exponential()
            self.shared_stall_s = stalls.pause_s * share if hit < stalls.probability else 0.0

    def computation(self, n_computes: int) -> FloatArray:
        """Return factors on computes, (computes, dp, tp)."""
        shape = self.scenario.layout
        return lognormal(self.random, (n_computes, shape.dp, shape.tp), self.scenario.jitter.compute_cv)

    def launch(self) -> FloatArray:
        """Return factors on launch times, (dp, tp)."""
        shape = self.scenario.layout
        return lognormal(self.random, (shape.dp, shape.tp), self.scenario.jitter.launch_cv)

    def ring_s(self, axis: Axis, stage: tuple[int, ...], n_calls: tuple[int, ...] = ()) -> FloatArray:
        """Return the transfer times of calls on the rings of a stage, (*n_calls, rings of the stage)."""
        jitter = self.scenario.jitter
        between = self._paths.ring_is_between[axis][stage]
        cv = np.where(between, jitter.rdma_cv / np.sqrt(_RING_CHUNKS), jitter.within_node_cv)
        base = self._paths.ring_s[axis][stage] * self.factors.ring[axis][stage]
        times: FloatArray = base * lognormal(self.random, (*n_calls, *base.shape), cv)
        return times

    def gc_pauses(self, n_items: int) -> list[tuple[int, int, int]]:
        """Return (item, dp, tp) of the hosts of a stage that collect garbage before an item."""
        gc = self.scenario.find(GcPauses)
        if gc is None:
            return []
        shape = self.scenario.layout
        hit: AnyArray = self.random.random((shape.dp, shape.tp)) < gc.probability
        before = self.random.integers(1, n_items, hit.shape)
        return [(int(before[dp, tp]), int(dp), int(tp)) for dp, tp in np.argwhere(hit)]

    def data_stalls_s(self) -> FloatArray:
        """Return (dp, tp): how long each host of a stage waits for its data."""
        stalls, shape = self.scenario.find(DataStalls), self.scenario.layout
        waits = np.full((shape.dp, shape.tp), self.shared_stall_s)
        if stalls and not stalls.is_shared:
            hit = self.random.random(waits.shape) < stalls.probability
            waits += np.where(hit, stalls.pause_s * self.random.exponential(size=waits.shape), 0.0)
        return waits
