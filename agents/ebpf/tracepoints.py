"""Attaches loaded programs to tracepoints; closing what is returned ends it, and so does the end of the process."""

import ctypes
import fcntl
import os
import platform
from pathlib import Path

from agents.collector import NotAvailable
from agents.ebpf.bpf_call import bpf
from agents.kernel_types import TRACEFS

RAW, RECORD = 17, 5  # BPF_PROG_TYPE_RAW_TRACEPOINT, BPF_PROG_TYPE_TRACEPOINT

_SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_BPF_RAW_TRACEPOINT_OPEN = 17
_PERF_TYPE_TRACEPOINT = 2
_PERF_FLAG_FD_CLOEXEC = 8
_IOC_ENABLE, _IOC_SET_BPF = 0x2400, 0x40042408

_libc = ctypes.CDLL(None, use_errno=True)


class _RawTracepoint(ctypes.Structure):
    """union bpf_attr of linux/bpf.h, as BPF_RAW_TRACEPOINT_OPEN reads it."""

    _fields_ = (("name", ctypes.c_char_p), ("program_fd", ctypes.c_uint32), ("padding", ctypes.c_uint32))


class _EventAttributes(ctypes.Structure):
    """struct perf_event_attr of linux/perf_event.h in its first version, which has all that a tracepoint needs."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("id", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    )


def attach_raw(program_fd: int, event: str) -> int:
    """Run a program of kind RAW wherever the kernel passes the tracepoint. Raises OSError."""
    attributes = _RawTracepoint(event.encode(), program_fd)
    return bpf(_BPF_RAW_TRACEPOINT_OPEN, attributes)


def attach_record(program_fd: int, group: str, event: str, tracefs: Path = TRACEFS) -> int:
    """Run a program of kind RECORD wherever the kernel passes the tracepoint. Raises OSError."""
    number = int((tracefs / "events" / group / event / "id").read_text())
    attributes = _EventAttributes(type=_PERF_TYPE_TRACEPOINT, size=ctypes.sizeof(_EventAttributes), id=number, period=1)
    every_process, first_cpu, no_group = -1, 0, -1  # the program runs on all CPUs all the same
    arguments = ctypes.byref(attributes), every_process, first_cpu, no_group, _PERF_FLAG_FD_CLOEXEC
    fd: int = _libc.syscall(_SYS_PERF_EVENT_OPEN[platform.machine()], *arguments)
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    try:
        fcntl.ioctl(fd, _IOC_SET_BPF, program_fd)
        fcntl.ioctl(fd, _IOC_ENABLE, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def need_tracefs(tracefs: Path = TRACEFS) -> None:
    """Raise NotAvailable where the kernel's list of tracepoints cannot be read."""
    if not (tracefs / "events/sched/sched_switch/id").is_file():
        raise NotAvailable(
            f"no tracepoints below {tracefs}",
            f"mount it with `mount -t tracefs tracefs {tracefs}`, in the agent's container too, and run it as root",
        )
