"""What the programs of nccl.bpf.c keep in the kernel, read from user space: rings, open runs, losses, launches."""

import struct
import time

import numpy as np

from agents.ebpf.backend import Backend
from agents.ebpf.maps import Map, SharedArray, n_possible_cpus
from agents.ebpf.records import CREATION_DTYPE, RUN_DTYPE, Rows
from agents.ebpf.ring import Ring

CREATIONS_BYTES = 1 << 19  # as in nccl.bpf.c
IDLE_NS = 1_000_000_000  # twice EXTEND_NS there: such a run can no longer grow

# struct process, struct thread and their numbers, as in nccl.bpf.c.
N_PROCESSES = 1024
N_THREADS = 16384
_PROCESS = np.dtype(
    [
        ("run", RUN_DTYPE),
        ("owner", "<u8"),
        ("lock", "<u8"),
        ("lost_calls", "<u8"),
        ("is_broken", "<u4"),
        ("n_unresolved", "<u4"),
        ("next_unresolved", "<u8"),
    ]
)
_THREAD = np.dtype([("owner", "<u8"), ("rest", "V40")])
_N_COUNTERS = 16
_LOST_CREATIONS, _LOST_OTHER = (struct.pack("<I", place) for place in range(2))


class KernelState:
    """Reads, and forgets, on behalf of one tracer."""

    def __init__(self, backend: Backend, ring_bytes: int) -> None:
        """Open the maps of a loaded backend. Raises OSError."""
        self._runs = Ring(backend.map_fd("runs"), ring_bytes, RUN_DTYPE)
        self._creations = Ring(backend.map_fd("creations"), CREATIONS_BYTES, CREATION_DTYPE)
        self._processes = SharedArray(backend.map_fd("processes"), _PROCESS, N_PROCESSES)
        self._threads = SharedArray(backend.map_fd("threads"), _THREAD, N_THREADS)
        self._counters = Map(backend.map_fd("counters"), 16, 8 * _N_COUNTERS)
        self._creating = Map(backend.map_fd("creating"), 8, CREATION_DTYPE.itemsize)
        self._unresolved = Map(backend.map_fd("unresolved"), 8, CREATION_DTYPE.itemsize)
        self._reported = Map(backend.map_fd("reported"), 4, 8)
        self._launches = Map(backend.map_fd("launches"), 4, 8 * n_possible_cpus())
        self._lost = Map(backend.map_fd("lost"), 4, 8)
        self._told: dict[int, int] = {}  # by process, the start of the open run that was handed out

    def read_runs(self) -> Rows:
        """Return what has come in of runs and synchronisations, without what was handed out while it was open."""
        rows = self._runs.read()
        for tgid, start_ns in self._told.items() if len(rows) else ():
            is_told = (rows["tgid"] == tgid) & (rows["start_ns"] == start_ns)
            if is_told.any():
                rows = rows[~is_told]
        return rows

    def read_creations(self) -> Rows:
        """Return what has come in of communicators."""
        return self._creations.read()

    def open_runs(self, *, idle_ns: int = IDLE_NS, only: int | None = None) -> Rows:
        """Hand out runs that nobody extends any more, each once; later the kernel's own record of it is left out."""
        before, now_ns = self._states(), time.monotonic_ns()
        found = []
        for state, again in zip(before, self._states(), strict=False):
            tgid, run = int(state["owner"]), state["run"]
            start_ns = int(run["start_ns"])
            if not run["count"] or only not in {None, tgid} or self._told.get(tgid) == start_ns:
                continue
            if now_ns - int(run["end_ns"]) < idle_ns or again != state:
                continue  # at work, or it changed while it was read
            self._told[tgid] = start_ns
            self._reported.set(struct.pack("<I", tgid), struct.pack("<Q", start_ns))
            found.append(run)
        return np.array(found, RUN_DTYPE)

    def processes(self) -> list[int]:
        """Return the numbers of the processes that have called something."""
        return [int(tgid) for tgid in self._states()["owner"]]

    def lost_calls(self) -> dict[int, int]:
        """Return how many calls of each process have found no room, from the beginning."""
        return {int(state["owner"]): int(state["lost_calls"]) for state in self._states()}

    def lost_creations(self) -> int:
        """Return how many beginnings and ends of communicators have found no room, from the beginning."""
        return int(struct.unpack("<Q", self._lost.get(_LOST_CREATIONS) or bytes(8))[0])

    def lost_other(self) -> int:
        """Return how many other records have found no room, from the beginning."""
        return int(struct.unpack("<Q", self._lost.get(_LOST_OTHER) or bytes(8))[0])

    def launches(self) -> dict[int, int]:
        """Return how many kernels each process has launched, from the beginning."""
        counts = {key: np.frombuffer(self._launches.get(key) or bytes(8), "<u8") for key in list(self._launches)}
        return {int(struct.unpack("<I", key)[0]): int(each.sum()) for key, each in counts.items()}

    def forget(self, tgid: int) -> None:
        """Delete everything about a process that has ended."""
        key = struct.pack("<I", tgid)
        for by_process in (self._reported, self._launches):
            by_process.delete(key)
        # The process is the upper half of a thread's key, the end of a communicator's, the beginning of a creation's.
        for by_part, part in (
            (self._creating, slice(4, 8)),
            (self._counters, slice(8, 12)),
            (self._unresolved, slice(0, 4)),
        ):
            for own in [each for each in by_part if each[part] == key]:
                by_part.delete(own)
        for rows, owners in (
            (self._threads.rows, self._threads.rows["owner"] >> np.uint64(32)),
            (self._processes.rows, self._processes.rows["owner"]),
        ):
            for place in np.flatnonzero(owners == tgid):
                # The owner last: from then on the place is another's.
                emptied = np.zeros(1, rows.dtype)
                emptied["owner"] = rows["owner"][place]
                rows[place] = emptied[0]
                rows["owner"][place] = 0
        self._told.pop(tgid, None)

    def close(self) -> None:
        """Unmap everything."""
        for each in (self._runs, self._creations, self._processes, self._threads):
            each.close()

    def _states(self) -> Rows:
        rows = self._processes.rows
        states: Rows = rows[np.flatnonzero(rows["owner"])]
        return states
