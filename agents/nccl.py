"""The calls that rank processes make to NCCL, and their waits for the GPU: kernel records to rows.

The kernel knows a communicator by its pointer, which means something within one process and until it is destroyed. Rows
carry NCCL's communicator hash, which all members share; the registry translates, and rows are translated in the order
of time, since pointers are used again. Rows of processes that are not known as ranks yet wait here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.clock import Clock
from agents.collector import Limit, Observations, ProcessKey, RankProcess
from agents.communicators import Registry
from agents.ebpf.libraries import Library
from agents.ebpf.records import RUN_DTYPE, CommCreated, CommEnded
from agents.ebpf.tracer import Tracer
from agents.late import Late
from agents.placing import CallTimes
from schemas.events import Calls, CallSource, Communicators, Sensor, Syncs
from schemas.table import AnyArray

ROWS_MAX = 200_000  # of one process that wait for it to become known as a rank
HELD_NS = 180_000_000_000  # a rank is known by then, or never
UNRESOLVED_NS = 30_000_000_000  # after which a pointer whose creation nobody saw gets a name of its own

RESULTS_OF_SUCCESS = (0, 7)  # ncclSuccess, ncclInProgress
_UNKNOWN_RANK = np.uint32(0xFFFFFFFF)
_Rows = npt.NDArray[Any]
_NAMED = np.dtype([*RUN_DTYPE.descr, ("hash", "<u8"), ("is_counted", "u1")], align=False)


@dataclass(slots=True)
class _Process:
    """What waits of one process."""

    key: ProcessKey
    runs: list[_Rows] = field(default_factory=list)
    syncs: list[_Rows] = field(default_factory=list)
    n_rows: int = 0
    seen_ns: int = 0
    is_over: bool = False  # nothing more can be learnt of it
    has_called: bool = False
    n_lost: int = 0  # events that are known to be missing


class NcclCollector:
    """Rows of Calls, Syncs and Communicators from the eBPF tracer."""

    name = "nccl"

    def __init__(
        self,
        tracer: Tracer,
        registry: Registry,
        clock: Clock,
        *,
        call_times: CallTimes,
        late: Late,
        key_of: Callable[[int], ProcessKey | None],
    ) -> None:
        self.n_unknown = 0  # rows of processes that ended before anybody could tell who they were
        self._tracer = tracer
        self._registry = registry
        self._clock = clock
        self._call_times = call_times
        self._late = late
        self._key_of = key_of
        self._is_open = False
        self._processes: dict[int, _Process] = {}
        self._lost = 0

    @property
    def sensors(self) -> Sensor:
        """Host calls, how long they took, and waits for the GPU; whether of a job, its rows tell (batches.py)."""
        if not self._is_open:
            return Sensor(0)
        if not self._tracer.has_return_probes:
            return Sensor.HOST_CALL  # a wait without an end says nothing
        return Sensor.HOST_CALL | Sensor.HOST_DURATION | Sensor.SYNC

    @property
    def is_open(self) -> bool:
        """Whether libraries can be attached to."""
        return self._is_open

    def open(self) -> None:
        """Load the programs. Raises NotAvailable."""
        self._tracer.open()
        self._is_open = True

    def attach(self, library: Library) -> bool:
        """Observe a library from now on, in every process that uses it; returns whether it is observed.

        May be asked again and again: what could not be read or probed is tried anew now and then.
        """
        if not self._is_open:
            return False
        self._tracer.attach(library)
        return self._tracer.is_attached(library)

    def detach(self, library: Library) -> None:
        """Observe a library no more."""
        if self._is_open:
            self._tracer.detach(library)

    def poll(self) -> None:
        """Take the kernel's records into memory; cheap, for every few tens of milliseconds."""
        if self._is_open:
            self._tracer.poll()

    def absorb(self) -> None:
        """Name what was recorded, so that processes become known by their communicators."""
        if not self._is_open:
            return
        records = self._tracer.take()
        self._lost += records.lost_other + records.lost_creations
        for tgid, n_lost in records.lost_calls.items():
            process = self._process(tgid)
            if process is None:
                self._lost += n_lost
            else:
                process.n_lost += n_lost
        if records.lost_creations:
            self._registry.doubt()
        events: dict[int, list[CommCreated | CommEnded]] = {}
        for event in records.communicators:
            events.setdefault(event.tgid, []).append(event)
        runs, syncs = _by_process(records.runs), _by_process(records.syncs)
        for tgid in runs.keys() | syncs.keys() | events.keys():
            process = self._process(tgid)
            if process is None:
                self.n_unknown += len(runs.get(tgid, ())) + len(syncs.get(tgid, ()))
                continue
            self._absorb(process, runs.get(tgid), events.get(tgid, []))
            if process.runs and not process.has_called:
                process.has_called = True
                self._registry.note_call(process.key)
            if tgid in syncs and process.has_called:  # who does not call NCCL is no rank
                self._keep(process, process.syncs, syncs[tgid])
        self._forget_strangers()
        self._registry.save()  # before anything can end the agent

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        """Return the rows of processes that are known as ranks."""
        calls, syncs, communicators = [], [], []
        lost_by_rank: dict[int, int] = {}
        for place, rank in enumerate(ranks):
            communicators.append(self._memberships(place, rank.key))
            process = self._processes.get(rank.key.pid)
            if process is None or process.key != rank.key:
                continue
            if rows := self._take_runs(process):
                table = self._calls(place, np.concatenate(rows))
                self._call_times.note(rank.key, table)
                calls.append(table)
            if process.syncs:
                syncs.append(self._syncs(place, np.concatenate(process.syncs)))
                process.syncs = []
            process.n_rows = sum(len(rows) for rows in process.runs)
            if process.n_lost:
                lost_by_rank[place], process.n_lost = process.n_lost, 0
        lost, self._lost = self._lost, 0
        return Observations(
            calls=Calls.concatenate(calls),
            syncs=Syncs.concatenate(syncs),
            communicators=Communicators.concatenate(communicators),
            lost_events=lost,
            lost_by_rank=lost_by_rank,
        )

    def conclude(self, key: ProcessKey) -> None:
        """Take note that a process has ended, and that nothing more can be learnt of it: what has no name gets one."""
        process = self._processes.get(key.pid)
        if process is not None and process.key == key:
            process.is_over = True

    def forget(self, key: ProcessKey) -> None:
        """Let go of a process that has ended."""
        process = self._processes.get(key.pid)
        if process is not None and process.key == key:
            del self._processes[key.pid]
        if self._is_open:
            self._tracer.forget(key.pid)
        self._registry.forget(key)
        self._late.forget(key)
        self._call_times.forget(key)

    def learn(self, ranks: Sequence[RankProcess], told: Observations) -> None:
        """Take note of what the Inspector says of communicators that were made before the agent looked."""
        self._late.learn(ranks, told)

    def limits(self) -> Sequence[Limit]:
        """Return what the tracer, the libraries and the communicators keep from being seen."""
        return [*self._tracer.limits(), *self._late.limits()]

    def close(self) -> None:
        """Detach all programs; what the communicators are called is kept for the agent that follows."""
        if self._is_open:
            self._is_open = False
            self._tracer.close()
        self._registry.save()

    def _process(self, tgid: int) -> _Process | None:
        process = self._processes.get(tgid)
        key = self._key_of(tgid)
        if process is not None and key in {None, process.key}:
            process.seen_ns = self._clock.now_ns()
            return process
        if key is None:
            return None
        process = self._processes[tgid] = _Process(key, seen_ns=self._clock.now_ns())
        return process

    def _absorb(self, process: _Process, runs: _Rows | None, events: list[CommCreated | CommEnded]) -> None:
        rest = np.empty(0, _NAMED)
        if runs is not None:
            rest = np.zeros(len(runs), _NAMED)
            for name in RUN_DTYPE.names or ():
                rest[name] = runs[name]
            is_numbered = (rest["bytes"] > 0) & np.isin(rest["result"], RESULTS_OF_SUCCESS)
            rest = rest[is_numbered]  # the others are no part of an iteration, nor of NCCL's own count
            rest = rest[np.argsort(rest["start_ns"], kind="stable")]
        for event in events:
            # What was called before a pointer was given away, or given back, means what it meant then.
            is_before = rest["end_ns"] <= event.time_ns
            self._keep(process, process.runs, self._named(process.key, rest[is_before]))
            rest = rest[~is_before]
            self._settle(process, event.comm)
            self._registry.note(process.key, event)
        self._keep(process, process.runs, self._named(process.key, rest))

    def _settle(self, process: _Process, pointer: int) -> None:
        """Give what waits of a pointer its last name, before the pointer means something else."""
        for rows in process.runs:
            own = (rows["hash"] == 0) & (rows["comm"] == pointer)
            if own.any():
                rows["hash"][own] = self._late.name(process.key, pointer)
        self._late.drop(process.key, pointer)

    def _named(self, key: ProcessKey, rows: _Rows) -> _Rows:
        """Put the communicators' hashes in; 0 stays where none is known.

        Calls on a communicator of one are left out: they move nothing, and NCCL does not count them.
        """
        for pointer in np.unique(rows["comm"][rows["hash"] == 0]).tolist():
            membership = self._registry.find(key, pointer) or self._late.find(key, pointer)
            own = (rows["comm"] == pointer) & (rows["hash"] == 0)
            if membership is not None and membership.size == 1:
                rows = rows[~own]
            elif membership is not None:
                rows["hash"][own] = membership.comm
                rows["is_counted"][own] = membership.is_counted_from_creation
        return rows

    def _keep(self, process: _Process, kept: list[_Rows], rows: _Rows) -> None:
        if not len(rows):
            return
        kept.append(rows)
        process.n_rows += len(rows)
        while process.n_rows > ROWS_MAX and len(kept) > 1:
            dropped = kept.pop(0)
            process.n_rows -= len(dropped)
            process.n_lost += int(dropped["count"].sum()) if "count" in (dropped.dtype.names or ()) else len(dropped)

    def _take_runs(self, process: _Process) -> list[_Rows]:
        """Return the rows that have a name; those without one get one when nothing can be expected any more."""
        ready, waiting = [], []
        overdue_ns = self._clock.now_ns() - self._clock.offset_ns - UNRESOLVED_NS
        for rows in process.runs:
            named = self._named(process.key, rows)
            is_nameless = named["hash"] == 0
            for pointer in np.unique(named["comm"][is_nameless]).tolist():
                own = is_nameless & (named["comm"] == pointer)
                if not process.is_over and not self._late.has_named(process.key, pointer):
                    own &= named["end_ns"] < overdue_ns
                if own.any():
                    named["hash"][own] = self._late.name(process.key, pointer)
            self._late.see(process.key, named)
            is_named = named["hash"] != 0
            ready.append(named[is_named])
            if not is_named.all():
                waiting.append(named[~is_named])
        process.runs = waiting
        return [rows for rows in ready if len(rows)]

    def _calls(self, place: int, rows: _Rows) -> Calls:
        rows = rows[np.argsort(rows["start_ns"], kind="stable")]
        return Calls.build(
            len(rows),
            rank=place,
            comm=rows["hash"],
            op=rows["op"],
            source=int(CallSource.HOST_CALL),
            bytes=rows["bytes"],
            peer=rows["peer"],
            count=rows["count"],
            first_seq=rows["first_seq"],
            seq_known=rows["is_counted"],
            start_ns=self._clock.to_epoch_ns(rows["start_ns"]),
            end_ns=self._clock.to_epoch_ns(rows["end_ns"]),
            duration_ns=rows["total_ns"],
            duration_min_ns=rows["least_ns"],
        )

    def _syncs(self, place: int, rows: _Rows) -> Syncs:
        return Syncs.build(
            len(rows),
            rank=place,
            start_ns=self._clock.to_epoch_ns(rows["start_ns"]),
            duration_ns=(rows["end_ns"] - rows["start_ns"]).astype("i8"),
        )

    def _memberships(self, place: int, key: ProcessKey) -> Communicators:
        known = [*self._registry.memberships(key), *self._late.memberships(key)]
        return Communicators.build(
            len(known),
            rank=place,
            comm=np.array([m.comm for m in known], np.uint64),
            comm_rank=np.array([_UNKNOWN_RANK if m.comm_rank is None else m.comm_rank for m in known], np.uint32),
            size=np.array([m.size or 0 for m in known], np.uint32),
        )

    def _forget_strangers(self) -> None:
        """Let go of processes that call NCCL but did not turn out to be ranks."""
        now_ns = self._clock.now_ns()
        for tgid in [t for t, p in self._processes.items() if p.n_rows and now_ns - p.seen_ns > HELD_NS]:
            self.n_unknown += self._processes.pop(tgid).n_rows


def _by_process(rows: _Rows) -> dict[int, _Rows]:
    """Return the rows of each process, in their order."""
    if not len(rows):
        return {}
    owners: AnyArray = rows["tgid"]
    return {int(tgid): rows[owners == tgid] for tgid in np.unique(owners)}
