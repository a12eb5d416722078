"""How often the kernel has run this process's BPF programs: its own exact count, where it is told to keep one."""

import contextlib
import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from agents.ebpf.bpf_call import bpf

_ENABLE_STATS = 32
_INFO_BY_FD = 15
_NAME_AT, _NAME_BYTES = 64, 16  # in struct bpf_prog_info


class _Stats(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint32),)


class _InfoByFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_uint32), ("size", ctypes.c_uint32), ("info", ctypes.c_uint64))


@contextlib.contextmanager
def counted_runs() -> Iterator[bool]:
    """Let the kernel count, which makes every program of the node a little dearer; whether it does."""
    try:
        fd = bpf(_ENABLE_STATS, _Stats())
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)


def runs_by_name() -> Counter[str]:
    """Return the counts so far by the programs' names, of which the kernel keeps 15 characters."""
    found: Counter[str] = Counter()
    for info in Path("/proc/self/fdinfo").iterdir():
        try:
            lines = dict(re.findall(r"^(\w+):\s+(\d+)$", info.read_text(), re.MULTILINE))
            if "run_cnt" in lines:
                found[_name(int(info.name))] += int(lines["run_cnt"])
        except OSError:
            continue  # it was closed meanwhile, as that of the listing itself
    return found


def _name(fd: int) -> str:
    info = ctypes.create_string_buffer(256)
    bpf(_INFO_BY_FD, _InfoByFd(fd=fd, size=len(info), info=ctypes.addressof(info)))
    return info.raw[_NAME_AT : _NAME_AT + _NAME_BYTES].partition(b"\0")[0].decode(errors="replace")
