"""Communicators that were made before the agent looked: found again in what others say, or called by a name of our own.

NCCL Inspector's files tell a process's communicators by hash, with size and rank, and the operations and sizes that
each carried; the kernel tells the same operations and sizes by pointer. Where one hash and one pointer fit each other
and nothing else, they are one communicator. Where two fit, as when data- and tensor-parallel groups carry equal
messages, nothing is concluded. A pointer without a hash gets a number that no other pointer has, so that its iterations
are seen; its members stay unknown.
"""

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agents.collector import Limit, Observations, ProcessKey, RankProcess
from agents.communicators import PROCESSES_MAX, Membership, Registry
from agents.processes import read_key
from schemas.events import Op

STRANGER_NS = 3_000_000_000  # after which a pointer's creation is not told any more
SPAN_NS = 10_000_000_000  # for which both sides have to be watched before they are compared
POINTERS_MAX = 1024  # of one process
KINDS_MAX = 512  # of messages on one communicator
# The Inspector leaves out smaller messages unless it is told otherwise.
ALWAYS_REPORTED_BYTES = 8192

_Kind = tuple[int, int]  # operation and bytes
_POINT_TO_POINT = (int(Op.SEND), int(Op.RECV))  # may be left out by the Inspector


@dataclass(slots=True)
class _Pattern:
    """What was carried, and over what time."""

    kinds: set[_Kind] = field(default_factory=set)
    first_ns: int = 0
    last_ns: int = 0

    def add(self, kinds: Iterable[_Kind], first_ns: int, last_ns: int) -> None:
        for kind in kinds:
            if len(self.kinds) < KINDS_MAX and kind[0] not in _POINT_TO_POINT:
                self.kinds.add(kind)
        self.first_ns = min(self.first_ns, first_ns) if self.last_ns else first_ns
        self.last_ns = max(self.last_ns, last_ns)

    @property
    def is_long(self) -> bool:
        return self.last_ns - self.first_ns >= SPAN_NS


@dataclass(slots=True)
class _Process:
    """One process that has pointers nobody can name."""

    first_seen_ns: dict[int, int] = field(default_factory=dict)  # of pointers, by the monotonic clock
    by_pointer: dict[int, _Pattern] = field(default_factory=dict)
    by_hash: dict[int, _Pattern] = field(default_factory=dict)
    told: dict[int, Membership] = field(default_factory=dict)
    matched: dict[int, int] = field(default_factory=dict)  # pointer to hash
    refuted: set[int] = field(default_factory=set)  # pointers whose match turned out wrong
    named: set[int] = field(default_factory=set)  # pointers with a name of our own


