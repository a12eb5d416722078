"""Who is in which communicator: what was seen when communicators were made, kept over a restart of the agent.

A pointer means something within one process and until it is given back; a key of (process, pointer, generation) means
something for good. A child of a split gets its name from its parent's name, how many children the parent had before,
and the color; its size and the ranks in it are known here where all members of the parent run on this node, since no
argument of the call says them. Where it is not sure that all of a parent's children were seen, a further child's name
would be a guess: such a child is unknown.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agents.collector import Limit, ProcessKey
from agents.communicator_state import SavedCommunicator, SavedProcess, load_state, save_state
from agents.ebpf.records import CommCreated, CommEnded
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

logger = logging.getLogger(__name__)

COMMUNICATORS_MAX = 4096  # alive in one process
SIZES_MAX = 64  # of which the first communicator of a process is remembered
_RESULTS_OF_SUCCESS = (0, 7)  # ncclSuccess, ncclInProgress


@dataclass(frozen=True, slots=True)
class Membership:
    """A process's place in one communicator."""

    comm: int  # NCCL's 64-bit hash, alike on all members; never 0
    comm_rank: int | None
    size: int | None  # None: of a split with members on other nodes
    is_counted_from_creation: bool  # whether the kernel's call counters of this pointer began at its creation
    generation: int  # of the pointer in its process


@dataclass(slots=True, eq=False)
class _Communicator:
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
    split: "_Split | None" = None
    key: int = 0
    color: int = NO_COLOR


@dataclass(slots=True)
class _Split:
    """One split of a communicator, as far as its members on this node have called it."""

    parts: dict[ProcessKey, tuple[_Communicator, _Communicator]] = field(default_factory=dict)  # parent and child


@dataclass(slots=True)
class _Process:
    alive: dict[int, _Communicator] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)  # pointer to its last generation
    firsts: dict[int, tuple[int, int | None]] = field(default_factory=dict)  # size to the first one's hash and rank
    has_strangers: bool = False  # uses communicators that nobody saw being made
    has_called: bool = False
    is_restored: bool = False
    uses_old_hashes: bool = False
    told: dict[int, Membership] = field(default_factory=dict)  # by others than the kernel, by hash


