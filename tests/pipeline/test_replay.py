"""Replaying puts records into one order, compares alerts by their bytes, and groups them into incidents."""

import itertools
from collections.abc import Iterator

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.record import Record
from pipeline.replay import compare, count_records, incidents, merge, replay
from schemas.alerts import (
    Alert,
    AlertState,
    Component,
    ComponentName,
    ComponentType,
    Evidence,
    Kind,
    Resolution,
    Severity,
)
from schemas.codec import InvalidRecord, encode_alert
from schemas.topics import EVENTS, ITERATIONS


def record(time_ns: int, partition: int, offset: int, *, topic: str = EVENTS, value: bytes = b"v") -> Record:
    return Record(topic, partition, offset, time_ns, b"key", value)


def alert(revision: int = 1, *, job_id: str = "job", resolution: Resolution | None = None, **changes: object) -> Alert:
    name = ComponentName(type=ComponentType.GPU, node="node-3", gpu="GPU-5")
    made = Alert(
        schema_version=1,
        fingerprint="f00d",
        revision=revision,
        state=AlertState.FIRING if resolution is None else AlertState.RESOLVED,
        severity=Severity.WARNING,
        job_id=job_id,
        incarnation="0",
        kind=Kind.SLOW_GPU,
        component=Component(type=ComponentType.GPU, name=name, candidates=(name,)),
        onset_iteration=101,
        detected_iteration=103,
        as_of_iteration=103 + revision,
        resolved_iteration=None if resolution is None else 103 + revision,
        resolution=resolution,
        onset_time_ns=10**18,
        as_of_time_ns=10**18 + revision,
        slowdown_ratio=1.31,
        lost_gpu_s=17.0,
        confidence=0.97,
        sources=("gpu",),
        evidence=(Evidence(what="computation over peers", value=1.31, unit="ratio"),),
        causes=("thermal throttling",),
        advice="replace the node",
    )
    return msgspec.structs.replace(made, **changes)


class Echo:
    """A stage that makes one alert of each record whose value is readable."""

    def handle(self, record: Record) -> Iterator[Alert]:
        if record.value == b"garbage":
            raise InvalidRecord("not a batch: garbage")
        yield alert(record.offset)


def test_an_unreadable_record_is_reported_and_the_replay_goes_on() -> None:
    reported = []
    records = [record(0, 0, 1), record(1, 0, 2, value=b"garbage"), record(2, 0, 3)]
    alerts = list(replay(records, Echo(), when_unreadable=lambda record, error: reported.append((record, str(error)))))
    assert [a.revision for a in alerts] == [1, 3]
    assert reported == [(records[1], "not a batch: garbage")]


@given(
    times=st.lists(st.lists(st.integers(0, 23), max_size=7), min_size=1, max_size=5),
    data=st.data(),
)
def test_merging_gives_one_order_whatever_order_partitions_were_recorded_in(
    times: list[list[int]], data: st.DataObject
) -> None:
    partitions = [[record(t, p, o) for o, t in enumerate(in_partition)] for p, in_partition in enumerate(times)]
    one_after_another = list(itertools.chain.from_iterable(partitions))
    expected = list(merge(one_after_another, EVENTS, count_records(one_after_another)))
    assert sorted(expected, key=repr) == sorted(one_after_another, key=repr)

    queues = [list(reversed(p)) for p in partitions if p]
    shuffled = []
    while queues:
        place = data.draw(st.integers(0, len(queues) - 1))
        shuffled.append(queues[place].pop())
        queues = [q for q in queues if q]
    assert list(merge(shuffled, EVENTS, count_records(shuffled))) == expected


def test_merging_goes_by_time_and_keeps_each_partition_in_order() -> None:
    first = [record(5, 0, 0), record(3, 0, 1), record(11, 0, 2)]  # a producer's clock that ran behind
    second = [record(4, 1, 0), record(7, 1, 1)]
    records = first + second
    merged = list(merge(records, EVENTS, count_records(records)))
    assert merged == [second[0], first[0], first[1], second[1], first[2]]


