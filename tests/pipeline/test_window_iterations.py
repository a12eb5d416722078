"""Iterations of hand-made streams, to the nanosecond: where they end, how they are numbered, and what lies in them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.window_params import WindowParams
from schemas.events import CallSource, EventBatch, MarkerKind, Markers, Op, Sensor, SpanKind
from schemas.iterations import IterationRows, Numbering, Quality
from tests.pipeline.window_streams import (
    ALL_SENSORS,
    DATA,
    MS,
    PIPE,
    T0,
    WORLD,
    Trainer,
    answers,
    batch,
    gpu_samples,
    host_samples,
    spans,
)

OTHER_PLAN = ((PIPE, Op.RECV, 1, 5000, 1), (DATA, Op.ALL_REDUCE, 0, 7000, 2), (WORLD, Op.ALL_REDUCE, 0, 4, 1))
FORWARD_ONLY = ((PIPE, Op.RECV, 1, 5000, 1), (DATA, Op.ALL_REDUCE, 0, 7000, 3))


def flushed(trainer: Trainer, seq: int, **changes: Any) -> EventBatch:
    return batch(seq, **{"flush_ns": trainer.now_ns + 1, **trainer.tables(), **changes})


def run(n_iterations: int, *, sensors: Sensor = ALL_SENSORS, known: bool = True, **changes: Any) -> IterationRows:
    trainer = Trainer(known=known)
    for _ in range(n_iterations):
        trainer.iterate()
    return answers([flushed(trainer, 0, sensors=sensors, is_last=True, **changes)]).rows


def test_an_iteration_ends_with_the_wait_for_the_gpu() -> None:
    rows = run(7)
    assert rows.iteration.tolist() == list(range(7))
    assert rows.end_ns.tolist() == [T0 + 100 * MS * (i + 1) for i in range(7)]
    assert set(rows.numbering.tolist()) == {Numbering.SEQUENCE}
    np.testing.assert_allclose(rows.duration_s[1:], 0.1)
    # The first begins with the first call, a millisecond after the host began to work.
    assert rows.duration_s[0] == pytest.approx(0.099)
    np.testing.assert_allclose(rows.host_wait_s, 0.09)
    assert not rows.quality.any()


def test_without_waits_it_ends_with_the_anchor_call() -> None:
    rows = run(7, sensors=Sensor.HOST_CALL)
    assert rows.end_ns.tolist() == [T0 + 100 * MS * i + 4 * MS for i in range(7)]
    assert np.isnan(rows.host_wait_s).all()
    on_gpu = run(7, sensors=Sensor.GPU)
    assert on_gpu.end_ns.tolist() == [T0 + 100 * MS * i + 40 * MS for i in range(7)]


def test_what_is_told_before_the_iteration_is_learnt_is_not_lost() -> None:
    trainer = Trainer()
    said = answers(trainer.batches(7, per_batch=1))
    assert [len(answer.rows) for answer in said.batches] == [0, 0, 2, 1, 1, 1, 1]
    assert said.rows.iteration.tolist() == list(range(6))


def test_communication_is_told_by_communicator_and_operation() -> None:
    trainer = Trainer()
    said = answers(trainer.batches(3))
    table = said.communication
    second = table.take(table.row == 1)
    assert second.comm.tolist() == [PIPE, DATA, DATA, WORLD, DATA]
    assert second.op.tolist() == [Op.RECV, Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_GATHER]
    assert second.peer.tolist() == [1, 0, 0, 0, 0]
    assert second.order.tolist() == [0, 1, 2, 3, 4]
    assert second.calls.tolist() == [1, 3, 1, 1, 1]
    assert second.bytes.tolist() == [5000, 21_000, 90_000, 4, 90_000]
    assert second.first_seq.tolist() == [1, 3, 1, 1, 1]
    assert second.last_seq.tolist() == [1, 5, 1, 1, 1]
    assert second.seq_known.tolist() == [1] * 5
    np.testing.assert_allclose(second.busy_s, 0.004)
    np.testing.assert_allclose(second.least_s, 0.001)


def test_computation_is_what_remains_of_the_duration() -> None:
    rows = run(7)
    np.testing.assert_allclose(rows.communication_s, 5 * 0.004)
    np.testing.assert_allclose(rows.compute_s[1:], 0.1 - 5 * 0.004)


def test_calls_that_overlap_count_once_and_of_runs_the_calls_alone() -> None:
    trainer = Trainer()
    for _ in range(6):
        start = trainer.now_ns
        trainer.iterate()
        for call in trainer.calls[-10:]:
            if call["source"] == CallSource.GPU and call["op"] == Op.REDUCE_SCATTER:
                call |= {"start_ns": start + 40 * MS - 2 * MS, "end_ns": start + 42 * MS}  # into the world's all-reduce
            if call["source"] == CallSource.GPU and call["count"] == 3:
                call |= {"end_ns": start + 30 * MS}  # 10 ms from first to last, 4 ms of calls
    rows = answers([flushed(trainer, 0, is_last=True)]).rows
    np.testing.assert_allclose(rows.communication_s, 5 * 0.004 - 0.002)


def test_calls_without_times_of_their_own_are_taken_to_run_one_after_the_other() -> None:
    """NCCL's Inspector says by default how long they ran and not when, so they are put where the host made them."""
    trainer = Trainer()
    for _ in range(6):
        trainer.iterate()
        for host, gpu in zip(trainer.calls[-10::2], trainer.calls[-9::2], strict=True):
            gpu |= {"start_ns": host["start_ns"], "end_ns": host["start_ns"] + 4 * MS}
    tables = trainer.tables()
    is_gpu = tables["calls"].source == CallSource.GPU
    untimed = tables["calls"].replace(is_timed=np.where(is_gpu, 0, 1))
    end = {"flush_ns": trainer.now_ns + 1, "is_last": True}
    rows = answers([batch(0, **(tables | end | {"calls": untimed}))]).rows
    np.testing.assert_allclose(rows.communication_s, 5 * 0.004)
    np.testing.assert_allclose(rows.compute_s[1:], 0.1 - 5 * 0.004)
    timed = answers([batch(0, **(tables | end))]).rows
    np.testing.assert_allclose(timed.communication_s, 0.004 + 0.008)  # the run's calls, and what the others cover