class Registry:
    """Communicators of this node's processes. state_file: what survives the agent; None keeps nothing."""

    def __init__(self, state_file: Path | None = None) -> None:
        self.n_dropped = 0  # communicators beyond COMMUNICATORS_MAX
        self._state_file = state_file
        self._processes: dict[ProcessKey, _Process] = {}
        self._splits: dict[tuple[int, int], _Split] = {}
        self._is_changed = False
        self._limits: dict[str, Limit] = {}
        if state_file is not None:
            saved, limit = load_state(state_file)
            self._note_limit("load", limit)
            self._restore(saved)

    def note(self, key: ProcessKey, event: CommCreated | CommEnded) -> None:
        """Take note of a communicator that was made or given back; in the order of time."""
        process = self._processes.setdefault(key, _Process())
        self._is_changed = True
        if isinstance(event, CommEnded):
            ended = process.alive.pop(event.comm, None)
            if ended is not None:
                process.ended[event.comm] = ended.generation
            return
        made = self._make(key, process, event)
        if made is not None and event.comm != 0:
            self._place(process, event.comm, made)

    def find(self, key: ProcessKey, pointer: int) -> Membership | None:
        """Return what a pointer stands for now; None if nobody saw it being made, or its name is unknown."""
        process = self._processes.get(key)
        communicator = process.alive.get(pointer) if process else None
        return None if communicator is None else _membership(communicator)

    def saw(self, key: ProcessKey, pointer: int) -> bool:
        """Whether the communicator that a pointer stands for was seen being made, even if its name is unknown."""
        process = self._processes.get(key)
        return process is not None and pointer in process.alive

    def memberships(self, key: ProcessKey) -> list[Membership]:
        """Return the communicators of a process that are alive and have a name."""
        process = self._processes.get(key)
        if process is None:
            return []
        return [m for c in process.alive.values() if (m := _membership(c)) is not None]

    def world(self, key: ProcessKey, world_size: int | None = None) -> Membership | None:
        """Return the process's first communicator of world_size members, or else of the most that any has.

        Of a process whose first communicators nobody saw it is what others told, where that leaves no choice.
        """
        process = self._processes.get(key)
        if process is None:
            return None
        if not process.has_strangers:
            size = max(process.firsts, default=None) if world_size is None else world_size
            if size in process.firsts:
                comm, rank = process.firsts[size]
                return Membership(comm, rank, size, is_counted_from_creation=False, generation=0)
        known = [m for m in process.told.values() if m.size is not None]
        size = max((m.size for m in known if m.size), default=None) if world_size is None else world_size
        found = [m for m in known if m.size == size]
        return found[0] if len(found) == 1 else None

    def note_call(self, key: ProcessKey, *, is_stranger: bool = False) -> None:
        """Take note that a process calls NCCL, or does so on a communicator that nobody saw being made."""
        process = self._processes.setdefault(key, _Process())
        process.has_called = True
        if is_stranger and not process.has_strangers:
            process.has_strangers = self._is_changed = True

    def tell(self, key: ProcessKey, membership: Membership) -> None:
        """Take over what another source, such as the Inspector, says of a process that was there before the agent."""
        told = self._processes.setdefault(key, _Process()).told
        if len(told) < COMMUNICATORS_MAX or membership.comm in told:
            told[membership.comm] = membership

    def calls_nccl(self, key: ProcessKey) -> bool:
        """Whether a process has made a communicator or called NCCL: a rank does, its helpers do not."""
        process = self._processes.get(key)
        return process is not None and (process.has_called or bool(process.alive) or bool(process.firsts))

    def is_restored(self, key: ProcessKey) -> bool:
        """Whether an earlier agent watched a process since before its first communicator."""
        process = self._processes.get(key)
        return process is not None and process.is_restored and not process.has_strangers

    def is_late(self, key: ProcessKey) -> bool:
        """Whether a process uses communicators that were made before the agent looked."""
        process = self._processes.get(key)
        return process is not None and process.has_strangers

    def use_old_hashes(self, key: ProcessKey) -> None:
        """Name a process's communicators as its library, older than nccl_hash.NEW_HASH_SINCE, does."""
        self._processes.setdefault(key, _Process()).uses_old_hashes = True

    def doubt(self, keys: Collection[ProcessKey] | None = None) -> None:
        """Take note that creations may have been lost, of these processes or of any: children are unknown from now."""
        for key, process in self._processes.items():
            if keys is None or key in keys:
                for communicator in process.alive.values():
                    communicator.n_children = None

    def forget(self, key: ProcessKey) -> None:
        """Let go of a process that has ended."""
        if self._processes.pop(key, None) is None:
            return
        self._is_changed = True
        for name in [name for name, split in self._splits.items() if key in split.parts]:
            split = self._splits[name]
            del split.parts[key]
            if not split.parts:
                del self._splits[name]

    def save(self) -> None:
        """Write the state file where something has changed; a failure is said in limits() and tried again."""
        if self._state_file is None or not self._is_changed:
            return
        limit = save_state(self._state_file, list(self._saved()))
        self._note_limit("save", limit)
        self._is_changed = limit is not None

    def limits(self) -> list[Limit]:
        """Return what is not known, and why."""
        limits = list(self._limits.values())
        n_nameless = sum(c.comm is None for p in self._processes.values() for c in p.alive.values())
        if n_nameless:
            limits.append(
                Limit(
                    what=f"{n_nameless} communicators without a name",
                    why="not all of what their parents were used for was seen, so their names would be guesses",
                    remedy="start the agent before the job, or switch NCCL Inspector on",
                )
            )
        if self.n_dropped:
            limits.append(
                Limit(
                    what=f"{self.n_dropped} communicators",
                    why=f"a process has more than {COMMUNICATORS_MAX} at a time",
                    remedy="destroy communicators that are no longer used",
                )
            )
        return limits

    def _make(self, key: ProcessKey, process: _Process, event: CommCreated) -> _Communicator | None:
        parent = None if event.parent is None else process.alive.get(event.parent)
        if parent is not None and event.function == "ncclCommShrink" and event.nth_child is not None:
            parent.uncounted.append(event.nth_child)
        if event.result not in _RESULTS_OF_SUCCESS:
            if parent is not None and event.function == "ncclCommSplit":
                parent.n_children = None  # NCCL does not count a call with bad arguments, but one that failed later
            return None
        if event.function == "ncclCommSplit":
            return self._split(key, process, event, parent)
        if event.function == "ncclCommShrink":
            return _shrunk(parent, process)
        if event.function == "ncclCommGrow":
            return _grown(parent, event)
        return _initialized(event, process)

    def _split(
        self, key: ProcessKey, process: _Process, event: CommCreated, parent: _Communicator | None
    ) -> _Communicator | None:
        """Return the child; None where this member gets none, which counts all the same for children that follow."""
        color = NO_COLOR if event.color is None else event.color
        child = _Communicator(0, 0, None, key=event.key or 0, color=color)
        count = None if parent is None else _count(parent, event.nth_child)
        if parent is not None and parent.comm is not None and count is not None and event.color is not None:
            child.split = self._splits.setdefault((parent.comm, count), _Split())
            child.split.parts[key] = (parent, child)
            modern = child_hash(parent.comm, count, color)
            child.comm = old_child_hash(parent.comm, color) if process.uses_old_hashes else modern
            child.magic = child.comm
        return None if event.color == NO_COLOR else child

    def _place(self, process: _Process, pointer: int, made: _Communicator) -> None:
        before = process.alive.pop(pointer, None)
        last = before.generation if before else process.ended.pop(pointer, -1)
        made.pointer, made.generation = pointer, last + 1
        process.alive[pointer] = made
        if made.comm is not None and made.size is not None and len(process.firsts) < SIZES_MAX:
            process.firsts.setdefault(made.size, (made.comm, made.rank))
        if len(process.alive) > COMMUNICATORS_MAX:
            del process.alive[next(iter(process.alive))]
            self.n_dropped += 1
        while len(process.ended) > COMMUNICATORS_MAX:
            del process.ended[next(iter(process.ended))]

    def _saved(self) -> Iterator[SavedProcess]:
        for key, process in self._processes.items():
            alive = []
            for c in process.alive.values():
                known = _membership(c)
                rank, size = (known.comm_rank, known.size) if known else (None, None)
                alive.append(SavedCommunicator(c.pointer, c.generation, c.comm, rank, size, c.magic))
            yield SavedProcess(
                pid=key.pid,
                start_ticks=key.start_ticks,
                communicators=alive,
                firsts={str(size): first for size, first in process.firsts.items()},
                has_strangers=process.has_strangers,
                uses_old_hashes=process.uses_old_hashes,
            )

    def _restore(self, saved: Collection[SavedProcess]) -> None:
        for s in saved:
            process = self._processes[ProcessKey(s.pid, s.start_ticks)] = _Process(
                firsts={int(size): first for size, first in s.firsts.items()},
                has_strangers=s.has_strangers,
                has_called=True,
                is_restored=True,
                uses_old_hashes=s.uses_old_hashes,
            )
            for c in s.communicators:
                process.alive[c.pointer] = _Communicator(
                    c.pointer, c.generation, c.comm, c.rank, c.size, c.magic, n_children=None, is_counted=False
                )
        if saved:
            self._limits["restored"] = Limit(
                what=f"how often {len(saved)} processes called each communicator",
                why="what they called while no agent ran was not counted; a communicator that was made anew at the "
                "same address in the meantime would be taken for its predecessor",
                remedy="none is needed where clocks are in step; a restart of the job begins the count anew",
            )

    def _note_limit(self, name: str, limit: Limit | None) -> None:
        if limit is None:
            self._limits.pop(name, None)
            return
        if name not in self._limits:
            logger.warning("%s: %s: %s", limit.what, limit.why, limit.remedy)
        self._limits[name] = limit


