"""Which slow links and interfaces nobody could tell apart, because they slow the very same transfers.

This is the simulator's own answer, from the placement that it knows; whoever judges has to infer as much from events.
A series is what can be observed of the network: the messages of one pipeline over one edge in one direction, or the
collectives of one communicator, whose ring is as slow as its slowest edge. Edges within a node are not looked at.

What is alike follows from what a series can say:
- That one is slow is known from its own past. Without a past it takes equals, the series that carry as much in the same
  way: four of them at least (of fewer, none is the usual one), a quarter of which the suspect leaves healthy. A job has
  one communicator of the whole world, so that nothing is known of that from the first iteration on.
- One that is slow clears every suspect that would not slow it.
- One that is not slow clears those that would, if it is large. A message of a few bytes takes the latency of its path:
  a link of little bandwidth need not slow it, and that it is quick clears nobody.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from agents.simulated.conditions import Paths
from agents.simulated.faults import SlowLink, SlowNic
from agents.simulated.layout import Axis, Placement

Series = tuple[str, int, int]  # kind of transfer, number of the communicator, edge and direction
NodePair = tuple[int, int]  # in ascending order
Suspect = int | NodePair  # a node's interface, or the link between two nodes

_FEWEST_EQUALS = 4
_LEAST_HEALTHY = 0.25  # of the equals
_SMALL = frozenset({Axis.WORLD.name})  # kinds of a few bytes


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

    def alike(self, suspect: Suspect, *, has_past: bool = True) -> frozenset[Suspect]:
        """Return all suspects that no series tells from this one, itself included.

        Where nothing shows it at all, those are returned that would not differ with a past either.
        """
        telling = self._all if has_past else self._with_equals(suspect) or self._all
        slow = self._predicted.get(suspect, set()) & telling
        if not slow:
            return frozenset({suspect})
        return frozenset(
            {suspect} | {other for other, series in self._predicted.items() if _may_be(series & telling, slow)}
        )

    def has_equals(self, suspect: Suspect) -> bool:
        """Whether a slowed series shows without a past: by healthy ones that are equal to it."""
        return bool(self._with_equals(suspect))

    def _with_equals(self, suspect: Suspect) -> set[Series]:
        """Return the series of the kinds in which equals show what a suspect slows; none if they show nothing."""
        predicted = self._predicted.get(suspect, set())
        equals, slowed = Counter(kind for kind, _, _ in self._all), Counter(kind for kind, _, _ in predicted)
        kinds = {
            kind
            for kind, n in equals.items()
            if n >= _FEWEST_EQUALS and n - slowed[kind] >= _LEAST_HEALTHY * n  # nothing slowed: all are seen healthy
        }
        return {series for series in self._all if series[0] in kinds} if kinds & slowed.keys() else set()


def _may_be(series: set[Series], slow: set[Series]) -> bool:
    """Return whether slowing some series may be why exactly those that are slow are so."""
    return slow <= series and all(kind in _SMALL for kind, _, _ in series - slow)


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