def test_gpu_times_that_come_two_flushes_late_are_waited_for() -> None:
    trainer, gpu = Trainer(), []
    batches = []
    for seq in range(6):
        for _ in range(5):
            trainer.iterate()
        flush_ns = trainer.now_ns + 1
        gpu.append(trainer.tables(host=False)["calls"])
        made = batch(seq, flush_ns=flush_ns, **trainer.tables(gpu=False))
        if seq >= 2:
            made = replace(made, calls=type(made.calls).concatenate([made.calls, gpu[seq - 2]]))
        batches.append(made)
    trainer_syncs = Trainer().batches(6)
    batches = [replace(made, syncs=whole.syncs) for made, whole in zip(batches, trainer_syncs, strict=True)]
    said = answers(batches)
    assert [len(answer.rows) for answer in said.batches] == [0, 0, 5, 5, 5, 5]
    assert not said.rows.quality.any()
    np.testing.assert_allclose(said.rows.communication_s, 0.02)


def test_gpu_times_that_never_come_hold_an_iteration_back_for_three_flushes_only() -> None:
    trainer = Trainer()
    batches = trainer.batches(6)
    without = [replace(b, calls=b.calls.take(b.calls.source == CallSource.HOST_CALL)) for b in batches]
    said = answers(without)
    assert [len(answer.rows) for answer in said.batches] == [0, 0, 0, 4, 5, 5]
    assert set(said.rows.quality.tolist()) == {Quality.NO_GPU_TIMES}
    assert np.isnan(said.rows.communication_s).all()
    assert np.isnan(said.rows.compute_s).all()
    assert np.isfinite(said.rows.duration_s).all()


def test_a_window_that_is_restarted_in_mid_job_goes_on_with_the_same_numbers() -> None:
    batches = Trainer().batches(9)
    whole, later = answers(batches).rows, answers(batches[4:]).rows
    shared = whole.take(np.isin(whole.iteration, later.iteration))
    assert later.iteration.tolist() == shared.iteration.tolist()
    assert later.quality[0] == Quality.INCOMPLETE
    assert np.isnan(later.duration_s[0])
    np.testing.assert_array_equal(later.duration_s[1:], shared.duration_s[1:])
    assert set(later.numbering.tolist()) == {Numbering.SEQUENCE}


