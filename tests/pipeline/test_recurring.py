"""Short slowdowns of the whole job: one is no incident, a second one like it is, and pauses are none."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.synthetic_job import SyntheticJob
from pipeline.judge import Judge
from schemas.alerts import Alert, AlertState, Kind

ONSET, N = 61, 181


def judged(slowdown: Callable[[int], float]) -> list[Alert]:
    job, judge = SyntheticJob(2, 1, 8, seed=7), Judge()
    # Each iteration has some noise of its own.
    noise = np.random.default_rng(11).normal(1.0, 0.02, N)
    return [
        alert
        for i in range(N)
        for record in job.records(i, slowdown(i) * float(noise[i]))
        for alert in judge.handle(record)
    ]


def spells(*lengths: int, gap: int = 7, size: float = 1.15, second: float | None = None) -> Callable[[int], float]:
    """Return slow spells of these lengths from ONSET on, `gap` iterations apart; all but the first by `second`."""
    slow: dict[int, float] = {}
    start = ONSET
    for number, length in enumerate(lengths):
        slow |= dict.fromkeys(range(start, start + length), size if number == 0 else second or size)
        start += length + gap
    return lambda iteration: slow.get(iteration, 1.0)


def test_a_second_spell_like_the_first_is_told_with_the_onset_of_the_first() -> None:
    alerts = judged(spells(5, 5))
    firing = alerts[0]
    assert (firing.kind, firing.state, firing.onset_iteration) == (Kind.SLOW_JOB, AlertState.FIRING, ONSET)
    assert firing.detected_iteration == ONSET + 5 + 7 + 3
    assert {alert.fingerprint for alert in alerts} == {firing.fingerprint}


def test_spells_that_go_on_are_one_incident() -> None:
    alerts = judged(spells(5, 5, 5, 5, 5, 5, 5, 5))
    assert len({alert.fingerprint for alert in alerts}) == 1
    *firing, resolved = alerts
    assert {alert.state for alert in firing} == {AlertState.FIRING}
    assert resolved.resolved_iteration is not None
    assert resolved.resolved_iteration >= ONSET + 7 * 12 + 5


def test_noisy_spells_with_long_pauses_are_one_incident_from_the_second_on() -> None:
    slowdown, noise = spells(7, 7, 7, 7, gap=11, size=2.1), np.random.default_rng(13).standard_normal(N)
    firing, *updates, resolved = judged(lambda i: slowdown(i) * float(np.exp(0.07 * noise[i])))
    assert (firing.kind, firing.detected_iteration) == (Kind.SLOW_JOB, ONSET + 7 + 11 + 3)
    assert {alert.state for alert in updates} <= {AlertState.FIRING}
    assert resolved.as_of_iteration >= ONSET + 3 * (7 + 11) + 7 + 10


@pytest.mark.parametrize(
    "slowdown",
    [
        spells(5),
        spells(3, 3, 3, 3, 3),
        spells(5, 3, 3),
        spells(5, 5, gap=67),
        spells(5, 5, gap=17, second=1.5),
    ],
    ids=["one", "pauses", "pauses after one", "far apart", "another size"],
)
def test_what_does_not_come_back_alike_is_no_incident(slowdown: Callable[[int], float]) -> None:
    assert judged(slowdown) == []
