"""The order of batches: duplicates, gaps, restarts and ends, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.observer import Counting
from pipeline.record import Record
from pipeline.window import Window
from pipeline.window_params import WindowParams
from schemas.codec import InvalidRecord, encode_events
from schemas.events import Calls, EventBatch, Markers, Sensor, Syncs
from schemas.iterations import Quality
from tests.pipeline.window_streams import MS, T0, Trainer, answers, batch, record

N_BATCHES, PER_BATCH = 7, 5


def story() -> list[EventBatch]:
    batches = Trainer().batches(N_BATCHES, PER_BATCH)
    return [*batches[:-1], replace(batches[-1], is_last=True)]


def test_every_batch_has_one_answer_with_its_header() -> None:
    batches = [replace(b, clock_error_ns=7, lost_events=0) for b in story()]
    said = answers(batches).batches
    assert len(said) == len(batches)
    for events, answer in zip(batches, said, strict=True):
        for name in (
            "job_id", "incarnation", "node", "seq", "agent_start_ns", "flush_ns", "flush_interval_ns", "world_size",
            "sensors", "lost_events", "clock_error_ns", "is_last", "ranks", "communicators",
        ):  # fmt: skip
            assert getattr(answer, name) == getattr(events, name)


def test_an_empty_batch_is_answered_since_a_pulse_moves_time_on() -> None:
    said = answers([batch(0), batch(1)])
    assert [answer.seq for answer in said.batches] == [0, 1]
    assert len(said.rows) == 0


def test_duplicates_change_nothing_and_are_counted() -> None:
    batches = story()
    doubled = [b for i, first in enumerate(batches) for b in (first, *batches[max(0, i - 1) : i])]
    said = answers(doubled)
    assert said.counts == {"batches_duplicate": N_BATCHES - 2, "batches_after_end": 1}
    assert said.rows == answers(batches).rows
    assert said.communication == answers(batches).communication


def test_batches_that_overtook_each_other_are_answered_in_order() -> None:
    batches = story()
    mixed = [batches[i] for i in (0, 3, 2, 1, 5, 4, 6)]
    said = answers(mixed)
    assert [answer.seq for answer in said.batches] == list(range(N_BATCHES))
    assert said.rows == answers(batches).rows
    assert said.communication == answers(batches).communication
    assert said.counts == {}


def test_a_batch_that_does_not_come_is_a_loss_after_a_few_others() -> None:
    batches = story()
    window = Window(counting := Counting(), WindowParams(reorder_batches=2))
    waited = [len(list(window.handle(record(batches[i])))) for i in (0, 2, 3, 4, 5)]
    assert waited == [1, 0, 0, 3, 1]
    assert counting.counts["batches_lost"] == 1


def test_a_lost_batch_marks_what_it_touched_and_no_more() -> None:
    batches = story()
    said = answers(batches[:2] + batches[3:])
    lost = [answer.lost_events for answer in said.batches]
    assert [answer.seq for answer in said.batches] == [0, 1, 3, 4, 5, 6]
    assert lost == [0, 0, 1, 0, 0, 0]
    incomplete = said.rows.iteration[(said.rows.quality & Quality.INCOMPLETE) != 0]
    # Iterations 10 to 14 were lost; 9 was seen but for what follows it, 15 starts where 14 ended.
    assert set(range(10, 15)) <= set(incomplete.tolist()) <= set(range(9, 16))


def test_every_iteration_of_a_loss_has_a_row_so_that_no_frame_waits_for_it() -> None:
    batches = story()
    rows = answers(batches[:2] + batches[3:]).rows
    assert rows.iteration.tolist() == list(range(N_BATCHES * PER_BATCH))
    np.testing.assert_allclose(rows.duration_s[1:], 0.1)


def test_events_that_the_agent_lost_mark_the_iterations_of_their_interval() -> None:
    batches = story()
    batches[3] = replace(batches[3], lost_events=13)
    said = answers(batches)
    assert [answer.lost_events for answer in said.batches] == [0, 0, 0, 13, 0, 0, 0]
    incomplete = said.rows.iteration[(said.rows.quality & Quality.INCOMPLETE) != 0]
    assert set(range(15, 20)) <= set(incomplete.tolist()) <= set(range(14, 21))


def test_the_end_of_a_job_answers_what_is_held_and_frees_the_state() -> None:
    batches = story()
    window = Window(Counting())
    said = answers([batches[0], batches[2], batches[6]], window)
    assert [answer.seq for answer in said.batches] == [0, 2, 6]
    assert window.n_nodes == 0
    after = answers([batches[5], batches[6]], window)
    assert after.batches == ()


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    window = Window(counting := Counting())
    answers(Trainer().batches(3), window)
    said = answers([replace(b, incarnation="second") for b in Trainer().batches(3)], window)
    assert window.n_nodes == 1
    assert [answer.incarnation for answer in said.batches] == ["second"] * 3
    assert said.rows.iteration.tolist() == list(range(14))
    assert list(window.handle(record(batch(3)))) == []
    assert counting.counts == {"batches_after_end": 1}


def test_jobs_and_nodes_do_not_touch_each_other() -> None:
    alone = answers(story())
    window = Window(Counting())
    both = [
        list(window.handle(record(e)))
        for events in story()
        for e in (events, replace(events, job_id="other", seq=events.seq), replace(events, node="node1"))
    ]
    mine = [answer for said in both for answer in said if (answer.job_id, answer.node) == ("job", "node0")]
    assert [answer.rows for answer in mine] == [answer.rows for answer in alone.batches]


def test_a_restarted_agent_starts_its_numbers_anew_and_what_spans_the_break_is_incomplete() -> None:
    batches = story()
    restarted = [replace(b, agent_start_ns=T0 + 9, seq=b.seq - 4) for b in batches[4:]]
    said = answers(batches[:4] + restarted + [batches[2]])
    assert [answer.seq for answer in said.batches] == [0, 1, 2, 3, 0, 1, 2]
    assert said.counts["batches_after_end"] == 1
    rows = said.rows
    broken = (rows.quality & Quality.INCOMPLETE) != 0
    assert 20 in rows.iteration[broken]
    assert set(rows.iteration[broken].tolist()) <= {19, 20}


def test_the_first_batches_of_a_restarted_agent_are_missed_when_they_do_not_come() -> None:
    batches = story()
    restarted = [replace(b, agent_start_ns=T0 + 9, seq=b.seq - 2) for b in batches[3:]]
    said = answers(batches[:3] + restarted)
    assert [(answer.seq, answer.lost_events) for answer in said.batches[3:]] == [(1, 1), (2, 0), (3, 0), (4, 0)]


def test_a_late_batch_of_an_earlier_agent_is_a_duplicate() -> None:
    batches = story()
    restarted = replace(batches[4], agent_start_ns=T0 + 9, seq=0)
    said = answers([*batches[:4], restarted, batches[3]])
    assert said.counts["batches_duplicate"] == 1
    assert len(said.batches) == 5


def test_nodes_are_bounded_and_forgotten_when_silent() -> None:
    window = Window(counting := Counting(), WindowParams(nodes=3, silent_s=60))
    for number in range(5):
        list(window.handle(record(batch(0, node=f"node{number}"))))
    assert window.n_nodes == 3
    list(window.handle(record(batch(1, node="node4"), time_ns=10**12)))
    list(window.handle(record(batch(2, node="node4"), time_ns=10**12)))
    list(window.handle(record(batch(3, node="node4"), time_ns=10**12)))
    assert window.n_nodes == 1
    assert counting.counts == {"nodes_dropped": 4}


CALL = {
    "rank": 0, "comm": 1, "op": 0, "source": 0, "bytes": 8, "count": 1, "first_seq": 0, "seq_known": 1,
    "start_ns": T0, "end_ns": T0 + 9, "duration_ns": 9, "duration_min_ns": 9,
}  # fmt: skip


def calls(**changes: int) -> Calls:
    return Calls.build(1, **CALL | changes)


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"calls": calls(end_ns=T0 - 1)}, "calls.end_ns - start_ns"),
        ({"calls": calls(duration_ns=-1)}, "calls.duration_ns"),
        ({"calls": calls(duration_min_ns=-1)}, "calls.duration_min_ns"),
        ({"calls": calls(duration_min_ns=10)}, "calls.duration_min_ns"),
        ({"calls": calls(count=0)}, "calls.count"),
        ({"calls": calls(bytes=-5)}, "calls.bytes"),
        ({"calls": calls(first_seq=-1)}, "calls.first_seq"),
        ({"calls": calls(start_ns=-(2**63), end_ns=2**63 - 1)}, "calls.start_ns"),
        ({"syncs": Syncs.build(1, rank=0, start_ns=T0, duration_ns=-1)}, "syncs.duration_ns"),
        ({"markers": Markers.build(1, rank=0, kind=0, iteration=-1, time_ns=T0)}, "markers.iteration"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused_by_name_and_changes_nothing(
    tables: dict[str, Calls | Syncs | Markers], named: str
) -> None:
    batches = story()
    window = Window(Counting())
    said = answers(batches[:3], window)
    with pytest.raises(InvalidRecord, match=named):
        list(window.handle(record(replace(batches[3], **tables))))  # type: ignore[arg-type]
    said_after = answers(batches[3:], window)
    assert [b.rows for b in said.batches + said_after.batches] == [b.rows for b in answers(batches).batches]


def test_a_job_of_another_size_under_the_same_name_is_refused() -> None:
    window = Window(Counting())
    answers(story()[:2], window)
    with pytest.raises(InvalidRecord, match="different identifiers"):
        list(window.handle(record(batch(2, world_size=8))))


def test_garbage_is_refused() -> None:
    with pytest.raises(InvalidRecord):
        list(Window().handle(Record("failslow.events", 0, 0, 0, b"", b"\x00garbage")))
    whole = encode_events(story()[0])
    with pytest.raises(InvalidRecord):
        list(Window().handle(Record("failslow.events", 0, 0, 0, b"", whole[: len(whole) // 2])))


def test_unknown_operations_sources_and_markers_of_later_versions_are_put_up_with() -> None:
    trainer = Trainer()
    batches = trainer.batches(4)
    strange = Calls.build(1, **CALL | {"op": 77, "source": 9})
    marker = Markers.build(1, rank=0, kind=99, iteration=0, time_ns=T0 + 50 * MS)
    batches[1] = replace(batches[1], calls=Calls.concatenate([batches[1].calls, strange]), markers=marker)
    said = answers(batches)
    assert said.rows == answers(Trainer().batches(4)).rows
    assert said.counts == {"calls_dropped": 1}


@pytest.mark.parametrize("name", ["reorder_batches", "buffer_rows", "nodes"])
def test_bounds_are_checked_at_the_start(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        WindowParams(**{name: -1})


def test_sensors_that_change_do_not_carry_the_past_over() -> None:
    trainer = Trainer()
    batches = trainer.batches(3)
    changed = []
    for seq in range(3, 6):
        for _ in range(5):
            trainer.iterate()
        tables = trainer.tables()
        changed.append(batch(seq, flush_ns=trainer.now_ns + 1, **tables, sensors=Sensor.GPU))
    rows = answers(batches + changed).rows
    later = rows.iteration >= 16
    assert rows.quality[later & (rows.iteration > 17)].tolist() == [0] * int((later & (rows.iteration > 17)).sum())
    assert (np.diff(rows.iteration) >= 1).all()
