"""Links that are slow from the first iteration: known by equal transfers, and what they cost by the few equals too.

Two nodes hold the first stage of a pipeline and two the second, two ranks each: eight messages back and forth have
equals, the gradients of each stage only those of the other.
"""

import numpy as np
import pytest

from pipeline.frames import Frame
from pipeline.history import History
from pipeline.judge_params import DEFAULTS
from pipeline.links import LinkSearch
from pipeline.paths import Paths
from pipeline.suspect import Span, Suspect
from pipeline.topology import Topology
from schemas.alerts import ComponentName, ComponentType
from schemas.events import Communicators, Op

RANKS, FRAMES, LARGE, TRANSFER_S = 8, 8, 1 << 20, 0.01
SPAN = Span(start=0, stop=FRAMES)
ALIKE = tuple(
    ComponentName(type=ComponentType.LINK, node=node, peer=peer)
    for node, peer in (("node0", ""), ("node0", "node2"), ("node2", ""))
)


@pytest.fixture
def topology() -> Topology:
    made = Topology(RANKS)
    for rank in range(RANKS):
        stage, pipeline = divmod(rank, 4)
        comm, place, size = [40 + pipeline, 30 + stage], [stage, pipeline], [2, 4]
        table = Communicators.build(2, rank=rank, comm=comm, comm_rank=place, size=size)
        made.learn(f"node{rank // 2}", (), table, np.array([rank]))
    for rank in range(RANKS):
        stage, pipeline = divmod(rank, 4)
        for op in (Op.SEND, Op.RECV):
            made.series_index(rank, 40 + pipeline, int(op), 1 - stage, 4, LARGE)
        made.series_index(rank, 30 + stage, int(Op.REDUCE_SCATTER), -1, 4, LARGE)
    return made


def search(topology: Topology, factors: dict[int, float], least_s: float = 0.005) -> list[Suspect]:
    return looking(topology, factors).find(SPAN, least_s)


def looking(topology: Topology, factors: dict[int, float], noise: dict[int, float] | None = None) -> LinkSearch:
    """Return a search in a job without a past, the transfers of whose communicators take longer by factors."""
    random, history = np.random.default_rng(6), History(RANKS)
    factor = np.array([factors.get(one.key.comm, 1.0) for one in topology.series])
    spread = np.array([(noise or {}).get(one.key.comm, 0.03) for one in topology.series])
    for number in range(FRAMES):
        times = TRANSFER_S * factor * np.exp(spread * random.standard_normal(len(factor)))
        history.push(Frame.empty(number, RANKS, 0), 1.0, times, np.ones(RANKS, bool))
    return LinkSearch(history, topology, Paths.of(topology), DEFAULTS)


def test_a_suspect_costs_what_the_transfers_without_enough_equals_lose_too(topology: Topology) -> None:
    messages_s = 2 * 4 * TRANSFER_S  # each way, four calls, twice as long as those of other nodes
    gradients_s = 4 * TRANSFER_S
    (suspect,) = search(topology, {40: 2.0, 41: 2.0, 30: 2.0})
    assert suspect.component.candidates == ALIKE
    assert suspect.excess_s == pytest.approx(messages_s + gradients_s, rel=0.05)
    assert suspect.claims == {("series", i) for i, one in enumerate(topology.series) if one.key.comm in (30, 40, 41)}
    assert search(topology, {40: 2.0, 41: 2.0}, 1.2 * messages_s) == []
    assert search(topology, {40: 2.0, 41: 2.0, 30: 2.0}, 1.2 * messages_s) != []


@pytest.mark.parametrize("of_gradients", [{30: 1.0, 31: 1.0}, {30: 3.0, 31: 3.0}, {30: 1.25}])
def test_the_only_equal_has_to_be_clearly_quicker(topology: Topology, of_gradients: dict[int, float]) -> None:
    (suspect,) = search(topology, {40: 2.0, 41: 2.0, **of_gradients})
    assert suspect.excess_s == pytest.approx(8 * TRANSFER_S, rel=0.05)


def test_the_only_equal_is_not_believed_where_transfers_scatter(topology: Topology) -> None:
    (suspect,) = looking(topology, {40: 4.0, 41: 4.0, 30: 2.0}, {30: 1.5, 31: 1.5}).find(SPAN, 0.005)
    assert suspect.excess_s == pytest.approx(2 * 4 * 3 * TRANSFER_S, rel=0.05)


def test_what_would_be_healthy_is_known_by_the_only_equal(topology: Topology) -> None:
    search_ = looking(topology, {40: 2.0, 41: 2.0, 30: 2.0})
    (suspect,) = search_.find(SPAN, 0.005)
    healthy_s = search_.healthy_s(suspect, SPAN)
    np.testing.assert_allclose(healthy_s, TRANSFER_S, rtol=0.1)


def test_a_transfer_that_is_slow_beside_its_only_equal_accuses_nobody_by_itself(topology: Topology) -> None:
    assert search(topology, {30: 5.0}) == []


def test_what_a_suspect_would_not_slow_is_no_cost_of_it(topology: Topology) -> None:
    for comm, ranks in ((50, (0, 1)), (51, (6, 7))):  # within a node
        for place, rank in enumerate(ranks):
            table = Communicators.build(1, rank=rank, comm=[comm], comm_rank=place, size=2)
            topology.learn(f"node{rank // 2}", (), table, np.array([rank]))
            topology.series_index(rank, comm, int(Op.REDUCE_SCATTER), -1, 4, LARGE)
    (suspect,) = search(topology, {40: 2.0, 41: 2.0, 50: 3.0})
    assert suspect.excess_s == pytest.approx(8 * TRANSFER_S, rel=0.05)
