"""The parallel layout of a Megatron job and the communicators that it implies, for files that name no communicator."""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from schemas.events import Communicators

Axis = Literal["pipeline", "data", "tensor", "embedding"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a recorded rank stands in the parallel layout; `shard` counts recorded ranks of one stage and replica."""

    stage: int
    dp_rank: int
    shard: int


class Layout:
    """The communicators of a job, each with an identifier that its members share.

    One of a single member does not exist, as in NCCL. `embedding_ranks` are those that share the word embeddings.
    """

    def __init__(
        self, job_id: str, placements: dict[int, Placement], world_size: int, *, embedding_ranks: set[int]
    ) -> None:
        self.placements = placements
        self.n_stages = max(p.stage for p in placements.values()) + 1
        n_replicas = len({p.dp_rank for p in placements.values()})
        self._job_id = job_id
        self._rows: dict[int, dict[Axis, tuple[int, int, int]]] = {rank: {} for rank in placements}
        self._add_groups("pipeline", {rank: (p.dp_rank, p.shard) for rank, p in placements.items()})
        self._add_groups("data", {rank: (p.stage, p.shard) for rank, p in placements.items()})
        self._add_groups(
            "tensor",
            {rank: (p.stage, p.dp_rank) for rank, p in placements.items()},
            n_members_least=world_size // (self.n_stages * n_replicas),
        )
        self._add_groups(
            "embedding", {rank: (p.dp_rank, p.shard) for rank, p in placements.items() if rank in embedding_ranks}
        )

    def _add_groups(self, axis: Axis, group_by_rank: dict[int, tuple[int, int]], *, n_members_least: int = 0) -> None:
        """Add one communicator a group; it has `n_members_least` members even where fewer were recorded."""
        members_by_group: dict[tuple[int, int], list[int]] = {}
        for rank, group in group_by_rank.items():
            members_by_group.setdefault(group, []).append(rank)
        for group, members in members_by_group.items():
            n_members = max(len(members), n_members_least)
            if n_members < 2:
                continue
            name = f"{self._job_id}/{axis}/{group[0]}/{group[1]}".encode()
            comm = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
            for comm_rank, rank in enumerate(members):
                self._rows[rank][axis] = comm, comm_rank, n_members

    def comm(self, rank: int, axis: Axis) -> int:
        """Return the communicator's identifier, 0 where there is none."""
        return self._rows[rank].get(axis, (0, 0, 0))[0]

    def membership(self, rank: int) -> Communicators:
        """Return what the rank's agent says of its communicators."""
        rows = list(self._rows[rank].values())
        comms = np.array([row[0] for row in rows], np.uint64)  # left to itself, numpy makes floats of such numbers
        return Communicators.build(
            len(rows), rank=rank, comm=comms, comm_rank=[row[1] for row in rows], size=[row[2] for row in rows]
        )
