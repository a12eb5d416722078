"""BPF maps by their file descriptors: read, write, delete, walk."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.ebpf.bpf_call import MAP_DELETE, MAP_LOOKUP, MAP_NEXT, MAP_UPDATE, MapElement, bpf

_Buffer = ctypes.Array[ctypes.c_char]


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
        return self._value.raw if self._call(MAP_LOOKUP, self._key, self._value) else None

    def set(self, key: bytes, value: bytes) -> bool:
        """Write a value; False if the map is full."""
        self._key.raw, self._value.raw = key, value
        return self._call(MAP_UPDATE, self._key, self._value)

    def delete(self, key: bytes) -> None:
        """Delete a value that may be there."""
        self._key.raw = key
        self._call(MAP_DELETE, self._key, None)

    def __iter__(self) -> Iterator[bytes]:
        """Give all keys; one that is added or deleted meanwhile may be missed, or given twice."""
        has_next = self._call(MAP_NEXT, None, self._next)
        while has_next:
            key = self._next.raw
            yield key
            self._key.raw = key
            has_next = self._call(MAP_NEXT, self._key, self._next)

    def _call(self, command: int, key: _Buffer | None, value: _Buffer | None) -> bool:
        addresses = (0 if each is None else ctypes.addressof(each) for each in (key, value))
        try:
            bpf(command, MapElement(self._fd, 0, *addresses))
        except OSError:
            return False
        return True


class SharedArray:
    """An array of the kernel's that is also memory of ours."""

    def __init__(self, fd: int, dtype: np.dtype[np.void], n: int) -> None:
        """Map it. Raises OSError."""
        assert dtype.itemsize % 8 == 0, "the kernel begins elements at multiples of 8 bytes"
        n_bytes = -(-n * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(fd, n_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.rows: npt.NDArray[Any] = np.frombuffer(self._map, dtype, n)

    def close(self) -> None:
        """Unmap it; no view of its rows may be left."""
        del self.rows
        self._map.close()


def n_possible_cpus() -> int:
    """Return how many values a map per CPU has for each key."""
    with open("/sys/devices/system/cpu/possible") as file:
        last = file.read().strip().rpartition(",")[2].rpartition("-")[2]
    return int(last) + 1 if last else (os.cpu_count() or 1)
