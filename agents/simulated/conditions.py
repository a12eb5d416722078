"""What the network and the faults make of one incarnation: transfer times of healthy paths and factors upon them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from agents.simulated.faults import Fault, SlowGpu, SlowHost, SlowJob, SlowLink, SlowNic, SlowRank
from agents.simulated.layout import Axis, Placement
from schemas.table import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Factors:
    """By how much each thing is slower than healthy."""

    gpu: FloatArray  # (pp, dp, tp)
    host: FloatArray  # (pp, dp, tp)
    p2p: FloatArray  # (pp - 1, dp, tp): between a stage and the next
    ring: dict[Axis, FloatArray]  # of a communicator's slowest edge: TP (pp, dp), DP (pp, tp), WORLD ()


@dataclass(frozen=True, eq=False)
class Paths:
    """Which transfers leave a node, and how long healthy ones take."""

    placement: Placement

    @cached_property
    def p2p_nodes(self) -> tuple[IntArray, IntArray]:
        """Return the nodes of the two ends of every pipeline edge, (pp - 1, dp, tp) each."""
        return self.placement.node[:-1], self.placement.node[1:]

    @cached_property
    def p2p_is_between(self) -> BoolArray:
        """Return (pp - 1, dp, tp): whether an edge connects two nodes."""
        source, target = self.p2p_nodes
        is_between: BoolArray = source != target
        return is_between

    def ring_nodes(self, axis: Axis) -> tuple[IntArray, IntArray]:
        """Return the nodes of both ends of each edge of the rings, (..., members): neighbours in order, then closed."""
        node = self.placement.node
        members = {
            Axis.TP: node,
            Axis.DP: node.transpose(0, 2, 1),
            Axis.WORLD: node.reshape(-1),
        }[axis]
        return members, np.roll(members, -1, axis=-1)

    @cached_property
    def ring_is_between(self) -> dict[Axis, BoolArray]:
        """Return per axis whether a communicator's ring leaves a node: TP (pp, dp), DP (pp, tp), WORLD ()."""
        found = {}
        for axis in (Axis.TP, Axis.DP, Axis.WORLD):
            source, target = self.ring_nodes(axis)
            found[axis] = np.asarray((source != target).any(axis=-1))
        return found

    @cached_property
    def p2p_s(self) -> FloatArray:
        """Return (pp - 1, dp, tp): the time of one message."""
        network = self.placement.scenario.network
        return self._time(self.p2p_is_between, 1, network.p2p_bytes)

    @cached_property
    def ring_s(self) -> dict[Axis, FloatArray]:
        """Return per axis the time of one call: an all-reduce for TP, a reduce-scatter or all-gather for DP.

        A ring moves (n - 1) / n of the message over each edge in n - 1 hops, twice for an all-reduce. The four bytes
        of the world's all-reduce go through a tree: only its depth counts.
        """
        network, shape = self.placement.scenario.network, self.placement.shape
        between = self.ring_is_between
        tp, dp = shape.tp, shape.dp
        depth = int(np.ceil(np.log2(max(shape.world_size, 2))))
        return {
            Axis.TP: self._time(between[Axis.TP], 2 * (tp - 1), 2 * (tp - 1) / tp * network.tp_bytes),
            Axis.DP: self._time(between[Axis.DP], dp - 1, (dp - 1) / dp * network.dp_bytes),
            Axis.WORLD: self._time(between[Axis.WORLD], 2 * depth, 0.0),
        }

    def _time(self, is_between: BoolArray, hops: int, size: float) -> FloatArray:
        network = self.placement.scenario.network
        slow = hops * network.between_latency_s + size / network.between_bytes_per_s
        fast = hops * network.within_latency_s + size / network.within_bytes_per_s
        return np.where(is_between, slow, fast)


class Conditions:
    """The factors of every iteration under the given faults."""

    def __init__(self, paths: Paths, faults: Sequence[Fault]) -> None:
        self._paths = paths
        self._faults = faults
        self._last: tuple[tuple[float, ...], Factors] | None = None

    def at(self, iteration: int) -> Factors:
        """Return the factors of an iteration; the same object while nothing changes."""
        strengths = tuple(fault.factor_at(iteration) for fault in self._faults)
        if self._last is None or self._last[0] != strengths:
            self._last = (strengths, self._combine(strengths))
        return self._last[1]

    def _combine(self, strengths: tuple[float, ...]) -> Factors:
        placement, paths = self._paths.placement, self._paths
        gpu = np.ones(placement.rank.shape)
        host = np.ones(placement.rank.shape)
        p2p = np.ones(paths.p2p_is_between.shape)
        edges = {axis: np.ones(paths.ring_nodes(axis)[0].shape) for axis in paths.ring_is_between}
        for fault, strength in zip(self._faults, strengths, strict=True):
            match fault:
                case SlowGpu(node=node, gpu=index):
                    gpu[(placement.node == node) & (placement.gpu == index)] *= strength
                case SlowRank(rank=rank):
                    gpu[placement.rank == rank] *= strength
                case SlowJob():
                    gpu *= strength
                case SlowHost(node=node):
                    host[placement.node == node] *= strength
                case SlowNic() | SlowLink():
                    p2p[uses(fault, *paths.p2p_nodes)] *= strength
                    for axis, edge in edges.items():
                        edge[uses(fault, *paths.ring_nodes(axis))] *= strength
        ring = {axis: np.asarray(edge.max(axis=-1)) for axis, edge in edges.items()}
        return Factors(gpu, host, p2p, ring)


def uses(path: SlowNic | SlowLink, source: IntArray, target: IntArray) -> BoolArray:
    """Return which edges between nodes `source` and `target` go through an interface or over a link."""
    if isinstance(path, SlowNic):
        touches: BoolArray = ((source == path.node) | (target == path.node)) & (source != target)
        return touches
    a, b = path.nodes
    joins: BoolArray = ((source == a) & (target == b)) | ((source == b) & (target == a))
    return joins
