"""Which link slows these transfers: four nodes with a rank each, tensor-parallel in pairs and data-parallel across."""

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

WORLD, TENSOR, DATA = (1,), (20, 21), (30, 31)
MEMBERS = {1: (0, 1, 2, 3), 20: (0, 1), 21: (2, 3), 30: (0, 2), 31: (1, 3)}
LARGE, SMALL = 1 << 20, 4
BEFORE, AFTER = 30, 8


@pytest.fixture
def topology() -> Topology:
    made = Topology(4)
    for rank in range(4):
        own = [(comm, members.index(rank), len(members)) for comm, members in MEMBERS.items() if rank in members]
        comm, comm_rank, size = zip(*own, strict=True)
        table = Communicators.build(len(own), rank=rank, comm=list(comm), comm_rank=list(comm_rank), size=list(size))
        made.learn(f"node{rank}", (), table, np.array([rank]))
        for comm_id in comm:
            call_bytes = SMALL if comm_id in WORLD else LARGE
            op = Op.REDUCE_SCATTER if comm_id in DATA else Op.ALL_REDUCE
            made.series_index(rank, comm_id, int(op), 0, 2, call_bytes)
    return made


def search(topology: Topology, factors: dict[int, float], noise: dict[int, float] | None = None) -> list[Suspect]:
    """Look for links after the shortest transfers of some communicators have become longer by factors."""
    random = np.random.default_rng(5)
    history = History(4)
    series = [one.key.comm for one in topology.series]
    for number in range(BEFORE + AFTER):
        is_late = number >= BEFORE
        spread = np.array([(noise or {}).get(comm, 0.0) if is_late else 0.0 for comm in series])
        factor = np.array([factors.get(comm, 1.0) if is_late else 1.0 for comm in series])
        times = 0.01 * factor * np.exp((0.03 + spread) * random.standard_normal(len(series)))
        history.push(Frame.empty(number, 4, 0), 1.0, times, np.ones(4, bool))
    span = Span(start=BEFORE, stop=BEFORE + AFTER, reference_start=0, reference_stop=BEFORE)
    return LinkSearch(history, topology, Paths.of(topology), DEFAULTS).find(span, 0.005)


def link(node: str, peer: str = "") -> ComponentName:
    return ComponentName(type=ComponentType.LINK, node=node, peer=peer)


def test_what_two_groups_have_in_common_is_named(topology: Topology) -> None:
    (suspect,) = search(topology, {21: 5.0, 30: 5.0, 1: 5.0})
    assert suspect.component.candidates == (link("node2"),)
    assert suspect.is_clear


def test_small_transfers_that_keep_their_time_do_not_speak_for_a_link_without_bandwidth(topology: Topology) -> None:
    (suspect,) = search(topology, {21: 5.0, 30: 5.0})
    assert suspect.component.candidates == (link("node2"),)


def test_less_bandwidth_may_slow_one_transfer_by_more_than_another(topology: Topology) -> None:
    (suspect,) = search(topology, {21: 1.7, 30: 40.0})
    assert suspect.component.candidates == (link("node2"),)


def test_the_link_between_two_nodes_slows_their_transfers_alone(topology: Topology) -> None:
    (suspect,) = search(topology, {30: 5.0})
    assert suspect.component.candidates == (link("node0", "node2"),)
    assert suspect.is_clear


def test_it_is_not_clear_which_link_it_is_while_a_transfer_is_too_uneven_to_tell(topology: Topology) -> None:
    (suspect,) = search(topology, {21: 3.0, 30: 5.0}, noise={21: 1.5})
    assert not suspect.is_clear
