"""A late rank: its GPU, or the host that gives it too little to do, too late, or no time at all."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from benchmarks.synthetic_job import SyntheticJob
from pipeline.judge import Judge
from pipeline.record import Record
from schemas.alerts import Alert, Kind
from schemas.codec import decode_iterations, encode_iterations
from schemas.events import Sensor
from schemas.iterations import IterationRows
from schemas.table import BoolArray

ONSET, N = 61, 97
CULPRIT = 21
NODE = "node-0002"


def judged(
    factor: float,
    change: Callable[[IterationRows, BoolArray], IterationRows],
    sensors: Sensor | None = None,
) -> list[Alert]:
    """Judge a job in which one rank computes `factor` times as long; change(rows, is_culprit) says what else is so."""
    job = SyntheticJob(4, 2, 8, seed=7)

    def records() -> Iterable[Record]:
        for iteration in range(N):
            slowdown = np.ones(job.world_size)
            slowdown[CULPRIT] = factor if iteration >= ONSET else 1.0
            for record in job.records(iteration, slowdown):
                batch = decode_iterations(record.value)
                values = {f: getattr(batch, f) for f in batch.__dataclass_fields__}
                values["rows"] = change(batch.rows, batch.rows.rank == CULPRIT)
                values["sensors"] = sensors if sensors is not None else batch.sensors
                yield Record(record.topic, 0, 0, record.time_ns, record.key, encode_iterations(type(batch)(**values)))

    judge = Judge()
    return [alert for record in records() for alert in judge.handle(record)]


def since_onset(rows: IterationRows) -> BoolArray:
    found: BoolArray = rows.iteration >= ONSET
    return found


def test_whether_a_late_host_is_the_reason_is_waited_for_where_it_may_be() -> None:
    """Its times vary so much that the first iterations cannot tell, while the GPU's tell at once that it was late."""
    random = np.random.default_rng(5)

    def change(rows: IterationRows, is_culprit: BoolArray) -> IterationRows:
        late_s = 0.06 * random.standard_normal(len(rows)) + np.where(is_culprit & since_onset(rows), 0.2, 0.0)
        return rows.replace(host_wait_s=rows.host_wait_s - late_s)

    firing = judged(1.3, change)[0]
    assert (firing.kind, firing.component.name.node) == (Kind.SLOW_HOST, NODE)
    assert 3 < firing.detected_iteration - ONSET <= 8


KEPT = [
    ("stopped_ratio", "a debugger, checkpointer or operator that stops the process"),
    ("throttled_ratio", "CPU quota of its container or control group"),
    ("blocked_ratio", "slow storage or data loading"),
]


@pytest.mark.parametrize(("signal", "cause"), KEPT)
def test_a_process_that_is_kept_from_running_makes_its_host_slow_and_not_its_gpu(signal: str, cause: str) -> None:
    def change(rows: IterationRows, is_culprit: BoolArray) -> IterationRows:
        return rows.replace(**{signal: np.where(is_culprit & since_onset(rows), 0.27, 0.01)})

    firing = judged(1.4, change)[0]
    assert (firing.kind, firing.component.name.node, len(firing.component.candidates)) == (Kind.SLOW_HOST, NODE, 1)
    assert firing.detected_iteration - ONSET <= 3
    assert firing.causes[0] == cause


@pytest.mark.parametrize("signal", [signal for signal, _ in KEPT])
def test_what_was_usual_before_does_not_excuse_a_gpu(signal: str) -> None:
    def change(rows: IterationRows, is_culprit: BoolArray) -> IterationRows:
        return rows.replace(**{signal: np.where(is_culprit, 0.27, 0.01)})

    firing = judged(1.4, change)[0]
    assert (firing.kind, firing.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00021")


def test_what_explains_little_does_not_excuse_a_gpu() -> None:
    def change(rows: IterationRows, is_culprit: BoolArray) -> IterationRows:
        return rows.replace(blocked_ratio=np.where(is_culprit & since_onset(rows), 0.07, 0.0))

    assert judged(1.7, change)[0].kind is Kind.SLOW_GPU


def test_a_host_that_is_late_by_as_much_as_its_gpu_is_the_reason() -> None:
    """Even if most of the iteration is the GPU's: half of it is not the host's in any healthy job."""

    def change(rows: IterationRows, is_culprit: BoolArray) -> IterationRows:
        late_s = np.where(is_culprit & since_onset(rows), 0.2, 0.0)
        assert (rows.duration_s - rows.host_wait_s + late_s < 0.5 * rows.duration_s).all()
        return rows.replace(host_wait_s=rows.host_wait_s - late_s)

    firing = judged(1.2, change)[0]
    assert (firing.kind, firing.component.name.node) == (Kind.SLOW_HOST, NODE)
    assert firing.sources[0] == "sync"


def test_a_host_that_is_late_by_little_is_not() -> None:
    def change(rows: IterationRows, is_culprit: BoolArray) -> IterationRows:
        return rows.replace(host_wait_s=rows.host_wait_s - np.where(is_culprit & since_onset(rows), 0.08, 0.0))

    assert judged(1.3, change)[0].kind is Kind.SLOW_GPU


@pytest.mark.parametrize(("signal", "cause"), [*KEPT, ("run_queue_ratio", "CPU contention by another process")])
def test_where_no_time_tells_the_kernel_s_word_makes_a_suspect(signal: str, cause: str) -> None:
    random = np.random.default_rng(3)

    def change(rows: IterationRows, is_culprit: BoolArray) -> IterationRows:
        noise = np.abs(0.02 * random.standard_normal(len(rows)))
        kept = {signal: np.where(is_culprit & since_onset(rows), 0.35, noise)}
        return rows.replace(compute_s=np.nan, communication_s=np.nan, host_wait_s=np.nan, **kept)

    firing = judged(1.4, change, Sensor.HOST_CALL | Sensor.HOST)[0]
    assert (firing.kind, firing.component.name.node) == (Kind.SLOW_HOST, NODE)
    assert firing.causes[0] == cause


def test_a_queue_that_is_as_long_at_times_anyway_makes_no_suspect() -> None:
    random = np.random.default_rng(3)

    def change(rows: IterationRows, is_culprit: BoolArray) -> IterationRows:
        queue = np.where(is_culprit, random.choice([0.0, 0.2, 0.4], len(rows)), 0.0)
        queue += np.where(is_culprit & since_onset(rows), 0.1, 0.0)
        return rows.replace(compute_s=np.nan, communication_s=np.nan, host_wait_s=np.nan, run_queue_ratio=queue)

    assert {alert.kind for alert in judged(1.4, change, Sensor.HOST_CALL | Sensor.HOST)} == {Kind.SLOW_JOB}


def test_a_host_that_became_late_is_not_accused_where_the_job_is_as_fast_as_before() -> None:
    """Without the GPU's times a busy host looks like one that holds the job up, and only the job tells otherwise."""
    sensors = Sensor.HOST_CALL | Sensor.SYNC

    def late(rows: IterationRows, is_late: BoolArray) -> IterationRows:
        wait_s = rows.host_wait_s - np.where(is_late, 0.6, 0.0)
        return rows.replace(compute_s=np.nan, communication_s=np.nan, host_wait_s=wait_s)

    assert judged(1.0, lambda rows, is_culprit: late(rows, is_culprit & since_onset(rows)), sensors) == []
    from_start = judged(1.0, late, sensors)
    assert {(alert.kind, alert.component.name.node) for alert in from_start} == {(Kind.SLOW_HOST, NODE)}
