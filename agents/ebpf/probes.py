"""Attaches loaded programs to functions in files.

Probes belong to file descriptors, so that an agent that is killed leaves none behind. (The way through tracefs would.)
They cover all processes that map the file, those that start later included. Since Linux 6.6 one link holds a program's
probes at many places of a file; it needs CAP_BPF and CAP_PERFMON alone, and ending it waits for the kernel once instead
of once per probe. Before, there are perf events, which need CAP_SYS_ADMIN.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agents.collector import NotAvailable
from agents.ebpf.bpf_call import LINK_CREATE, UprobeLink, bpf

UPROBE_MULTI = 48  # bpf_attach_type, which the programs are loaded for
_RETURN = 1
_SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_IOC_ENABLE = 0x2400
_IOC_SET_BPF = 0x40042408
_FD_CLOEXEC = 8
_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
_RETURN_BIT = Path("/sys/bus/event_source/devices/uprobe/format/retprobe")

_libc = ctypes.CDLL(None, use_errno=True)


class _EventAttributes(ctypes.Structure):
    """struct perf_event_attr of linux/perf_event.h, as far as a uprobe needs it."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_events", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("path", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
    )


class Prober:
    """Places probes; it knows how this kernel wants to be asked for them."""

    def __init__(self, *, has_links: bool = True) -> None:
        """Ask the kernel. Raises NotAvailable where it has no uprobes."""
        self._has_links = has_links
        try:
            self._type = int(_TYPE.read_text())
            self._return_bit = int(_RETURN_BIT.read_text().removeprefix("config:"))
        except (OSError, ValueError) as error:
            raise NotAvailable(
                f"this kernel has no uprobes ({_TYPE}: {error})",
                "run a kernel with CONFIG_UPROBE_EVENTS and CONFIG_PERF_EVENTS",
            ) from None

    def attach(self, program_fd: int, path: str, offsets: Sequence[int], *, is_return: bool, pid: int = 0) -> list[int]:
        """Run a program where functions of a file begin, or return, in one process or (0) in all of them.

        Closing what is returned ends it. Raises OSError, and then there is no probe.
        """
        if self._has_links:
            try:
                return [_link(program_fd, path, offsets, is_return=is_return, pid=pid)]
            except OSError as error:
                if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise
        fds: list[int] = []
        try:
            fds.extend(self._event(program_fd, path, offset, is_return=is_return, pid=pid) for offset in offsets)
        except OSError:
            close_all(fds)
            raise
        self._has_links = False
        return fds

    def _event(self, program_fd: int, path: str, offset: int, *, is_return: bool, pid: int) -> int:
        name = ctypes.create_string_buffer(os.fsencode(path))
        attributes = _EventAttributes(
            type=self._type,
            size=ctypes.sizeof(_EventAttributes),
            config=int(is_return) << self._return_bit,
            path=ctypes.addressof(name),
            offset=offset,
        )
        # Of a uprobe in all processes it matters not which CPU is said, but one has to be.
        whom = (pid, -1) if pid else (-1, 0)
        call = _SYS_PERF_EVENT_OPEN[platform.machine()]
        fd = int(_libc.syscall(call, ctypes.byref(attributes), *whom, -1, ctypes.c_ulong(_FD_CLOEXEC)))
        if fd < 0:
            raise _error()
        if _libc.ioctl(fd, ctypes.c_ulong(_IOC_SET_BPF), program_fd) or _libc.ioctl(fd, ctypes.c_ulong(_IOC_ENABLE), 0):
            error = _error()
            os.close(fd)
            raise error
        return fd


def close_all(fds: Iterable[int]) -> None:
    """End probes, waiting for the kernel for all of them at once."""
    fds = list(fds)
    if fds:
        with ThreadPoolExecutor(len(fds)) as threads:
            list(threads.map(os.close, fds))


def _link(program_fd: int, path: str, offsets: Sequence[int], *, is_return: bool, pid: int) -> int:
    name = ctypes.create_string_buffer(os.fsencode(path))
    places = (ctypes.c_uint64 * len(offsets))(*offsets)
    attributes = UprobeLink(
        program_fd=program_fd,
        attach_type=UPROBE_MULTI,
        path=ctypes.addressof(name),
        offsets=ctypes.addressof(places),
        n=len(offsets),
        uprobe_flags=_RETURN if is_return else 0,
        pid=pid,
    )
    return bpf(LINK_CREATE, attributes)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
