"""BPF maps by their file descriptors: the few commands of bpf(2) that a reader needs."""

import ctypes
import os
import platform
from collections.abc import Iterator

_SYS_BPF = {"x86_64": 321, "aarch64": 280}
_LOOKUP, _UPDATE, _DELETE, _NEXT = 1, 2, 3, 4

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    """union bpf_attr of linux/bpf.h, as the commands on elements read it."""

    _fields_ = (
        ("fd", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("key", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class Map:
    """A hash or an array in the kernel; keys and values are bytes."""

    def __init__(self, fd: int, key_bytes: int, value_bytes: int) -> None:
        """Say what the map's types measure; of a map per CPU, the values of all CPUs together."""
        self._fd = fd
        self._key = ctypes.create_string_buffer(key_bytes)
        self._next = ctypes.create_string_buffer(key_bytes)
        self._value = ctypes.create_string_buffer(value_bytes)

    def get(self, key: bytes) -> bytes | None:
        """Return a value."""
        self._key.raw = key
        return self._value.raw if self._call(_LOOKUP, self._key, self._value) else None

    def set(self, key: bytes, value: bytes) -> bool:
        """Write a value; False if the map is full."""
        self._key.raw, self._value.raw = key, value
        return self._call(_UPDATE, self._key, self._value)

    def delete(self, key: bytes) -> None:
        """Delete a value that may be there."""
        self._key.raw = key
        self._call(_DELETE, self._key, None)

    def __iter__(self) -> Iterator[bytes]:
        """Give all keys; one that is added or deleted meanwhile may be missed, or given twice."""
        has_next = self._call(_NEXT, None, self._next)
        while has_next:
            key = self._next.raw
            yield key
            self._key.raw = key
            has_next = self._call(_NEXT, self._key, self._next)

    def _call(self, command: int, key: ctypes.Array[ctypes.c_char] | None, value: object) -> bool:
        attributes = _Attributes(
            fd=self._fd,
            key=ctypes.addressof(key) if key is not None else 0,
            value=ctypes.addressof(value) if isinstance(value, ctypes.Array) else 0,
        )
        arguments = ctypes.byref(attributes), ctypes.c_uint(ctypes.sizeof(attributes))
        return bool(_libc.syscall(_SYS_BPF[platform.machine()], command, *arguments) == 0)


def n_possible_cpus() -> int:
    """Return how many values a map per CPU has for each key."""
    with open("/sys/devices/system/cpu/possible") as file:
        last = file.read().strip().rpartition(",")[2].rpartition("-")[2]
    return int(last) + 1 if last else (os.cpu_count() or 1)
