"""Which call ends an iteration: periods within periods, losses, sizes that change, and jobs that cannot be told."""

import numpy as np
import pytest

from pipeline.window_params import WindowParams
from schemas.events import EventBatch, Op, Sensor
from schemas.iterations import Numbering, Quality
from tests.pipeline.window_streams import DATA, MS, PIPE, T0, WORLD, Trainer, answers, batch

Plan = tuple[tuple[int, Op, int, int, int], ...]
LOGGING = (WORLD, Op.BROADCAST, 0, 64, 1)


def micro_batches(n: int) -> Plan:
    one = ((PIPE, Op.RECV, 1, 5000, 1), (DATA, Op.ALL_REDUCE, 0, 7000, 4), (PIPE, Op.SEND, 1, 5000, 1))
    return (*one * n, (DATA, Op.REDUCE_SCATTER, 0, 90_000, 1), (WORLD, Op.ALL_REDUCE, 0, 4, 1))


def rows_of(
    plans: list[Plan], *, syncs: bool = True, sensors: Sensor | None = None, per_batch: int = 100_000
) -> list[int]:
    batches: list[EventBatch] = []
    trainer = Trainer(iteration_ms=1000)
    for place, plan in enumerate(plans):
        trainer.iterate(plan, syncs=syncs)
        if place % per_batch == per_batch - 1:
            batches.append(batch(len(batches), flush_ns=trainer.now_ns + 1, sensors=use(sensors), **trainer.tables()))
    last = batch(len(batches), flush_ns=trainer.now_ns + 1, sensors=use(sensors), is_last=True, **trainer.tables())
    numbers: list[int] = answers([*batches, last]).rows.iteration.tolist()
    return numbers


def use(sensors: Sensor | None) -> Sensor:
    return Sensor.HOST_CALL | Sensor.SYNC if sensors is None else sensors


@pytest.mark.parametrize("n_micro_batches", [1, 2, 7, 61])
def test_micro_batches_are_not_iterations(n_micro_batches: int) -> None:
    assert rows_of([micro_batches(n_micro_batches)] * 13) == list(range(13))