def test_a_count_from_the_agents_attachment_gives_local_numbers_in_one_segment() -> None:
    trainer = Trainer(known=False)
    for _ in range(9):
        trainer.iterate()
    tables = trainer.tables(gpu=False)
    rows = answers([batch(0, sensors=Sensor.HOST_CALL | Sensor.SYNC, **tables, is_last=True)]).rows
    assert set(rows.numbering.tolist()) == {Numbering.LOCAL}
    assert rows.iteration.tolist() == list(range(9))
    assert set(rows.segment.tolist()) == {T0 + MS}
    assert rows.quality[0] == Quality.INCOMPLETE


def test_gpu_calls_tell_a_late_agent_how_the_others_count() -> None:
    trainer = Trainer(known=False)
    trainer.gpu_first = {
        (PIPE, int(Op.RECV)): 100,
        (DATA, int(Op.ALL_REDUCE)): 303,
        (DATA, int(Op.REDUCE_SCATTER)): 100,
        (WORLD, int(Op.ALL_REDUCE)): 100,
        (DATA, int(Op.ALL_GATHER)): 101,
    }
    said = answers(trainer.batches(4))
    rows, table = said.rows, said.communication
    assert set(rows.numbering.tolist()) == {Numbering.SEQUENCE}
    assert rows.iteration.tolist() == list(range(100, 100 + len(rows)))
    assert table.seq_known.all()
    tenth = table.take(table.row == 10)
    assert tenth.first_seq.tolist() == [110, 333, 110, 110, 111]
    np.testing.assert_allclose(rows.communication_s, 0.02)


def test_a_restarted_agent_counts_anew_and_is_told_the_jobs_numbers_anew() -> None:
    first = Trainer(known=False)
    batches = first.batches(4)
    second = Trainer(known=False, now_ns=first.now_ns, gpu_first=dict(first.seq))
    again = [replace(b, agent_start_ns=T0 + 9) for b in second.batches(4)]
    rows = answers(batches + again).rows
    assert set(rows.numbering.tolist()) == {Numbering.SEQUENCE}
    assert rows.iteration.tolist() == [*range(19), *range(20, 39)]
    assert rows.iteration[rows.quality != 0].tolist() == [0, 20]


def test_a_gpu_call_that_was_over_before_the_host_called_is_not_the_same_call() -> None:
    trainer = Trainer(known=False)
    batches = trainer.batches(4)
    early = []
    for events in batches:
        calls = events.calls
        moved = (calls.source == CallSource.GPU) & (calls.op == Op.ALL_REDUCE) & (calls.comm == DATA)
        shift = np.where(moved, 23 * MS, 0)
        early.append(replace(events, calls=calls.replace(start_ns=calls.start_ns - shift, end_ns=calls.end_ns - shift)))
    table = answers(early).communication
    moved = (table.op == Op.ALL_REDUCE) & (table.comm == DATA)
    assert not table.seq_known[moved].any()
    assert table.seq_known[~moved].all()


def test_gpu_calls_that_do_not_fit_the_hosts_leave_the_numbers_local() -> None:
    trainer = Trainer(known=False)
    batches = trainer.batches(4)
    # Every third call of the GPU is missing: no iteration is whole.
    batches = [
        replace(b, calls=b.calls.take((b.calls.source == CallSource.HOST_CALL) | (np.arange(len(b.calls)) % 3 > 0)))
        for b in batches
    ]
    assert set(answers(batches).rows.numbering.tolist()) <= {Numbering.LOCAL, Numbering.SEQUENCE}
    blind = [replace(b, calls=b.calls.take(b.calls.op != Op.ALL_REDUCE), sensors=ALL_SENSORS) for b in batches]
    assert Numbering.SEQUENCE not in answers([*blind]).rows.numbering.tolist()


