"""Physical consistency: dependencies are kept, victims wait and the culprit does not, faults cost what they should."""

from collections.abc import Iterator

import numpy as np
import pytest

from agents.simulated import Scenario, load_scenario
from agents.simulated.conditions import Paths
from agents.simulated.labels import slowdown_ratio
from agents.simulated.layout import Axis, Placement
from agents.simulated.program import training
from agents.simulated.stage import Stage
from agents.simulated.timeline import Passed, timeline, truth
from schemas.events import Op
from schemas.table import FloatArray

PP, DP, TP = 2, 5, 2


def scenario(
    faults: str = "", benign: str = "", more: str = "", layout: tuple[int, int, int, int] = (TP, PP, DP, 2)
) -> Scenario:
    tp, pp, dp, gpus_per_node = layout
    return load_scenario(
        f"""
title = "physics"
seed = 13
iterations = 23
micro_batches = 7
faults = [{faults}]
benign = [{benign}]
layout = {{ tp = {tp}, pp = {pp}, dp = {dp}, gpus_per_node = {gpus_per_node} }}
"""
    )


def passes(given: Scenario) -> Iterator[Passed]:
    return (h for h in timeline(given, given.faults) if isinstance(h, Passed))


def waits(given: Scenario, axis: Axis, op: Op) -> FloatArray:
    """Mean seconds in calls per iteration, (pp, dp, tp)."""
    per_stage = []
    done = list(passes(given))
    for stage in range(given.layout.pp):
        rows = [n for n, row in enumerate(done[0].program.stages[stage].rows) if (row.axis, row.op) == (axis, op)]
        per_stage.append(np.mean([one.times.stages[stage].total[rows].sum(axis=0) for one in done], axis=0))
    return np.array(per_stage)


def test_stages_follow_one_forward_one_backward() -> None:
    first, middle, last = training(scenario(layout=(1, 3, 1, 1))).stages
    ops = [[(row.op.name[0], row.peer) for row in stage.rows if row.axis == Axis.PP] for stage in (first, middle, last)]
    assert ops[0] == [("S", 1)] * 2 + [("S", 1), ("R", 1)] * 5 + [("R", 1)] * 2
    assert ops[1][:10] == [
        ("R", 0),
        ("S", 2),
        ("R", 0),
        ("S", 2),
        ("R", 2),
        ("S", 0),
        ("R", 0),
        ("S", 2),
        ("R", 2),
        ("S", 0),
    ]
    assert ops[2] == [("R", 1), ("S", 1)] * 7


@pytest.mark.parametrize(
    "layout", [(1, 1, 1, 1), (1, 5, 1, 1), (2, 4, 1, 8), (1, 11, 2, 2), (4, 1, 3, 2), (2, 3, 5, 5)]
)
def test_every_layout_finishes_and_repeats(layout: tuple[int, int, int, int]) -> None:
    done = truth(scenario(layout=layout))
    assert np.all(done.duration_s > 0)
    np.testing.assert_array_equal(done.start_s[1:], done.end_s[:-1])
    assert done.duration_s.std() < 0.02 * done.duration_s.mean()


def test_both_sides_of_a_message_and_all_members_of_a_collective_leave_together() -> None:
    for one in passes(scenario()):
        first, second = one.times.stages
        rows, other_rows = ([n for n, row in enumerate(s.rows) if row.axis == Axis.PP] for s in one.program.stages)
        np.testing.assert_array_equal(np.sort(first.end[rows], axis=0), np.sort(second.end[other_rows], axis=0))
        for stage, program in zip(one.times.stages, one.program.stages, strict=True):
            for n, row in enumerate(program.rows):
                members = {Axis.TP: (DP, TP), Axis.DP: (1, DP, TP), Axis.WORLD: (DP * TP,), Axis.PP: (DP, TP, 1)}
                ends = stage.end[n].reshape(members[row.axis])
                assert np.all(np.ptp(ends, axis=1 if row.axis == Axis.DP else -1) == 0)
        assert np.all(first.total > 0)
        assert np.all(first.least <= first.total)


def test_operations_of_a_rank_follow_each_other() -> None:
    for one in passes(scenario()):
        for stage, program in zip(one.times.stages, one.program.stages, strict=True):
            same_item = np.diff(program.item_of_row) == 0  # a send and its answer go together
            gap = stage.start[1:] - stage.end[:-1]
            assert np.all(gap[~same_item] >= 0)
            assert np.all(stage.host_start <= stage.start + 1e-12)


