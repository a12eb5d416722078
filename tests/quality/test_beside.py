"""What baselines say of an episode, as incidents: who is meant, since when, and that all are scored alike."""

from dataclasses import dataclass

import numpy as np
import pytest

from agents.simulated.layout import Placement, gpu_uuid, incarnations, node_name
from agents.simulated.scenario import Parallelism, Scenario
from benchmarks.quality.answers import Said
from benchmarks.quality.baselines.baseline import Detection, Input, Observed
from benchmarks.quality.baselines.feed import Series
from benchmarks.quality.baselines.statements import HINDSIGHT, Seen
from benchmarks.quality.beside import OURS, Beside, beside
from benchmarks.quality.compare import compared
from benchmarks.quality.components import JOB
from benchmarks.quality.corpus import Episode
from benchmarks.quality.matching import match
from benchmarks.quality.outcome import Opening
from benchmarks.quality.trial import outcome
from schemas.alerts import ComponentName, ComponentType, Kind
from tests.quality.test_matching import answer, matched

N, FIRST, S = 41, 100, 10**9
SHAPE = Parallelism(tp=1, pp=1, dp=8, gpus_per_node=2)


@dataclass
class Told:
    """Says what it was told to."""

    told: list[Detection]
    is_online: bool = True
    name = "told"
    needs = frozenset({Input.DURATION})

    def judges(self, _: Observed) -> list[Detection]:
        return self.told


@pytest.fixture
def placement() -> Placement:
    ((placement, _, _),) = incarnations(Scenario(title="eight ranks", seed=3, iterations=N, layout=SHAPE))
    return placement


def said(placement: Placement, *told: Detection, is_online: bool = True) -> list[Opening]:
    numbers = np.arange(N)
    series = Series(
        iteration=numbers,
        end_ns=(numbers + 1) * S,
        known_ns=(numbers + 3) * S,
        observed=Observed(duration_s=np.ones(N)),
    )
    return Seen(series, placement, FIRST, 0).said(Told(list(told), is_online), Kind.SLOW_RANK)


def test_who_accuses_nobody_says_that_the_job_is_slower_until_it_is_faster_again(placement: Placement) -> None:
    first, second = said(placement, Detection(at=7, onset=5), Detection(at=19, is_slower=False), Detection(at=29))
    assert (first.kind, first.candidates, first.also) == (Kind.SLOW_JOB, frozenset({JOB}), ())
    assert (first.onset, first.detected, first.resolved) == (FIRST + 5, FIRST + 7, FIRST + 19)
    assert first.detected_s == 10.0
    assert (second.onset, second.detected, second.resolved) == (FIRST + 29, FIRST + 29, FIRST + N)


def test_ranks_named_at_once_are_one_incident_and_stand_for_whatever_they_may_be(placement: Placement) -> None:
    (opening,) = said(placement, Detection(at=7, rank=3), Detection(at=7, rank=2))
    scenario = placement.scenario
    host = ComponentName(type=ComponentType.HOST, node=node_name(scenario, 1))
    cards = {
        ComponentName(type=ComponentType.GPU, node=node_name(scenario, 1), gpu=gpu_uuid(scenario, 1, gpu))
        for gpu in (0, 1)
    }
    assert Said(kind=Kind.SLOW_HOST, candidates=frozenset({host})) in opening.also
    assert Said(kind=Kind.SLOW_GPU, candidates=frozenset(cards)) in opening.also


def test_a_rank_is_right_for_its_gpu_and_its_host_coarse_for_its_link_and_wrong_for_others(
    placement: Placement,
) -> None:
    (opening,) = said(placement, Detection(at=7, rank=2))
    scenario = placement.scenario
    here, there = node_name(scenario, 1), node_name(scenario, 3)
    card, other = (ComponentName(type=ComponentType.GPU, node=here, gpu=gpu_uuid(scenario, 1, gpu)) for gpu in (0, 1))
    expected = {
        (Kind.SLOW_GPU, card): (True, True),
        (Kind.SLOW_GPU, other): (False, False),
        (Kind.SLOW_HOST, ComponentName(type=ComponentType.HOST, node=here)): (True, True),
        (Kind.SLOW_HOST, ComponentName(type=ComponentType.HOST, node=there)): (False, False),
        (Kind.SLOW_LINK, ComponentName(type=ComponentType.LINK, node=here, peer=there)): (True, False),
        (Kind.SLOW_LINK, ComponentName(type=ComponentType.LINK, node=there)): (False, False),
        (Kind.SLOW_JOB, JOB): (False, False),
    }
    for (kind, name), (is_found, is_first) in expected.items():
        label = answer(accepted=(Said(kind=kind, candidates=frozenset({name})),), onset=FIRST + 5, end=FIRST + N)
        one = matched([label], opening)
        (finding,) = one.findings
        assert (finding.is_found, finding.names_component_first) == (is_found, is_first), name
        assert len(one.false) == (not is_found)


def test_hindsight_may_be_a_little_early_and_never_later_than_the_end(placement: Placement) -> None:
    early, late = said(placement, Detection(at=7), Detection(at=N - 2), is_online=False)
    assert (early.onset, early.detected) == (FIRST + 7, FIRST + 7 + HINDSIGHT)
    assert late.detected == FIRST + N - 1


@pytest.fixture(scope="module")
def episode() -> Episode:
    return Episode("gpu_step", 0)


@pytest.fixture(scope="module")
def judged(episode: Episode) -> Beside:
    return beside(episode, ("adwin", "dlrover", "longest_collective"))


def test_listening_changes_nothing_and_everybody_gets_the_same_labels(episode: Episode, judged: Beside) -> None:
    assert judged.ours == outcome(episode)
    for name in ("adwin", "longest_collective"):
        assert judged.outcome(name).answers == judged.ours.answers
    openings = judged.others["longest_collective"]
    assert openings
    assert all(0 <= one.detected < judged.ours.iterations and one.detected_s > 0 for one in openings)


def test_a_method_is_scored_as_ours_is_and_what_it_cannot_see_is_told(judged: Beside) -> None:
    blind = Beside(ours=judged.ours, others={"dlrover": None})
    row = compared("dlrover", [blind])
    assert (row.sees, row.recall, row.false_incidents_per_10000) == (0.0, 0.0, 0.0)
    assert np.isnan([row.recall_where_seen, row.kind]).all()
    ours = compared(OURS, [judged])
    (finding,) = match(judged.ours).findings
    assert (ours.recall, ours.sees) == (float(finding.is_found), 1.0)
