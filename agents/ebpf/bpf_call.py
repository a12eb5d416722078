"""bpf(2): the system call, for the few commands that the tracer gives itself."""

import ctypes
import os
import platform

_NUMBER = {"x86_64": 321, "aarch64": 280}
MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, MAP_NEXT, PROG_LOAD, LINK_CREATE = 1, 2, 3, 4, 5, 28

_libc = ctypes.CDLL(None, use_errno=True)


class MapElement(ctypes.Structure):
    """union bpf_attr of linux/bpf.h, as the commands on a map's elements read it."""

    _fields_ = (
        ("fd", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("key", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class Program(ctypes.Structure):
    """The same, as PROG_LOAD reads it."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("n_instructions", ctypes.c_uint32),
        ("instructions", ctypes.c_uint64),
        ("license", ctypes.c_uint64),
        ("log_level", ctypes.c_uint32),
        ("log_bytes", ctypes.c_uint32),
        ("log", ctypes.c_uint64),
        ("kernel_version", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("name", ctypes.c_char * 16),
        ("interface", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
    )


class UprobeLink(ctypes.Structure):
    """The same, as LINK_CREATE reads it for uprobes at many places of one file."""

    _fields_ = (
        ("program_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("path", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("reference_offsets", ctypes.c_uint64),
        ("cookies", ctypes.c_uint64),
        ("n", ctypes.c_uint32),
        ("uprobe_flags", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
    )


def bpf(command: int, attributes: ctypes.Structure) -> int:
    """Give a command. Raises OSError."""
    size = ctypes.c_uint(ctypes.sizeof(attributes))
    result = int(_libc.syscall(_NUMBER[platform.machine()], command, ctypes.byref(attributes), size))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
