"""The job from its first iteration to its last: passes, pauses and restarts, in the order of time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agents.simulated.benign import Checkpoint, Evaluation, Restart, SlowSpells
from agents.simulated.faults import Fault
from agents.simulated.layout import Placement, incarnations
from agents.simulated.physics import JobState, Pass, Physics
from agents.simulated.program import Program, evaluation, training
from agents.simulated.scenario import Scenario
from schemas.events import MarkerKind
from schemas.table import FloatArray, IntArray

_FIRST_START_S = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """An incarnation's processes run and its communicators exist."""

    placement: Placement
    programs: tuple[Program, ...]  # all that it will ever run
    first_iteration: int
    time_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """An iteration, or the forward-only passes after one, has been done."""

    iteration: int
    program: Program
    is_evaluation: bool
    times: Pass


@dataclass(frozen=True, slots=True, eq=False)
class Paused:
    """All ranks were away from training; `end_s` (pp, dp, tp)."""

    kind: MarkerKind
    iteration: int  # that came before
    start_s: FloatArray
    end_s: FloatArray
    has_marker: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """An incarnation's processes are gone."""

    time_s: float


Happening = Started | Passed | Paused | Ended


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What really happened, in seconds of true time since the scenario's epoch; all arrays are (iterations,)."""

    incarnation: IntArray
    start_s: FloatArray  # when the last rank was done with what came before, pauses and evaluations included
    end_s: FloatArray  # when the last rank was done

    @property
    def duration_s(self) -> FloatArray:
        """Return (iterations,): the time of each iteration itself."""
        return self.end_s - self.start_s


def truth(scenario: Scenario) -> Truth:
    """Run the scenario without events and return when its iterations began and ended."""
    rows: list[tuple[int, float, float]] = []
    incarnation = 0
    for happening in timeline(scenario, scenario.faults):
        if isinstance(happening, Started):
            incarnation = happening.placement.incarnation
        elif isinstance(happening, Passed) and not happening.is_evaluation:
            rows.append((incarnation, happening.times.start_s, happening.times.end_s))
    numbers, start_s, end_s = zip(*rows, strict=True)
    return Truth(np.array(numbers), np.array(start_s), np.array(end_s))


def timeline(scenario: Scenario, faults: Sequence[Fault]) -> Iterator[Happening]:
    """Yield what happens in a scenario, but under the given faults."""
    restarts = [benign for benign in scenario.benign if isinstance(benign, Restart)]
    start_s = _FIRST_START_S
    evaluate = scenario.find(Evaluation)
    for placement, first, end in incarnations(scenario):
        if placement.incarnation:
            start_s += restarts[placement.incarnation - 1].pause_s
        programs = [training(placement.scenario)]
        if evaluate:
            programs.append(evaluation(placement.scenario, evaluate.micro_batches))
        yield Started(placement, tuple(programs), first, start_s)
        state = JobState.at(start_s, placement)
        yield from _incarnation(Physics(placement, faults, first), programs, range(first, end), state)
        start_s = state.latest_s
        yield Ended(start_s)


def _incarnation(physics: Physics, programs: list[Program], iterations: range, state: JobState) -> Iterator[Happening]:
    scenario = physics.scenario
    checkpoint, evaluate = scenario.find(Checkpoint), scenario.find(Evaluation)
    spells = scenario.find(SlowSpells)
    for iteration in iterations:
        times = physics.train(programs[0], iteration, state)
        yield Passed(iteration, programs[0], is_evaluation=False, times=times)
        if spells and spells.is_profiling and spells.is_slow(iteration):
            start_s = np.full_like(state.host, times.start_s)
            yield Paused(MarkerKind.PROFILING, iteration, start_s, state.host, has_marker=True)
        if iteration == iterations[-1]:
            return
        if evaluate and (iteration + 1) % evaluate.every == 0:
            before = state.host
            times = physics.evaluate(programs[1], iteration, state)
            yield Passed(iteration, programs[1], is_evaluation=True, times=times)
            yield Paused(MarkerKind.EVALUATION, iteration, before, state.host, evaluate.marker)
        if checkpoint and (iteration + 1) % checkpoint.every == 0:
            before = state.host
            state.wait_until(state.latest_s + checkpoint.pause_s)
            yield Paused(MarkerKind.CHECKPOINT, iteration, before, state.host, checkpoint.marker)