def test_a_ring_joins_neighbours_in_rank_order_and_the_last_to_the_first() -> None:
    paths = Paths(Placement(scenario(layout=(1, 1, 5, 1)), 0, 0))
    source, target = (nodes.ravel().tolist() for nodes in paths.ring_nodes(Axis.DP))
    assert list(zip(source, target, strict=True)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    one_per_node = Paths(Placement(scenario(layout=(2, 2, 3, 1)), 0, 0))
    shapes = [one_per_node.ring_nodes(axis)[0].shape for axis in (Axis.TP, Axis.DP, Axis.WORLD)]
    assert shapes == [(2, 3, 2), (2, 2, 3), (12,)]


@pytest.mark.parametrize("nodes", [(2, 7), (2, 3)])
def test_a_slow_link_is_slow_both_ways(nodes: tuple[int, int]) -> None:
    one, other = (
        scenario(f'{{ kind = "slow_link", nodes = [{a}, {b}], factor = 12.0 }}') for a, b in (nodes, nodes[::-1])
    )
    np.testing.assert_array_equal(truth(one).end_s, truth(other).end_s)
    assert truth(one).end_s[-1] > 1.1 * truth(scenario()).end_s[-1]


def test_a_run_of_calls_on_the_host_lasts_from_its_first_to_its_last() -> None:
    given = scenario()
    rows = [n for n, row in enumerate(training(given).stages[0].rows) if row.axis == Axis.TP]
    for one in passes(given):
        stage = one.times.stages[0]
        span_s = (stage.host_end - stage.host_start)[rows].mean(axis=(1, 2))
        launch_s = given.work.host_ratio * given.work.forward_s * np.array([1, 2])[[0, *[0, 1] * 6, 1]]
        np.testing.assert_allclose(span_s, 0.75 * launch_s, rtol=0.1)


def test_the_slow_gpu_waits_least_and_its_victims_wait() -> None:
    given = scenario('{ kind = "slow_gpu", node = 3, gpu = 1, factor = 1.5 }')
    culprit = (0, 3, 1)
    tensor = waits(given, Axis.TP, Op.ALL_REDUCE)
    assert tensor[culprit] < 0.1 * tensor[0, 3, 0]
    data = waits(given, Axis.DP, Op.REDUCE_SCATTER)
    assert np.all(data[0, 3] < 0.5 * np.delete(data[0], 3, axis=0))
    received = waits(given, Axis.PP, Op.RECV)
    assert np.all(received[1, 3] > 2 * np.delete(received[1], 3, axis=0).max())


def test_a_contended_host_waits_least_for_its_gpu() -> None:
    given = scenario('{ kind = "slow_host", node = 3, factor = 5.0 }')
    wait = np.mean([one.times.wait_end - one.times.wait_start for one in passes(given)], axis=0)
    assert np.all(wait[0, 3] < 0.1 * np.delete(wait[0], 3, axis=0).min())


@pytest.mark.parametrize(
    ("fault", "least", "most"),
    [
        ('{ kind = "slow_gpu", node = 3, gpu = 1, factor = 1.4, onset = 11 }', 1.2, 1.4),
        ('{ kind = "slow_host", node = 2, factor = 5.0, onset = 11 }', 1.2, 1.6),
        ('{ kind = "slow_host", node = 2, factor = 2.0, onset = 11 }', 1.0, 1.001),
        ('{ kind = "slow_nic", node = 8, factor = 4.0, onset = 11 }', 1.1, 1.6),
        ('{ kind = "slow_link", nodes = [2, 7], factor = 12.0, onset = 11 }', 1.15, 1.6),
        ('{ kind = "slow_link", nodes = [1, 7], factor = 99.0, onset = 11 }', 1.0, 1.0),
    ],
)
def test_iterations_get_longer_by_what_the_counterfactual_says(fault: str, least: float, most: float) -> None:
    given = scenario(fault)
    slow, healthy = truth(given).duration_s, truth(scenario()).duration_s
    np.testing.assert_array_equal(slow[:11], healthy[:11])
    ratio = slow[11:].sum() / healthy[11:].sum()
    assert ratio == pytest.approx(slowdown_ratio(given, given.faults[0]), rel=1e-3)
    assert least <= ratio <= most


def test_a_healthy_job_communicates_as_little_as_real_ones() -> None:
    given = scenario()
    iteration_s = truth(given).duration_s.mean()
    n_messages = 2 * given.micro_batches
    least = [np.stack([s.least for s in one.times.stages]) for one in passes(given)]
    rows = training(given).stages[0].rows
    data = [n for n, row in enumerate(rows) if row.axis == Axis.DP]
    pipeline = [n for n, row in enumerate(rows) if row.axis == Axis.PP]
    data_ratio = np.mean([one[:, data].sum(axis=1).min(axis=1).mean() for one in least]) / iteration_s
    message_ratio = np.mean([one[:, pipeline].min(axis=0).mean() for one in least]) * n_messages / iteration_s
    assert 0.05 < data_ratio < 0.10
    assert 0.01 < message_ratio < 0.06


def test_working_slice_by_slice_gives_what_the_short_cut_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    short = list(passes(scenario()))
    compute = Stage.compute

    def the_long_way(self: Stage, number: int, item: object) -> None:
        self._may_be_host_bound[:] = True
        compute(self, number, item)  # type: ignore[arg-type]

    monkeypatch.setattr(Stage, "compute", the_long_way)
    for one, other in zip(short, passes(scenario()), strict=True):
        for stage, other_stage in zip(one.times.stages, other.times.stages, strict=True):
            for name in ("start", "end", "total", "least"):
                np.testing.assert_allclose(getattr(stage, name), getattr(other_stage, name), rtol=0, atol=1e-12)


def test_a_ramp_grows_and_an_intermittent_fault_comes_and_goes() -> None:
    place = 'kind = "slow_gpu", node = 0, gpu = 0, factor = 2.0, onset = 3'
    ramp = scenario(f'{{ {place}, shape = "ramp", ramp = 10 }}').faults[0]
    assert [round(ramp.factor_at(i), 3) for i in (2, 3, 7, 12, 20)] == [1.0, 1.1, 1.5, 2.0, 2.0]
    comes = scenario(f'{{ {place}, end = 14, shape = "intermittent", period = 5, duty = 0.4 }}').faults[0]
    assert [i for i in range(23) if comes.factor_at(i) > 1] == [3, 4, 8, 9, 13]


def test_variable_sequence_length_varies_iterations_as_production_jobs_do() -> None:
    duration_s = truth(scenario(benign='{ kind = "variable_sequence_length" }')).duration_s
    assert 0.03 < duration_s.std() / duration_s.mean() < 0.12


def test_a_long_last_stage_keeps_the_first_waiting_but_no_member_of_a_stage() -> None:
    given = scenario(benign='{ kind = "long_last_stage", factor = 1.7 }')
    received = waits(given, Axis.PP, Op.RECV)
    assert received[0].min() > 3 * received[1].max()
    assert waits(given, Axis.TP, Op.ALL_REDUCE).max() < 0.05 * truth(given).duration_s.mean()


def test_warm_up_slows_the_first_iterations_after_every_start() -> None:
    benign = '{ kind = "warm_up", iterations = 4, factor = 3.0 }, { kind = "restart", at_iteration = 11 }'
    done = truth(scenario(benign=benign))
    typical = np.median(done.duration_s)
    assert done.incarnation.tolist() == [0] * 11 + [1] * 12
    for first in (0, 11):
        assert 2.5 < done.duration_s[first] / typical < 3.2
        assert np.all(np.diff(done.duration_s[first : first + 5]) < 0)
        np.testing.assert_allclose(done.duration_s[first + 4 : first + 11], typical, rtol=0.03)


def test_a_collecting_host_holds_everybody_up_now_and_then() -> None:
    healthy = truth(scenario()).duration_s
    paused = truth(scenario(benign='{ kind = "gc_pauses", probability = 0.02, pause_s = 0.2 }')).duration_s
    is_hit = paused > healthy + 0.1
    assert 1 <= is_hit.sum() <= 12
    np.testing.assert_allclose(paused[~is_hit], healthy[~is_hit], atol=0.1)


def test_a_gpu_keeps_its_fault_through_a_restart() -> None:
    benign = '{ kind = "restart", at_iteration = 11, node_shift = 3 }'
    given = scenario('{ kind = "slow_gpu", node = 4, gpu = 1, factor = 1.6 }', benign)
    done = list(passes(given))
    for shift, one in ((0, done[5]), (3, done[17])):
        placement = Placement(given, int(shift > 0), shift)
        tensor_rows = [[n for n, r in enumerate(stage.rows) if r.axis == Axis.TP] for stage in one.program.stages]
        wait = np.stack([s.total[rows].sum(axis=0) for s, rows in zip(one.times.stages, tensor_rows, strict=True)])
        culprit = placement.rank.ravel()[wait.argmin()]
        assert (placement.node.ravel()[culprit], placement.gpu.ravel()[culprit]) == (4, 1)
        assert culprit == placement.first_rank_on(4) + 1
