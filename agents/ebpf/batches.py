"""Reads a whole map of the kernel in one call, into arrays."""

import contextlib
import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.ebpf.bpf_call import bpf

_MAP_LOOKUP_BATCH = 24


class _Attributes(ctypes.Structure):
    """union bpf_attr of linux/bpf.h, as the commands on batches read it."""

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("fd", ctypes.c_uint32),
        ("element_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class HashReader:
    """Reads a hash from u32 to rows of one type; keeps its memory from one reading to the next."""

    def __init__(self, fd: int, dtype: np.dtype[Any], n_max: int) -> None:
        """Say how many rows the map can hold."""
        self._fd = fd
        self._keys, self._rows = np.empty(n_max, "<u4"), np.empty(n_max, dtype)

    def read(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
        """Return copies of all keys, (n,), and rows, (n,). Raises OSError (needs Linux 5.6)."""
        place = ctypes.c_uint64()
        attributes = _Attributes(
            end=ctypes.addressof(place),
            keys=self._keys.ctypes.data,
            values=self._rows.ctypes.data,
            count=len(self._keys),
            fd=self._fd,
        )
        with contextlib.suppress(FileNotFoundError):  # which says that this was all
            bpf(_MAP_LOOKUP_BATCH, attributes)
        n = attributes.count
        return self._keys[:n].copy(), self._rows[:n].copy()
