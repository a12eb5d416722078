"""One iteration of the whole job: when every GPU and host did what, in seconds since the job's start.

GPU operations of a rank run in order, each once its host has launched it. The members of a collective, and both sides
of a send and receive, leave when the last has arrived and the transfer is done; so victims wait, and the culprit does
not. All arrays are (dp, tp) per pipeline stage, one operation at a time, or (rows, dp, tp) for the rows of a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.simulated.benign import LongLastStage, MoeImbalance, SlowSpells, WarmUp
from agents.simulated.conditions import Conditions, Paths
from agents.simulated.draws import Draws, lognormal
from agents.simulated.faults import Fault
from agents.simulated.layout import Axis, Placement
from agents.simulated.program import (
    ArriveStep,
    ComputeStep,
    LeaveStep,
    Message,
    Program,
    RingStep,
    TransferStep,
    WorldStep,
)
from agents.simulated.stage import Stage, StageTimes
from schemas.table import FloatArray

_SYNC_S = 5e-6
_TRAINING, _EVALUATION, _SPREAD, _ROUTING = 1, 2, 3, 9  # purposes of random numbers


@dataclass(slots=True, eq=False)
class JobState:
    """When each rank's host and GPU are free, (pp, dp, tp)."""

    host: FloatArray
    gpu: FloatArray

    @classmethod
    def at(cls, time_s: float, placement: Placement) -> "JobState":
        """Return the state of a job whose ranks all start at one time."""
        shape = placement.rank.shape
        return cls(np.full(shape, time_s), np.full(shape, time_s))

    @property
    def latest_s(self) -> float:
        """Return when all hosts and GPUs are free."""
        return float(max(self.host.max(), self.gpu.max()))

    def wait_until(self, time_s: float) -> None:
        """Keep all ranks from doing anything before a time."""
        self.host, self.gpu = np.full_like(self.host, time_s), np.full_like(self.gpu, time_s)


@dataclass(slots=True, eq=False)
class Pass:
    """One execution of a program: its rows, and the host's wait at the end, (pp, dp, tp)."""

    stages: list[StageTimes]
    wait_start: FloatArray
    wait_end: FloatArray
    is_synchronised: bool
    start_s: float  # when the last rank was done with what came before
    end_s: float  # when the last rank is done
    complete_s: float  # everything later ends after this time
    gc_pauses: list[tuple[int, float]]  # rank and start


