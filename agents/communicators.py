"""Who is in which communicator: what was seen when communicators were made, kept over a restart of the agent.

A pointer means something within one process and until it is given back; a key of (process, pointer, generation) means
something for good. Where it is not sure that all of a parent's children were seen, a further child's name would be a
guess: such a child is unknown.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agents.collector import Limit, ProcessKey
from agents.communicator_names import (
    NEW_NAMES,
    OLD_NAMES,
    Communicator,
    Membership,
    Names,
    Split,
    count_child,
    grown,
    initialized,
    membership,
    shrunk,
)
from agents.communicator_state import SavedCommunicator, SavedProcess, load_state, save_state
from agents.ebpf.records import CommCreated, CommEnded
from agents.nccl_hash import NO_COLOR
from agents.processes import read_key

__all__ = ["Membership", "Registry"]

logger = logging.getLogger(__name__)

COMMUNICATORS_MAX = 4096  # alive in one process
PROCESSES_MAX = 1024  # beyond which those that have ended are let go of
SIZES_MAX = 64  # of which the first communicator of a process is remembered
_RESULTS_OF_SUCCESS = (0, 7)  # ncclSuccess, ncclInProgress


@dataclass(slots=True)
class _Process:
    alive: dict[int, Communicator] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)  # pointer to its last generation
    firsts: dict[int, tuple[int, int | None]] = field(default_factory=dict)  # size to the first one's hash and rank
    has_strangers: bool = False  # uses communicators that nobody saw being made
    has_called: bool = False
    is_restored: bool = False
    uses_old_hashes: bool = False
    told: dict[int, Membership] = field(default_factory=dict)  # by others than the kernel, by hash

    @property
    def names(self) -> Names:
        return OLD_NAMES if self.uses_old_hashes else NEW_NAMES


class Registry:
    """Communicators of this node's processes. state_file: what survives the agent; None keeps nothing."""

    def __init__(self, state_file: Path | None = None) -> None:
        self.n_dropped = 0  # communicators beyond COMMUNICATORS_MAX
        self._state_file = state_file
        self._processes: dict[ProcessKey, _Process] = {}
        self._splits: dict[tuple[int, int], Split] = {}
        self._is_changed = False
        self._limits: dict[str, Limit] = {}
        if state_file is not None:
            saved, limit = load_state(state_file)
            self._note_limit("load", limit)
            self._restore(saved)

    def note(self, key: ProcessKey, event: CommCreated | CommEnded) -> None:
        """Take note of a communicator that was made or given back; in the order of time."""
        process = self._process(key)
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
        return None if communicator is None else membership(communicator)

    def saw(self, key: ProcessKey, pointer: int) -> bool:
        """Whether the communicator that a pointer stands for was seen being made, even if its name is unknown."""
        process = self._processes.get(key)
        return process is not None and pointer in process.alive

    def memberships(self, key: ProcessKey) -> list[Membership]:
        """Return the communicators of a process that are alive and have a name."""
        process = self._processes.get(key)
        if process is None:
            return []
        return [m for c in process.alive.values() if (m := membership(c)) is not None]

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
        process = self._process(key)
        process.has_called = True
        if is_stranger and not process.has_strangers:
            process.has_strangers = self._is_changed = True

    def tell(self, key: ProcessKey, membership: Membership) -> None:
        """Take over what another source, such as the Inspector, says of a process that was there before the agent."""
        told = self._process(key).told
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
        self._process(key).uses_old_hashes = True

    def doubt(self) -> None:
        """Take note that creations may have been lost: which children communicators have is not known from now on."""
        for process in self._processes.values():
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

    def _process(self, key: ProcessKey) -> _Process:
        process = self._processes.get(key)
        if process is None:
            if len(self._processes) >= PROCESSES_MAX:
                # Whoever calls NCCL for a moment only is no candidate, and nobody says when it ends.
                for other in [other for other in self._processes if read_key(other.pid) != other]:
                    self.forget(other)
            process = self._processes[key] = _Process()
        return process

    def _make(self, key: ProcessKey, process: _Process, event: CommCreated) -> Communicator | None:
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
            return shrunk(parent, process.names)
        if event.function == "ncclCommGrow":
            return grown(parent, event)
        return initialized(event, process.names)

    def _split(
        self, key: ProcessKey, process: _Process, event: CommCreated, parent: Communicator | None
    ) -> Communicator | None:
        """Return the child; None where this member gets none, which counts all the same for children that follow."""
        color = NO_COLOR if event.color is None else event.color
        child = Communicator(0, 0, None, key=event.key or 0, color=color)
        count = None if parent is None else count_child(parent, event.nth_child)
        if parent is not None and parent.comm is not None and count is not None and event.color is not None:
            child.split = self._splits.setdefault((parent.comm, count), Split())
            child.split.parts[key] = (parent, child)
            child.comm = child.magic = process.names.of_child(parent.comm, count, color)
        return None if event.color == NO_COLOR else child

    def _place(self, process: _Process, pointer: int, made: Communicator) -> None:
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
                known = membership(c)
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
                process.alive[c.pointer] = Communicator(
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
