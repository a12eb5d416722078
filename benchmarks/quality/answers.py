"""From answers.toml and a scenario to what is right to say of each fault, and how bad it really is.

How bad comes from counterfactuals: the same random numbers without the fault. Scoring reads Answers and nothing else of
a scenario.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from agents.simulated.faults import Fault, SlowGpu, SlowHost, SlowLink, SlowNic
from agents.simulated.hypotheses import LinkHypotheses, Suspect, suspect_of
from agents.simulated.layout import Placement, gpu_uuid, node_name
from agents.simulated.scenario import Scenario
from agents.simulated.timeline import truth
from detectors.robust import wide_scale
from schemas.alerts import ComponentName, ComponentType, Kind
from schemas.table import FloatArray

_PEERS_MIN = 3
_FULL_STRENGTH = 0.75
_SETTLED = 10  # iterations after which a job's own first ones no longer count as its noise
_COST_SHARE, _COST_ITERATIONS = 0.02, 60  # by when a fault that creeps has to be found, whichever is later
_JOB = ComponentName(type=ComponentType.JOB)

Asked = Literal["incident", "information", "nothing"]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: exactly these candidates, or (is_loose) any set that holds them."""

    kind: Kind
    candidates: frozenset[ComponentName]
    is_loose: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is right to say of one fault, in iterations of the whole job."""

    fault: str
    shape: str
    accepted: tuple[Said, ...]  # the first is the best that the sensors allow
    asked: Asked
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
def _table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "answers.toml").read_text(encoding="utf-8"))


def clock(scenario: Scenario) -> Clock:
    """Return the scenario's times, by the simulator's own truth."""
    actual = truth(scenario)
    healthy_s = truth(replace(scenario, faults=())).duration_s if scenario.faults else actual.duration_s
    return Clock(actual.start_s, actual.duration_s, healthy_s)


def answers(scenario: Scenario, setting: str, times: Clock) -> tuple[Answer, ...]:
    """Return the right answer for every fault of the scenario."""
    return tuple(_answer(scenario, setting, times, number) for number in range(len(scenario.faults)))


def _answer(scenario: Scenario, setting: str, times: Clock, number: int) -> Answer:
    fault = scenario.faults[number]
    accepted, shows = _accepted(scenario, setting, fault)
    alone, marginal = _ratios(scenario, times, number)
    end = scenario.iterations if fault.end is None else fault.end
    limits = _table()["severity"]
    asked: Asked = "nothing"
    if shows and marginal >= limits["informed"]:
        asked = "incident" if marginal >= limits["accused"] else "information"
    lost_s = np.cumsum((times.duration_s - times.healthy_s)[fault.onset : end])
    costly = np.flatnonzero(lost_s > _COST_SHARE * times.duration_s.sum())
    return Answer(
        fault=fault.kind,
        shape=fault.shape,
        accepted=accepted,
        asked=asked,
        onset=fault.onset,
        end=end,
        deadline=fault.onset + max(_COST_ITERATIONS, int(costly[0]) if len(costly) else 0),
        onset_s=float(times.start_s[fault.onset]),
        ratio=alone,
        shift_sigmas=float(np.log(max(marginal, 1e-9)) / times.sigma),
    )


def _ratios(scenario: Scenario, times: Clock, number: int) -> tuple[float, float]:
    """Return how much longer iterations are with this fault alone, and the least that it adds to them or to the others."""
    fault = scenario.faults[number]
    end = scenario.iterations if fault.end is None else fault.end
    least = 1 + (fault.factor - 1) * _FULL_STRENGTH
    active = [i for i in range(fault.onset, end) if fault.factor_at(i) >= least] or [fault.onset]
    if len(scenario.faults) == 1:
        ratio = float(np.median((times.duration_s / times.healthy_s)[active]))
        return ratio, ratio
    others = tuple(other for i, other in enumerate(scenario.faults) if i != number)
    alone_s = truth(replace(scenario, faults=(fault,))).duration_s
    without_s = truth(replace(scenario, faults=others)).duration_s
    alone = float(np.median((alone_s / times.healthy_s)[active]))
    return alone, min(alone, float(np.median((times.duration_s / without_s)[active])))


def _accepted(scenario: Scenario, setting: str, fault: Fault) -> tuple[tuple[Said, ...], bool]:
    """Return the right answers, the best first, and whether the fault shows at all."""
    is_partial = setting == "agent_missing"
    unseen = {late.node for late in scenario.agents.late}
    job = Said(kind=Kind.SLOW_JOB, candidates=frozenset({_JOB}))
    if isinstance(fault, SlowGpu | SlowHost) and fault.node in unseen:
        return (job,), fault.onset > 0
    name = "slow_gpu_unseen" if isinstance(fault, SlowGpu) and not fault.telemetry else fault.kind
    row = _table()[name]["inspector" if setting in {"losses", "agent_missing"} else setting]
    placement = Placement(scenario, 0, 0)
    kind = Kind(row["kind"])
    best = Said(kind=kind, candidates=frozenset(_components(placement, fault, row["component"])), is_loose=is_partial)
    shows = fault.onset > 0 or _shows_from_start(placement, fault, row["from_start"])
    # With a node unseen, that the component is not known is as much as may be said.
    return ((best, job) if is_partial else (best,)), shows


def _shows_from_start(placement: Placement, fault: Fault, rule: str) -> bool:
    if rule == "peers":
        return placement.shape.dp * placement.shape.tp >= _PEERS_MIN
    if rule == "equals" and isinstance(fault, SlowNic | SlowLink):
        return LinkHypotheses(placement).has_equals(suspect_of(fault))
    return rule == "always"


def _components(placement: Placement, fault: Fault, component: str) -> list[ComponentName]:
    scenario = placement.scenario
    match component, fault:
        case "gpu", SlowGpu(node=node, gpu=gpu):
            name = node_name(scenario, node)
            return [ComponentName(type=ComponentType.GPU, node=name, gpu=gpu_uuid(scenario, node, gpu))]
        case "rank", SlowGpu(node=node, gpu=gpu):
            rank = placement.first_rank_on(node) + gpu
            return [ComponentName(type=ComponentType.RANK, node=node_name(scenario, node), rank=rank)]
        case "host", SlowHost(node=node):
            return [ComponentName(type=ComponentType.HOST, node=node_name(scenario, node))]
        case "links", SlowNic() | SlowLink():
            alike = LinkHypotheses(placement).alike(suspect_of(fault))
            return [_link(scenario, suspect) for suspect in alike]
    return [_JOB]


def _link(scenario: Scenario, suspect: Suspect) -> ComponentName:
    if isinstance(suspect, int):
        return ComponentName(type=ComponentType.LINK, node=node_name(scenario, suspect))
    one, other = (node_name(scenario, node) for node in suspect)
    return ComponentName(type=ComponentType.LINK, node=one, peer=other)
