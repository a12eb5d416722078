"""From answers.toml and a scenario to what is right to say of each fault, and how bad it really is.

How bad comes from counterfactuals: the same random numbers without the fault. A fault that outlasts a restart has one
answer per incarnation. Scoring reads Answers and nothing else of a scenario.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from agents.simulated.faults import Fault, SlowGpu, SlowHost
from agents.simulated.layout import Placement, incarnations
from agents.simulated.scenario import Scenario
from agents.simulated.timeline import truth
from benchmarks.quality.components import JOB, components, has_equals, workload_ratio
from detectors.robust import wide_scale
from schemas.alerts import ComponentName, Kind
from schemas.table import FloatArray

_PEERS_MIN = 3
_FULL_STRENGTH = 0.75
_SETTLED = 10  # iterations after which a job's own first ones no longer count as its noise
_COST_SHARE, _COST_ITERATIONS = 0.02, 60  # by when a fault that creeps has to be found, whichever is later
_FROM_START_ITERATIONS = 20

Asked = Literal["incident", "information", "nothing"]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: exactly these candidates, or (is_loose) any set that holds them."""

    kind: Kind
    candidates: frozenset[ComponentName]
    is_loose: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is right to say of one fault in one incarnation, in iterations of the whole job."""

    fault: str
    shape: str
    accepted: tuple[Said, ...]  # the first is the best that the sensors allow
    asked: Asked
    has_past: bool  # whether the incarnation was healthy before
    onset: int
    end: int  # the first iteration without it
    deadline: int  # by which it has to be found
    onset_s: float  # since the scenario's epoch
    ratio: float
    shift_sigmas: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Iteration times of a scenario, and of the same one without its faults; arrays are (iterations,), seconds."""

    start_s: FloatArray
    duration_s: FloatArray
    healthy_s: FloatArray

    @property
    def sigma(self) -> float:
        """Return the noise of the healthy iteration time, as standard deviation of its logarithm."""
        return float(wide_scale(np.log(self.healthy_s[_SETTLED:])))


@cache
def table() -> dict[str, Any]:
    """Return answers.toml."""
    return tomllib.loads((Path(__file__).parent / "answers.toml").read_text(encoding="utf-8"))


def clock(scenario: Scenario) -> Clock:
    """Return the scenario's times, by the simulator's own truth."""
    actual = truth(scenario)
    healthy_s = truth(replace(scenario, faults=())).duration_s if scenario.faults else actual.duration_s
    return Clock(actual.start_s, actual.duration_s, healthy_s)


def answers(scenario: Scenario, setting: str, times: Clock) -> tuple[Answer, ...]:
    """Return the right answers for every fault of the scenario."""
    found: list[Answer] = []
    for number, fault in enumerate(scenario.faults):
        ratios = _ratios(scenario, times, number)
        for placement, first, end in incarnations(scenario):
            onset, stop = max(fault.onset, first), min(scenario.iterations if fault.end is None else fault.end, end)
            if onset < stop:
                found.append(_answer(placement, fault, setting, times, ratios, (first, onset, stop)))
    return tuple(found)


def _answer(
    placement: Placement,
    fault: Fault,
    setting: str,
    times: Clock,
    ratios: tuple[FloatArray, FloatArray],
    span: tuple[int, int, int],
) -> Answer:
    first, onset, end = span
    has_past = onset > first
    accepted, shows = _accepted(placement, fault, setting, has_past=has_past)
    least = 1 + (fault.factor - 1) * _FULL_STRENGTH
    active = [i for i in range(onset, end) if fault.factor_at(i) >= least] or [onset]
    alone, added = (float(np.median(ratio[active])) for ratio in ratios)
    limits = table()["severity"]
    asked: Asked = "nothing"
    if shows and added >= limits["informed"]:
        asked = "incident" if added >= limits["accused"] else "information"
    return Answer(
        fault=fault.kind,
        shape=fault.shape,
        accepted=accepted,
        asked=asked,
        has_past=has_past,
        onset=onset,
        end=end,
        deadline=_deadline(times, onset, end) if has_past else onset + _FROM_START_ITERATIONS,
        onset_s=float(times.start_s[onset]),
        ratio=alone,
        shift_sigmas=float(np.log(max(added, 1e-9)) / times.sigma),
    )


def _deadline(times: Clock, onset: int, end: int) -> int:
    lost_s = np.cumsum((times.duration_s - times.healthy_s)[onset:end])
    costly = np.flatnonzero(lost_s > _COST_SHARE * times.duration_s.sum())
    return onset + max(_COST_ITERATIONS, int(costly[0]) if len(costly) else 0)


def _ratios(scenario: Scenario, times: Clock, number: int) -> tuple[FloatArray, FloatArray]:
    """Return how much longer each iteration is with one fault alone, and by that or by what it adds to the others."""
    if len(scenario.faults) == 1:
        ratio = times.duration_s / times.healthy_s
        return ratio, ratio
    others = tuple(other for i, other in enumerate(scenario.faults) if i != number)
    alone = truth(replace(scenario, faults=(scenario.faults[number],))).duration_s / times.healthy_s
    added = times.duration_s / truth(replace(scenario, faults=others)).duration_s
    return alone, np.minimum(alone, added)


def _accepted(placement: Placement, fault: Fault, setting: str, *, has_past: bool) -> tuple[tuple[Said, ...], bool]:
    """Return the right answers, the best first, and whether the fault shows at all."""
    scenario = placement.scenario
    job = Said(kind=Kind.SLOW_JOB, candidates=frozenset({JOB}))
    if isinstance(fault, SlowGpu | SlowHost) and fault.node in {late.node for late in scenario.agents.late}:
        return (job,), has_past
    name = "slow_gpu_unseen" if isinstance(fault, SlowGpu) and not fault.telemetry else fault.kind
    row = table()[name]["inspector" if setting in {"losses", "agent_missing"} else setting]
    is_partial = setting == "agent_missing"
    said = [
        Said(
            kind=Kind(one["kind"]),
            candidates=frozenset(components(placement, fault, one["component"], has_past=has_past)),
            is_loose=is_partial,
        )
        for one in (row, *([row["also"]] if "also" in row else []))
    ]
    shows = has_past or _shows_from_start(placement, fault, row["from_start"])
    return (*said, job) if is_partial else tuple(said), shows


def _shows_from_start(placement: Placement, fault: Fault, rule: str) -> bool:
    match rule:
        case "peers":
            return placement.shape.dp * placement.shape.tp >= _PEERS_MIN
        case "equals":
            return has_equals(placement, fault)
    return rule == "always"


def hints(scenario: Scenario, setting: str) -> tuple[Kind, ...]:
    """Return the kinds of information about the workload itself that are due."""
    due = []
    for kind in (Kind.STAGE_IMBALANCE, Kind.DATA_IMBALANCE):
        row = table()[kind.value]
        if setting in row["settings"] and workload_ratio(scenario, kind) >= row["least_ratio"]:
            due.append(kind)
    return tuple(due)
