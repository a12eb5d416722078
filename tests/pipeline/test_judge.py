"""The judge on synthetic iteration batches: what it names, what it leaves alone, and the laws it keeps."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from benchmarks.synthetic_job import SyntheticJob
from pipeline.judge import Judge
from pipeline.observer import Counting
from pipeline.record import Record
from schemas.alerts import Alert, AlertState, ComponentType, Kind, Resolution, Severity
from schemas.codec import InvalidRecord, decode_alert, decode_iterations, encode_alert, encode_iterations
from schemas.events import Sensor
from schemas.table import FloatArray

ONSET, END, N = 61, 113, 151
CULPRIT = 21


def records(job: SyntheticJob, slowdown: Callable[[int], FloatArray | float], n: int = N) -> list[Record]:
    return [record for i in range(n) for record in job.records(i, slowdown(i))]


def judged(given: Iterable[Record], judge: Judge | None = None) -> list[Alert]:
    judge = judge or Judge()
    return [alert for record in given for alert in judge.handle(record)]


def one_slow_rank(factor: float, onset: int = ONSET, end: int = END) -> Callable[[int], FloatArray]:
    def slowdown(iteration: int) -> FloatArray:
        factors = np.ones(64)
        factors[CULPRIT] = factor if onset <= iteration < end else 1.0
        return factors

    return slowdown


def job(**changes: object) -> SyntheticJob:
    return SyntheticJob(4, 2, 8, seed=7, **changes)  # type: ignore[arg-type]


def test_a_healthy_job_gives_no_alert() -> None:
    assert judged(records(job(), lambda _: 1.0)) == []


def test_a_slow_gpu_is_named_with_its_onset_and_resolved() -> None:
    firing, *updates, resolved = judged(records(job(), one_slow_rank(1.4)))
    assert (firing.kind, firing.state, firing.component.name.gpu) == (Kind.SLOW_GPU, AlertState.FIRING, "GPU-00021")
    assert len(firing.component.candidates) == 1
    assert firing.onset_iteration == ONSET
    assert firing.detected_iteration - ONSET <= 3
    assert firing.slowdown_ratio == pytest.approx(1.38, abs=0.04)
    assert (resolved.state, resolved.resolution) == (AlertState.RESOLVED, Resolution.RECOVERED)
    assert resolved.resolved_iteration == END
    assert {a.fingerprint for a in [*updates, resolved]} == {firing.fingerprint}
    assert [a.revision for a in [firing, *updates, resolved]] == list(range(1, len(updates) + 3))


def test_lost_gpu_seconds_are_those_of_the_whole_job() -> None:
    resolved = judged(records(job(), one_slow_rank(1.4)))[-1]
    assert resolved.lost_gpu_s == pytest.approx(64 * 0.38 * (END - ONSET), rel=0.1)


def test_a_gpu_slow_from_the_first_iteration_is_named_by_its_peers() -> None:
    firing = judged(records(job(), one_slow_rank(1.4, onset=0), n=29))[0]
    assert (firing.kind, firing.component.name.gpu, firing.onset_iteration) == (Kind.SLOW_GPU, "GPU-00021", 0)
    assert firing.detected_iteration <= 20


def test_all_ranks_slower_alike_accuse_the_job_and_no_component() -> None:
    alerts = judged(records(job(), lambda i: 1.3 if i >= ONSET else 1.0))
    assert [(a.kind, a.component.type) for a in alerts] == [(Kind.SLOW_JOB, ComponentType.JOB)]


@pytest.mark.parametrize(("factor", "end"), [(1.09, END), (1.11, ONSET + 12)])  # a job of 64 feels less of it
def test_a_small_or_passing_slowdown_below_ten_percent_is_information_about_the_job(factor: float, end: int) -> None:
    alerts = judged(records(job(), one_slow_rank(factor, end=end)))
    assert {(a.kind, a.severity, a.component.type) for a in alerts} == {
        (Kind.SLOW_JOB, Severity.INFO, ComponentType.JOB)
    }


def test_a_culprit_of_nearly_ten_percent_is_accused_once_it_has_lasted() -> None:
    alerts = judged(records(job(noise=0.001), one_slow_rank(1.088)))
    information, superseded, firing = alerts[:3]
    assert (information.kind, information.severity) == (Kind.SLOW_JOB, Severity.INFO)
    assert superseded.resolution is Resolution.SUPERSEDED
    assert (firing.kind, firing.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00021")
    assert firing.severity is Severity.WARNING
    assert firing.as_of_iteration - information.as_of_iteration >= 22
    assert len({alert.fingerprint for alert in alerts}) == 2


def test_a_culprit_whose_times_got_lost_when_it_became_slow_is_waited_for() -> None:
    def lossy(record: Record) -> Record:
        batch = decode_iterations(record.value)
        is_lost = np.isin(batch.rows.iteration, range(ONSET, ONSET + 6)) & (batch.rows.rank // 8 == CULPRIT // 8)
        return changed(record, rows=batch.rows.replace(compute_s=np.where(is_lost, np.nan, batch.rows.compute_s)))

    firing = judged(map(lossy, records(job(), one_slow_rank(1.4))))[0]
    assert (firing.kind, firing.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00021")
    assert firing.onset_iteration == ONSET


def test_a_job_that_slows_down_while_it_gets_under_way_is_told_once_that_lasts() -> None:
    (said,) = judged(records(job(), lambda i: 1.2 if i >= 26 else 1.0))[:1]
    assert (said.kind, said.onset_iteration) == (Kind.SLOW_JOB, 26)
    assert 25 <= said.detected_iteration - 26 <= 35


def test_a_gpu_that_slows_down_just_after_the_whole_job_did_is_found_as_soon() -> None:
    second = ONSET + 5

    def slowdown(iteration: int) -> FloatArray:
        factors = np.full(64, 1.08 if iteration >= ONSET else 1.0)
        factors[CULPRIT] *= 2.0 if iteration >= second else 1.0
        return factors

    firing = next(a for a in judged(records(job(), slowdown)) if a.severity is not Severity.INFO)
    assert (firing.kind, firing.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00021")
    assert firing.detected_iteration - second <= 3
    assert firing.slowdown_ratio > 1.8


def test_one_long_iteration_is_no_incident() -> None:
    assert judged(records(job(), lambda i: 6.0 if i % 37 == 36 else 1.0)) == []


def test_without_gpu_times_a_slow_gpu_leaves_the_component_unknown() -> None:
    def host_only(record: Record) -> Record:
        batch = decode_iterations(record.value)
        rows = batch.rows.replace(compute_s=np.nan, communication_s=np.nan, sm_clock_ratio=np.nan)
        changed = {f: getattr(batch, f) for f in batch.__dataclass_fields__}
        changed |= {
            "rows": rows,
            "sensors": Sensor.HOST_CALL,
            "communication": batch.communication.replace(busy_s=np.nan, least_s=np.nan),
        }
        return Record(record.topic, 0, 0, record.time_ns, record.key, encode_iterations(type(batch)(**changed)))

    alerts = judged(map(host_only, records(job(), one_slow_rank(1.4))))
    assert {(a.kind, a.component.type) for a in alerts} == {(Kind.SLOW_JOB, ComponentType.JOB)}


def test_the_order_of_nodes_within_an_iteration_changes_nothing() -> None:
    given = records(job(), one_slow_rank(1.4))
    random = np.random.default_rng(11)
    nodes = job().n_nodes
    shuffled = [given[i * nodes + int(k)] for i in range(N) for k in random.permutation(nodes)]
    assert judged(shuffled) == judged(given)


def test_duplicated_batches_change_nothing_and_are_counted() -> None:
    given = records(job(), one_slow_rank(1.4))
    observer = Counting()
    assert judged([r for r in given for _ in range(2)], Judge(observer)) == judged(given)
    assert observer.counts["batches_duplicate"] == len(given)


def test_two_jobs_in_one_stream_do_not_touch_each_other() -> None:
    slow, fine = records(job(), one_slow_rank(1.4)), records(job(job_id="other"), lambda _: 1.0)
    both = [r for pair in zip(slow, fine, strict=True) for r in pair]
    assert judged(both) == judged(slow)


def test_a_silent_node_is_unknown_and_delays_only_one_frame() -> None:
    given = records(job(), one_slow_rank(1.4))
    nodes = job().n_nodes
    present = [r for i, r in enumerate(given) if i % nodes != 5 or i < 20 * nodes]
    observer = Counting()
    firing = judged(present, Judge(observer))[0]
    assert firing.component.name.gpu == "GPU-00021"
    assert firing.detected_iteration - ONSET <= 3
    assert observer.counts["ranks_missing"] > 0


def test_a_node_that_disagrees_on_the_world_size_is_refused_by_name() -> None:
    judge = Judge()
    list(judge.handle(records(job(), lambda _: 1.0, n=1)[0]))
    other = next(SyntheticJob(4, 2, 4, seed=7).records(0))
    with pytest.raises(InvalidRecord, match="world_size 32"):
        list(judge.handle(other))


def test_the_state_of_an_ended_job_is_freed_and_its_incident_closed() -> None:
    judge = Judge()
    given = records(job(), one_slow_rank(1.4, end=N))
    alerts = judged(given, judge)
    assert alerts[-1].state is AlertState.FIRING
    for record in job().records(N):
        batch = decode_iterations(record.value)
        changed = {f: getattr(batch, f) for f in batch.__dataclass_fields__} | {"is_last": True}
        last = Record(record.topic, 0, 0, record.time_ns, record.key, encode_iterations(type(batch)(**changed)))
        alerts += judge.handle(last)
    assert alerts[-1].resolution is Resolution.JOB_ENDED
    assert judge.n_jobs == 0


def changed(record: Record, **fields: object) -> Record:
    """The same record with some fields of its batch put otherwise."""
    batch = decode_iterations(record.value)
    values = {f: getattr(batch, f) for f in batch.__dataclass_fields__} | fields
    return Record(record.topic, 0, 0, record.time_ns, record.key, encode_iterations(type(batch)(**values)))


def test_a_node_that_returns_after_a_silence_is_waited_for_again() -> None:
    given = records(job(), one_slow_rank(1.4))
    nodes, culprit = job().n_nodes, CULPRIT // 8
    present = [r for i, r in enumerate(given) if i % nodes != culprit or not 15 * nodes <= i < 45 * nodes]
    last_of_each_iteration = sorted(present, key=lambda r: (r.time_ns, decode_iterations(r.value).node == "node-0002"))
    firing = judged(last_of_each_iteration)[0]
    assert (firing.kind, firing.component.name.gpu, firing.onset_iteration) == (Kind.SLOW_GPU, "GPU-00021", ONSET)


@pytest.mark.parametrize("skew_s", [-61, 61])
def test_a_node_whose_clock_is_wrong_makes_nobody_late(skew_s: int) -> None:
    skew_ns = skew_s * 10**9

    def skewed(record: Record) -> Record:
        batch = decode_iterations(record.value)
        if batch.node != "node-0000":
            return record
        rows = batch.rows.replace(end_ns=batch.rows.end_ns + skew_ns)
        return changed(record, flush_ns=batch.flush_ns + skew_ns, rows=rows)

    def arrival(record: Record) -> int:
        lag_s = 5 if decode_iterations(record.value).node == "node-0007" else 0  # several iterations stay open
        return record.time_ns + lag_s * 10**9

    observer = Counting()
    in_order = sorted(records(job(), one_slow_rank(1.4)), key=arrival)
    firing = judged(map(skewed, in_order), Judge(observer))[0]
    assert firing.component.name.gpu == "GPU-00021"
    assert "rows_late" not in observer.counts


def test_iterations_that_count_from_zero_again_are_judged_again() -> None:
    def epochs(record: Record) -> Record:
        rows = decode_iterations(record.value).rows
        return changed(record, rows=rows.replace(iteration=rows.iteration % 40))

    alerts = judged(map(epochs, records(job(), one_slow_rank(1.4))))
    assert {a.component.name.gpu for a in alerts} == {"GPU-00021"}


def test_one_rank_with_absurd_iteration_numbers_blinds_nobody() -> None:
    given = records(job(), one_slow_rank(1.4))
    for at in range(30, 37):
        place = at * job().n_nodes
        rows = decode_iterations(given[place].value).rows
        iteration = rows.iteration.copy()
        iteration[0] += 2**61
        given[place] = changed(given[place], rows=rows.replace(iteration=iteration))
    observer = Counting()
    assert judged(given, Judge(observer))[0].component.name.gpu == "GPU-00021"
    assert observer.counts["frames_sparse"] > 0
    assert "rows_late" not in observer.counts


def test_a_rank_that_no_agent_introduces_is_placed_on_the_node_that_reports_it() -> None:
    given = [changed(r, ranks=()) for r in records(job(), one_slow_rank(1.4))]
    firing = judged(given)[0]
    assert (firing.kind, firing.component.name.rank, firing.component.name.node) == (Kind.SLOW_RANK, 21, "node-0002")


def test_throttle_reasons_without_clocks_are_evidence_that_can_be_read_back() -> None:
    def throttled(record: Record) -> Record:
        batch = decode_iterations(record.value)
        is_slow = (batch.rows.rank == CULPRIT) & (batch.rows.iteration >= ONSET)
        rows = batch.rows.replace(
            compute_s=np.nan, sm_clock_ratio=np.nan, throttle_reasons=np.where(is_slow, 0x40, 0), throttle_known=1
        )
        return changed(record, rows=rows, sensors=Sensor.HOST_CALL | Sensor.NVML)

    firing = judged(map(throttled, records(job(), one_slow_rank(1.4))))[0]
    assert (firing.kind, firing.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00021")
    assert decode_alert(encode_alert(firing)) == firing


def test_a_dead_incarnation_does_not_resolve_what_goes_on_in_the_next() -> None:
    first = records(job(), one_slow_rank(1.4, onset=30), n=60)
    later_s = 60
    second = [
        changed(r, incarnation="2", flush_ns=decode_iterations(r.value).flush_ns + later_s * 10**9)
        for r in records(job(), one_slow_rank(1.4, onset=0, end=N), n=60)
        if decode_iterations(r.value).node != "node-0007"  # died, and said no last word
    ]
    moved = [Record(r.topic, 0, 0, r.time_ns + later_s * 10**9, r.key, r.value) for r in second]
    judge = Judge()
    alerts = judged([*first, *moved], judge)
    assert [(a.incarnation, a.state) for a in alerts] == [
        ("1", AlertState.FIRING),
        ("1", AlertState.RESOLVED),
        ("2", AlertState.FIRING),
    ]
    assert judge.n_jobs == 1