def test_micro_batches_are_not_iterations_even_before_the_first_iteration_is_over() -> None:
    batches: list[EventBatch] = []
    trainer = Trainer(iteration_ms=1000)
    for _ in range(7):
        trainer.iterate(micro_batches(61))
        tables = trainer.tables(gpu=False)
        third = len(tables["calls"]) // 3
        for part in range(3):
            calls = tables["calls"].take(np.arange(len(tables["calls"])) // (third + 1) == part)
            kept = tables if part == 2 else {}
            batches.append(batch(len(batches), sensors=Sensor.HOST_CALL | Sensor.SYNC, **(kept | {"calls": calls})))
    assert answers(batches).rows.iteration.tolist() == list(range(6))


@pytest.mark.parametrize("every", [2, 3, 5])
def test_an_iteration_that_does_more_now_and_then_is_still_one_iteration(every: int) -> None:
    plain = micro_batches(3)
    plans = [(*plain[:-1], LOGGING, plain[-1]) if i % every == every - 1 else plain for i in range(31)]
    assert rows_of(plans) == list(range(31))


def test_the_smallest_call_of_all_ranks_is_the_anchor_whatever_stage_a_rank_is_in() -> None:
    """All ranks reduce the norm over the world; what else they call differs with their stage."""
    stages: list[Plan] = [
        micro_batches(4),
        tuple(row for row in micro_batches(4) if row[1] != Op.RECV),
        tuple(row for row in micro_batches(4) if row[0] != PIPE),
    ]
    for sensors in (Sensor.HOST_CALL, Sensor.GPU):
        ends = []
        for plan in stages:
            trainer = Trainer()
            for _ in range(9):
                trainer.iterate(plan)
            events = batch(0, sensors=sensors, is_last=True, **trainer.tables())
            rows = answers([events]).rows
            norms = events.calls.take((events.calls.bytes == 4) & (events.calls.source == (sensors == Sensor.GPU)))
            ends.append(rows.end_ns.tolist())
            assert ends[-1] == (norms.start_ns if sensors == Sensor.HOST_CALL else norms.end_ns).tolist()


def test_the_same_call_twice_per_iteration_counts_once() -> None:
    norm = (WORLD, Op.ALL_REDUCE, 0, 4, 1)
    plan = (*micro_batches(2), norm)
    assert rows_of([plan] * 11) == list(range(11))


def test_a_few_corrupted_iterations_do_not_hide_the_rest() -> None:
    plain = micro_batches(3)
    plans = [plain[:4] + plain[6:] if i in {4, 9, 10} else plain for i in range(31)]
    assert rows_of(plans) == list(range(31))


def test_sizes_that_change_in_every_iteration_are_put_up_with_when_nothing_else_repeats() -> None:
    plans: list[Plan] = [
        tuple((comm, op, peer, size + 10 * i if size > 4 else size, n) for comm, op, peer, size, n in micro_batches(8))
        for i in range(101)
    ]
    assert rows_of(plans) == list(range(101))


def test_without_the_sizes_of_communicators_iterations_are_found_later() -> None:
    batches: list[EventBatch] = []
    trainer = Trainer()
    for seq in range(30):
        for _ in range(5):
            trainer.iterate(micro_batches(6))
        made = batch(seq, sensors=Sensor.HOST_CALL | Sensor.SYNC, **trainer.tables())
        batches.append(made)
    blind = [
        batch(
            b.seq, sensors=b.sensors, calls=b.calls, syncs=b.syncs, communicators=b.communicators.take(np.empty(0, int))
        )
        for b in batches
    ]
    first = next(i for i, answer in enumerate(answers(blind).batches) if len(answer.rows))
    assert first > next(i for i, answer in enumerate(answers(batches).batches) if len(answer.rows))
    assert answers(blind).rows.iteration.tolist() == answers(batches).rows.iteration.tolist()


def test_a_stream_without_a_period_has_no_iterations() -> None:
    random = np.random.default_rng(7)
    plans: list[Plan] = [
        tuple(
            (WORLD, Op(int(op)), 0, int(size), 1)
            for op, size in zip(random.integers(0, 4, 9), random.integers(9, 10**6, 9), strict=True)
        )
        for _ in range(40)
    ]
    assert rows_of(plans) == []


def test_a_new_kind_of_iteration_is_learnt_while_numbers_go_on() -> None:
    """After a change of the job's work the anchor remains, and with it the count."""
    trainer = Trainer()
    plans = [micro_batches(3)] * 17 + [micro_batches(5)] * 17
    batches = []
    for seq in range(0, 34, 2):
        for plan in plans[seq : seq + 2]:
            trainer.iterate(plan)
        batches.append(batch(seq // 2, is_last=seq == 32, **trainer.tables()))
    rows = answers(batches).rows
    assert rows.iteration.tolist() == list(range(34))
    assert rows.iteration[(rows.quality & Quality.OTHER_WORK) != 0].tolist() == [17, 18]


def test_an_anchor_that_disappears_is_replaced_and_what_it_counted_is_not_mixed_up() -> None:
    batches: list[EventBatch] = []
    trainer = Trainer()
    trainer.seq[WORLD, Op.BROADCAST] = 500  # it has been used before, so its count is another one
    norm_free = tuple(row for row in micro_batches(3) if row[0] != WORLD)
    other = (*norm_free, (WORLD, Op.BROADCAST, 0, 8, 1))
    for place in range(120):
        trainer.iterate(micro_batches(3) if place < 30 else other)
        if place % 10 == 9:
            tables = trainer.tables()
            batches.append(
                batch(len(batches), flush_ns=trainer.now_ns, sensors=Sensor.HOST_CALL | Sensor.SYNC, **tables)
            )
    rows = answers(batches).rows
    assert rows.iteration[:30].tolist() == list(range(30))
    assert len(set(rows.numbering[:29].tolist())) == 1
    later = rows.take(rows.end_ns > T0 + 60 * 100 * MS)
    assert len(later) > 40
    assert set(later.numbering.tolist()).isdisjoint(rows.numbering[:29].tolist())
    assert (np.diff(later.iteration) == 1).all()
    assert (later.segment > T0 + 29 * 100 * MS).all()


def test_a_long_evaluation_is_not_taken_for_training() -> None:
    """It makes no use of what all ranks share, so its passes are no iterations however often they repeat."""
    forward = ((PIPE, Op.RECV, 1, 5000, 1), (DATA, Op.ALL_REDUCE, 0, 7000, 4))
    batches: list[EventBatch] = []
    trainer = Trainer()
    for place in range(200):
        trainer.iterate(forward if 50 <= place < 150 else micro_batches(1))
        if place % 5 == 4:
            batches.append(batch(len(batches), sensors=Sensor.HOST_CALL | Sensor.SYNC, **trainer.tables()))
    rows = answers(batches, params=WindowParams(buffer_rows=400)).rows
    assert set(rows.numbering.tolist()) == {Numbering.SEQUENCE}
    assert rows.iteration.tolist() == list(range(99))
    assert np.flatnonzero(rows.quality).tolist() == [50]
    assert rows.duration_s[50] == pytest.approx(10.1)
