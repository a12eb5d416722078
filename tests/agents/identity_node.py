"""A node for tests of identity: made-up processes and communicators, and a clock that stands where it is put."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.collector import ProcessKey, RankProcess
from agents.communicators import Registry
from agents.ebpf.libraries import Identity, Library
from agents.ebpf.records import CommCreated
from agents.job_identity import Discovery, IdentityConfig
from agents.processes import Candidate
from agents.rank_gpu import Gpu

S = 1_000_000_000
NCCL = Library("/proc/7/root/lib/libnccl.so.2", Identity(7, 11, 13, "ab"), "nccl")
PIDS = itertools.count(1000)


def an_id(seed: int) -> bytes:
    return bytes((place * seed + 5) % 256 for place in range(128))


def a_process(
    environment: dict[str, str],
    *,
    parent: int = 1,
    started_s: int = 1000,
    libraries: Sequence[Library] = (NCCL,),
    unmapped_ns: int | None = None,
) -> Candidate:
    pid = next(PIDS)
    return Candidate(
        key=ProcessKey(pid, started_s * 100),
        parent=parent,
        start_ns=started_s * S,
        namespace_pid=pid % 97,
        environment=environment,
        libraries=tuple(libraries),
        unmapped_ns=unmapped_ns,
    )


def torchrun(rank: int, world_size: int, **other: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": str(world_size // 2),
        "MASTER_ADDR": "node-1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    } | other


@dataclass
class Node:
    """One node with its agent, which observes the library since second 500 of a clock that stands at now_s."""

    name: str = "node-2"
    config: IdentityConfig = field(default_factory=IdentityConfig)
    registry: Registry = field(default_factory=Registry)
    now_s: float = 1000.0
    processes: list[Candidate] = field(default_factory=list)
    observes_calls: bool = True
    watches_since_s: float | None = 500.0
    discovery: Discovery = field(init=False)

    def __post_init__(self) -> None:
        self.discovery = Discovery(self.config, self.registry, self.name, observes_calls=self.observes_calls)
        if self.watches_since_s is not None:
            self.discovery.note_observed(NCCL, round(self.watches_since_s * S))

    def start(self, *processes: Candidate) -> None:
        self.processes += processes

    def make(self, process: Candidate, seed: int, *, rank: int, size: int) -> None:
        fields: dict[str, Any] = dict.fromkeys(("parent", "color", "key", "name", "nth_child"))
        event = CommCreated(
            tgid=process.key.pid,
            tid=process.key.pid,
            time_ns=round(self.now_s * S),
            comm=0x1000 * seed,
            function="ncclCommInitRankConfig",
            unique_id=an_id(seed),
            n_ranks=size,
            rank=rank,
            result=0,
            **fields,
        )
        self.registry.note(process.key, event)

    def look(self, after_s: float = 1.0, gpus: dict[int, list[Gpu]] | None = None) -> list[RankProcess]:
        self.now_s += after_s
        return self.discovery.update(self.processes, gpus or {}, round(self.now_s * S))


def names(ranks: Sequence[RankProcess]) -> set[tuple[str, str]]:
    return {(rank.job_id, rank.incarnation) for rank in ranks}


def run_torchrun(node: Node, ranks: Sequence[int], world_size: int, seed: int, **other: str) -> list[Candidate]:
    processes = [a_process(torchrun(rank, world_size, **other)) for rank in ranks]
    node.start(*processes)
    for rank, process in zip(ranks, processes, strict=True):
        node.make(process, seed, rank=rank, size=world_size)
    return processes
