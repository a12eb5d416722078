"""One partition under one stage: what leaves it, what does not a second time, and what stays in the hand."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pipeline import dead_letters
from pipeline.lanes import Lane, Stage
from pipeline.metrics import Metrics, PartitionObserver
from pipeline.poison import ENDS_MAX, Hand, Ledger, held, place
from pipeline.record import Record
from pipeline.resume import Published
from schemas.alerts import Resolution
from schemas.codec import decode_alert, decode_iterations, encode_events
from schemas.topics import ALERTS, DEAD_LETTERS, EVENTS, ITERATIONS
from tests.integration.fake_stages import (
    END,
    EXPLOSIVE,
    ONSET,
    FakeJudge,
    FakeWindow,
    batch,
    expected,
    iterations_record,
)

N_BATCHES = 43


class Bench:
    """A lane and what is around it."""

    def __init__(self, folder: Path) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.hand_path = folder / "hand"
        self.hand = Hand(self.hand_path)
        self.ledger = Ledger(folder / "ledger.json")

    def lane(
        self, stage: Stage, *, topic: str = EVENTS, start: int = 0, committed: int = 0, end: int = 0,
        published: Published | None = None,
    ) -> Lane:  # fmt: skip
        return Lane(
            partition=(topic, 0), stage=stage, position=start, committed=committed, end=end, published=published,
            metrics=self.metrics, observer=PartitionObserver(self.metrics), hand=self.hand, ledger=self.ledger,
        )  # fmt: skip

    def occurrences(self, what: str) -> float | None:
        return self.metrics.registry.get_sample_value("failslow_occurrences_total", {"what": what})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def event(offset: int, *, node: str = "n0") -> Record:
    return Record(EVENTS, 0, offset, offset * 10**6, b"job-a/n0", encode_events(batch("job-a", offset, node=node)))


def iterations(offset: int) -> Record:
    (rows,) = FakeWindow(Metrics(CollectorRegistry())).handle(event(offset))
    return iterations_record(rows, offset)


def drive(lane: Lane, records: list[Record]) -> list[tuple[str, bytes]]:
    left = []
    for record in records:
        outgoing = lane.handle(record)
        left += [(message.topic, message.value) for message in outgoing]
        lane.done(record, outgoing)
    return left


def test_a_window_lane_publishes_iterations_from_what_is_committed_on(bench: Bench) -> None:
    lane = bench.lane(FakeWindow(bench.metrics), start=3, committed=7)
    left = drive(lane, [event(offset) for offset in range(3, 11)])
    assert [topic for topic, _ in left] == [ITERATIONS] * 4
    assert [decode_iterations(value).seq for _, value in left] == [7, 8, 9, 10]
    assert lane.position == 11


def test_a_record_that_came_before_is_nothing_new(bench: Bench) -> None:
    lane = bench.lane(FakeWindow(bench.metrics))
    records = [event(offset) for offset in range(5)]
    assert len(drive(lane, records)) == 5
    assert drive(lane, records) == []
    assert lane.position == 5


def test_records_that_the_broker_let_go_of_are_counted(bench: Bench) -> None:
    lane = bench.lane(FakeWindow(bench.metrics))
    drive(lane, [event(0), event(1), event(9)])
    assert bench.occurrences("records_skipped") == 7
    assert lane.position == 10


def test_an_unreadable_record_is_set_aside_with_its_place(bench: Bench) -> None:
    lane = bench.lane(FakeWindow(bench.metrics))
    ((topic, value),) = drive(lane, [Record(EVENTS, 0, 5, 11, b"key", b"\xc1")])
    letter = dead_letters.decode(value)
    assert topic == DEAD_LETTERS
    assert (letter.topic, letter.partition, letter.offset, letter.time_ns) == (EVENTS, 0, 5, 11)
    assert (letter.key, letter.value, letter.value_bytes) == (b"key", b"\xc1", 1)
    assert "not a batch" in letter.reason
    assert held(bench.hand_path) is None


def test_a_record_is_set_aside_once_however_often_it_is_read_again(bench: Bench) -> None:
    lane = bench.lane(FakeWindow(bench.metrics), committed=6)
    assert drive(lane, [Record(EVENTS, 0, 5, 11, b"key", b"\xc1")]) == []


def test_a_huge_value_is_set_aside_in_part(bench: Bench) -> None:
    lane = bench.lane(FakeWindow(bench.metrics))
    size = dead_letters.VALUE_BYTES_MAX + 3
    ((_, value),) = drive(lane, [Record(EVENTS, 0, 0, 0, b"", b"\xc1" * size)])
    letter = dead_letters.decode(value)
    assert len(letter.value) == dead_letters.VALUE_BYTES_MAX
    assert letter.value_bytes == size


def test_a_bug_in_a_stage_is_not_caught_and_leaves_its_record_in_the_hand(bench: Bench) -> None:
    lane = bench.lane(FakeWindow(bench.metrics))
    drive(lane, [event(0)])
    with pytest.raises(RuntimeError, match="a bug in the stage"):
        lane.handle(event(1, node=EXPLOSIVE))
    assert held(bench.hand_path) == place(event(1))
    assert lane.position == 1


def test_poison_does_not_reach_the_stage(bench: Bench) -> None:
    record = event(1, node=EXPLOSIVE)
    for _ in range(ENDS_MAX):
        bench.ledger.count(place(record))
    left = drive(bench.lane(FakeWindow(bench.metrics)), [event(0), record, event(2)])
    assert [topic for topic, _ in left] == [ITERATIONS, DEAD_LETTERS, ITERATIONS]
    assert dead_letters.decode(left[1][1]).cause is dead_letters.Cause.POISON


def judge_lane(bench: Bench, committed: int, n_published: int) -> Lane:
    published = Published()
    for alert in expected("job-a", N_BATCHES)[:n_published]:
        published.note(alert, 10**18)
    return bench.lane(
        FakeJudge(bench.metrics), topic=ITERATIONS, committed=committed, end=N_BATCHES, published=published
    )


@pytest.mark.parametrize("committed", [0, 5, ONSET + 1, 30])
def test_a_judge_lane_publishes_what_the_topic_lacks(bench: Bench, committed: int) -> None:
    wanted = expected("job-a", N_BATCHES)
    n_done = sum(alert.as_of_iteration < committed for alert in wanted)
    for n_published in range(n_done, len(wanted) + 1):
        left = drive(judge_lane(bench, committed, n_published), [iterations(offset) for offset in range(N_BATCHES)])
        assert [decode_alert(value) for _, value in left] == wanted[n_published:]
        assert {topic for topic, _ in left} <= {ALERTS}


def test_what_a_judge_with_a_shorter_memory_says_of_records_that_were_done_is_not_published(bench: Bench) -> None:
    """The judge before has seen the same records and more of the job, and has said nothing."""
    lane = judge_lane(bench, committed=END, n_published=0)
    assert drive(lane, [iterations(offset) for offset in range(N_BATCHES)]) == []


def test_an_incident_that_was_seen_to_end_but_is_open_on_the_topic_is_ended_there(bench: Bench) -> None:
    wanted = expected("job-a", N_BATCHES)
    lane = judge_lane(bench, committed=40, n_published=3)
    ((topic, value),) = drive(lane, [iterations(offset) for offset in range(N_BATCHES)])
    end = decode_alert(value)
    assert (topic, end.state, end.resolution) == (ALERTS, wanted[-1].state, wanted[-1].resolution)
    assert end.revision == wanted[2].revision + 1


def test_an_incident_whose_records_are_gone_ends_when_all_has_been_read_again(bench: Bench) -> None:
    published = Published()
    (orphan,) = expected("job-gone", ONSET + 1)
    published.note(orphan, 10**18)
    lane = bench.lane(FakeJudge(bench.metrics), topic=ITERATIONS, committed=5, end=9, published=published)
    assert drive(lane, [iterations(offset) for offset in range(8)]) == []
    ((topic, value),) = drive(lane, [iterations(8)])
    end = decode_alert(value)
    assert (topic, end.fingerprint, end.resolution) == (ALERTS, orphan.fingerprint, Resolution.LOST_SIGHT)
    left = drive(lane, [iterations(offset) for offset in range(9, N_BATCHES)])
    assert [decode_alert(value) for _, value in left] == expected("job-a", N_BATCHES)