class Physics:
    """Works out the passes of one incarnation under the given faults."""

    def __init__(self, placement: Placement, faults: Sequence[Fault], first_iteration: int) -> None:
        scenario = placement.scenario
        self.scenario = scenario
        self.placement = placement
        self._first_iteration = first_iteration
        self._paths = Paths(placement)
        self._conditions = Conditions(self._paths, faults)
        self._stage_ratio = np.array(scenario.work.stage_ratios or (1.0,) * scenario.layout.pp)
        long_last = scenario.find(LongLastStage)
        if long_last:
            self._stage_ratio[-1] *= long_last.factor
        # Drawn by physical place, so that a card keeps its speed when ranks move.
        spread = lognormal(
            np.random.default_rng([scenario.seed, _SPREAD]),
            (scenario.n_nodes, scenario.layout.gpus_per_node),
            scenario.jitter.gpu_spread_cv,
        )
        self._spread = spread[placement.node, placement.gpu]

    def train(self, program: Program, iteration: int, state: JobState) -> Pass:
        """Work out one iteration; moves `state` on."""
        work = self.scenario.work
        is_synchronised = (iteration + 1 - self._first_iteration) % work.sync_every == 0
        return self._run(program, iteration, state, _TRAINING, is_synchronised=is_synchronised)

    def evaluate(self, program: Program, iteration: int, state: JobState) -> Pass:
        """Work out the forward-only passes that follow an iteration; moves `state` on."""
        return self._run(program, iteration, state, _EVALUATION, is_synchronised=True)

    def _run(self, program: Program, iteration: int, state: JobState, purpose: int, *, is_synchronised: bool) -> Pass:
        random = np.random.default_rng([self.scenario.seed, purpose, self.placement.incarnation, iteration])
        draws = Draws(self.scenario, self._paths, self._conditions.at(iteration), program, random)
        pace = self._pace(iteration) * draws.common
        spread = self._spread * self._routing(iteration)
        stages = [
            Stage(
                draws,
                p,
                stage,
                pace=float(pace * self._stage_ratio[p]),
                gpu_s=state.gpu[p],
                host_s=state.host[p],
                spread=spread[p],
            )
            for p, stage in enumerate(program.stages)
        ]
        start_s = state.latest_s
        _execute(program, stages, draws)
        gpu = np.stack([stage.ready for stage in stages])
        wait_start = np.stack([stage.host[-1] for stage in stages])
        wait_end = np.maximum(gpu, wait_start) + _SYNC_S if is_synchronised else wait_start
        state.gpu, state.host = gpu, wait_end
        return Pass(
            stages=[stage.times() for stage in stages],
            wait_start=wait_start,
            wait_end=wait_end,
            is_synchronised=is_synchronised,
            start_s=start_s,
            end_s=float(max(gpu.max(), wait_end.max())),
            complete_s=float(min(gpu.min(), wait_end.min())),
            gc_pauses=[
                (int(self.placement.rank[p, dp, tp]), start)
                for p, stage in enumerate(stages)
                for dp, tp, start in stage.gc_pauses
            ],
        )

    def _pace(self, iteration: int) -> float:
        """Return how much longer all computation takes because the job has just started, or has a slow spell."""
        warm_up, spells = self.scenario.find(WarmUp), self.scenario.find(SlowSpells)
        pace = spells.factor if spells and spells.is_slow(iteration) else 1.0
        since = iteration - self._first_iteration
        if warm_up is None or since >= warm_up.iterations:
            return pace
        return float(pace * warm_up.factor ** (1 - since / warm_up.iterations))

    def _routing(self, iteration: int) -> FloatArray:
        """Return (pp, dp, 1) factors on computation: the tokens that each rank's experts get, alike for a while."""
        moe = self.scenario.find(MoeImbalance)
        if moe is None:
            return np.ones(1)
        shape = (self.scenario.layout.pp, self.scenario.layout.dp, 1)
        seed = [self.scenario.seed, _ROUTING, self.placement.incarnation]
        recent = [np.random.default_rng([*seed, iteration + k]).standard_normal(shape) for k in range(moe.memory)]
        sigma = np.sqrt(np.log1p(moe.cv**2))
        factors: FloatArray = np.exp(sigma * np.sum(recent, axis=0) / np.sqrt(moe.memory) - sigma**2 / 2)
        return factors


def _execute(program: Program, stages: list[Stage], draws: Draws) -> None:
    world_s = draws.ring_s(Axis.WORLD, ())
    ring_s = [list(draws.ring_s(Axis.DP, (p,), (2,))) for p in range(len(stages))]  # reduce-scatter, all-gather
    for step in program.steps:
        match step:
            case ComputeStep(stage, number, item):
                stages[stage].compute(number, item)
            case ArriveStep(stage, number, item):
                stages[stage].arrive(number, item)
            case TransferStep(message, sides):
                _transfer(message, [(stages[p], row) for p, row in sides], draws)
            case LeaveStep(stage, item):
                stages[stage].leave(item)
            case RingStep(stage, number, row):
                arrival = stages[stage].arrive_at(number, row)
                stages[stage].leave_from(row, arrival.max(axis=0, keepdims=True) + ring_s[stage].pop(0))
            case WorldStep(places):
                last = max(stage.arrive_at(*place).max() for stage, place in zip(stages, places, strict=True))
                for stage_, (_, row) in zip(stages, places, strict=True):
                    stage_.leave_from(row, last + world_s)


def _transfer(message: Message, sides: list[tuple[Stage, int]], draws: Draws) -> None:
    (one, row), (other, other_row) = sides
    transfer_s = draws.p2p_s[int(message.is_forward), message.micro_batch, message.edge]
    end = np.maximum(one.start[row], other.start[other_row]) + transfer_s
    one.end[row] = end
    other.end[other_row] = end
