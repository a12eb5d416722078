"""A GPU that only its clock and its throttle reasons can accuse: named where the job feels it, and only there."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from benchmarks.synthetic_job import SyntheticJob
from pipeline.frames import Frame, Signal
from pipeline.history import History
from pipeline.judge import Judge
from pipeline.judge_params import DEFAULTS
from pipeline.record import Record
from pipeline.suspect import Span
from pipeline.telemetry import Telemetry
from pipeline.topology import Topology
from pipeline.watch import JobWatch
from schemas.alerts import Alert, Kind, Severity
from schemas.codec import decode_iterations, encode_iterations
from schemas.events import Sensor, ThrottleReason
from schemas.iterations import IterationRows
from schemas.table import BoolArray

CULPRIT = 21
SEEN = Sensor.HOST_CALL | Sensor.NVML
THROTTLED = int(ThrottleReason.HW_THERMAL_SLOWDOWN)
Change = Callable[[IterationRows, BoolArray], dict[str, object]]


def judged(
    change: Change, slowdown: Callable[[int], float] = lambda _: 1.0, n: int = 61, sensors: Sensor = SEEN
) -> list[Alert]:
    """Judge a job of two stages without GPU times; change(rows, is_culprit) says what the samples show."""
    job = SyntheticJob(4, 2, 8, seed=7)

    def records() -> Iterator[Record]:
        for iteration in range(n):
            for record in job.records(iteration, slowdown(iteration)):
                batch = decode_iterations(record.value)
                values = {f: getattr(batch, f) for f in batch.__dataclass_fields__}
                rows = batch.rows.replace(compute_s=np.nan, communication_s=np.nan, host_wait_s=np.nan)
                values |= {"rows": rows.replace(**change(rows, rows.rank == CULPRIT)), "sensors": sensors}
                yield Record(record.topic, 0, 0, record.time_ns, record.key, encode_iterations(type(batch)(**values)))

    judge = Judge()
    return [alert for record in records() for alert in judge.handle(record)]


def slow_clock(ratio: float, since: int = 0, reason: int = THROTTLED) -> Change:
    def change(rows: IterationRows, is_culprit: BoolArray) -> dict[str, object]:
        is_slow = is_culprit & (rows.iteration >= since)
        return {
            "sm_clock_ratio": np.where(is_slow, ratio, 1.0),
            "throttle_reasons": np.where(is_slow, reason, 0),
        }

    return change


def test_a_gpu_throttled_from_the_first_iteration_is_named_by_its_clock() -> None:
    firing = judged(slow_clock(0.5))[0]
    assert (firing.kind, firing.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00021")
    assert firing.onset_iteration == 0
    assert firing.detected_iteration <= 20
    # Two stages with four micro-batches compute for four turns of five, and communicate for a tenth of the time.
    assert firing.slowdown_ratio == pytest.approx(1 + 0.9 * 0.8, abs=0.01)
    assert any("assumed" in one.what for one in firing.evidence)


def test_it_is_resolved_when_its_clock_is_back() -> None:
    def change(rows: IterationRows, is_culprit: BoolArray) -> dict[str, object]:
        return {"sm_clock_ratio": np.where(is_culprit & (rows.iteration < 31), 0.5, 1.0), "throttle_reasons": 1 << 6}

    assert judged(change) == []  # everybody is throttled: that is how this fleet runs
    alerts = judged(lambda rows, is_culprit: change(rows, is_culprit) | {"throttle_reasons": is_culprit * (1 << 6)})
    assert alerts[-1].resolved_iteration == 31


@pytest.mark.parametrize("ratio", [1.0, 0.93])
def test_throttle_reasons_without_a_clock_that_costs_a_tenth_accuse_nobody(ratio: float) -> None:
    assert judged(slow_clock(ratio, reason=int(ThrottleReason.SW_POWER_CAP))) == []


def test_a_low_clock_without_a_throttle_reason_accuses_nobody() -> None:
    assert judged(slow_clock(0.5, reason=0)) == []


def test_a_low_clock_that_makes_the_job_no_slower_accuses_nobody_however_long_it_lasts() -> None:
    assert judged(slow_clock(0.6, since=61), n=241) == []


def test_throttle_reasons_beside_a_high_clock_accuse_nobody_of_a_slowdown() -> None:
    change = slow_clock(1.0, reason=int(ThrottleReason.SW_POWER_CAP))
    alerts = judged(change, lambda iteration: 1.4 if iteration >= 61 else 1.0, n=97)
    assert {(alert.kind, alert.severity) for alert in alerts} == {(Kind.SLOW_JOB, Severity.WARNING)}


def test_where_computation_is_seen_a_clock_alone_accuses_nobody() -> None:
    assert judged(slow_clock(0.5), sensors=SEEN | Sensor.GPU) == []


def suspected(clock: list[float], onset: int) -> list[str]:
    """Return which GPUs the samples make suspects of a slowdown since a frame, by the fourth one's clock in each."""
    topology, history = Topology(8), History(8)
    (record,) = SyntheticJob(1, 1, 8, seed=7).records(0, 1.0)
    batch = decode_iterations(record.value)
    topology.learn(batch.node, batch.ranks, batch.communicators, batch.rows.rank)
    for number, ratio in enumerate(clock):
        frame = Frame.empty(number, 8, 0)
        frame.signal(Signal.SM_CLOCK)[:] = np.where(np.arange(8) == 3, ratio, 1.0)
        history.push(frame, 1.0, np.empty(0), np.ones(8, bool))
    telemetry = Telemetry(history, topology, DEFAULTS, np.arange(8) == 3)
    span = Span(start=onset, stop=len(clock), reference_start=onset - 30, reference_stop=onset)
    return [one.component.name.gpu for one in telemetry.suspects(span, 0.1, JobWatch(1.0))]


@pytest.mark.parametrize(
    ("clock", "is_reason"),
    [
        ([1.0] * 30 + [0.8] * 8, True),
        ([0.8] * 38, False),
        ([1.0] * 20 + [0.83] * 10 + [0.8] * 8, True),  # it has been falling
        ([0.8] * 22 + [1.0] * 8 + [0.8] * 8, True),  # it comes and goes
        ([0.8] * 26 + [1.0] * 4 + [0.8] * 8, True),
        ([1.0] * 36 + [0.8] * 2, True),  # its last sample is the first of the slowdown
    ],
)
def test_a_clock_is_a_reason_for_what_came_with_its_fall(clock: list[float], *, is_reason: bool) -> None:
    assert suspected(clock, 30) == (["GPU-00003"] if is_reason else [])
