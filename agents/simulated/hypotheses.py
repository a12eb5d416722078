"""Which slow links and interfaces nobody could tell apart, because they slow the very same transfers.

This is the simulator's own answer, from the placement that it knows; whoever judges has to infer as much from events.
A series is what can be observed of the network: the messages of one pipeline over one edge in one direction, or the
collectives of one communicator, whose ring is as slow as its slowest edge. Edges within a node are not looked at.
"""

from collections import defaultdict
from collections.abc import Iterator

from agents.simulated.conditions import Paths
from agents.simulated.faults import SlowLink, SlowNic
from agents.simulated.layout import Axis, Placement

Series = tuple[str, int, int]  # kind of transfer, number of the communicator, edge and direction
NodePair = tuple[int, int]  # in ascending order
Suspect = int | NodePair  # a node's interface, or the link between two nodes


class LinkHypotheses:
    """Every interface and every used link of an incarnation, with the series that it would slow."""

    def __init__(self, placement: Placement) -> None:
        self._predicted: dict[Suspect, set[Series]] = defaultdict(set)
        self._all: set[Series] = set()
        for series, a, b in _edges(placement):
            self._all.add(series)
            for suspect in (a, b, (min(a, b), max(a, b))):
                self._predicted[suspect].add(series)

    def predicted(self, suspect: Suspect) -> frozenset[Series]:
        """Return the series that a suspect would slow; none if nothing goes over it."""
        return frozenset(self._predicted.get(suspect, ()))

    def alike(self, suspect: Suspect) -> frozenset[Suspect]:
        """Return all suspects that would slow the very same series, this one included."""
        predicted = self._predicted.get(suspect, set())
        return frozenset({suspect} | {other for other, series in self._predicted.items() if series == predicted})

    def has_equals(self, suspect: Suspect) -> bool:
        """Whether some series of the same kind as a slowed one stays healthy, to compare with."""
        predicted = self.predicted(suspect)
        return bool({kind for kind, _, _ in predicted} & {kind for kind, _, _ in self._all - predicted})


def suspect_of(fault: SlowNic | SlowLink) -> Suspect:
    """Return the true suspect."""
    if isinstance(fault, SlowNic):
        return fault.node
    return min(fault.nodes), max(fault.nodes)


def _edges(placement: Placement) -> Iterator[tuple[Series, int, int]]:
    paths = Paths(placement)
    source, target = paths.p2p_nodes
    between = paths.p2p_is_between
    for edge in range(between.shape[0]):
        ends = zip(between[edge].ravel(), source[edge].ravel().tolist(), target[edge].ravel().tolist(), strict=True)
        for pipeline, (is_between, a, b) in enumerate(ends):
            for direction in (0, 1) if is_between else ():
                yield ("pipeline", pipeline, 2 * edge + direction), a, b
    for axis in (Axis.TP, Axis.DP, Axis.WORLD):
        if placement.size(axis) == 1:
            continue
        first, second = (nodes.reshape(-1, nodes.shape[-1]).tolist() for nodes in paths.ring_nodes(axis))
        for number, ring in enumerate(zip(first, second, strict=True)):
            for a, b in {(a, b) for a, b in zip(*ring, strict=True) if a != b}:
                yield (axis.name, number, 0), a, b