def test_merging_takes_one_topic_alone() -> None:
    records = [record(1, 0, 0), record(0, 0, 0, topic=ITERATIONS), record(2, 0, 1)]
    assert list(merge(records, EVENTS, count_records(records))) == [records[0], records[2]]


def test_merging_holds_no_more_than_what_another_partition_lags_behind() -> None:
    records = [record(i, i % 3, i // 3) for i in range(300)]
    n_read = 0

    def reading() -> Iterator[Record]:
        nonlocal n_read
        for each in records:
            n_read += 1
            yield each

    for n_merged, _ in enumerate(merge(reading(), EVENTS, count_records(records)), 1):
        assert n_read - n_merged <= 3


def test_equal_alerts_are_identical_though_one_was_delivered_twice() -> None:
    alerts = [alert(1), alert(2), alert(3, resolution=Resolution.RECOVERED)]
    recorded = [encode_alert(a) for a in (alerts[0], alerts[1], alerts[0], alerts[1], alerts[2])]
    comparison = compare(recorded, alerts)
    assert comparison.is_identical
    assert comparison.n_identical == 3


def test_jobs_are_compared_each_for_itself() -> None:
    one, two = [alert(r, job_id="one") for r in (1, 2)], [alert(r, job_id="two") for r in (1, 2)]
    recorded = [encode_alert(a) for a in (one[0], two[0], two[1], one[1])]
    assert compare(recorded, [*two, *one]).is_identical


def test_a_differing_value_is_named_with_both_readings() -> None:
    comparison = compare([encode_alert(alert(1))], [alert(1, slowdown_ratio=1.5)])
    assert not comparison.is_identical
    assert comparison.differences == [
        "job job, alert 1: slow_gpu f00d revision 1 (firing): slowdown_ratio 1.31 recorded, 1.5 replayed"
    ]


def test_alerts_on_one_side_alone_are_named() -> None:
    assert compare([encode_alert(alert(1))], []).differences == [
        "job job, alert 1: only recorded: slow_gpu f00d revision 1 (firing)"
    ]
    assert compare([], [alert(1)]).differences == ["job job, alert 1: only replayed: slow_gpu f00d revision 1 (firing)"]


def test_order_matters() -> None:
    assert len(compare([encode_alert(alert(1)), encode_alert(alert(2))], [alert(2), alert(1)]).differences) == 2


def test_one_revision_with_two_contents_is_a_difference() -> None:
    recorded = [encode_alert(alert(1)), encode_alert(alert(1, lost_gpu_s=19.0))]
    assert compare(recorded, [alert(1)]).differences == [
        "job job: slow_gpu f00d revision 1 (firing) was recorded twice, with other content"
    ]


def test_the_same_values_in_other_bytes_are_a_difference() -> None:
    recorded = encode_alert(alert(1)).replace(b'"revision":1', b'"revision": 1')
    assert compare([recorded], [alert(1)]).differences == [
        "job job, alert 1: slow_gpu f00d revision 1 (firing): the same values in other bytes"
    ]


def test_an_unreadable_recorded_alert_is_a_difference() -> None:
    (difference,) = compare([b"garbage"], []).differences
    assert difference.startswith("a recorded alert cannot be read: not an alert")


def test_incidents_gather_revisions_and_begin_anew_after_their_end() -> None:
    alerts = [
        alert(1, severity=Severity.INFO),
        alert(1, job_id="other", severity=Severity.INFO),
        alert(2),
        alert(3, resolution=Resolution.RECOVERED, severity=Severity.INFO),
        alert(4, severity=Severity.INFO),
    ]
    found = incidents(alerts)
    assert [(i.first.job_id, i.first.revision, i.last.revision) for i in found] == [
        ("job", 1, 3),
        ("other", 1, 1),
        ("job", 4, 4),
    ]
    assert [i.is_above_info for i in found] == [True, False, False]
