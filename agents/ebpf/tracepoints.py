"""Loads programs for tracepoints and attaches them.

Closing the file descriptors that are returned undoes it, and so does the end of the process.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
from pathlib import Path

from agents.collector import NotAvailable
from agents.ebpf import bpf_call as call
from agents.kernel_types import TRACEFS

TYPED, RECORD = 26, 5  # BPF_PROG_TYPE_TRACING, BPF_PROG_TYPE_TRACEPOINT

_BPF_TRACE_RAW_TP = 23
_LOG_BYTES = 1 << 16
_SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_BPF_RAW_TRACEPOINT_OPEN = 17
_PERF_TYPE_TRACEPOINT = 2
_PERF_FLAG_FD_CLOEXEC = 8
_IOC_ENABLE, _IOC_SET_BPF = 0x2400, 0x40042408

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """union bpf_attr of linux/bpf.h, as PROG_LOAD reads it for a program that follows the kernel's types."""

    _anonymous_ = ("program",)
    _fields_ = (
        ("program", call.Program),
        ("unused", ctypes.c_uint32 * 9),  # what the program itself would tell of its types and lines
        ("target", ctypes.c_uint32),
    )


class _RawTracepoint(ctypes.Structure):
    """The same, as BPF_RAW_TRACEPOINT_OPEN reads it."""

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


def load(name: str, kind: int, instructions: int, size: int, target: int = 0) -> int:
    """Load a program of some bytes at an address: of kind RECORD, or TYPED for a target, the number of a type.

    Raises OSError, with what the kernel's verifier says.
    """
    license_ = ctypes.create_string_buffer(b"GPL")
    attributes = _Program(
        type=kind,
        n_instructions=size // 8,
        instructions=instructions,
        license=ctypes.addressof(license_),
        name=name.encode()[:15],
        attach_type=_BPF_TRACE_RAW_TP if kind == TYPED else 0,
        target=target,
    )
    try:
        return call.bpf(call.PROG_LOAD, attributes)
    except OSError as error:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        attributes.log_level, attributes.log_bytes, attributes.log = 1, _LOG_BYTES, ctypes.addressof(log)
        with contextlib.suppress(OSError):
            os.close(call.bpf(call.PROG_LOAD, attributes))
        reasons = log.value.decode(errors="replace").strip().splitlines()[-3:]
        raise OSError(error.errno, f"{name}: {error.strerror}: {' / '.join(reasons)}") from None


def attach_typed(program_fd: int) -> int:
    """Run a program of kind TYPED at the tracepoint that it was loaded for. Raises OSError."""
    return call.bpf(_BPF_RAW_TRACEPOINT_OPEN, _RawTracepoint(None, program_fd))


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
    # By the capabilities that we have, which access() leaves out unless it is told to count what is effective.
    if not os.access(tracefs / "events/sched/sched_switch/id", os.R_OK, effective_ids=True):
        raise NotAvailable(
            f"no tracepoints below {tracefs}",
            f"mount it with `mount -t tracefs tracefs {tracefs}`, in the agent's container too, and run it as root",
        )
