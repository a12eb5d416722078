"""Loads the kernel programs of ebpf/host.bpf.c and attaches those whose tracepoints this kernel has."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from agents.collector import Limit, NotAvailable
from agents.ebpf.backend import SOURCES
from agents.ebpf.batches import HashReader
from agents.ebpf.bcc_backend import BccBackend
from agents.ebpf.maps import Map, n_possible_cpus
from agents.ebpf.tracepoints import RAW, RECORD, attach_raw, attach_record, need_tracefs
from agents.kernel_types import BTF, TRACEFS, member_offset, record_offsets

SOURCE = SOURCES / "host.bpf.c"
# The same figures as in the source.
THREADS_MAX: Final = 16_384
PROCESSES_MAX: Final = 256
FILTER_SIZE: Final = 65_536

_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO

_SUMS = [("ns", "<u8", 8), ("switches", "<u8"), ("reclaim_ns", "<u8")]
THREAD = np.dtype([*_SUMS, ("since", "<u8"), ("reclaim_since", "<u8"), ("state", "<u4"), ("process", "<u4")])
PROCESS = np.dtype([*_SUMS, ("io_ns", "<u8"), ("io_requests", "<u8")])


class Program(NamedTuple):
    """One program, and the tracepoint that it belongs to."""

    name: str
    group: str
    event: str


_RAW_SCHEDULER = [Program("host_switch", "sched", "sched_switch"), Program("host_wakeup", "sched", "sched_wakeup")]
_SCHEDULER = [program._replace(name=f"{program.name}_cooked") for program in _RAW_SCHEDULER]
_THREADS = [
    Program("host_thread_begins", "task", "task_newtask"),
    Program("host_thread_ends", "sched", "sched_process_exit"),
]
_RECLAIM = [
    Program("host_direct_reclaim_begins", "vmscan", "mm_vmscan_direct_reclaim_begin"),
    Program("host_direct_reclaim_ends", "vmscan", "mm_vmscan_direct_reclaim_end"),
]
_GROUP_RECLAIM = [
    Program("host_group_reclaim_begins", "vmscan", "mm_vmscan_memcg_reclaim_begin"),
    Program("host_group_reclaim_ends", "vmscan", "mm_vmscan_memcg_reclaim_end"),
]
_REQUESTS = [
    Program("host_request_begins", "block", "block_io_start"),
    Program("host_request_ends", "block", "block_rq_complete"),
]
# Before Linux 6.5: where a request goes to its device, which a thread of the kernel may do for the process.
_REQUESTS_BEFORE = [_REQUESTS[0]._replace(event="block_rq_issue"), _REQUESTS[1]]

_FIELDS = {
    "SWITCH_PREV_PID_AT": ("sched", "sched_switch", "prev_pid"),
    "SWITCH_PREV_STATE_AT": ("sched", "sched_switch", "prev_state"),
    "SWITCH_NEXT_PID_AT": ("sched", "sched_switch", "next_pid"),
    "WAKEUP_PID_AT": ("sched", "sched_wakeup", "pid"),
    "NEWTASK_PID_AT": ("task", "task_newtask", "pid"),
    "NEWTASK_FLAGS_AT": ("task", "task_newtask", "clone_flags"),
    "REQUEST_SECTOR_AT": ("block", "block_rq_issue", "sector"),  # a record of the same kind as block_io_start's
    "REQUEST_DEVICE_AT": ("block", "block_rq_issue", "dev"),
    "COMPLETE_SECTOR_AT": ("block", "block_rq_complete", "sector"),
    "COMPLETE_DEVICE_AT": ("block", "block_rq_complete", "dev"),
}


class _Backend(BccBackend):
    """Loads programs of two kinds."""

    def load_kinds(self, defines: Sequence[str], kinds: dict[str, int]) -> None:
        """Compile, and load each program as its kind. Raises NotAvailable."""
        self.load(SOURCE, defines, ())
        self._program_fds = {name: self._bpf.load_func(name, kind).fd for name, kind in kinds.items()}


@dataclass(slots=True)
class HostPrograms:
    """The programs in the kernel, attached, and their maps."""

    has_reclaim: bool = False
    has_requests: bool = False
    limits: list[Limit] = field(default_factory=list)
    _backend: _Backend = field(default_factory=_Backend)
    _links: list[int] = field(default_factory=list)

    def open(self, btf: Path = BTF, tracefs: Path = TRACEFS) -> None:
        """Load and attach. Raises NotAvailable where the scheduler cannot be observed."""
        _need_own_numbers()
        need_tracefs(tracefs)
        offsets = {
            name: record_offsets(group, event, tracefs).get(wanted) for name, (group, event, wanted) in _FIELDS.items()
        }
        task_pid = member_offset("task_struct", "pid", btf.read_bytes()) if btf.exists() else None
        offsets["TASK_PID_AT"] = task_pid
        try:
            self._load(offsets)
            self._attach_scheduler(is_raw=task_pid is not None)
            self._attach(_THREADS)
        except (OSError, NotAvailable) as error:
            self.close()
            if isinstance(error, NotAvailable):
                raise
            raise NotAvailable(
                f"the scheduler's tracepoints cannot be used ({error})", "run the agent as root"
            ) from error
        self.has_reclaim = any(
            [self._try("memory reclaim", _RECLAIM), self._try("group memory reclaim", _GROUP_RECLAIM)]
        )
        begins = _REQUESTS if record_offsets("block", "block_io_start", tracefs) else _REQUESTS_BEFORE
        self.has_requests = self._try("block requests", begins)

    def close(self) -> None:
        """Detach and unload; may be called twice."""
        self._detach_from(0)
        self._backend.close()

    @property
    def threads(self) -> Map:
        """Rows of THREAD by thread."""
        return Map(self._backend.map_fd("threads"), 4, THREAD.itemsize)

    @property
    def all_threads(self) -> HashReader:
        """The same, read in one call."""
        return HashReader(self._backend.map_fd("threads"), THREAD, THREADS_MAX)

    @property
    def processes(self) -> Map:
        """Rows of PROCESS by index, one for each CPU: what ended threads leave behind, and requests."""
        return Map(self._backend.map_fd("processes"), 4, PROCESS.itemsize * n_possible_cpus())

    @property
    def filter(self) -> Map:
        """What lets threads of no interest pass quickly: 8 bytes for each number modulo FILTER_SIZE."""
        return Map(self._backend.map_fd("filter"), 4, 8)

    @property
    def lost_threads(self) -> Map:
        """How many threads began that found no room, at index 0."""
        return Map(self._backend.map_fd("lost_threads"), 4, 8)

    def _load(self, offsets: dict[str, int | None]) -> None:
        cooked = [*_SCHEDULER, *_THREADS, *_RECLAIM, *_GROUP_RECLAIM, *_REQUESTS]
        kinds = {program.name: RAW for program in _RAW_SCHEDULER} | {program.name: RECORD for program in cooked}
        self._backend.load_kinds([f"{name}={offset or 0}" for name, offset in offsets.items()], kinds)

    def _attach_scheduler(self, *, is_raw: bool) -> None:
        if is_raw:
            try:
                for program in _RAW_SCHEDULER:
                    self._links.append(attach_raw(self._backend.program_fd(program.name), program.event))
            except OSError:  # before Linux 5.18 the kernel's call has one argument less
                self._detach_from(0)
            else:
                return
        self._attach(_SCHEDULER)

    def _attach(self, programs: Sequence[Program]) -> None:
        for name, group, event in programs:
            self._links.append(attach_record(self._backend.program_fd(name), group, event))

    def _detach_from(self, first: int) -> None:
        for link in self._links[first:]:
            os.close(link)
        del self._links[first:]

    def _try(self, what: str, programs: Sequence[Program]) -> bool:
        n_before = len(self._links)
        try:
            self._attach(programs)
        except OSError as error:
            self._detach_from(n_before)
            events = " and ".join(f"{program.group}:{program.event}" for program in programs)
            self.limits.append(
                Limit(what, f"the tracepoints {events} cannot be used ({error})", "use a kernel with them")
            )
            return False
        return True


def _need_own_numbers() -> None:
    """Raise NotAvailable where the kernel's numbers of processes are not those that the agent sees."""
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        raise NotAvailable(
            "the agent is in a PID namespace of its own, where processes have other numbers than in the kernel",
            "run its container with the node's PID namespace (docker --pid=host, Kubernetes hostPID: true)",
        )
