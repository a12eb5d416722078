"""Iterations of simulated jobs against what really happened: layouts, sensors, loss, evaluation, late agents."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from agents.simulated import Cluster
from pipeline.observer import Counting
from pipeline.window import Window
from schemas.events import CallSource, EventBatch, Op
from schemas.iterations import IterationRows, Numbering, Quality
from tests.pipeline.window_streams import answers, duration_error, simulated

NOT_COMPARABLE = int(Quality.INCOMPLETE | Quality.OTHER_WORK)
LAYOUTS = [
    # tp, pp, dp, micro_batches
    (1, 1, 8, 1),
    (8, 1, 1, 3),
    (1, 8, 1, 8),
    (4, 1, 2, 2),
    (2, 2, 2, 3),
    (1, 4, 2, 16),
    (2, 4, 1, 64),
    (4, 2, 1, 5),
    (1, 2, 4, 2),
    (2, 1, 4, 1),
]
SENSORS = ["host_call gpu sync", "host_call sync", "gpu", "gpu sync", "host_call gpu sync marker", "gpu marker span"]


@cache
def job(sensors: str = "host_call gpu sync", more: str = "", **changes: float) -> tuple[EventBatch, ...]:
    return tuple(Cluster(simulated(sensors, more=more, **changes)).batches())


def pairs(rows: IterationRows) -> set[tuple[int, int]]:
    return set(zip(rows.rank.tolist(), rows.iteration.tolist(), strict=True))


def comparable(rows: IterationRows) -> IterationRows:
    return rows.take((rows.quality & NOT_COMPARABLE) == 0)


@pytest.mark.parametrize(("tp", "pp", "dp", "micro_batches"), LAYOUTS)
@pytest.mark.parametrize("sensors", ["host_call gpu sync", "gpu"])
def test_inferred_iteration_times_are_within_1_2_percent_of_the_true_ones(
    tp: int, pp: int, dp: int, micro_batches: int, sensors: str
) -> None:
    changes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "micro_batches": micro_batches}
    changes |= {"iterations": 31, "gpus_per_node": 8}
    rows = answers(job(sensors, **changes)).rows
    assert pairs(rows) == {(rank, iteration) for rank in range(8) for iteration in range(31)}
    assert len(rows) == 8 * 31
    assert set(rows.numbering.tolist()) == {Numbering.SEQUENCE}
    later = rows.take(rows.iteration > 0)
    assert not later.quality.any()
    error = duration_error(rows, simulated(sensors, **changes))
    mean_s = later.duration_s.mean() / np.diff(Cluster(simulated(sensors, **changes)).truth().end_s).mean()
    assert abs(mean_s - 1) < 0.002
    assert np.median(error) < 0.012


@pytest.mark.parametrize("sensors", SENSORS)
def test_whatever_the_sensors_every_iteration_of_every_rank_is_told_once(sensors: str) -> None:
    rows = answers(job(sensors)).rows
    assert len(rows) == len(pairs(rows)) == 8 * 61
    assert np.median(duration_error(rows, simulated(sensors))) < 0.012
    said = (rows.quality & NOT_COMPARABLE) == 0
    assert np.count_nonzero(~said) <= 8
    assert np.isfinite(rows.duration_s[said]).all()
    assert np.isfinite(rows.compute_s[said]).all() == ("gpu" in sensors)
    assert np.isfinite(rows.host_wait_s[said]).all() == ("sync" in sensors)
    assert np.isfinite(rows.forward_s[said]).all() == ("span" in sensors)


def test_without_any_wait_or_gpu_time_the_iteration_is_still_found() -> None:
    rows = answers(job("host_call")).rows
    later = rows.take(rows.iteration > 0)
    assert not later.quality.any()
    assert len(pairs(rows)) == 8 * 61
    truth_s = np.diff(Cluster(simulated("host_call")).truth().end_s).mean()
    assert later.duration_s.mean() == pytest.approx(truth_s, rel=0.012)


@pytest.mark.parametrize("sensors", ["host_call gpu sync", "gpu sync"])
def test_a_host_that_synchronises_every_seventh_iteration_tells_means(sensors: str) -> None:
    more = "[work]\nsync_every = 7"
    rows = answers(job(sensors, more)).rows
    assert set(rows.quality.tolist()) == {Quality.BLOCK_MEAN}
    assert sorted(set(rows.iteration.tolist())) == list(range(7 * (61 // 7)))
    end_s = Cluster(simulated(sensors, more=more)).truth().end_s
    blocks = rows.take((rows.rank == 3) & (rows.iteration >= 7))
    true_s = np.repeat(np.diff(end_s[6:56:7]) / 7, 7)
    np.testing.assert_allclose(blocks.duration_s, true_s, rtol=0.005)


def test_waits_that_are_told_before_the_calls_teach_nothing() -> None:
    changes = {"seed": 1, "micro_batches": 5, "dp": 4, "flush_s": 1.0}
    said = answers(job("gpu sync", "[work]\nsync_every = 7", **changes))
    assert set(said.rows.quality.tolist()) == {Quality.BLOCK_MEAN}


def test_markers_of_a_host_that_runs_ahead_are_not_taken_for_ends_of_work() -> None:
    more = "[work]\nsync_every = 7"
    rows = answers(job("host_call gpu sync marker", more)).rows
    assert set(rows.numbering.tolist()) == {Numbering.MARKER}
    assert set(rows.quality.tolist()) == {Quality.BLOCK_MEAN}
    error = duration_error(rows, simulated("host_call gpu sync marker", more=more))
    assert np.median(error) < 0.012


# The agent attaches in the middle of iteration 17, when the host has made all of its calls already.
def test_a_late_agent_gets_the_jobs_numbers_from_the_gpu_calls() -> None:
    rows = answers(job(more="late = [{ node = 1, at_iteration = 17 }]")).rows
    late = rows.take(rows.rank >= 4)
    assert set(rows.numbering.tolist()) == {Numbering.SEQUENCE}
    assert pairs(late) == {(rank, iteration) for rank in range(4, 8) for iteration in range(18, 61)}
    partial = late.take(late.quality != 0)
    assert set(partial.iteration.tolist()) == {18}
    assert set(partial.quality.tolist()) == {Quality.INCOMPLETE}
    assert np.max(duration_error(late.take(late.iteration > 18), simulated())) < 0.012


def test_a_late_agent_without_gpu_calls_counts_locally() -> None:
    rows = answers(job("host_call sync", more="late = [{ node = 1, at_iteration = 17 }]")).rows
    assert set(rows.numbering[rows.rank < 4].tolist()) == {Numbering.SEQUENCE}
    late = rows.take(rows.rank >= 4)
    assert set(late.numbering.tolist()) == {Numbering.LOCAL}
    assert late.iteration[late.rank == 5].tolist() == list(range(61 - 18))


def test_a_window_restarted_in_mid_job_goes_on_with_the_same_numbers() -> None:
    batches = job()
    whole = answers(batches).rows
    later = answers(batches[len(batches) // 2 :]).rows
    assert pairs(later) <= pairs(whole)
    said = {(r, i): d for r, i, d in zip(whole.rank, whole.iteration, whole.duration_s, strict=True)}
    good = comparable(later)
    assert len(good) > 8 * 20
    # Rows at the cut lack their GPU times, which came before; durations are the same throughout.
    assert all(said[r, i] == d for r, i, d in zip(good.rank, good.iteration, good.duration_s, strict=True))


@pytest.mark.parametrize(
    "sensors", ["host_call gpu sync", "host_call sync", "gpu", "gpu sync", "host_call gpu sync marker"]
)
@pytest.mark.parametrize("known", ["false", "true"])
def test_loss_is_marked_and_never_makes_an_iteration_look_slow(sensors: str, known: str) -> None:
    more = f'[[benign]]\nkind = "lost_batches"\nprobability = 0.1\nknown = {known}'
    changes: dict[str, Any] = {"iterations": 149, "flush_s": 0.2, "seed": 13}
    said = answers(job(sensors, more, **changes))
    rows = said.rows
    assert len(rows) == len(pairs(rows))
    assert sum(answer.lost_events for answer in said.batches) > 0
    incomplete = (rows.quality & Quality.INCOMPLETE) != 0
    assert 8 <= np.count_nonzero(incomplete) < len(rows) / 2
    good = comparable(rows)
    assert np.max(duration_error(good, simulated(sensors, more=more, **changes))) < 0.03
    # What was lost has rows too, but for what came before a rank was first seen.
    for rank in range(8):
        numbers = rows.iteration[rows.rank == rank]
        assert numbers.tolist() == list(range(numbers[0], numbers[-1] + 1))


@pytest.mark.parametrize("sensors", ["host_call gpu sync", "gpu"])
def test_evaluations_are_other_work_in_the_iteration_that_follows(sensors: str) -> None:
    more = '[[benign]]\nkind = "evaluation"\nevery = 9\nmicro_batches = 2\nmarker = false'
    rows = answers(job(sensors, more)).rows
    other = {i for _, i in pairs(rows.take((rows.quality & Quality.OTHER_WORK) != 0))} - {0}
    assert other == {9, 18, 27, 36, 45, 54}
    assert len(pairs(rows)) == 8 * 61
    good = comparable(rows.take(rows.iteration > 0))
    assert np.max(duration_error(good, simulated(sensors, more=more))) < 0.03


def test_a_marked_checkpoint_is_told_as_a_pause() -> None:
    more = '[[benign]]\nkind = "checkpoint"\nevery = 13\npause_s = 0.7'
    rows = answers(job("host_call gpu sync marker", more)).rows
    paused = rows.take((rows.quality & Quality.PAUSED) != 0)
    assert {i for _, i in pairs(paused)} == {13, 26, 39, 52}
    assert (paused.duration_s > 0.7).all()
    assert set(rows.quality[(rows.quality & Quality.PAUSED) == 0].tolist()) == {0}


def test_a_restarted_job_begins_anew() -> None:
    more = '[[benign]]\nkind = "restart"\nat_iteration = 29'
    said = answers(job(more=more))
    incarnations = {answer.incarnation for answer in said.batches}
    assert len(incarnations) == 2
    for incarnation, n in zip(dict.fromkeys(a.incarnation for a in said.batches), (29, 61 - 29), strict=True):
        rows = IterationRows.concatenate([a.rows for a in said.batches if a.incarnation == incarnation])
        assert pairs(rows) == {(rank, iteration) for rank in range(8) for iteration in range(n)}


def test_waits_victims_and_culprits_are_told_apart_by_their_own_time() -> None:
    """The slow GPU computes longer and waits less; everybody's iteration is the same."""
    more = '[[faults]]\nkind = "slow_gpu"\nnode = 0\ngpu = 1\nfactor = 1.5\nonset = 30'
    rows = answers(job(more=more, dp=4, pp=1)).rows
    slow = rows.take(rows.iteration >= 31)
    compute_s = np.array([np.median(slow.compute_s[slow.rank == rank]) for rank in range(8)])
    wait_s = np.array([np.median(slow.communication_s[slow.rank == rank]) for rank in range(8)])
    assert compute_s.argmax() == wait_s.argmin() == 1
    assert compute_s[1] > 1.3 * np.median(compute_s)


