"""Who talks to whom: communicators with their inferred roles, ranks that do equal work, and the paths of transfers.

Everything is inferred from membership and from the calls of ordinary iterations; nothing is configured. What cannot be
inferred is left unknown (a role of OTHER, a peer group of one).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from schemas.alerts import ComponentName, ComponentType
from schemas.events import Communicators, Op, RankInfo
from schemas.table import AnyArray, IntArray

POINT_TO_POINT = (int(Op.SEND), int(Op.RECV))
_SHARDED = (int(Op.REDUCE_SCATTER), int(Op.ALL_GATHER))
LARGE_BYTES = 4096
_MANY_CALLS = 16
_MOST_PER_RANK = 64  # communicators and transfer series: what a job makes beyond that is not looked at


class Role(StrEnum):
    """What a communicator is for, inferred from its calls."""

    WORLD = "world"
    DATA = "data"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    OTHER = "other"


@dataclass(frozen=True, slots=True, order=True)
class SeriesKey:
    """One observable transfer: a collective of a communicator, or one direction between two of its members."""

    comm: int
    op: int  # of the sender, for point-to-point
    source: int = -1  # rank in the communicator; -1 for collectives
    target: int = -1


@dataclass(slots=True)
class Series:
    """What is known of one transfer series; calls and bytes are per rank and ordinary iteration."""

    key: SeriesKey
    calls: int
    call_bytes: int

    @property
    def is_point_to_point(self) -> bool:
        """Whether it has one sender and one receiver."""
        return self.key.source >= 0


@dataclass(slots=True)
class Topology:
    """Grows as batches arrive; `version` changes whenever a conclusion drawn from it may."""

    world_size: int
    node_by_rank: list[str] = field(init=False)
    gpu_by_rank: list[str] = field(init=False)
    members: dict[int, dict[int, int]] = field(default_factory=dict)  # comm -> rank in comm -> rank
    size: dict[int, int] = field(default_factory=dict)
    comm_rank: dict[tuple[int, int], int] = field(default_factory=dict)  # (comm, rank) -> rank in comm
    series: list[Series] = field(default_factory=list)
    index: dict[SeriesKey, int] = field(default_factory=dict)
    series_by_rank: dict[int, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))
    version: int = 0
    _unsized: dict[int, set[int]] = field(default_factory=dict)  # comm -> ranks whose nodes do not know all members
    _sized: set[int] = field(default_factory=set)  # comms of which some node knows the size
    _learnt: dict[str, tuple[tuple[RankInfo, ...], bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.node_by_rank = [""] * self.world_size
        self.gpu_by_rank = [""] * self.world_size

    def learn(self, node: str, ranks: tuple[RankInfo, ...], memberships: Communicators, seen: AnyArray) -> None:
        """Take note of where ranks run and what they are members of; nodes repeat both in every batch.

        A rank that is only seen in rows runs on the node that reports it.
        """
        for rank in seen.tolist():
            if not self.node_by_rank[rank]:
                self.node_by_rank[rank] = node
                self.version += 1
        said = (ranks, memberships.rank.tobytes() + memberships.comm.tobytes())
        if self._learnt.get(node) != said:
            self._learn_ranks(node, ranks)
            self._learn_communicators(memberships)
            self._learnt[node] = said

    def _learn_ranks(self, node: str, ranks: Iterable[RankInfo]) -> None:
        for info in ranks:
            gpu = info.gpu_uuid or ("" if info.gpu is None else str(info.gpu))
            if self.node_by_rank[info.rank] != node or self.gpu_by_rank[info.rank] != gpu:
                self.node_by_rank[info.rank] = node
                self.gpu_by_rank[info.rank] = gpu
                self.version += 1

    def _learn_communicators(self, table: Communicators) -> None:
        rows = zip(table.rank.tolist(), table.comm.tolist(), table.comm_rank.tolist(), table.size.tolist(), strict=True)
        for rank, comm, comm_rank, size in rows:
            if len(self.comm_rank) >= _MOST_PER_RANK * self.world_size:
                return
            if not size:
                self._learn_part(rank, comm)
            elif self.comm_rank.get((comm, rank)) is None or comm not in self._sized:
                if comm not in self._sized:
                    self._sized.add(comm)
                    self._forget_places(comm)
                self.comm_rank[comm, rank] = comm_rank
                self.members.setdefault(comm, {})[comm_rank] = rank
                self.size[comm] = size
                self._place_rest(comm)
                self.version += 1

    def _learn_part(self, rank: int, comm: int) -> None:
        """Put together the members of a communicator of which nodes see their own part alone.

        NCCL orders the members of a split by a key, for which frameworks give the rank. What was inferred from places
        in an incomplete communicator is forgotten.
        """
        known = self._unsized.setdefault(comm, set())
        if rank in known:
            return
        known.add(rank)
        if comm in self._sized:
            self._place_rest(comm)
        else:
            self._forget_places(comm)
            self.members[comm] = dict(enumerate(sorted(known)))
            self.size[comm] = len(known)
            self.comm_rank |= {(comm, member): place for place, member in self.members[comm].items()}
        self.version += 1

    def _place_rest(self, comm: int) -> None:
        """Give the places that are left to the members whose nodes do not know theirs, once these are as many."""
        members = self.members.get(comm, {})
        rest = sorted(self._unsized.get(comm, set()) - set(members.values()))
        free = [place for place in range(self.size[comm]) if place not in members]
        if rest and len(rest) == len(free):
            members |= dict(zip(free, rest, strict=True))
            self.comm_rank |= {(comm, rank): place for place, rank in zip(free, rest, strict=True)}

    def _forget_places(self, comm: int) -> None:
        for calls in self.series_by_rank.values():
            for index in [index for index in calls if self.series[index].key.comm == comm]:
                del calls[index]
        for rank in self.members.pop(comm, {}).values():
            self.comm_rank.pop((comm, rank), None)

    def series_index(self, rank: int, comm: int, op: int, peer: int, calls: int, call_bytes: int) -> int:
        """Return the index of the series that a rank's calls belong to, making one if it is new; -1 if it has none."""
        own = self.comm_rank.get((comm, rank))
        if op not in POINT_TO_POINT:
            key = SeriesKey(comm, op)
        elif own is None:
            return -1
        else:
            key = SeriesKey(comm, int(Op.SEND), *((own, peer) if op == Op.SEND else (peer, own)))
        found = self.index.get(key)
        if found is None and len(self.series) >= _MOST_PER_RANK * self.world_size:
            return -1
        if found is None:
            found = self.index[key] = len(self.series)
            self.series.append(Series(key, calls, call_bytes))
            self.version += 1
        if found not in self.series_by_rank[rank]:
            self.series_by_rank[rank][found] = (calls, call_bytes)
            self.version += 1
        return found

    def expected_reports(self) -> IntArray:
        """Return (n_series,): by how many ranks each series has to be reported before its minimum means anything."""
        return np.array(
            [2 if s.is_point_to_point else self.size.get(s.key.comm, 1 << 30) for s in self.series], np.int64
        )

    def roles(self) -> dict[int, Role]:
        """Return the role of each communicator that has calls."""
        calls_by_comm: dict[int, list[Series]] = defaultdict(list)
        for series in self.series:
            calls_by_comm[series.key.comm].append(series)
        return {comm: self._role(comm, calls) for comm, calls in calls_by_comm.items()}

    def _role(self, comm: int, calls: list[Series]) -> Role:
        if any(s.is_point_to_point for s in calls):
            return Role.PIPELINE
        size = self.size.get(comm, 0)
        large = [s for s in calls if s.call_bytes >= LARGE_BYTES or s.key.op in _SHARDED]
        if size == self.world_size and not large:
            return Role.WORLD
        nodes = {self.node_by_rank[rank] for rank in self.members.get(comm, {}).values()}
        if len(nodes) == 1 and sum(s.calls for s in calls) >= _MANY_CALLS and size < self.world_size:
            return Role.TENSOR
        return Role.DATA if large else Role.OTHER

    def signature(self, rank: int) -> tuple[tuple[int, int, int, int], ...]:
        """Return what a rank does in an iteration: equal for ranks that do equal work."""
        calls = self.series_by_rank.get(rank, {})
        return tuple(
            sorted(
                (self.series[i].key.op, self._direction(i, rank), n_calls, call_bytes)
                for i, (n_calls, call_bytes) in calls.items()
            )
        )

    def _direction(self, index: int, rank: int) -> int:
        key = self.series[index].key
        if key.source < 0:
            return 0
        step = 1 if key.target > key.source else -1
        return step if self.comm_rank.get((key.comm, rank)) == key.source else 2 * step

    def peers(self) -> IntArray:
        """Return (world_size,): a group number per rank; ranks of one group do equal work. -1 for ranks not seen.

        A group is a data-parallel communicator, or, where that has fewer than three members, all ranks of the same
        call signature.
        """
        roles = self.roles()
        groups = np.full(self.world_size, -1, np.int64)
        by_signature: dict[tuple[tuple[int, int, int, int], ...], int] = {}
        number: dict[object, int] = {}
        for rank in range(self.world_size):
            if not self.node_by_rank[rank]:
                continue
            comm = self._data_communicator(rank, roles)
            if comm is not None and self.size.get(comm, 0) >= 3:
                groups[rank] = number.setdefault(comm, len(number))
            else:
                signature = self.signature(rank)
                first = by_signature.setdefault(signature, rank)
                groups[rank] = number.setdefault(("signature", first), len(number))
        return groups

    def _data_communicator(self, rank: int, roles: Mapping[int, Role]) -> int | None:
        """Return the communicator over which a rank reduces its gradients: sharded and heavy ones before others."""
        best: tuple[bool, int, int, int] | None = None
        for index, (calls, call_bytes) in self.series_by_rank.get(rank, {}).items():
            key = self.series[index].key
            if roles.get(key.comm) is Role.DATA:
                score = (key.op in _SHARDED, calls * call_bytes, self.size.get(key.comm, 0), key.comm)
                best = score if best is None else max(best, score)
        return None if best is None else best[3]

    def stages(self) -> IntArray:
        """Return (world_size,): the pipeline stage of each rank, 0 where there is no pipeline."""
        stage = np.zeros(self.world_size, np.int64)
        for (comm, rank), comm_rank in self.comm_rank.items():
            if any(self.series[i].key.comm == comm and self.series[i].is_point_to_point for i in self._of(rank)):
                stage[rank] = comm_rank
        return stage

    def _of(self, rank: int) -> Iterable[int]:
        return self.series_by_rank.get(rank, {})

    def paths(self, index: int) -> frozenset[tuple[str, str]]:
        """Return the node pairs (sorted) that a series crosses; (node, node) for traffic inside a node.

        A collective is taken to run around a ring in the order of ranks in the communicator.
        """
        key = self.series[index].key
        members = self.members.get(key.comm, {})
        if key.source >= 0:
            ends = (members.get(key.source), members.get(key.target))
            hops = [(ends[0], ends[1])]
        else:
            order = [members.get(i) for i in range(self.size.get(key.comm, 0))]
            hops = list(zip(order, [*order[1:], *order[:1]], strict=True))
        pairs = {self._pair(a, b) for a, b in hops if a is not None and b is not None}
        between = {pair for pair in pairs if pair[0] != pair[1]}
        return frozenset(between or pairs)

    def _pair(self, a: int, b: int) -> tuple[str, str]:
        first, second = sorted((self.node_by_rank[a], self.node_by_rank[b]))
        return first, second


def gpu_name(topology: Topology, rank: int) -> ComponentName:
    """Return how the GPU of a rank is named, or its rank where the GPU is not known."""
    gpu = topology.gpu_by_rank[rank]
    return (
        ComponentName(type=ComponentType.GPU, node=topology.node_by_rank[rank], gpu=gpu)
        if gpu
        else rank_name(topology, rank)
    )


def rank_name(topology: Topology, rank: int) -> ComponentName:
    """Return how a rank is named."""
    return ComponentName(type=ComponentType.RANK, node=topology.node_by_rank[rank], rank=rank)
