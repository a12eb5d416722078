"""Attaches loaded programs to functions in files.

Probes belong to file descriptors, so that an agent that is killed leaves none behind. (The way through tracefs would.)
They cover all processes that map the file, those that start later included. Since Linux 6.6 one link holds a program's
probes at many places of a file, and ending it waits for the kernel once instead of once per probe; before, and for
probes of a single process, there are perf events.
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

    def attach(self, program_fd: int, path: str, offsets: Sequence[int], *, is_return: bool) -> list[int]:
        """Run a program where functions of a file begin, or return; closing what is returned ends it.

        Raises OSError, and then there is no probe.
        """
        if self._has_links:
            try:
                return [_link(program_fd, path, offsets, is_return=is_return)]
            except OSError as error:
                if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise
        fds: list[int] = []
        try:
            fds.extend(self.attach_event(program_fd, path, offset, is_return=is_return) for offset in offsets)
        except OSError:
            close_all(fds)
            raise
        self._has_links = False
        return fds

    def attach_event(self, program_fd: int, path: str, offset: int, *, is_return: bool, pid: int = -1) -> int:
        """Do the same at one place by a perf event, of one process if that is wanted. Raises OSError."""
        name = ctypes.create_string_buffer(os.fsencode(path))
        attributes = _EventAttributes(
            type=self._type,
            size=ctypes.sizeof(_EventAttributes),
            config=int(is_return) << self._return_bit,
            path=ctypes.addressof(name),
            offset=offset,
        )
        cpu = 0 if pid == -1 else -1  # of a uprobe it matters not which; something has to be chosen
        call = _SYS_PERF_EVENT_OPEN[platform.machine()]
        fd = int(_libc.syscall(call, ctypes.byref(attributes), pid, cpu, -1, ctypes.c_ulong(_FD_CLOEXEC)))
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


def _link(program_fd: int, path: str, offsets: Sequence[int], *, is_return: bool) -> int:
    name = ctypes.create_string_buffer(os.fsencode(path))
    places = (ctypes.c_uint64 * len(offsets))(*offsets)
    attributes = UprobeLink(
        program_fd=program_fd,
        attach_type=UPROBE_MULTI,
        path=ctypes.addressof(name),
        offsets=ctypes.addressof(places),
        n=len(offsets),
        uprobe_flags=_RETURN if is_return else 0,
    )
    return bpf(LINK_CREATE, attributes)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
