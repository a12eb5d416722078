"""One communicator: what it is called, and who is in it.

A child of a split gets its name from its parent's name, how many children the parent had before, and the color. Its
size and the ranks in it are known where all members of the parent run on this node, since no argument of the call says
them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.collector import ProcessKey
from agents.ebpf.records import CommCreated
from agents.nccl_hash import (
    NO_COLOR,
    child_hash,
    grown_hash,
    grown_magic,
    old_child_hash,
    old_unique_id_hash,
    unique_id_hash,
    unique_id_magic,
)


@dataclass(frozen=True, slots=True)
class Membership:
    """A process's place in one communicator."""

    comm: int  # NCCL's 64-bit hash, alike on all members; never 0
    comm_rank: int | None
    size: int | None  # None: of a split with members on other nodes
    is_counted_from_creation: bool  # whether the kernel's call counters of this pointer began at its creation
    generation: int  # of the pointer in its process


class Names(NamedTuple):
    """How a library names communicators."""

    of_unique_id: Callable[[bytes], int]
    of_child: Callable[[int, int, int], int]  # parent, count of children, color


NEW_NAMES = Names(unique_id_hash, child_hash)
OLD_NAMES = Names(old_unique_id_hash, lambda parent, _, color: old_child_hash(parent, color))


@dataclass(slots=True, eq=False)
class Communicator:
    """What is known of a pointer."""

    pointer: int
    generation: int
    comm: int | None  # None: a child of unknown name
    rank: int | None = None
    size: int | None = None
    magic: int | None = None
    n_children: int | None = 0  # None: some may not have been seen
    n_grown: int = 0  # of them by growth
    uncounted: list[int] = field(default_factory=list)  # of the tracer's numbers of children, those NCCL does not count
    is_counted: bool = True
    split: "Split | None" = None
    key: int = 0
    color: int = NO_COLOR


@dataclass(slots=True)
class Split:
    """One split of a communicator, as far as its members on this node have called it."""

    parts: dict[ProcessKey, tuple[Communicator, Communicator]] = field(default_factory=dict)  # parent and child


def initialized(event: CommCreated, names: Names) -> Communicator:
    """Return a communicator that is made of a unique id, or of none that could be seen."""
    if event.unique_id is None:
        return Communicator(0, 0, None)
    magic = unique_id_magic(event.unique_id)
    comm = names.of_unique_id(event.unique_id)
    return Communicator(0, 0, comm, rank=event.rank, size=event.n_ranks, magic=magic)


def count_child(parent: Communicator, nth_child: int | None) -> int | None:
    """Return which child of its parent a split makes, as NCCL counts: from 1, growth included, shrinking not."""
    if parent.n_children is None:
        return None
    count = parent.n_children + 1
    if nth_child is not None:
        count = nth_child + 1 - sum(n < nth_child for n in parent.uncounted) + parent.n_grown
    parent.n_children = max(parent.n_children, count)
    return count


def shrunk(parent: Communicator | None, names: Names) -> Communicator:
    """Return a parent without some of its members; which they are, an argument in the process's memory says."""
    if parent is None or parent.comm is None:
        return Communicator(0, 0, None)
    comm = names.of_child(parent.comm, 0, 0)
    return Communicator(0, 0, comm, magic=comm)


def grown(parent: Communicator | None, event: CommCreated) -> Communicator:
    """Return a parent with further members, for old members, who keep their ranks, and for new ones."""
    magic = None if event.unique_id is None else unique_id_magic(event.unique_id)
    rank = event.rank
    if parent is not None:
        rank = parent.rank
        if parent.n_children is not None:
            parent.n_children += 1
            parent.n_grown += 1
            if magic is None and parent.magic is not None:
                magic = grown_magic(parent.magic, parent.n_children)
    comm = None if magic is None or event.n_ranks is None else grown_hash(magic, event.n_ranks)
    return Communicator(0, 0, comm, rank=rank, size=event.n_ranks, magic=magic)


def membership(communicator: Communicator) -> Membership | None:
    """Return what is told of a communicator; None of one without a name."""
    if communicator.comm is None:
        return None
    _settle(communicator)
    return Membership(
        communicator.comm,
        communicator.rank,
        communicator.size,
        is_counted_from_creation=communicator.is_counted,
        generation=communicator.generation,
    )


def _settle(child: Communicator) -> None:
    """Find size and rank of a split's child, once all members of its parent have been seen to call the split."""
    if child.size is not None or child.split is None:
        return
    parts = child.split.parts.values()
    for parent, _ in parts:
        _settle(parent)
    sizes = {parent.size for parent, _ in parts}
    ranks = {parent.rank for parent, _ in parts}
    if sizes != {len(ranks)} or None in ranks or len(ranks) != len(parts):
        return
    members = sorted((c.key, p.rank or 0, c is child) for p, c in parts if c.color == child.color)
    child.size = len(members)
    child.rank = next(place for place, (_, _, is_child) in enumerate(members) if is_child)