def _initialized(event: CommCreated, process: _Process) -> _Communicator:
    if event.unique_id is None:
        return _Communicator(0, 0, None)
    comm = old_unique_id_hash(event.unique_id) if process.uses_old_hashes else unique_id_hash(event.unique_id)
    magic = unique_id_magic(event.unique_id)
    return _Communicator(0, 0, comm, rank=event.rank, size=event.n_ranks, magic=magic)


def _count(parent: _Communicator, nth_child: int | None) -> int | None:
    """Return which child of its parent a split makes, as NCCL counts: from 1, growth included, shrinking not."""
    if parent.n_children is None:
        return None
    count = parent.n_children + 1
    if nth_child is not None:
        count = nth_child + 1 - sum(n < nth_child for n in parent.uncounted) + parent.n_grown
    parent.n_children = max(parent.n_children, count)
    return count


def _shrunk(parent: _Communicator | None, process: _Process) -> _Communicator:
    """Return a parent without some of its members; which they are, an argument in the process's memory says."""
    if parent is None or parent.comm is None:
        return _Communicator(0, 0, None)
    comm = old_child_hash(parent.comm, 0) if process.uses_old_hashes else child_hash(parent.comm, 0, 0)
    return _Communicator(0, 0, comm, magic=comm)


def _grown(parent: _Communicator | None, event: CommCreated) -> _Communicator:
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
    return _Communicator(0, 0, comm, rank=rank, size=event.n_ranks, magic=magic)


def _membership(communicator: _Communicator) -> Membership | None:
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


def _settle(child: _Communicator) -> None:
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
