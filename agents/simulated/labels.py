"""The right answer for each fault of a scenario: what any observer could know with the sensors that are on.

Right means exactly the identifiable set (design decision 9): the smallest set of components that the observations
separate. How bad a fault is comes from the counterfactual: the same seed with this fault alone, and without any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.simulated.faults import Fault, SlowGpu, SlowHost, SlowLink, SlowNic, SlowRank
from agents.simulated.hypotheses import LinkHypotheses, Suspect, suspect_of
from agents.simulated.layout import Placement, gpu_uuid, incarnation, node_name
from agents.simulated.physics import JobState, Physics
from agents.simulated.program import training
from agents.simulated.scenario import Scenario
from schemas.alerts import ComponentName, ComponentType, Kind, Severity
from schemas.events import Sensor

LEAST_SLOWDOWN = 1.10  # an incident
LEAST_INFO = 1.05  # information that accuses nobody; below, the fault is absorbed
_SIMULATED_MAX = 40
_FULL_STRENGTH = 0.75  # a ramp counts from this share of its height
_PEERS_MIN = 3  # among two, nobody can say which one is slow

_JOB = ComponentName(type=ComponentType.JOB)


@dataclass(frozen=True, slots=True)
class Expected:
    """What should be said of one fault; iterations are absolute, the end is None where the job ends first."""

    kind: Kind
    candidates: frozenset[ComponentName]
    onset_iteration: int
    end_iteration: int | None
    visible: bool  # whether anybody could see it and should say so
    severity: Severity
    slowdown_ratio: float  # of the iterations at full strength, by the counterfactual


def expected(scenario: Scenario) -> tuple[Expected, ...]:
    """Return the right answer for every fault, in the order of the scenario's faults."""
    return tuple(_expected(scenario, fault) for fault in scenario.faults)


def slowdown_ratio(scenario: Scenario, fault: Fault) -> float:
    """Return how much longer iterations take with this fault alone than without any, by the same random numbers."""
    placement, first, end = incarnation(scenario, fault.onset)
    end = min(end, fault.end or end)
    least = 1 + (fault.factor - 1) * _FULL_STRENGTH
    active = [i for i in range(fault.onset, end) if fault.factor_at(i) >= least][:_SIMULATED_MAX]
    if not active:
        return 1.0
    healthy_s = _total_s(Physics(placement, (), first), active)
    return _total_s(Physics(placement, (fault,), first), active) / healthy_s


def component(scenario: Scenario, text: str) -> ComponentName:
    """Read a component as scenario files spell it: `gpu 2/5`, `host 1`, `rank 7`, `nic 3`, `link 0-4` or `job`.

    Raises ValueError where it is none of these.
    """
    kind, _, place = text.partition(" ")
    match kind:
        case "gpu":
            node, gpu = map(int, place.split("/"))
            return _gpu(scenario, node, gpu)
        case "host":
            return ComponentName(type=ComponentType.HOST, node=node_name(scenario, int(place)))
        case "rank":
            return _rank(scenario, Placement(scenario, 0, 0), int(place))
        case "nic":
            return _link(scenario, int(place))
        case "link":
            a, b = sorted(map(int, place.split("-")))
            return _link(scenario, (a, b))
        case "job":
            return _JOB
    raise ValueError(f"{text!r} names no component; write it as gpu 2/5, host 1, rank 7, nic 3, link 0-4 or job")


def _expected(scenario: Scenario, fault: Fault) -> Expected:
    kind, candidates, is_seen = _answer(scenario, fault)
    ratio = slowdown_ratio(scenario, fault)
    severity = Severity.WARNING
    if ratio < LEAST_SLOWDOWN:
        severity = Severity.INFO
        if ratio >= LEAST_INFO:
            kind, candidates = Kind.SLOW_JOB, frozenset({_JOB})
    end = None if fault.end is None or fault.end >= scenario.iterations else fault.end
    return Expected(kind, candidates, fault.onset, end, is_seen and ratio >= LEAST_INFO, severity, ratio)


def _answer(scenario: Scenario, fault: Fault) -> tuple[Kind, frozenset[ComponentName], bool]:
    """Return what an observer could say, and whether it could see anything at all."""
    sensors = scenario.agents.sensor_flags
    sees_gpu, sees_waits = Sensor.GPU in sensors, Sensor.SYNC in sensors
    has_past = fault.onset > 0
    match fault:
        case SlowGpu() | SlowRank():
            placement = incarnation(scenario, fault.onset)[0]
            rank = fault.rank if isinstance(fault, SlowRank) else placement.first_rank_on(fault.node) + fault.gpu
            shows = isinstance(fault, SlowGpu) and Sensor.NVML in sensors and fault.telemetry
            has_equals = has_past or scenario.layout.dp * scenario.layout.tp >= _PEERS_MIN
            # Until it moves to another card, a rank that is slow by itself looks as its card would.
            if shows or (sees_gpu and sees_waits):
                node, gpu = int(placement.node.ravel()[rank]), int(placement.gpu.ravel()[rank])
                return Kind.SLOW_GPU, frozenset({_gpu(scenario, node, gpu)}), shows or has_equals
            if sees_gpu:
                return Kind.SLOW_RANK, frozenset({_rank(scenario, placement, rank)}), has_equals
        case SlowHost(node=node, telemetry=telemetry):
            shows = Sensor.HOST in sensors and telemetry
            if shows or sees_gpu or sees_waits:
                host = ComponentName(type=ComponentType.HOST, node=node_name(scenario, node))
                return Kind.SLOW_HOST, frozenset({host}), True
        case SlowNic() | SlowLink():
            hypotheses = LinkHypotheses(incarnation(scenario, fault.onset)[0])
            suspect = suspect_of(fault)
            if sees_gpu:
                candidates = frozenset(_link(scenario, alike) for alike in hypotheses.alike(suspect, has_past=has_past))
                return Kind.SLOW_LINK, candidates, has_past or hypotheses.has_equals(suspect)
    return Kind.SLOW_JOB, frozenset({_JOB}), has_past


def _total_s(physics: Physics, iterations: Sequence[int]) -> float:
    program = training(physics.scenario)
    state = JobState.at(0.0, physics.placement)
    passes = [physics.train(program, iteration, state) for iteration in iterations]
    return float(np.sum([one.end_s - one.start_s for one in passes]))


def _gpu(scenario: Scenario, node: int, gpu: int) -> ComponentName:
    return ComponentName(type=ComponentType.GPU, node=node_name(scenario, node), gpu=gpu_uuid(scenario, node, gpu))


def _rank(scenario: Scenario, placement: Placement, rank: int) -> ComponentName:
    node = int(placement.node.ravel()[rank])
    return ComponentName(type=ComponentType.RANK, node=node_name(scenario, node), rank=rank)


def _link(scenario: Scenario, suspect: Suspect) -> ComponentName:
    if isinstance(suspect, int):
        return ComponentName(type=ComponentType.LINK, node=node_name(scenario, suspect))
    a, b = (node_name(scenario, node) for node in suspect)
    return ComponentName(type=ComponentType.LINK, node=a, peer=b)
