"""Where ranks run and which communicators they share."""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from agents.simulated.benign import Restart
from agents.simulated.scenario import Parallelism, Scenario
from schemas.table import AnyArray, IntArray


class Axis(IntEnum):
    """The kinds of communicator, by the axis of parallelism that their members differ in."""

    TP = 0
    DP = 1
    PP = 2
    WORLD = 3


def node_name(scenario: Scenario, node: int) -> str:
    """Return a node's name; names sort as their numbers do."""
    return f"node{node:0{len(str(scenario.n_nodes - 1))}d}"


def gpu_uuid(scenario: Scenario, node: int, gpu: int) -> str:
    """Return the UUID of a physical GPU, the same whatever job or seed runs on it."""
    digits = hashlib.blake2b(f"{node_name(scenario, node)}/{gpu}".encode(), digest_size=16).hexdigest()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


@dataclass(frozen=True, eq=False)
class Placement:
    """One incarnation's ranks: arrays over ranks are (pp, dp, tp), which is rank order when flattened."""

    scenario: Scenario
    incarnation: int  # 0, 1, ...
    node_shift: int  # ranks of the i-th group of gpus_per_node run on node i + node_shift

    @property
    def shape(self) -> Parallelism:
        """Return the degrees of parallelism."""
        return self.scenario.layout

    @cached_property
    def name(self) -> str:
        """Return the incarnation's id, alike on all nodes."""
        return hashlib.blake2b(f"{self.scenario.job}/{self.incarnation}".encode(), digest_size=6).hexdigest()

    @cached_property
    def rank(self) -> IntArray:
        """Return (pp, dp, tp): the global rank."""
        shape = self.shape
        return np.arange(shape.world_size).reshape(shape.pp, shape.dp, shape.tp)

    @cached_property
    def node(self) -> IntArray:
        """Return (pp, dp, tp): the number of the physical node."""
        slot = self.rank // self.shape.gpus_per_node
        return (slot + self.node_shift) % self.scenario.n_nodes

    @cached_property
    def gpu(self) -> IntArray:
        """Return (pp, dp, tp): the index of the GPU on its node."""
        return self.rank % self.shape.gpus_per_node

    def first_rank_on(self, node: int) -> int:
        """Return the lowest rank of a node; its ranks are consecutive."""
        return (node - self.node_shift) % self.scenario.n_nodes * self.shape.gpus_per_node

    def size(self, axis: Axis) -> int:
        """Return how many members a communicator has; those of one member do not exist."""
        shape = self.shape
        return (shape.tp, shape.dp, shape.pp, shape.world_size)[axis]

    def member_axis(self, axis: Axis) -> int | tuple[int, int, int]:
        """Return the array axes along which members differ."""
        return (2, 1, 0, (0, 1, 2))[axis]

    @cached_property
    def comm(self) -> dict[Axis, AnyArray]:
        """Return each axis' communicator hash by rank, (pp, dp, tp) of uint64."""
        return {axis: self._hashes(axis) for axis in Axis if self.size(axis) > 1}

    @cached_property
    def comm_rank(self) -> dict[Axis, IntArray]:
        """Return each axis' rank in the communicator, (pp, dp, tp)."""
        place = np.indices(self.rank.shape)
        return {Axis.TP: place[2], Axis.DP: place[1], Axis.PP: place[0], Axis.WORLD: self.rank}

    def _hashes(self, axis: Axis) -> AnyArray:
        lowest = np.broadcast_to(self.rank.min(axis=self.member_axis(axis), keepdims=True), self.rank.shape)
        values = {
            first: int.from_bytes(
                hashlib.blake2b(f"{self.scenario.job}/{self.name}/{axis.name}/{first}".encode(), digest_size=8).digest()
            )
            for first in np.unique(lowest).tolist()
        }
        return np.array([values[first] for first in lowest.ravel().tolist()], np.uint64).reshape(self.rank.shape)


def incarnations(scenario: Scenario) -> list[tuple[Placement, int, int]]:
    """Return the incarnations in order, each with its first iteration and its end."""
    restarts = [benign for benign in scenario.benign if isinstance(benign, Restart)]
    bounds = [0, *(restart.at_iteration for restart in restarts), scenario.iterations]
    found, resized, node_shift = [], scenario, 0
    for number, (first, end) in enumerate(pairwise(bounds)):
        if number:
            restart = restarts[number - 1]
            node_shift += restart.node_shift
            resized = resized_by(resized, restart)
        found.append((Placement(resized, number, node_shift), first, end))
    return found


def incarnation(scenario: Scenario, iteration: int) -> tuple[Placement, int, int]:
    """Return the incarnation that runs an iteration, with its first iteration and its end."""
    return next(one for one in incarnations(scenario) if one[1] <= iteration < one[2])


def resized_by(scenario: Scenario, restart: Restart) -> Scenario:
    """Return the scenario as it goes on after a restart: the same one, unless its size changes."""
    if restart.dp is None and restart.micro_batches is None:
        return scenario
    layout = replace(scenario.layout, dp=restart.dp or scenario.layout.dp)
    return replace(scenario, layout=layout, micro_batches=restart.micro_batches or scenario.micro_batches)