def test_other_work_is_told_apart_and_becomes_usual_when_it_lasts() -> None:
    trainer = Trainer()
    for place in range(23):
        trainer.iterate(OTHER_PLAN if place == 7 or place >= 15 else Trainer.PLAN)
    rows = answers([flushed(trainer, 0, is_last=True)]).rows
    other = rows.iteration[(rows.quality & Quality.OTHER_WORK) != 0]
    assert other.tolist() == [7, 15, 16]
    assert rows.iteration.tolist() == list(range(23))


def test_an_evaluation_without_a_marker_makes_a_long_iteration_of_other_work() -> None:
    trainer = Trainer()
    for place in range(13):
        trainer.iterate()
        if place == 6:
            trainer.iterate(FORWARD_ONLY)
    rows = answers([flushed(trainer, 0, is_last=True)]).rows
    assert rows.iteration.tolist() == list(range(13))
    assert rows.iteration[rows.quality != 0].tolist() == [7]
    assert rows.quality[7] == Quality.OTHER_WORK
    assert rows.duration_s[7] == pytest.approx(0.2)


@pytest.mark.parametrize("kind", [MarkerKind.CHECKPOINT, MarkerKind.EVALUATION, MarkerKind.PROFILING])
def test_a_marked_pause_is_told_of_the_iteration_in_which_it_lies(kind: MarkerKind) -> None:
    trainer = Trainer()
    for place in range(13):
        trainer.iterate()
        if place == 6:
            trainer.now_ns += 500 * MS
            trainer.mark(kind, 500 * MS)
    rows = answers([flushed(trainer, 0, is_last=True)]).rows
    assert rows.iteration[rows.quality != 0].tolist() == [7]
    assert rows.quality[7] == Quality.PAUSED
    assert rows.duration_s[7] == pytest.approx(0.6)


def test_markers_number_iterations_where_there_are_any() -> None:
    trainer = Trainer(n_done=1000)
    for _ in range(7):
        trainer.iterate()
        trainer.mark()
    rows = answers([flushed(trainer, 0, sensors=ALL_SENSORS | Sensor.MARKER, is_last=True)]).rows
    assert rows.iteration.tolist() == list(range(1000, 1007))
    assert set(rows.numbering.tolist()) == {Numbering.MARKER}
    assert rows.end_ns.tolist() == [T0 + 100 * MS * (i + 1) for i in range(7)]
    np.testing.assert_allclose(rows.communication_s, 0.02)
    assert not rows.quality.any()


def test_markers_alone_are_enough_for_durations() -> None:
    ends = Markers.build(5, rank=0, kind=0, iteration=range(3, 8), time_ns=[T0 + i * 70 * MS for i in range(5)])
    rows = answers([batch(0, markers=ends, sensors=Sensor.MARKER)]).rows
    assert rows.iteration.tolist() == [3, 4, 5, 6, 7]
    np.testing.assert_allclose(rows.duration_s, [np.nan, 0.07, 0.07, 0.07, 0.07])
    assert rows.quality.tolist() == [Quality.INCOMPLETE, 0, 0, 0, 0]


def test_markers_wait_for_gpu_calls_for_a_few_flushes_only() -> None:
    trainer, batches = Trainer(), []
    for seq in range(12):
        for _ in range(5):
            trainer.iterate()
            trainer.mark()
        made = flushed(trainer, seq, sensors=Sensor.GPU | Sensor.MARKER)
        batches.append(made if seq < 4 else replace(made, calls=made.calls.take(np.empty(0, int))))
    said = answers(batches)
    assert [len(answer.rows) for answer in said.batches] == [4, 5, 5, 5, 0, 0, 1, 5, 5, 5, 5, 5]
    assert said.rows.iteration.tolist() == list(range(45))


def test_sampled_iterations_begin_with_their_first_event() -> None:
    """Markers that do not count on say that the time between was something else."""
    trainer = Trainer()
    for place in range(4):
        trainer.n_done = 10 * place
        trainer.iterate()
        trainer.mark()
        trainer.now_ns += 300 * MS
    rows = answers([flushed(trainer, 0, sensors=ALL_SENSORS | Sensor.MARKER, is_last=True)]).rows
    assert rows.iteration.tolist() == [0, 10, 20, 30]
    np.testing.assert_allclose(rows.duration_s, 0.099)


