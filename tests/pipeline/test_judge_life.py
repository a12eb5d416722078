"""The life of an incident: it grows with what the job loses, and a fault that comes and goes is one."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from benchmarks.synthetic_job import SyntheticJob
from pipeline.judge import Judge
from pipeline.record import Record
from schemas.alerts import Alert, AlertState, Kind, Resolution, Severity
from schemas.codec import decode_iterations, encode_iterations
from schemas.events import Sensor, ThrottleReason
from schemas.table import FloatArray

ONSET, CULPRIT = 61, 21


def judged(
    slowdown: Callable[[int], FloatArray | float], n: int, sensors: Sensor, clock: Callable[[int], float] | None = None
) -> list[Alert]:
    """Judge a job; without Sensor.GPU nobody sees computation, and the culprit's clock is what `clock` says."""
    job = SyntheticJob(2, 1, 8, seed=7)

    def records() -> Iterator[Record]:
        for iteration in range(n):
            for record in job.records(iteration, slowdown(iteration)):
                batch = decode_iterations(record.value)
                values = {f: getattr(batch, f) for f in batch.__dataclass_fields__} | {"sensors": sensors}
                if not sensors & Sensor.GPU:
                    ratio = np.where(batch.rows.rank == CULPRIT % 16, clock(iteration) if clock else 1.0, 1.0)
                    values["rows"] = batch.rows.replace(
                        compute_s=np.nan,
                        communication_s=np.nan,
                        host_wait_s=np.nan,
                        sm_clock_ratio=ratio,
                        throttle_reasons=np.where(ratio < 1, int(ThrottleReason.HW_SLOWDOWN), 0),
                    )
                yield Record(record.topic, 0, 0, record.time_ns, record.key, encode_iterations(type(batch)(**values)))

    judge = Judge()
    return [alert for record in records() for alert in judge.handle(record)]


def stairs(iteration: int) -> float:
    """Return five steps of 6 %, the first at ONSET, each 23 iterations long."""
    return 1 + 0.06 * min(max((iteration - ONSET) // 23 + 1, 0), 5)


def test_information_about_a_job_becomes_a_warning_with_all_that_it_has_lost() -> None:
    first, *rest = judged(stairs, 211, Sensor.HOST_CALL)
    assert (first.kind, first.severity) == (Kind.SLOW_JOB, Severity.INFO)
    raised = next(alert for alert in rest if alert.severity is Severity.WARNING)
    assert (raised.kind, raised.fingerprint) == (Kind.SLOW_JOB, first.fingerprint)
    assert raised.as_of_iteration - (ONSET + 23) <= 23
    assert 1.10 <= raised.slowdown_ratio <= 1.20
    assert rest[-1].slowdown_ratio >= 1.2


def test_it_accuses_its_culprit_once_that_can_be_seen() -> None:
    alerts = judged(stairs, 211, Sensor.HOST_CALL | Sensor.NVML, lambda iteration: 1 / stairs(iteration))
    accusing = [alert for alert in alerts if alert.severity is not Severity.INFO]
    assert {alert.kind for alert in accusing} == {Kind.SLOW_GPU}
    assert accusing[0].detected_iteration - (ONSET + 23) <= 23
    superseded = next(alert for alert in alerts if alert.state is AlertState.RESOLVED)
    assert (superseded.kind, superseded.resolution) == (Kind.SLOW_JOB, Resolution.SUPERSEDED)


def test_information_that_does_not_grow_stays_information() -> None:
    alerts = judged(lambda i: 1.07 if i >= ONSET else 1.0, 211, Sensor.HOST_CALL)
    assert {alert.severity for alert in alerts} == {Severity.INFO}


@pytest.mark.parametrize(("period", "there"), [(11, 4), (23, 9), (29, 13)])
def test_a_fault_that_comes_and_goes_is_one_incident(period: int, there: int) -> None:
    def slowdown(iteration: int) -> FloatArray:
        factors = np.ones(16)
        factors[5] = 1.5 if iteration >= ONSET and (iteration - ONSET) % period < there else 1.0
        return factors

    alerts = judged(slowdown, ONSET + 5 * period, Sensor.HOST_CALL | Sensor.GPU | Sensor.SYNC)
    assert len({alert.fingerprint for alert in alerts}) == 1
    assert [alert for alert in alerts if alert.state is AlertState.RESOLVED] == []


@pytest.mark.parametrize("lasts", [13, 47])
def test_a_fault_that_does_not_come_back_is_resolved_as_of_its_end(lasts: int) -> None:
    def slowdown(iteration: int) -> FloatArray:
        factors = np.ones(16)
        factors[5] = 1.5 if ONSET <= iteration < ONSET + lasts else 1.0
        return factors

    resolved = judged(slowdown, ONSET + lasts + 3 * 13, Sensor.HOST_CALL | Sensor.GPU | Sensor.SYNC)[-1]
    assert resolved.resolution is Resolution.RECOVERED
    assert resolved.resolved_iteration == ONSET + lasts


def test_what_came_on_top_of_a_fault_is_measured_anew_when_that_is_over() -> None:
    """A job of 1.5 s gets slower by 8 %: 12 % of what is left when the GPU that made it so slow has recovered."""

    def slowdown(iteration: int) -> FloatArray:
        factors = np.full(16, 1.12 if iteration >= ONSET + 23 else 1.0)
        factors[5] = 1.5 if ONSET <= iteration < ONSET + 47 else factors[5]
        factors[5] *= 1.08 if iteration >= ONSET + 23 and factors[5] == 1.5 else 1.0
        return factors

    alerts = judged(slowdown, ONSET + 2 * 47, Sensor.HOST_CALL | Sensor.GPU | Sensor.SYNC)
    of_job = [alert for alert in alerts if alert.kind is Kind.SLOW_JOB]
    assert of_job[0].severity is Severity.INFO
    assert of_job[-1].severity is Severity.WARNING
    assert of_job[-1].slowdown_ratio == pytest.approx(1.12, abs=0.02)


def test_a_first_stair_too_small_to_be_told_counts_all_the_same() -> None:
    def slowdown(iteration: int) -> float:
        return 1.0 + 0.035 * (iteration >= ONSET) + 0.07 * (iteration >= ONSET + 31)

    alerts = judged(slowdown, ONSET + 61, Sensor.HOST_CALL)
    assert (alerts[0].severity, alerts[-1].severity) == (Severity.INFO, Severity.WARNING)
