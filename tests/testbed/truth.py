"""What a rank itself knows that it did: written by the rank, read by tests.

A rank's truth is two files: `rank<N>.rows`, rows of ROW_FORMAT in the order in which things ended, and `rank<N>.json`.
"""

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from schemas.table import AnyArray

CALL, SYNC, ITERATION = range(3)
FUNCTIONS = (
    "ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclBcast", "ncclReduce", "ncclSend",
    "ncclRecv", "ncclAlltoAll", "ncclGather", "ncclScatter", "ncclGroupStart", "ncclGroupEnd",
)  # fmt: skip
SYNCS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
TYPE_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)

ROW_FORMAT = "<BBBBiIiQQQQQ"
ROW_FIELDS = (
    ("kind", "u1"),  # CALL, SYNC or ITERATION
    ("function", "u1"),  # place in FUNCTIONS or SYNCS
    ("data_type", "u1"),  # as NCCL numbers them
    ("depth", "u1"),  # open groups
    ("result", "i4"),
    ("tid", "u4"),
    ("peer", "i4"),  # or root, where the function has one; else 0
    ("count", "u8"),  # elements, as NCCL is told
    ("comm", "u8"),  # pointer
    ("start_ns", "u8"),  # CLOCK_MONOTONIC, just before the call
    ("end_ns", "u8"),  # and just after
    ("iteration", "u8"),  # from 1; 0 before the first
)  # fmt: skip


class CommunicatorTruth(msgspec.Struct, kw_only=True):
    """One communicator of one rank."""

    function: str  # that created it
    pointer: int
    hash: int
    rank: int
    size: int
    created_ns: int  # CLOCK_MONOTONIC, after the call that created it
    axis: str  # world, tp, dp, pp
    unique_id: str | None = None  # 128 bytes in hexadecimal digits
    parent: int | None = None  # pointer
    color: int | None = None
    key: int | None = None
    name: str | None = None
    ended_ns: int | None = None


class RankFacts(msgspec.Struct, kw_only=True):
    """What there is one of."""

    rank: int
    pid: int
    hostname: str
    communicators: list[CommunicatorTruth]
    launches: int = 0  # kernels
    is_complete: bool = False  # the rank came to its end in peace


class TruthWriter:
    """Collects rows and writes them in large pieces."""

    def __init__(self, path: Path, *, rows_buffered: int = 1024) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._row = struct.Struct(ROW_FORMAT)
        self._buffer = bytearray(self._row.size * rows_buffered)
        self._used = 0

    def add(self, *fields: int) -> None:
        """Append a row."""
        self._row.pack_into(self._buffer, self._used, *fields)
        self._used += self._row.size
        if self._used == len(self._buffer):
            self.flush()

    def flush(self) -> None:
        """Write what is collected."""
        os.write(self._file, self._buffer[: self._used])
        self._used = 0


class RankTruth:
    """One rank's truth. Row arrays have the fields of ROW_FIELDS."""

    def __init__(self, directory: Path, rank: int) -> None:
        import numpy as np

        dtype = np.dtype(list(ROW_FIELDS))
        content = (directory / f"rank{rank}.rows").read_bytes()
        rows = np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype=dtype)
        self.facts = msgspec.json.decode((directory / f"rank{rank}.json").read_bytes(), type=RankFacts)
        calls = rows[rows["kind"] == CALL]
        is_group = calls["function"] >= FUNCTIONS.index("ncclGroupStart")
        self.calls: AnyArray = calls[~is_group]
        """Everything but group starts and ends."""
        self.groups: AnyArray = calls[is_group]
        self.syncs: AnyArray = rows[rows["kind"] == SYNC]
        self.iterations: AnyArray = rows[rows["kind"] == ITERATION]

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.facts.rank

    @property
    def pid(self) -> int:
        """Its process."""
        return self.facts.pid

    def communicator(self, axis: str) -> CommunicatorTruth:
        """Return the communicator along an axis."""
        return next(comm for comm in self.facts.communicators if comm.axis == axis)

    def named(self, *functions: str) -> "AnyArray":
        """Return the calls of some functions."""
        import numpy as np

        return self.calls[np.isin(self.calls["function"], [FUNCTIONS.index(name) for name in functions])]

    def iteration_ms(self, first: int = 1) -> "AnyArray":
        """Return how long each iteration from `first` on took."""
        import numpy as np

        rows = self.iterations[self.iterations["iteration"] >= first]
        return np.asarray((rows["end_ns"] - rows["start_ns"]) / 1e6)


def call_bytes(calls: "AnyArray") -> "AnyArray":
    """Return the bytes of each call as NCCL counts them: elements times the size of their type."""
    import numpy as np

    return np.asarray(calls["count"] * np.asarray(TYPE_BYTES, dtype=np.uint64)[calls["data_type"]])
