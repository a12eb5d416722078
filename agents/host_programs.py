"""Loads the kernel programs of ebpf/host.bpf.c and attaches those whose tracepoints this kernel has."""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
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
    """One program, the tracepoint that it belongs to, and the fields of its record that it reads, as defined for C."""

    name: str
    group: str
    event: str
    fields: Mapping[str, str] = MappingProxyType({})


_RAW_SCHEDULER = [Program("host_switch", "sched", "sched_switch"), Program("host_wakeup", "sched", "sched_wakeup")]
_SCHEDULER = [
    Program(
        "host_switch_cooked",
        "sched",
        "sched_switch",
        {
            "SWITCH_PREV_PID_AT": "prev_pid",
            "SWITCH_PREV_STATE_AT": "prev_state",
            "SWITCH_NEXT_PID_AT": "next_pid",
        },
    ),
    Program("host_wakeup_cooked", "sched", "sched_wakeup", {"WAKEUP_PID_AT": "pid"}),
]
_THREADS = [
    Program("host_thread_begins", "task", "task_newtask", {"NEWTASK_PID_AT": "pid", "NEWTASK_FLAGS_AT": "clone_flags"}),
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
_BEGIN_FIELDS = {"REQUEST_SECTOR_AT": "sector", "REQUEST_DEVICE_AT": "dev"}
_REQUEST_BEGINS = [
    Program("host_request_begins", "block", "block_io_start", _BEGIN_FIELDS),
    # Before Linux 6.5: where the request goes to the device, which a thread of the kernel may do for the process.
    Program("host_request_begins", "block", "block_rq_issue", _BEGIN_FIELDS),
]
_REQUEST_ENDS = Program(
    "host_request_ends", "block", "block_rq_complete", {"COMPLETE_SECTOR_AT": "sector", "COMPLETE_DEVICE_AT": "dev"}
)


class _Backend(BccBackend):
    """Loads programs of two kinds."""

    def load_kinds(self, defines: Sequence[str], kinds: dict[str, int]) -> None:
        """Compile, and load each program as its kind. Raises NotAvailable."""
        self.load(SOURCE, defines, ())
        try:
            self._program_fds = {name: self._bpf.load_func(name.encode(), kind).fd for name, kind in kinds.items()}
        except Exception as error:
            self.close()
            raise NotAvailable(
                f"the kernel refuses a program of {SOURCE.name} ({error})", "run the agent as root"
            ) from error


@dataclass(slots=True)
class HostPrograms:
    """The programs in the kernel, attached, and their maps. May be opened again after it was closed."""

    btf: Path = BTF
    tracefs: Path = TRACEFS
    has_reclaim: bool = False
    has_requests: bool = False
    limits: list[Limit] = field(default_factory=list)
    _backend: _Backend = field(default_factory=_Backend)
    _links: list[int] = field(default_factory=list)

    def open(self) -> None:
        """Load and attach. Raises NotAvailable where the scheduler cannot be observed."""
        self.limits = []
        _need_own_numbers()
        need_tracefs(self.tracefs)
        begins = next((program for program in _REQUEST_BEGINS if _fields(program, self.tracefs)), _REQUEST_BEGINS[0])
        requests = [begins, _REQUEST_ENDS]
        task_pid = member_offset("task_struct", "pid", self.btf.read_bytes()) if self.btf.exists() else None
        try:
            self._load([*_SCHEDULER, *_THREADS, *_RECLAIM, *_GROUP_RECLAIM, *requests], task_pid)
            self._attach_scheduler(is_raw=task_pid is not None)
            self._attach(_THREADS)
        except OSError as error:
            self.close()
            raise NotAvailable(
                f"the scheduler's tracepoints cannot be used ({error})",
                "run the agent as root, on a kernel with CONFIG_BPF_EVENTS",
            ) from error
        tried = [self._try("freeing memory", _RECLAIM), self._try("freeing memory of a control group", _GROUP_RECLAIM)]
        self.has_reclaim = any(tried)
        self.has_requests = self._try("what requests to block devices take", requests)

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

    def _load(self, cooked: Sequence[Program], task_pid: int | None) -> None:
        offsets = {"TASK_PID_AT": task_pid or 0}
        kinds = {} if task_pid is None else {program.name: RAW for program in _RAW_SCHEDULER}
        for program in cooked:
            fields = _fields(program, self.tracefs)
            offsets |= fields or dict.fromkeys(program.fields, 0)
            if fields or not program.fields:
                kinds[program.name] = RECORD
        self._backend.load_kinds([f"{name}={offset}" for name, offset in offsets.items()], kinds)

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
        for program in programs:
            name, group, event, fields = program
            if fields and not _fields(program, self.tracefs):
                raise FileNotFoundError(errno.ENOENT, f"{group}:{event} lacks one of {', '.join(fields.values())}")
            self._links.append(attach_record(self._backend.program_fd(name), group, event, self.tracefs))

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
            self.limits.append(Limit(what, f"{events} cannot be used ({error})", "a kernel that has these tracepoints"))
            return False
        return True


def _fields(program: Program, tracefs: Path) -> dict[str, int]:
    """Return where a program's fields lie, by their names in C; empty unless all are there."""
    offsets = record_offsets(program.group, program.event, tracefs)
    if not offsets.keys() >= set(program.fields.values()):
        return {}
    return {define: offsets[name] for define, name in program.fields.items()}


def _need_own_numbers() -> None:
    """Raise NotAvailable where the kernel's numbers of processes are not those that the agent sees."""
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        raise NotAvailable(
            "the agent is in a PID namespace of its own, where processes have other numbers than in the kernel",
            "run its container with the node's PID namespace (docker --pid=host, Kubernetes hostPID: true)",
        )
