"""The right answers: sets worked out by hand, and what each setting of the sensors lets anybody know."""

from pathlib import Path

import pytest

from agents.simulated import Scenario, load_scenario
from agents.simulated.hypotheses import LinkHypotheses
from agents.simulated.labels import Expected, component, expected
from agents.simulated.layout import Placement
from schemas.alerts import ComponentType, Kind, Severity

SCENARIOS = sorted((Path(__file__).resolve().parents[2] / "scenarios").glob("*.toml"))


ALL = "host_call gpu sync nvml host marker"
LAYOUT = "tp = 2, pp = 2, dp = 8"


def scenario(fault: str, sensors: str = ALL, layout: str = LAYOUT) -> Scenario:
    return load_scenario(
        f"""
title = "labels"
seed = 19
iterations = 97
layout = {{ {layout}, gpus_per_node = 4 }}
agents.sensors = {sensors.split()}
faults = [{{ {fault} }}]
"""
    )


def answer(*given: str) -> Expected:
    (only,) = expected(scenario(*given))
    return only


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_answers_written_in_a_scenario_are_those_computed(path: Path) -> None:
    given = load_scenario(path)
    written = {
        (Kind(one.kind), frozenset(component(given, text) for text in one.candidates), one.onset, one.end)
        for one in given.expected
    }
    computed = {
        (one.kind, one.candidates, one.onset_iteration, one.end_iteration) for one in expected(given) if one.visible
    }
    assert written == computed


GPU = 'kind = "slow_gpu", node = 1, gpu = 2, factor = 1.5'
HOST = 'kind = "slow_host", node = 1, factor = 6.0'
LINK = 'kind = "slow_link", nodes = [1, 5], factor = 12.0'
LATER, FIRST = ", onset = 31", ""


@pytest.mark.parametrize(
    ("fault", "sensors", "kind", "named", "visible"),
    [
        (GPU + LATER, "gpu sync", "slow_gpu", "gpu 1/2", True),
        (GPU + LATER, "gpu nvml", "slow_gpu", "gpu 1/2", True),
        (GPU + LATER + ", telemetry = false", "gpu nvml", "slow_rank", "rank 6", True),
        (GPU + LATER, "gpu host", "slow_rank", "rank 6", True),
        (GPU + LATER, "nvml host_call", "slow_gpu", "gpu 1/2", True),
        (GPU + LATER + ", telemetry = false", "nvml host_call", "slow_job", "job", True),
        (GPU + LATER, "host_call sync marker", "slow_job", "job", True),
        (GPU + FIRST, "gpu sync", "slow_gpu", "gpu 1/2", True),
        (GPU + FIRST, "nvml", "slow_gpu", "gpu 1/2", True),
        (GPU + FIRST, "host_call sync", "slow_job", "job", False),
        (HOST + LATER, "sync", "slow_host", "host 1", True),
        (HOST + LATER, "gpu", "slow_host", "host 1", True),
        (HOST + LATER, "host", "slow_host", "host 1", True),
        (HOST + LATER + ", telemetry = false", "host host_call", "slow_job", "job", True),
        (HOST + FIRST, "sync", "slow_host", "host 1", True),
        (HOST + FIRST, "host_call", "slow_job", "job", False),
        (LINK + LATER, "gpu", "slow_link", "link 1-5", True),
        (LINK + LATER, "host_call sync nvml host", "slow_job", "job", True),
        (LINK + FIRST, "gpu", "slow_link", "link 1-5", True),
        (LINK + FIRST, "host_call sync nvml host", "slow_job", "job", False),
    ],
)
def test_sensors_decide_what_anybody_can_know(fault: str, sensors: str, kind: str, named: str, visible: object) -> None:
    one = answer(fault, sensors)
    assert (one.kind, one.visible) == (Kind(kind), visible)
    assert one.candidates == {component(scenario(fault), named)}


def test_a_fault_from_the_start_needs_peers_or_telemetry() -> None:
    alone = "tp = 1, pp = 8, dp = 1"
    assert not answer(GPU + ", telemetry = false", ALL, alone).visible
    assert answer(GPU, ALL, alone).visible


def test_an_absorbed_fault_is_not_to_be_seen_and_a_small_one_accuses_nobody() -> None:
    absorbed = answer('kind = "slow_host", node = 1, factor = 2.0, onset = 31')
    assert not absorbed.visible
    assert absorbed.slowdown_ratio == pytest.approx(1.0, abs=1e-3)
    small = answer('kind = "slow_gpu", node = 1, gpu = 2, factor = 1.1, onset = 31')
    assert 1.05 < small.slowdown_ratio < 1.1
    assert (small.kind, small.severity, small.visible) == (Kind.SLOW_JOB, Severity.INFO, True)
    assert {name.type for name in small.candidates} == {ComponentType.JOB}


