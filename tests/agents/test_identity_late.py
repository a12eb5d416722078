"""Agents that come late, or start anew, call jobs as the others do where they can, and say where they guess."""

from pathlib import Path

import pytest

from agents.communicators import Membership, Registry
from agents.nccl_hash import unique_id_hash
from tests.agents.identity_node import Node, S, a_process, an_id, names, run_torchrun, torchrun


def test_an_agent_that_comes_late_takes_the_world_from_the_inspector_and_agrees_with_the_others() -> None:
    first, late = Node("node-1"), Node("node-2", watches_since_s=None)
    run_torchrun(first, (0, 1), 4, seed=83)
    processes = [a_process(torchrun(rank, 4), started_s=10) for rank in (2, 3)]
    late.start(*processes)
    for process in processes:
        late.registry.note_call(process.key, is_stranger=True)
        late.make(process, 89, rank=int(process.environment["RANK"]), size=4)  # not the world's first
    assert late.look() == []
    for process in processes:
        rank = int(process.environment["RANK"])
        world = Membership(unique_id_hash(an_id(83)), rank, 4, is_counted_from_creation=False, generation=0)
        late.registry.tell(process.key, world)
    assert names(late.look()) == names(first.look())


def test_a_world_communicator_seen_by_an_agent_that_came_late_is_not_believed_before_it_could_have_been_refuted() -> (
    None
):
    node = Node(watches_since_s=None)
    process = a_process(torchrun(0, 2), started_s=10)
    node.start(process)
    node.look()
    node.make(process, 97, rank=0, size=2)
    assert node.look() == []
    (rank,) = node.look(after_s=6.0)
    assert rank.incarnation == f"{unique_id_hash(an_id(97)):016x}"


@pytest.mark.parametrize(("after_s", "n_named"), [(0.0, 1), (0.009, 1), (0.011, 0)])
def test_a_process_is_late_only_if_it_started_a_tick_before_the_agent_looked(after_s: float, n_named: int) -> None:
    node = Node(watches_since_s=1000 + after_s)
    process = a_process(torchrun(0, 2), started_s=1000)
    node.start(process)
    node.make(process, 97, rank=0, size=2)
    assert len(node.look()) == n_named


def test_a_process_that_was_waited_for_is_believed_at_once() -> None:
    node = Node(watches_since_s=None)
    process = a_process(torchrun(0, 2), started_s=990, unmapped_ns=round(1000.3 * S))
    node.start(process)
    node.make(process, 97, rank=0, size=2)
    assert len(node.look()) == 1


def test_agents_that_all_come_late_guess_alike_after_a_while_and_say_so() -> None:
    nodes = [Node(f"node-{place}", watches_since_s=None) for place in range(2)]
    for place, node in enumerate(nodes):
        counts = {"TORCHELASTIC_RESTART_COUNT": str(place)}
        process = a_process(torchrun(2 * place, 4, **counts), started_s=10)
        node.start(process)
        node.registry.note_call(process.key, is_stranger=True)
        assert node.look() == []
        assert node.look(after_s=4.0) == []
        assert len(node.look(after_s=2.0)) == 1
        assert "guessed" in node.discovery.limits()[0].why
    assert len(names([rank for node in nodes for rank in node.look()])) == 1


def test_a_guess_is_replaced_once_the_world_is_told() -> None:
    node = Node(watches_since_s=None)
    process = a_process(torchrun(0, 2), started_s=10)
    node.start(process)
    node.registry.note_call(process.key, is_stranger=True)
    node.look()
    (guessed,) = node.look(after_s=61.0)
    world = Membership(101, 0, 2, is_counted_from_creation=False, generation=0)
    node.registry.tell(process.key, world)
    (known,) = node.look()
    assert guessed.incarnation.startswith("guess-")
    assert known.incarnation == f"{101:016x}"
    assert node.discovery.limits() == []


def test_a_job_that_never_makes_a_world_communicator_keeps_the_name_that_all_its_nodes_guess() -> None:
    node = Node()
    process = a_process(torchrun(0, 4))
    node.start(process)
    node.make(process, 103, rank=0, size=2)
    node.look()
    assert node.look(after_s=50.0) == []
    (guessed,) = node.look(after_s=11.0)
    node.make(process, 107, rank=0, size=4)
    assert node.look() == [guessed]


def test_an_agent_that_starts_anew_calls_everything_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(registry=Registry(tmp_path / "state"))
    processes = run_torchrun(node, (0, 1), 2, seed=109)
    before = node.look()
    node.registry.save()
    monkeypatch.setattr("agents.communicator_state.read_key", {p.key.pid: p.key for p in processes}.get)
    again = Node(registry=Registry(tmp_path / "state"), now_s=2000.0, watches_since_s=None)
    again.start(*processes)
    assert again.look() == before
