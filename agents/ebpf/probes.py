"""Attaches loaded programs to functions in files, through perf events.

A perf event lives as long as its file descriptor, so that an agent that is killed leaves no probe behind. (The other
way, through tracefs, would.) One event covers all processes that map the file, those that start later included.
"""

import ctypes
import os
import platform
from pathlib import Path

from agents.collector import NotAvailable

_SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_IOC_ENABLE = 0x2400
_IOC_SET_BPF = 0x40042408
_FD_CLOEXEC = 8
_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
_RETURN_BIT = Path("/sys/bus/event_source/devices/uprobe/format/retprobe")

_libc = ctypes.CDLL(None, use_errno=True)


class _EventAttributes(ctypes.Structure):
    """struct perf_event_attr of linux/perf_event.h, as far as a uprobe needs it (version 1 and later)."""

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

    def __init__(self) -> None:
        """Ask the kernel. Raises NotAvailable where it has no uprobes."""
        try:
            self._type = int(_TYPE.read_text())
            self._return_bit = int(_RETURN_BIT.read_text().removeprefix("config:"))
        except (OSError, ValueError) as error:
            raise NotAvailable(
                f"this kernel has no uprobes ({_TYPE}: {error})",
                "run a kernel with CONFIG_UPROBE_EVENTS and CONFIG_PERF_EVENTS (4.17 or later)",
            ) from None

    def attach(self, program_fd: int, path: str, offset: int, *, is_return: bool, pid: int = -1) -> int:
        """Run a program where the file's function at that offset begins, or returns; closing the result ends it.

        Raises OSError.
        """
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
            raise _error(path)
        if _libc.ioctl(fd, ctypes.c_ulong(_IOC_SET_BPF), program_fd) or _libc.ioctl(fd, ctypes.c_ulong(_IOC_ENABLE), 0):
            error = _error(path)
            os.close(fd)
            raise error
        return fd


def _error(path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)
