"""Loads the kernel programs of ebpf/host.bpf.c and attaches those whose tracepoints this kernel has."""

import ctypes
import errno
import logging
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
from agents.ebpf.bcc_backend import BccBackend, import_bcc
from agents.ebpf.maps import Map, n_possible_cpus
from agents.ebpf.requirements import require
from agents.ebpf.tracepoints import RECORD, TYPED, attach_record, attach_typed, load, need_tracefs
from agents.kernel_types import BTF, TRACEFS, TYPEDEF, find_type, member_offset, record_offsets

logger = logging.getLogger(__name__)

SOURCE = SOURCES / "host.bpf.c"
# The same figures as in the source.
THREADS_MAX: Final = 16_384
PROCESSES_MAX: Final = 256
FILTER_SIZE: Final = 65_536


_SUMS = [("ns", "<u8", 8), ("switches", "<u8"), ("reclaim_ns", "<u8")]
THREAD = np.dtype([*_SUMS, ("since", "<u8"), ("reclaim_since", "<u8"), ("state", "<u4"), ("process", "<u4")])
PROCESS = np.dtype([*_SUMS, ("io_ns", "<u8"), ("io_requests", "<u8")])


class Program(NamedTuple):
    """One program, the tracepoint that it belongs to, and the fields of its record that it reads, as defined for C."""

    name: str
    group: str
    event: str
    fields: Mapping[str, str] = MappingProxyType({})


_TYPED_SCHEDULER = [Program("host_switch", "sched", "sched_switch"), Program("host_wakeup", "sched", "sched_wakeup")]
_SCHEDULER = [
    Program(
        "host_switch_record",
        "sched",
        "sched_switch",
        {
            "SWITCH_PREV_PID_AT": "prev_pid",
            "SWITCH_PREV_STATE_AT": "prev_state",
            "SWITCH_NEXT_PID_AT": "next_pid",
        },
    ),
    Program("host_wakeup_record", "sched", "sched_wakeup", {"WAKEUP_PID_AT": "pid"}),
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
    """Compiles by bcc, and loads the programs itself: bcc does not know the kind that follows the kernel's types."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[str, int] = {}

    def compile(self, defines: Sequence[str]) -> None:
        """Compile. Raises NotAvailable."""
        self.load(SOURCE, defines, ())

    def load_program(self, name: str, kind: int, target: int = 0) -> None:
        """Load one compiled program. Raises OSError."""
        library = import_bcc().lib
        start = ctypes.cast(library.bpf_function_start(self._bpf.module, name.encode()), ctypes.c_void_p).value
        size = library.bpf_function_size(self._bpf.module, name.encode())
        self._loaded[name] = load(name, kind, start or 0, size, target)

    def program_fd(self, name: str) -> int:
        """Return the file descriptor of a loaded program."""
        return self._loaded[name]

    def close(self) -> None:
        """Unload."""
        for fd in self._loaded.values():
            os.close(fd)
        self._loaded = {}
        super().close()


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
    _requests: list[Program] = field(default_factory=list)
    _is_typed: bool = False

    def open(self) -> None:
        """Load and attach. Raises NotAvailable where the scheduler cannot be observed."""
        require()
        need_tracefs(self.tracefs)
        begins = next((program for program in _REQUEST_BEGINS if _fields(program, self.tracefs)), _REQUEST_BEGINS[0])
        self._requests = [begins, _REQUEST_ENDS]
        btf = self.btf.read_bytes() if self.btf.exists() else b""
        self._load([*_SCHEDULER, *_THREADS, *_RECLAIM, *_GROUP_RECLAIM, *self._requests], btf)
        try:
            self.attach()
        except NotAvailable:
            self.close()
            raise

    def attach(self) -> None:
        """Attach the loaded programs. Raises NotAvailable where the scheduler cannot be observed."""
        self.limits = []
        try:
            self._attach_scheduler()
            self._attach(_THREADS)
        except OSError as error:
            raise NotAvailable(
                f"the scheduler's tracepoints cannot be used ({error})",
                "run the agent as root, on a kernel with CONFIG_BPF_EVENTS",
            ) from error
        tried = [self._try("freeing memory", _RECLAIM), self._try("freeing memory of a control group", _GROUP_RECLAIM)]
        self.has_reclaim = any(tried)
        self.has_requests = self._try("what requests to block devices take", self._requests)

    def detach(self) -> None:
        """Detach the programs, which stay loaded."""
        self._detach_from(0)

    def close(self) -> None:
        """Detach and unload; may be called twice."""
        self.detach()
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

    def _load(self, programs: Sequence[Program], btf: bytes) -> None:
        """Compile everything, and load what this kernel can tell the fields of. Raises NotAvailable."""
        task_pid = member_offset("task_struct", "pid", btf)
        offsets = {"TASK_PID_AT": task_pid or 0}
        found = [(program, _fields(program, self.tracefs)) for program in programs]
        for program, fields in found:
            offsets |= fields or dict.fromkeys(program.fields, 0)
        self._backend.compile([f"{name}={offset}" for name, offset in offsets.items()])
        self._is_typed = task_pid is not None and self._load_typed(btf)
        try:
            for program, fields in found:
                if len(fields) == len(program.fields):
                    self._backend.load_program(program.name, RECORD)
        except OSError as error:
            self.close()
            raise NotAvailable(f"the kernel refuses a program ({error})", "run the agent as root") from error

    def _load_typed(self, btf: bytes) -> bool:
        for program in _TYPED_SCHEDULER:
            target = find_type(f"btf_trace_{program.event}", TYPEDEF, btf)
            if target is None:
                return False
            try:
                self._backend.load_program(program.name, TYPED, target.number)
            except OSError as error:
                logger.debug("the scheduler is observed by records: %s", error)
                return False
        return True

    def _attach_scheduler(self) -> None:
        if self._is_typed:
            for program in _TYPED_SCHEDULER:
                self._links.append(attach_typed(self._backend.program_fd(program.name)))
        else:
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