def test_a_slow_node_is_told_from_its_links_by_what_else_it_slows() -> None:
    # Stage 0 runs on nodes 0 to 3, stage 1 on 4 to 7; node i talks to node i + 4, rings close from 3 to 0 and 7 to 4.
    hypotheses = LinkHypotheses(Placement(scenario(LINK), 0, 0))
    assert hypotheses.alike((1, 5)) == {(1, 5)}
    assert hypotheses.alike(1) == {1}
    assert hypotheses.alike((1, 2)) == {(0, 1), (1, 2), (2, 3)}
    assert hypotheses.alike((3, 4)) == hypotheses.alike((0, 7)) == {(3, 4), (0, 7)}  # which only the world's ring uses
    pipelines = {number for kind, number, _ in hypotheses.predicted(1) if kind == "pipeline"}
    assert pipelines == {2 * 2 + 0, 2 * 2 + 1, 3 * 2 + 0, 3 * 2 + 1}
    assert len(hypotheses.predicted(1)) == 4 * 2 + 2 + 1  # both directions, the stage's two rings, the world's


def test_without_a_pipeline_no_transfer_tells_the_edges_of_a_ring_apart() -> None:
    given = scenario("kind = 'slow_nic', node = 1, factor = 8.0", "gpu", "tp = 1, pp = 1, dp = 16")
    (one,) = expected(given)
    assert one.candidates == {
        component(given, text)
        for text in ("nic 0", "nic 1", "nic 2", "nic 3", "link 0-1", "link 1-2", "link 2-3", "link 0-3")
    }
    assert not one.visible  # from the start, with no equal ring to compare with


def test_a_few_bytes_that_are_quick_clear_no_link_and_slow_ones_clear_those_they_do_not_use() -> None:
    hypotheses = LinkHypotheses(Placement(scenario(LINK), 0, 0))
    # Of the four links of the first stage's rings, the world's ring does not use the one that closes them.
    assert hypotheses.alike((0, 3)) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert hypotheses.alike((1, 2)) == {(0, 1), (1, 2), (2, 3)}
    assert hypotheses.alike(0) == {0}  # large messages of the pipeline do tell


@pytest.mark.parametrize("nodes", [(0, 1), (1, 2), (2, 3), (0, 3)])
def test_from_the_start_the_only_communicator_of_its_kind_tells_no_link_from_another(nodes: tuple[int, int]) -> None:
    hypotheses = LinkHypotheses(Placement(scenario(LINK), 0, 0))
    assert hypotheses.has_equals(nodes)
    assert hypotheses.alike(nodes, has_past=False) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    (one,) = expected(scenario(f"kind = 'slow_link', nodes = {list(nodes)}, factor = 12.0"))
    assert one.candidates == {
        component(scenario(LINK), text) for text in ("link 0-1", "link 1-2", "link 2-3", "link 0-3")
    }


def test_from_the_start_two_rings_do_not_show_whether_one_is_slow() -> None:
    # Nodes 0 and 1 are the first stage, 2 and 3 the second: one ring each, and eight pipelines.
    hypotheses = LinkHypotheses(Placement(scenario(GPU, layout="tp = 1, pp = 2, dp = 8"), 0, 0))
    assert hypotheses.alike(0) == {0}
    assert hypotheses.alike(0, has_past=False) == {0, 2, (0, 2)}
    assert hypotheses.has_equals((0, 2))
    assert not hypotheses.has_equals((0, 1))


def test_a_link_that_nothing_uses_is_not_to_be_seen() -> None:
    one = answer('kind = "slow_link", nodes = [0, 6], factor = 50.0, onset = 31')
    assert (one.visible, one.slowdown_ratio) == (False, 1.0)


def test_a_gpu_is_named_by_its_card_whatever_its_rank() -> None:
    given = scenario(GPU + LATER)
    (name,) = answer(GPU + LATER).candidates
    assert (name.node, name.rank) == ("node1", None)
    assert name.gpu == component(given, "gpu 1/2").gpu != component(given, "gpu 1/3").gpu


def test_a_component_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'switch 3' names no component"):
        component(scenario(LINK), "switch 3")
