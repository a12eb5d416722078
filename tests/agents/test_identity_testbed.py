"""Agents on two nodes of a real job, fed by real probes: the same names on both, and what the ranks know themselves."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from agents.collector import ProcessKey, RankProcess
from agents.communicators import Membership, Registry
from agents.ebpf.libraries import Library, identify
from agents.ebpf.symbols import read_image
from agents.ebpf.tracer import Tracer
from agents.job_identity import Discovery, IdentityConfig
from agents.processes import Processes, read_key
from tests.conftest import give_up
from tests.testbed import libraries
from tests.testbed.launch import Testbed, missing
from tests.testbed.workload import Workload

pytestmark = pytest.mark.kernel

DEADLINE_S = 60.0
WORKLOAD = Workload(tp=2, dp=2, pp=1, forward_ms=1.0, optimizer_ms=1.0)


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    reason = missing()
    if reason:
        give_up(reason)


@pytest.fixture(scope="module")
def library() -> Library:
    path = libraries.build() / "libnccl.so.2"
    identity = identify(str(path), read_image(str(path), ()).build_id)
    return Library(str(path), identity, "nccl", name=str(path))


@pytest.fixture
def tracer(library: Library) -> Iterator[Tracer]:
    tracer = Tracer()
    tracer.open()
    tracer.attach(library)
    yield tracer
    tracer.close()


@dataclass
class Agent:
    """The part of a node's agent that says who is who; its node is a group of torchrun's."""

    node: int
    registry: Registry = field(default_factory=Registry)
    ranks: list[RankProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = IdentityConfig(select={"GROUP_RANK": str(self.node)})
        self.processes = Processes(config.names)
        self.discovery = Discovery(config, self.registry, f"node{self.node}")

    def look(self) -> None:
        candidates = self.processes.scan(time.monotonic_ns())
        self.ranks = self.discovery.update(candidates, {}, time.monotonic_ns())


def look(tracer: Tracer, agents: list[Agent], until: Callable[[], bool]) -> None:
    """Let the agents look until it is so."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < deadline_s, [agent.discovery.limits() for agent in agents]
        tracer.poll()
        for event in tracer.take(flush_open=True).communicators:
            key = read_key(event.tgid)
            for agent in agents:
                if key is not None:
                    agent.registry.note(key, event)
        for agent in agents:
            agent.look()
        time.sleep(0.02)


def known_of(testbed: Testbed, agent: Agent) -> dict[int, list[Membership]]:
    """Return what an agent knows of each rank's communicators."""
    keys = {rank.rank: rank.key for rank in agent.ranks}
    return {rank: agent.registry.memberships(keys[rank]) for rank in sorted(keys)}


def test_both_nodes_call_the_job_and_its_ranks_alike_and_communicators_as_nccl_does(
    tracer: Tracer, library: Library, tmp_path: Path
) -> None:
    agents = [Agent(0, Registry(tmp_path / "state")), Agent(1)]
    for agent in agents:
        agent.discovery.note_observed(library, time.monotonic_ns())
    with Testbed(WORKLOAD, gpus_per_node=2, job="none") as testbed:
        look(tracer, agents, lambda: all(len(agent.ranks) == 2 for agent in agents))
        testbed.wait_until(3)
        look(tracer, agents, lambda: True)
        agents[0].registry.save()
        again = Agent(0, Registry(tmp_path / "state"))
        look(tracer, [again], lambda: len(again.ranks) == 2)
        testbed.stop()
        truths = testbed.truth()
        pids = list(testbed.pids)
    assert len({(rank.job_id, rank.incarnation) for agent in agents for rank in agent.ranks}) == 1
    assert [[rank.rank for rank in agent.ranks] for agent in agents] == [[0, 1], [2, 3]]
    assert [rank.key.pid for agent in agents for rank in agent.ranks] == pids
    assert [replace(rank, start_ns=0) for rank in again.ranks] == [replace(r, start_ns=0) for r in agents[0].ranks]
    world = next(c for c in truths[0].facts.communicators if c.axis == "world")
    assert {rank.incarnation for rank in agents[0].ranks} == {f"{world.hash:016x}"}
    for agent in (*agents, again):
        for rank, known in known_of(testbed, agent).items():
            for truth in truths[rank].facts.communicators:
                (own,) = [membership for membership in known if membership.comm == truth.hash]
                is_split_over_nodes = truth.parent is not None and own.size is None
                assert is_split_over_nodes or (own.comm_rank, own.size) == (truth.rank, truth.size)
                assert own.is_counted_from_creation is (agent is not again)
            assert len(known) == len(truths[rank].facts.communicators)


def test_two_jobs_with_run_id_none_at_the_same_time_are_two_jobs(tracer: Tracer, library: Library) -> None:
    agent = Agent(0)
    agent.discovery.note_observed(library, time.monotonic_ns())
    ports = ({"MASTER_PORT": "29501"}, {"MASTER_PORT": "29503"})
    with (
        Testbed(WORKLOAD, job="none", environment=ports[0], network=False) as first,
        Testbed(WORKLOAD, job="none", environment=ports[1], network=False) as second,
    ):
        look(tracer, [agent], lambda: len(agent.ranks) == 8)
        jobs = [{r.job_id for r in agent.ranks if r.key.pid in testbed.pids} for testbed in (first, second)]
    assert [len(names) for names in jobs] == [1, 1]
    assert jobs[0] != jobs[1]
    assert agent.discovery.disagreements() == []


def test_a_restart_by_torchrun_is_another_incarnation_of_the_same_job(tracer: Tracer, library: Library) -> None:
    agent = Agent(0)
    agent.discovery.note_observed(library, time.monotonic_ns())
    seen: list[RankProcess] = []
    ended: list[ProcessKey] = []
    for _ in range(2):
        with Testbed(WORKLOAD, job="llama", network=False):
            look(tracer, [agent], lambda: len(agent.ranks) == 4)
            seen += agent.ranks
        look(tracer, [agent], lambda: not agent.ranks)
        ended += agent.processes.take_ended()
    assert {rank.job_id for rank in seen} == {"llama"}
    assert len({rank.incarnation for rank in seen}) == 2
    assert sorted(rank.key for rank in seen) == sorted(set(ended) & {rank.key for rank in seen})
