"""A job of one rank that reports nothing but noisy iteration times: what is said of it, and what is not."""

import numpy as np

from benchmarks.quality.chain import one_rank_records
from pipeline.judge import Judge
from schemas.alerts import Alert, AlertState, Kind, Severity
from schemas.table import FloatArray

ONSET = 197


def judged(times_s: FloatArray) -> list[Alert]:
    judge = Judge()
    return [alert for record in one_rank_records(times_s) for alert in judge.handle(record)]


def noise(seed: int, n: int, cv: float) -> FloatArray:
    times_s: FloatArray = np.exp(cv * np.random.default_rng(seed).standard_normal(n))
    return times_s


def test_a_slowdown_within_the_noise_is_one_incident_that_stays() -> None:
    n_found = 0
    for seed in range(7):
        times_s = noise(seed, 331, 0.1)
        times_s[ONSET:] *= 1.12
        alerts = judged(times_s)
        fired = [alert for alert in alerts if alert.as_of_iteration == alert.detected_iteration]
        assert len(fired) <= 1, f"seed {seed}"
        assert AlertState.RESOLVED not in {alert.state for alert in alerts}, f"seed {seed}"
        n_found += len(fired)
    assert n_found >= 6


def test_noise_raises_no_slowdown_of_six_percent_above_information() -> None:
    for seed in range(5):
        times_s = noise(seed, 701, 0.05)
        times_s[ONSET:] *= 1.06
        alerts = judged(times_s)
        assert alerts
        later = [alert for alert in alerts if alert.as_of_iteration != alert.detected_iteration]
        assert all(alert.severity is alerts[0].severity for alert in later), f"seed {seed}"


def test_a_slowdown_of_nearly_a_tenth_is_more_than_information_once_it_has_lasted() -> None:
    for seed in range(5):
        times_s = noise(seed, 301, 0.01)
        times_s[ONSET:] *= 1.085
        first, *later = judged(times_s)
        assert (first.severity, first.detected_iteration - ONSET < 10) == (Severity.INFO, True), f"seed {seed}"
        raised = next(alert for alert in later if alert.severity is Severity.WARNING)
        assert 22 <= raised.as_of_iteration - first.as_of_iteration <= 36, f"seed {seed}"
        assert raised.fingerprint == first.fingerprint


def test_what_recovers_in_part_is_restated_with_what_is_left() -> None:
    times_s = noise(3, 431, 0.01)
    times_s[ONSET:] *= 1.4
    times_s[ONSET + 61 :] *= 1.12 / 1.4
    alerts = judged(times_s)
    assert {alert.kind for alert in alerts} == {Kind.SLOW_JOB}
    assert AlertState.RESOLVED not in {alert.state for alert in alerts}
    assert abs(alerts[-1].slowdown_ratio - 1.12) < 0.02
    assert alerts[-1].severity is Severity.WARNING
    assert min(a.as_of_iteration for a in alerts if a.slowdown_ratio < 1.2) - (ONSET + 61) <= 50


def test_a_spell_that_is_over_when_it_has_been_looked_at_is_passed_over() -> None:
    times_s = noise(4, 401, 0.02)
    times_s[ONSET : ONSET + 3] *= 2.0
    assert judged(times_s) == []
