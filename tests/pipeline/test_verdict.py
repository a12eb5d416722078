"""A verdict: right means the right set of components, resolved, and nothing else flagged."""

import msgspec

from pipeline.agent_process import ExpectedIncident
from pipeline.verdict import Arrival, answers
from schemas.alerts import (
    Alert,
    AlertState,
    Component,
    ComponentName,
    ComponentType,
    Kind,
    Resolution,
    Severity,
    fingerprint,
)

EPOCH_NS = 1_700_000_000 * 10**9
NODES = [ComponentName(type=ComponentType.HOST, node=f"node{n}") for n in range(7)]


def fault(*candidates: ComponentName, onset: int = 101, onset_s: float = 10.1) -> ExpectedIncident:
    return ExpectedIncident(
        kind=Kind.SLOW_HOST,
        candidates=frozenset(candidates),
        onset_iteration=onset,
        end_iteration=None,
        onset_s=onset_s,
        end_s=None,
        is_visible=True,
        severity=Severity.WARNING,
        slowdown_ratio=1.3,
    )


def arrival(
    *candidates: ComponentName, onset: int = 102, revision: int = 1, resolution: Resolution | None = None
) -> Arrival:
    component = Component(type=ComponentType.HOST, name=candidates[0], candidates=candidates)
    made = Alert(
        schema_version=1,
        fingerprint=fingerprint("job", Kind.SLOW_HOST, component),
        revision=revision,
        state=AlertState.FIRING if resolution is None else AlertState.RESOLVED,
        severity=Severity.WARNING,
        job_id="job",
        incarnation="0",
        kind=Kind.SLOW_HOST,
        component=component,
        onset_iteration=onset,
        detected_iteration=onset + 2,
        as_of_iteration=onset + 2 + revision,
        resolved_iteration=None if resolution is None else onset + 2 + revision,
        resolution=resolution,
        onset_time_ns=EPOCH_NS + onset * 10**8,
        as_of_time_ns=EPOCH_NS + (onset + 2) * 10**8,
        slowdown_ratio=1.31,
        lost_gpu_s=17.0,
        confidence=0.97,
        sources=(),
        evidence=(),
        causes=(),
        advice="",
    )
    return Arrival(made, EPOCH_NS + (onset + 5) * 10**8 + revision * 10**9)


def resolved(*candidates: ComponentName, onset: int = 102) -> list[Arrival]:
    return [
        arrival(*candidates, onset=onset),
        arrival(*candidates, onset=onset, revision=2, resolution=Resolution.RECOVERED),
    ]


def test_the_right_component_is_right_and_the_delay_counts_from_the_true_onset() -> None:
    ((answer,), strays) = answers([fault(NODES[3])], resolved(NODES[3]), EPOCH_NS)
    assert answer.is_right
    assert strays == []
    assert answer.delay_iterations == 3
    assert answer.delay_s is not None
    assert abs(answer.delay_s - (10.7 + 1.0 - 10.1)) < 1e-6


def test_another_component_is_wrong_and_a_stray() -> None:
    ((answer,), strays) = answers([fault(NODES[3])], resolved(NODES[5]), EPOCH_NS)
    assert not answer.is_right
    assert answer.found is None
    assert [stray.last.component.name for stray in strays] == [NODES[5]]


def test_a_larger_set_than_the_identifiable_one_is_wrong() -> None:
    ((answer,), _) = answers([fault(NODES[3])], resolved(NODES[3], NODES[5]), EPOCH_NS)
    assert not answer.is_right


def test_the_set_is_right_in_any_order() -> None:
    ((answer,), _) = answers([fault(NODES[3], NODES[5])], resolved(NODES[5], NODES[3]), EPOCH_NS)
    assert answer.is_right


def test_an_incident_without_an_end_is_not_right() -> None:
    ((answer,), _) = answers([fault(NODES[3])], [arrival(NODES[3])], EPOCH_NS)
    assert answer.found is not None
    assert not answer.is_right


def test_an_incident_answers_the_fault_whose_onset_is_the_nearest_and_no_other() -> None:
    faults = [fault(NODES[3], onset=101), fault(NODES[3], onset=307, onset_s=30.7)]
    given, strays = answers(faults, resolved(NODES[3], onset=308), EPOCH_NS)
    assert [answer.is_right for answer in given] == [False, True]
    assert strays == []


def test_information_is_no_stray() -> None:
    info = arrival(NODES[5])
    info = Arrival(msgspec.structs.replace(info.alert, severity=Severity.INFO), info.time_ns)
    _, strays = answers([fault(NODES[3])], [*resolved(NODES[3]), info], EPOCH_NS)
    assert strays == []