class Late:
    """Names for pointers that the registry does not know."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._processes: dict[ProcessKey, _Process] = {}

    def find(self, key: ProcessKey, pointer: int) -> Membership | None:
        """Return the communicator of a pointer that the registry has no name for, if it could be told which it is."""
        process = self._process(key)
        now_ns = time.monotonic_ns()
        if len(process.first_seen_ns) < POINTERS_MAX:
            process.first_seen_ns.setdefault(pointer, now_ns)
        is_stranger = now_ns - process.first_seen_ns.get(pointer, now_ns) >= STRANGER_NS
        self._registry.note_call(key, is_stranger=is_stranger and not self._registry.saw(key, pointer))
        comm = process.matched.get(pointer)
        return None if comm is None else process.told[comm]

    def name(self, key: ProcessKey, pointer: int) -> int:
        """Return a number for a pointer that stays without a name; the same for as long as its process lives."""
        if not self._registry.saw(key, pointer):
            self._registry.note_call(key, is_stranger=True)
        process = self._process(key)
        if len(process.named) < POINTERS_MAX:
            process.named.add(pointer)
        text = f"{_boot()} {key.pid} {key.start_ticks} {pointer}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1

    def drop(self, key: ProcessKey, pointer: int) -> None:
        """Forget a pointer that has been given back, or given out anew."""
        process = self._processes.get(key)
        if process is None:
            return
        for known in (process.first_seen_ns, process.by_pointer, process.matched):
            known.pop(pointer, None)
        process.refuted.discard(pointer)
        process.named.discard(pointer)

    def has_named(self, key: ProcessKey, pointer: int) -> bool:
        """Whether a pointer has got a number already, so that nobody needs to wait for its name again."""
        process = self._processes.get(key)
        return process is not None and pointer in process.named

    def see(self, key: ProcessKey, rows: npt.NDArray[np.void]) -> None:
        """Take note of a process's calls; rows of RUN_DTYPE with the field `hash`, looked at where it is no hash."""
        process = self._processes.get(key)
        if process is None or not len(rows):
            return
        for pointer in np.unique(rows["comm"]).tolist():
            is_known = pointer not in process.first_seen_ns or self._registry.find(key, pointer) is not None
            if is_known or len(process.by_pointer) >= POINTERS_MAX:
                continue
            own = rows[rows["comm"] == pointer]
            kinds = zip(own["op"].tolist(), own["bytes"].tolist(), strict=True)
            pattern = process.by_pointer.setdefault(pointer, _Pattern())
            pattern.add(set(kinds), int(own["start_ns"].min()), int(own["end_ns"].max()))

    def learn(self, ranks: Sequence[RankProcess], told: Observations) -> None:
        """Take note of what the Inspector says of these processes, and conclude what can be."""
        communicators, calls = told.communicators, told.calls
        for place, rank in enumerate(ranks):
            process = self._processes.get(rank.key)
            if process is None or not self._registry.is_late(rank.key):
                continue
            own = communicators.take(communicators.rank == place)
            for comm, comm_rank, size in zip(own.comm.tolist(), own.comm_rank.tolist(), own.size.tolist(), strict=True):
                if len(process.told) < POINTERS_MAX and size:
                    membership = Membership(comm, comm_rank, size, is_counted_from_creation=False, generation=0)
                    process.told[comm] = membership
                    self._registry.tell(rank.key, membership)
            rows = calls.take(calls.rank == place)
            for comm in np.unique(rows.comm).tolist():
                if comm in process.told:
                    of_comm = rows.take(rows.comm == comm)
                    pattern = process.by_hash.setdefault(comm, _Pattern())
                    kinds = zip(of_comm.op.tolist(), of_comm.bytes.tolist(), strict=True)
                    pattern.add(set(kinds), int(of_comm.start_ns.min()), int(of_comm.end_ns.max()))
            self._match(rank.key, process)

    def memberships(self, key: ProcessKey) -> list[Membership]:
        """Return the communicators that were found again."""
        process = self._processes.get(key)
        return [] if process is None else [process.told[comm] for comm in process.matched.values()]

    def forget(self, key: ProcessKey) -> None:
        """Let go of a process that has ended."""
        self._processes.pop(key, None)

    def limits(self) -> list[Limit]:
        """Return which communicators have no name or no members, and why."""
        limits = self._registry.limits()
        nameless = {key: p.named - p.matched.keys() for key, p in self._processes.items()}
        n_pointers = sum(map(len, nameless.values()))
        if not n_pointers:
            return limits
        pids = ", ".join(str(key.pid) for key, pointers in sorted(nameless.items()) if pointers)
        return [
            *limits,
            Limit(
                what=f"members of {n_pointers} communicators (processes {pids})",
                why="they were made before the agent looked, and nothing tells them apart without doubt",
                remedy="start the agent before the job, keep its state_file, or switch NCCL Inspector on",
            ),
        ]

    def _process(self, key: ProcessKey) -> _Process:
        process = self._processes.get(key)
        if process is None:
            if len(self._processes) >= PROCESSES_MAX:
                for other in [other for other in self._processes if read_key(other.pid) != other]:
                    self.forget(other)
            process = self._processes[key] = _Process()
        return process

    def _match(self, key: ProcessKey, process: _Process) -> None:
        known = {m.comm for m in self._registry.memberships(key)}
        for pointer, comm in list(process.matched.items()):
            # The kernel tells a call before the Inspector does, so what only the Inspector has is of another pointer.
            if not process.by_hash[comm].kinds <= process.by_pointer[pointer].kinds or comm in known:
                del process.matched[pointer]
                process.refuted.add(pointer)
        pointers = {
            pointer: pattern
            for pointer, pattern in process.by_pointer.items()
            if pattern.is_long and pointer not in process.matched and pointer not in process.refuted
        }
        taken = known.union(process.matched.values())
        hashes = {comm: pattern for comm, pattern in process.by_hash.items() if pattern.is_long and comm not in taken}
        while pair := _only_match(pointers, hashes):
            pointer, comm = pair
            process.matched[pointer] = comm
            del pointers[pointer], hashes[comm]


def _only_match(pointers: Mapping[int, _Pattern], hashes: Mapping[int, _Pattern]) -> tuple[int, int] | None:
    """Return a pointer and a hash that fit each other and nothing else."""
    fitting = {p: [c for c, told in hashes.items() if _fits(seen, told)] for p, seen in pointers.items()}
    for pointer, comms in fitting.items():
        if len(comms) == 1 and sum(comms[0] in others for others in fitting.values()) == 1:
            return pointer, comms[0]
    return None


def _fits(seen: _Pattern, told: _Pattern) -> bool:
    """Whether all that was told was seen, and all that had to be told was."""
    due = {kind for kind in seen.kinds if kind[1] >= ALWAYS_REPORTED_BYTES}
    return bool(told.kinds) and due <= told.kinds <= seen.kinds


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
