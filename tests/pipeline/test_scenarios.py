"""Every scenario of the repository, judged with the defaults: exactly the identifiable set, and nobody else."""

import pytest

from agents.simulated.labels import Expected, expected
from pipeline.observer import Counting
from schemas.alerts import Alert, AlertState, Kind, Resolution, Severity
from tests.pipeline.simulation import SCENARIOS, alerts_of, event_records, scenario

NAMES = sorted(path.stem for path in SCENARIOS.glob("*.toml"))
DELAY_MAX = 10  # iterations
RAMP_DELAY_MAX = 40  # a ramp has to become a slowdown first
FROM_START_DELAY_MAX = 20


@pytest.fixture(scope="module", params=NAMES)
def judged(request: pytest.FixtureRequest) -> tuple[str, list[Alert], tuple[Expected, ...]]:
    name: str = request.param
    print(f"scenario {name}, seed {scenario(name).seed}")  # noqa: T201 -- shown with a failure
    return name, alerts_of(event_records(scenario(name)), Counting()), expected(scenario(name))


def accusing(alerts: list[Alert]) -> list[Alert]:
    return [a for a in alerts if a.severity is not Severity.INFO]


def about(alerts: list[Alert], answer: Expected) -> list[Alert]:
    return [a for a in alerts if a.kind is answer.kind and frozenset(a.component.candidates) == answer.candidates]


def test_every_visible_fault_is_named_by_exactly_its_identifiable_set(
    judged: tuple[str, list[Alert], tuple[Expected, ...]],
) -> None:
    name, alerts, answers = judged
    for answer in answers:
        if not answer.visible:
            continue
        said = about(accusing(alerts), answer)
        assert said, f"{name}: nobody said {answer}"
        firing = said[0]
        allowed = RAMP_DELAY_MAX if "ramp" in name else DELAY_MAX if answer.onset_iteration else FROM_START_DELAY_MAX
        assert firing.state is AlertState.FIRING
        assert 0 <= firing.detected_iteration - answer.onset_iteration <= allowed
        assert abs(firing.onset_iteration - answer.onset_iteration) <= (20 if "ramp" in name else 2)


def test_nobody_else_is_accused(judged: tuple[str, list[Alert], tuple[Expected, ...]]) -> None:
    _, alerts, answers = judged
    right = [a for answer in answers if answer.visible for a in about(accusing(alerts), answer)]
    assert [a for a in accusing(alerts) if a not in right] == []


def test_every_incident_ends_and_with_the_right_reason(
    judged: tuple[str, list[Alert], tuple[Expected, ...]],
) -> None:
    _, alerts, answers = judged
    last = {a.fingerprint: a for a in alerts}
    assert {a.state for a in last.values()} <= {AlertState.RESOLVED}
    for answer in answers:
        if answer.visible and answer.end_iteration is not None:
            final = about(accusing(alerts), answer)[-1]
            assert final.resolution is Resolution.RECOVERED
            assert final.resolved_iteration is not None
            assert -12 <= final.resolved_iteration - answer.end_iteration <= 3


def test_revisions_of_an_incident_count_up_from_one(judged: tuple[str, list[Alert], tuple[Expected, ...]]) -> None:
    _, alerts, _ = judged
    for fingerprint in {a.fingerprint for a in alerts}:
        revisions = [a.revision for a in alerts if a.fingerprint == fingerprint]
        assert revisions == list(range(1, len(revisions) + 1))


def test_information_accuses_no_component(judged: tuple[str, list[Alert], tuple[Expected, ...]]) -> None:
    _, alerts, _ = judged
    kinds = {a.kind for a in alerts if a.severity is Severity.INFO}
    assert kinds <= {Kind.SLOW_JOB, Kind.STAGE_IMBALANCE, Kind.DATA_IMBALANCE}
