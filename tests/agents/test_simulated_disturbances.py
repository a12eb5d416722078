"""Staircases, ranks that are slow by themselves, and the disturbances that only look like faults."""

import numpy as np
import pytest

from agents.simulated import Cluster, Scenario, load_scenario
from agents.simulated.labels import expected
from agents.simulated.layout import incarnation, incarnations
from agents.simulated.timeline import truth
from schemas.alerts import ComponentType, Kind
from schemas.events import MarkerKind, ThrottleReason

STEADY = "compute_cv = 0, within_node_cv = 0, rdma_cv = 0, launch_cv = 0, iteration_cv = 0, gpu_spread_cv = 0"


def scenario(faults: str = "", benign: str = "", iterations: int = 40, jitter: str = STEADY) -> Scenario:
    return load_scenario(
        f"""
title = "disturbances"
seed = 23
iterations = {iterations}
layout = {{ tp = 2, pp = 2, dp = 4, gpus_per_node = 4 }}
jitter = {{ {jitter} }}
faults = [{faults}]
benign = [{benign}]
"""
    )


def test_a_staircase_rises_in_equal_steps_from_its_onset() -> None:
    place = 'kind = "slow_gpu", node = 0, gpu = 0, factor = 1.4, onset = 10'
    (stairs,) = scenario(f'{{ {place}, shape = "staircase", ramp = 20, steps = 4, end = 35 }}').faults
    assert [round(stairs.factor_at(i), 6) for i in (9, 10, 14, 15, 20, 25, 34, 35)] == [
        1,
        1.1,
        1.1,
        1.2,
        1.3,
        1.4,
        1.4,
        1,
    ]


def test_a_slow_job_slows_every_iteration_by_its_share_of_computation() -> None:
    ratio = truth(scenario('{ kind = "slow_job", factor = 1.5, onset = 20 }')).duration_s
    assert 1.4 < ratio[20:].mean() / ratio[:20].mean() < 1.5
    (answer,) = expected(scenario('{ kind = "slow_job", factor = 1.5, onset = 20 }'))
    assert (answer.kind, answer.visible) == (Kind.SLOW_JOB, True)


def test_a_slow_rank_takes_its_slowness_along_to_another_node() -> None:
    restart = '{ kind = "restart", at_iteration = 20, node_shift = 1 }'
    fault = 'kind = "slow_rank", rank = 5, factor = 1.6'
    ratio = truth(scenario(f"{{ {fault}, onset = 5 }}", restart)).duration_s
    assert ratio[25:].mean() == pytest.approx(ratio[6:20].mean(), rel=1e-3)
    nodes = [
        next(iter(e.candidates)).node for e in expected(scenario(f"{{ {fault} }}, {{ {fault}, onset = 20 }}", restart))
    ]
    assert nodes == ["node1", "node2"]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no rank 16"):
        scenario('{ kind = "slow_rank", rank = 16, factor = 1.6 }')


def test_a_host_that_waits_for_data_holds_everybody_up_now_and_then() -> None:
    healthy = truth(scenario()).duration_s
    for shared in ("true", "false"):
        stalls = f'{{ kind = "data_stalls", probability = 0.1, pause_s = 0.5, is_shared = {shared} }}'
        extra = truth(scenario(benign=stalls)).duration_s - healthy
        assert 0 < np.count_nonzero(extra > 0.01) < len(extra)
        assert extra.min() > -1e-9


def test_experts_that_get_more_tokens_do_so_for_a_while() -> None:
    moe = '{ kind = "moe_imbalance", cv = 0.2, memory = 4 }'
    extra = truth(scenario(benign=moe, iterations=200)).duration_s
    extra = np.log(extra) - np.log(extra).mean()
    correlation = [float(extra[:-lag] @ extra[lag:] / (extra @ extra)) for lag in (1, 8)]
    assert correlation[0] > 0.5
    assert abs(correlation[1]) < 0.3


def test_own_profiling_is_slow_and_says_so_and_a_recompilation_is_slow_alone() -> None:
    for profiling in (True, False):
        fields = f"every = 15, iterations = 2, factor = 2.0, is_profiling = {str(profiling).lower()}"
        spells = f'{{ kind = "slow_spells", {fields} }}'
        given = scenario(benign=spells)
        slow = np.flatnonzero(truth(given).duration_s > 1.3 * np.median(truth(given).duration_s))
        assert slow.tolist() == [15, 16, 30, 31]
        said = {
            int(iteration)
            for batch in Cluster(given).batches()
            for kind, iteration in zip(batch.markers.kind, batch.markers.iteration, strict=True)
            if kind == MarkerKind.PROFILING
        }
        assert said == (set(slow.tolist()) if profiling else set())


def test_cards_that_report_a_power_cap_are_not_slower() -> None:
    given = scenario(benign='{ kind = "throttle_reports", share = 0.5, probability = 0.5 }')
    reasons = np.concatenate([batch.gpu_samples.throttle_reasons for batch in Cluster(given).batches()])
    assert set(reasons.tolist()) == {0, int(ThrottleReason.SW_POWER_CAP)}
    np.testing.assert_array_equal(truth(given).duration_s, truth(scenario()).duration_s)


def test_a_job_goes_on_in_another_size_after_an_elastic_restart() -> None:
    given = scenario(benign='{ kind = "restart", at_iteration = 20, node_shift = 0, dp = 2, micro_batches = 16 }')
    sizes = {batch.incarnation: (batch.world_size, int(batch.node[-1])) for batch in Cluster(given).batches()}
    assert [size for size, _ in sizes.values()] == [16, 8]
    assert [(p.scenario.layout.dp, first, end) for p, first, end in incarnations(given)] == [(4, 0, 20), (2, 20, 40)]
    assert incarnation(given, 20)[0].scenario.micro_batches == 16
    duration_s = truth(given).duration_s
    assert duration_s[21:].mean() > 1.5 * duration_s[:20].mean()


def test_the_components_of_the_new_faults_are_ranks_cards_and_the_job() -> None:
    answers = expected(
        scenario('{ kind = "slow_rank", rank = 3, factor = 1.5 }, { kind = "slow_job", factor = 1.5, onset = 3 }')
    )
    types = [next(iter(answer.candidates)).type for answer in answers]
    assert types == [ComponentType.GPU, ComponentType.JOB]
