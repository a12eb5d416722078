"""Reads a ring buffer of the kernel's by numpy, straight from its mapping: no call per record, and nobody is woken."""

import mmap

import numpy as np

from agents.ebpf.records import Rows

# A record of a BPF ring buffer begins with its length and these two bits, and with where in the ring it lies.
_BUSY = 1 << 31
_DISCARDED = 1 << 30


class Ring:
    """A ring of records of one type, which a single reader empties."""

    def __init__(self, fd: int, n_bytes: int, dtype: np.dtype[np.void]) -> None:
        """Map the ring of a map's file descriptor. Raises OSError."""
        assert dtype.itemsize % 8 == 0, "the kernel begins records at multiples of 8 bytes"
        page = mmap.PAGESIZE
        self._n_bytes = n_bytes
        self._dtype = np.dtype([("header", "<u4"), ("place", "<u4"), ("record", dtype)])
        self._reader_map = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        # The kernel maps the data twice in a row, so that a record that crosses the end can be read in one piece.
        self._writer_map = mmap.mmap(fd, page + 2 * n_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._read = np.frombuffer(self._reader_map, "<u8", 1)
        self._written = np.frombuffer(self._writer_map, "<u8", 1)
        self._data = np.frombuffer(self._writer_map, "u1", 2 * n_bytes, page)

    def read(self) -> Rows:
        """Return a copy of the records that are complete, (n,), and give their room back."""
        read = int(self._read[0])
        size = self._dtype.itemsize
        n = (int(self._written[0]) - read) // size
        start = read & (self._n_bytes - 1)
        found = self._data[start : start + n * size].view(self._dtype)
        busy = np.flatnonzero(found["header"] & _BUSY)
        if len(busy):
            found = found[: busy[0]]
        records: Rows = found["record"][(found["header"] & _DISCARDED) == 0].copy()
        self._read[0] = read + len(found) * size
        return records

    def close(self) -> None:
        """Unmap the ring."""
        del self._read, self._written, self._data
        self._reader_map.close()
        self._writer_map.close()