def test_a_host_that_runs_ahead_gives_means_of_blocks() -> None:
    trainer = Trainer()
    for place in range(21):
        trainer.iteration_ms = 100 + 10 * (place % 3)
        trainer.iterate(syncs=place % 3 == 2)
    rows = answers([flushed(trainer, 0, is_last=True)]).rows
    assert rows.iteration.tolist() == list(range(21))
    np.testing.assert_allclose(rows.duration_s[3:], 0.11)
    assert set(rows.quality.tolist()) == {Quality.BLOCK_MEAN}
    assert (np.diff(rows.end_ns)[3:] == 110 * MS).all()


def test_spans_say_how_long_computation_took() -> None:
    trainer = Trainer()
    rows = []
    for _ in range(5):
        start = trainer.now_ns
        kinds = (SpanKind.FORWARD, SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER, SpanKind.GARBAGE_COLLECTION)
        rows += [(int(kind), start + (15 + 9 * i) * MS, (i + 1) * MS) for i, kind in enumerate(kinds)]
        trainer.iterate()
    tables = trainer.tables()
    events = batch(0, **tables, spans=spans(0, rows), sensors=ALL_SENSORS | Sensor.SPAN, is_last=True)
    said = answers([events]).rows
    np.testing.assert_allclose(said.forward_s, 0.003)
    np.testing.assert_allclose(said.backward_s, 0.003)
    np.testing.assert_allclose(said.compute_s, 0.010)
    np.testing.assert_allclose(said.communication_s, 0.02)


def test_samples_within_an_iteration_describe_it() -> None:
    gpu = gpu_samples((T0 + 210 * MS, 0.5, 0x4), (T0 + 260 * MS, 0.75, 0x40), (T0 + 500 * MS, 1.0, 0))
    host = host_samples((T0 + 220 * MS, 0.25), (T0 + 270 * MS, 0.75), (T0 + 280 * MS, float("nan")))
    rows = run(6, gpu_samples=gpu, host_samples=host)
    np.testing.assert_allclose(rows.sm_clock_ratio, [np.nan, np.nan, 0.75, 0.75, 1.0, 1.0])
    assert rows.throttle_reasons.tolist() == [0, 0, 0x44, 0x40, 0, 0]
    assert rows.throttle_known.tolist() == [0, 0, 1, 1, 1, 1]
    np.testing.assert_allclose(rows.temperature_c[2:], 61.0)
    np.testing.assert_allclose(rows.run_queue_ratio[2], 0.5)
    assert np.isnan(rows.blocked_ratio).all()


def test_old_samples_say_nothing() -> None:
    rows = run(40, gpu_samples=gpu_samples((T0 + 150 * MS, 0.5, 0x4)))
    assert rows.throttle_known.tolist() == [0] + [1] * 25 + [0] * 14
    assert np.isnan(rows.sm_clock_ratio[26:]).all()


def test_samples_of_another_gpu_say_nothing() -> None:
    other = gpu_samples((T0 + 150 * MS, 0.5, 0x4)).replace(gpu=1)
    assert not run(7, gpu_samples=other).throttle_known.any()


def test_buffers_are_bounded_and_what_they_drop_is_counted() -> None:
    trainer = Trainer()
    plan = tuple((WORLD, Op.ALL_REDUCE, 0, 100 + i, 1) for i in range(5))
    batches = []
    for seq in range(20):
        for i in range(5):
            trainer.iterate(tuple((c, o, p, size + 1000 * (seq * 5 + i), n) for c, o, p, size, n in plan), syncs=False)
        batches.append(flushed(trainer, seq, sensors=Sensor.HOST_CALL))
    said = answers(batches, params=WindowParams(buffer_rows=97))
    assert said.counts["calls_dropped"] == 20 * 5 * 5 - 97


def test_keys_and_ranks_are_bounded() -> None:
    trainer = Trainer()
    said = answers(trainer.batches(4), params=WindowParams(keys=3))
    assert said.counts["calls_without_key"] > 0
    two = [replace(b, markers=Markers.build(1, rank=1, kind=0, iteration=1, time_ns=T0)) for b in Trainer().batches(2)]
    assert answers(two, params=WindowParams(ranks=1)).counts["ranks_dropped"] == 2
