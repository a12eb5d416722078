"""Which link slows these transfers: four nodes with a rank each, tensor-parallel in pairs and data-parallel across."""

from collections.abc import Set

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


def search(
    topology: Topology,
    factors: dict[int, float],
    noise: dict[int, float] | None = None,
    *,
    slow_from: int = BEFORE,
    lost: Set[int] = frozenset(),
    never_seen: Set[int] = frozenset(),
    least_s: float = 0.005,
) -> list[Suspect]:
    """Look for links after the shortest transfers of some communicators have become longer by factors."""
    random = np.random.default_rng(5)
    history = History(topology.world_size)
    series = [one.key.comm for one in topology.series]
    for number in range(BEFORE + AFTER):
        is_late = number >= slow_from
        spread = np.array([(noise or {}).get(comm, 0.0) if is_late else 0.0 for comm in series])
        factor = np.array([factors.get(comm, 1.0) if is_late else 1.0 for comm in series])
        times = 0.01 * factor * np.exp((0.03 + spread) * random.standard_normal(len(series)))
        unseen = lost | never_seen if is_late else never_seen
        times[[comm in unseen for comm in series]] = np.nan
        everybody = np.ones(topology.world_size, bool)
        history.push(Frame.empty(number, topology.world_size, 0), 1.5 if is_late else 1.0, times, everybody)
    span = Span(start=BEFORE, stop=BEFORE + AFTER, reference_start=0, reference_stop=BEFORE)
    return LinkSearch(history, topology, Paths.of(topology), DEFAULTS).find(span, least_s)


@pytest.fixture
def hub() -> Topology:
    """Node 2 has two communicators with node 0, and eight with node 1."""
    made = Topology(3)
    for comm in range(10):
        for place, rank in enumerate((0 if comm < 2 else 1, 2)):
            table = Communicators.build(1, rank=rank, comm=[comm], comm_rank=place, size=2)
            made.learn(f"node{rank}", (), table, np.array([rank]))
            made.series_index(rank, comm, int(Op.REDUCE_SCATTER), 0, 2, LARGE)
    return made


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


def test_many_transfers_of_which_each_is_hardly_known_speak_against_an_interface_together(hub: Topology) -> None:
    others = range(2, 10)
    (suspect,) = search(hub, {0: 4.0, 1: 4.0} | dict.fromkeys(others, 1.1), noise=dict.fromkeys(others, 0.5))
    assert suspect.component.candidates == (link("node0"), link("node0", "node2"))
    assert suspect.is_clear


def test_one_transfer_that_is_not_slowed_does_not_outvote_all_that_are(hub: Topology) -> None:
    (suspect,) = search(hub, dict.fromkeys(range(9), 4.0))
    assert suspect.component.candidates == (link("node2"),)


def test_frames_in_which_the_job_is_not_slow_say_nothing_of_a_link_that_comes_and_goes(topology: Topology) -> None:
    (suspect,) = search(topology, {21: 5.0, 30: 5.0}, slow_from=BEFORE + AFTER - 3)
    assert suspect.component.candidates == (link("node2"),)
    assert suspect.is_clear


def test_it_is_not_clear_which_link_it_is_while_a_transfer_that_could_tell_is_lost(topology: Topology) -> None:
    (suspect,) = search(topology, {30: 5.0}, lost={21})
    assert suspect.component.candidates == (link("node0", "node2"), link("node2"))
    assert not suspect.is_clear


def test_nobody_waits_for_a_transfer_that_nobody_reports(topology: Topology) -> None:
    (suspect,) = search(topology, {30: 5.0}, never_seen={21})
    assert suspect.component.candidates == (link("node0", "node2"), link("node2"))
    assert suspect.is_clear


@pytest.mark.parametrize(("lost", "never_seen"), [({21}, set()), (set(), {21})])
def test_a_link_that_explains_too_little_of_a_slowdown_gives_way_to_one_whose_transfers_were_not_all_seen(
    topology: Topology, lost: set[int], never_seen: set[int]
) -> None:
    one_transfer_s = 2 * 0.01 * 4
    least_s = 1.5 * one_transfer_s
    (suspect,) = search(topology, {30: 5.0}, lost=lost, never_seen=never_seen, least_s=least_s)
    assert suspect.component.candidates == (link("node2"),)
    assert suspect.excess_s == pytest.approx(2 * one_transfer_s, rel=0.1)
    assert suspect.is_clear


def test_a_link_whose_worst_loser_is_reported_by_nobody_is_followed_by_what_is_seen() -> None:
    """Rank 0 of node 0 loses most, to a node without an agent; rank 1 of node 0 loses to two nodes that are seen."""
    members = {50: (0, 2), 51: (1, 3), 52: (1, 4), 53: (3, 4)}
    made, nodes = Topology(5), (0, 0, 1, 2, 3)
    for rank, node in enumerate(nodes):
        own = [(comm, ranks.index(rank)) for comm, ranks in members.items() if rank in ranks]
        for comm, place in own:
            table = Communicators.build(1, rank=rank, comm=[comm], comm_rank=place, size=2)
            made.learn(f"node{node}", (), table, np.array([rank]))
            made.series_index(rank, comm, int(Op.REDUCE_SCATTER), 0, 8 if comm == 50 else 2, LARGE)
    (suspect,) = search(made, {50: 5.0, 51: 5.0, 52: 5.0}, never_seen={50})
    assert suspect.component.candidates == (link("node0"),)
    seen = [index for index, one in enumerate(made.series) if one.key.comm in (51, 52)]
    times_s = np.where(np.isin(np.arange(len(made.series)), seen), 0.05, np.nan)
    history = History(5)
    history.push(Frame.empty(0, 5, 0), 1.5, times_s, np.ones(5, bool))
    assert suspect.watch.excess(history, 0, 1) == pytest.approx([suspect.excess_s], rel=0.15)
