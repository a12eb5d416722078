"""Every incident of a job says how many of its ranks no agent reports, as long as that is so."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.synthetic_job import SyntheticJob
from pipeline.judge import Judge
from schemas.alerts import Alert, AlertState, Kind, Severity
from schemas.codec import decode_iterations
from schemas.table import FloatArray

WORLD, CULPRIT, ONSET, N = 64, 21, 61, 241
PER_NODE = 8


def judged(
    slowdown: Callable[[int], FloatArray | float], n: int = N, silent: frozenset[str] = frozenset(), until: int = N
) -> list[Alert]:
    """Judge a job of which some nodes are not heard of until an iteration."""
    job, judge = SyntheticJob(4, 2, 8, seed=7), Judge()
    return [
        alert
        for i in range(n)
        for record in job.records(i, slowdown(i))
        if i >= until or decode_iterations(record.value).node not in silent
        for alert in judge.handle(record)
    ]


def one_gpu(iteration: int) -> FloatArray:
    factors = np.ones(WORLD)
    factors[CULPRIT] = 1.4 if iteration >= ONSET else 1.0
    return factors


def whole_job(iteration: int) -> float:
    return 1.3 if iteration >= ONSET else 1.0


def unreported(alert: Alert) -> list[float]:
    return [e.value for e in alert.evidence if e.what.startswith("ranks that no agent reports")]


def silent_node() -> frozenset[str]:
    """Return the last node: the culprit is on another one."""
    *_, last = SyntheticJob(4, 2, 8, seed=7).records(0, 1.0)
    return frozenset({decode_iterations(last.value).node})


@pytest.mark.parametrize(("slowdown", "kind"), [(one_gpu, Kind.SLOW_GPU), (whole_job, Kind.SLOW_JOB)])
def test_an_incident_of_any_kind_says_it_whenever_it_is_restated(
    slowdown: Callable[[int], FloatArray | float], kind: Kind
) -> None:
    alerts = judged(slowdown, silent=silent_node())
    assert len(alerts) >= 2
    assert {alert.kind for alert in alerts} == {kind}
    assert [unreported(alert) for alert in alerts] == [[PER_NODE]] * len(alerts)


def test_a_job_that_grew_from_information_to_an_incident_says_it() -> None:
    alerts = judged(lambda i: 1.0 + 0.07 * (i >= ONSET) + 0.07 * (i >= ONSET + 40), silent=silent_node())
    assert alerts[0].severity is Severity.INFO
    accusing = [alert for alert in alerts if alert.severity is not Severity.INFO]
    assert accusing
    assert all(unreported(alert) == [PER_NODE] for alert in accusing)


def test_it_says_so_no_longer_once_the_node_is_heard_of() -> None:
    firing, *rest = judged(one_gpu, silent=silent_node(), until=ONSET + 40)
    assert firing.state is AlertState.FIRING
    assert unreported(firing) == [PER_NODE]
    assert unreported(rest[-1]) == []


def test_a_job_that_is_reported_whole_says_nothing_of_it() -> None:
    assert [unreported(alert) for alert in judged(one_gpu, n=ONSET + 23)] == [[]]
