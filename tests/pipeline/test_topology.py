"""Communicators whose members no single node knows are put together from the nodes' parts."""

from itertools import permutations

import numpy as np
import pytest

from pipeline.topology import Topology
from schemas.events import Communicators, Op, RankInfo

COMM = 0x5BD1E995


def ranks(*numbers: int) -> tuple[RankInfo, ...]:
    return tuple(
        RankInfo(rank=r, local_rank=0, pid=1000 + r, process_start_ns=0, gpu=None, gpu_uuid=None) for r in numbers
    )


def learn_part(topology: Topology, node: str, *members: int) -> None:
    part = Communicators.build(len(members), rank=np.array(members), comm=COMM, comm_rank=0xFFFFFFFF, size=0)
    topology.learn(node, ranks(*members), part, np.array(members))


def test_parts_of_a_split_communicator_add_up_in_the_order_of_ranks() -> None:
    topology = Topology(world_size=7)
    learn_part(topology, "b", 5, 3)
    learn_part(topology, "a", 1)
    assert topology.size[COMM] == 3
    assert topology.members[COMM] == {0: 1, 1: 3, 2: 5}
    assert [topology.comm_rank[COMM, rank] for rank in (1, 3, 5)] == [0, 1, 2]


def test_what_was_said_of_places_in_an_incomplete_communicator_is_forgotten() -> None:
    topology = Topology(world_size=7)
    learn_part(topology, "b", 3, 5)
    early = topology.series_index(3, COMM, int(Op.SEND), 1, 1, 4096)  # place 0 sends to place 1
    learn_part(topology, "a", 1)
    assert topology.signature(3) == ()
    late = topology.series_index(3, COMM, int(Op.SEND), 2, 1, 4096)  # the same two ranks, now places 1 and 2
    assert early != late
    assert (topology.series[late].key.source, topology.series[late].key.target) == (1, 2)


def learn_whole(topology: Topology, node: str, size: int, places: dict[int, int]) -> None:
    members = np.array(list(places))
    whole = Communicators.build(
        len(places), rank=members, comm=COMM, comm_rank=np.array(list(places.values())), size=size
    )
    topology.learn(node, ranks(*places), whole, members)


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_a_node_that_knows_all_places_is_believed_whatever_came_first(order: tuple[str, ...]) -> None:
    topology = Topology(world_size=7)
    learn = {
        "a": lambda: learn_part(topology, "a", 0, 1),
        "b": lambda: learn_whole(topology, "b", 6, {2: 0, 3: 1}),
        "c": lambda: learn_part(topology, "c", 4, 6),
    }
    for node in order:
        learn[node]()
    assert topology.size[COMM] == 6
    assert topology.members[COMM] == {0: 2, 1: 3, 2: 0, 3: 1, 4: 4, 5: 6}
    assert {rank: topology.comm_rank[COMM, rank] for rank in (0, 1, 2, 3, 4, 6)} == {2: 0, 3: 1, 0: 2, 1: 3, 4: 4, 6: 5}


def test_places_that_nobody_knows_stay_open_while_members_are_missing() -> None:
    topology = Topology(world_size=7)
    learn_whole(topology, "b", 5, {2: 0, 3: 1})
    learn_part(topology, "a", 0, 1)
    assert topology.size[COMM] == 5
    assert topology.members[COMM] == {0: 2, 1: 3}