def test_rows_of_communication_sum_up_to_the_calls_that_were_made() -> None:
    batches = job()
    table = answers(batches).communication
    for source in (CallSource.HOST_CALL, CallSource.GPU):
        for op in (Op.ALL_REDUCE, Op.SEND, Op.RECV, Op.REDUCE_SCATTER, Op.ALL_GATHER):
            made = [b.calls.take((b.calls.source == source) & (b.calls.op == op)) for b in batches]
            mine = table.take(table.op == op)
            assert mine.calls.sum() == sum(calls.count.sum() for calls in made)
            if source == CallSource.GPU:
                total_s = sum(calls.duration_ns.sum() for calls in made) / 1e9
                assert mine.busy_s.sum() == pytest.approx(total_s, rel=1e-9)
    assert (table.least_s <= table.busy_s).all()


def test_lost_gpu_times_alone_leave_durations_as_they_are() -> None:
    batches = list(job())
    cut = [
        replace(b, calls=b.calls.take((b.calls.source == CallSource.HOST_CALL) | (b.calls.rank != 3))) for b in batches
    ]
    whole, rows = answers(batches).rows, answers(cut).rows
    mine = rows.rank == 3
    assert set(rows.quality[mine].tolist()) == {Quality.NO_GPU_TIMES}
    assert not rows.quality[~mine].any()
    by_pair = {(r, i): d for r, i, d in zip(whole.rank, whole.iteration, whole.duration_s, strict=True)}
    assert all(by_pair[r, i] == d for r, i, d in zip(rows.rank, rows.iteration, rows.duration_s, strict=True))


def test_the_same_records_give_the_same_bytes() -> None:
    first, second = answers(job()), answers(job())
    assert [a.rows for a in first.batches] == [a.rows for a in second.batches]
    assert [a.communication for a in first.batches] == [a.communication for a in second.batches]


def test_ended_jobs_leave_nothing_behind() -> None:
    window = Window(counting := Counting())
    answers(job(), window)
    assert window.n_nodes == 0
    assert not {name for name in counting.counts if "dropped" in name}
