"""What the kernel programs of ebpf/host.bpf.c have summed up about the threads of rank processes."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.collector import ProcessKey
from agents.deltas import NAN
from agents.ebpf.maps import n_possible_cpus
from agents.host_files import after_name
from agents.host_programs import FILTER_SIZE, PROCESS, PROCESSES_MAX, THREAD, HostPrograms

RUNNING, RUNNABLE, SLEEPING, BLOCKED, STOPPED, UNKNOWN = range(6)

_STATES = {"R": RUNNING, "S": SLEEPING, "I": SLEEPING, "P": SLEEPING, "D": BLOCKED, "T": STOPPED, "t": STOPPED}
_YES = (1).to_bytes(8, "little")
_Rows = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sums:
    """What happened to a process between two readings; times are seconds, of all its threads together."""

    run_queue_s: float
    off_cpu_s: float  # asleep or blocked
    blocked_s: float
    stopped_s: float  # of the thread that was stopped longest: a process is stopped as a whole
    reclaim_s: float
    switches: float
    io_s: float
    io_requests: float


@dataclass(slots=True)
class _Followed:
    place: int  # in the map `processes`
    reported: dict[str, float] = field(default_factory=dict)
    stopped_ns: dict[int, int] = field(default_factory=dict)  # by thread


class HostTracer:
    """Follows processes by the maps of the kernel programs."""

    def __init__(self, programs: HostPrograms, proc: Path = Path("/proc")) -> None:
        """Use programs that are open."""
        self.n_unfollowed = 0  # processes for which there was no place
        self._proc = proc
        self._threads, self._all_threads = programs.threads, programs.all_threads
        self._processes, self._filter, self._lost = programs.processes, programs.filter, programs.lost_threads
        self._unseen = {} if programs.has_reclaim else {"reclaim_s": NAN}
        self._unseen |= {} if programs.has_requests else {"io_s": NAN, "io_requests": NAN}
        self._followed: dict[ProcessKey, _Followed] = {}
        self._last_place = -1
        self._n_refused = 0

    @property
    def n_lost_threads(self) -> int:
        """Threads that found no room in the kernel: those that began so far, and those of the last search."""
        return int.from_bytes(self._lost.get(_u32(0)) or b"", "little") + self._n_refused

    def follow(self, keys: Sequence[ProcessKey]) -> None:
        """Follow these processes and no others. Threads that are there already are found by find_threads()."""
        for key in self._followed.keys() - set(keys):
            self._forget(key)
        for key in keys:
            if key not in self._followed and (place := self._free_place()) is not None:
                self._processes.set(_u32(place), bytes(PROCESS.itemsize * n_possible_cpus()))
                self._followed[key] = _Followed(place)
        self.n_unfollowed = len(keys) - len(self._followed)

    def find_threads(self) -> None:
        """Follow threads of followed processes that the kernel programs did not see begin."""
        self._n_refused = 0
        tids, rows = self._all_threads.read()
        for key, process in self._followed.items():
            known = set(tids[rows["process"] == process.place].tolist())
            while new := self._tids(key.pid) - known:
                for tid in sorted(new):
                    self._add(key.pid, tid, process.place)
                known |= new  # and look again: a thread may have begun another one before it was followed itself

    def read(self) -> tuple[int, dict[ProcessKey, Sums]]:
        """Return the monotonic time, and what happened since the last reading until then.

        What still lasts is counted as far as it went.
        """
        ended = {key: self._ended(process.place) for key, process in self._followed.items()}
        now = time.monotonic_ns()
        tids, rows = self._all_threads.read()  # after those that ended: one in between is missed now, never doubled
        rows["ns"][np.arange(len(rows)), rows["state"] & 7] += _elapsed(now, rows["since"])
        rows["reclaim_ns"] += np.where(rows["reclaim_since"] > 0, _elapsed(now, rows["reclaim_since"]), np.uint64(0))
        found = {}
        for key, process in self._followed.items():
            mine = rows["process"] == process.place
            found[key] = replace(_grown(process, ended[key], tids[mine], rows[mine]), **self._unseen)
        return now, found

    def _ended(self, place: int) -> _Rows:
        return np.frombuffer(self._processes.get(_u32(place)) or b"", PROCESS)

    def _free_place(self) -> int | None:
        taken = {process.place for process in self._followed.values()}
        for step in range(1, PROCESSES_MAX + 1):
            # In turn, so that a request of an ended process that is still under way is not booked on the next one.
            place = (self._last_place + step) % PROCESSES_MAX
            if place not in taken:
                self._last_place = place
                return place
        return None

    def _forget(self, key: ProcessKey) -> None:
        place = self._followed.pop(key).place
        tids, rows = self._all_threads.read()
        for tid in tids[rows["process"] == place].tolist():
            self._threads.delete(_u32(tid))

    def _tids(self, pid: int) -> set[int]:
        try:
            return {int(name) for name in os.listdir(f"{self._proc}/{pid}/task")}
        except OSError:
            return set()  # the process has ended

    def _add(self, pid: int, tid: int, place: int) -> None:
        """Follow a thread from the state that it is in."""
        row = np.zeros((), THREAD)
        row["since"], row["state"], row["process"] = time.monotonic_ns(), UNKNOWN, place
        name = _u32(tid)
        self._filter.set(_u32(tid % FILTER_SIZE), _YES)
        if not self._threads.set(name, row.tobytes()):
            self._n_refused += 1
            return
        try:
            with open(f"{self._proc}/{pid}/task/{tid}/stat") as file:
                state = after_name(file.read())[0]
        except OSError:
            self._threads.delete(name)  # it ended, perhaps before the kernel program could notice
            return
        found = self._threads.get(name)
        if found is not None and np.frombuffer(found, THREAD)[0]["state"] == UNKNOWN:  # else the kernel knows better
            row["state"] = _STATES.get(state, RUNNING)
            self._threads.set(name, row.tobytes())


def _elapsed(now: int, since: _Rows) -> npt.NDArray[np.uint64]:
    elapsed: npt.NDArray[np.uint64] = np.maximum(np.int64(now) - since.astype(np.int64), 0).astype(np.uint64)
    return elapsed


def _grown(process: _Followed, ended: _Rows, tids: _Rows, threads: _Rows) -> Sums:
    """Return what was added since the last reading. A sum that seems to have shrunk was read while it was written."""
    ns = (ended["ns"].sum(axis=0) + threads["ns"].sum(axis=0)).astype(float) / 1e9
    sums = {
        "run_queue_s": ns[RUNNABLE],
        "off_cpu_s": ns[SLEEPING] + ns[BLOCKED],
        "blocked_s": ns[BLOCKED],
        "reclaim_s": float(ended["reclaim_ns"].sum() + threads["reclaim_ns"].sum()) / 1e9,
        "switches": float(ended["switches"].sum() + threads["switches"].sum()),
        "io_s": float(ended["io_ns"].sum()) / 1e9,
        "io_requests": float(ended["io_requests"].sum()),
    }
    stopped_ns = dict(zip(tids.tolist(), threads["ns"][:, STOPPED].tolist(), strict=True))
    stopped = max((total - process.stopped_ns.get(tid, 0) for tid, total in stopped_ns.items()), default=0)
    process.stopped_ns = stopped_ns
    grown = {name: max(total - process.reported.get(name, 0.0), 0.0) for name, total in sums.items()}
    process.reported = {name: max(total, process.reported.get(name, 0.0)) for name, total in sums.items()}
    return Sums(stopped_s=max(stopped, 0) / 1e9, **grown)


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")
