"""When the host made which NCCL call, remembered for a while: what was seen of a call elsewhere finds its place by it.

Only calls whose number is counted from the communicator's creation can be found by number.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agents.collector import ProcessKey
from schemas.events import Calls, Op
from schemas.table import AnyArray, BoolArray, IntArray

SPAN_NS = 120_000_000_000  # a call is remembered for as long, by the time of the latest
ROWS_MAX = 1 << 15  # per process, communicator and op
COUNTERS_MAX = 1 << 14  # processes, communicators and ops together
TRANSFERS_MAX = 1 << 14  # sends and receives per communicator that nobody has asked for

_POINT_TO_POINT = (int(Op.SEND), int(Op.RECV))
_ROW = np.dtype([("first_seq", "i8"), ("count", "i8"), ("start_ns", "i8"), ("last_ns", "i8")])
_Rows = npt.NDArray[Any]


class Standing(Enum):
    """What is known of the host's calls of some kind on a communicator."""

    UNSEEN = 0
    WHOLE = 1  # all of them since its creation
    UNCOUNTED = 2  # since some time later
    BROKEN = 3  # counted from its creation, but some were not seen


class Transfer(NamedTuple):
    """One send or receive that the host called, in the order of all of its communicator."""

    order: int  # from 0, of all sends and receives of the communicator that are large enough to be counted
    op: int
    peer: int
    bytes: int
    seq: int
    start_ns: int


@dataclass(slots=True)
class _Transfers:
    """Sends and receives of one communicator."""

    rows: list[Transfer] = field(default_factory=list)
    standing: Standing = Standing.WHOLE
    n_counted: int = 0
    next_seq: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Process:
    """What is remembered of one process."""

    n_calls: dict[int, int] = field(default_factory=dict)  # by communicator
    latest_ns: int = 0
    transfers: dict[int, _Transfers] = field(default_factory=dict)
    least_bytes: int = 0  # of a send or receive that is counted


@dataclass(slots=True)
class CallTimes:
    """The host's calls of all rank processes of a node."""

    _rows: "OrderedDict[tuple[ProcessKey, int, int], _Rows]" = field(default_factory=OrderedDict)
    _processes: dict[ProcessKey, _Process] = field(default_factory=dict)
    _uncounted: set[tuple[ProcessKey, int, int]] = field(default_factory=set)

    def note(self, key: ProcessKey, calls: Calls) -> None:
        """Remember calls of one process; rows of the same communicator and op come in the order of time."""
        if not len(calls):
            return
        process = self._processes.setdefault(key, _Process())
        process.latest_ns = max(process.latest_ns, int(calls.end_ns.max()))
        names, place = np.unique(
            np.stack((calls.comm.astype("u8"), calls.op.astype("u8"))), axis=1, return_inverse=True
        )
        for number, (comm, op) in enumerate(names.T.tolist()):
            chosen = np.flatnonzero(place.ravel() == number)
            own = calls.take(chosen)
            process.n_calls[comm] = process.n_calls.get(comm, 0) + int(own.count.sum())
            if own.seq_known.all():
                self._uncounted.discard((key, comm, op))
                self._keep(key, comm, op, own, process.latest_ns)
            else:
                self._rows.pop((key, comm, op), None)
                if len(self._uncounted) < COUNTERS_MAX:
                    self._uncounted.add((key, comm, op))
        is_transfer = np.isin(calls.op, _POINT_TO_POINT)
        if is_transfer.any():
            self._note_transfers(process, calls.take(is_transfer))

    def find(self, key: ProcessKey, comm: int, op: int, seq: int) -> int | None:
        """Return when the host made a call, ns since the epoch; within a run of equal calls by interpolation."""
        start_ns, is_known = self.find_all(key, comm, op, np.array([seq], np.int64))
        return int(start_ns[0]) if is_known[0] else None

    def find_all(self, key: ProcessKey, comm: int, op: int, seqs: IntArray) -> tuple[IntArray, BoolArray]:
        """Return when the host made calls, (n,), and which of them are known, (n,)."""
        rows = self._rows.get((key, comm, op))
        if rows is None or not len(rows):
            return np.zeros(len(seqs), np.int64), np.zeros(len(seqs), bool)
        place = np.maximum(rows["first_seq"].searchsorted(seqs, "right") - 1, 0)
        row = rows[place]
        after = seqs - row["first_seq"]
        is_known: BoolArray = (after >= 0) & (after < row["count"])
        steps = np.maximum(row["count"] - 1, 1)
        return row["start_ns"] + (row["last_ns"] - row["start_ns"]) * np.minimum(after, steps) // steps, is_known

    def standing(self, key: ProcessKey, comm: int, op: int) -> Standing:
        """Return whether calls of that kind were seen, and since when they are counted; never BROKEN."""
        if (key, comm, op) in self._rows:
            return Standing.WHOLE
        return Standing.UNCOUNTED if (key, comm, op) in self._uncounted else Standing.UNSEEN

    def observes(self, key: ProcessKey) -> bool:
        """Whether the process's calls are observed at all."""
        process = self._processes.get(key)
        return process is not None and bool(process.n_calls)

    def n_calls(self, key: ProcessKey) -> dict[int, int]:
        """Return by communicator how many calls were noted."""
        process = self._processes.get(key)
        return {} if process is None else dict(process.n_calls)

    def count_transfers_from(self, key: ProcessKey, least_bytes: int) -> None:
        """Say from which size on sends and receives of a process count in Transfer.order."""
        self._processes.setdefault(key, _Process()).least_bytes = least_bytes

    def take_transfers(self, key: ProcessKey, comm: int) -> tuple[Sequence[Transfer], Standing]:
        """Return the sends and receives since the last time, and whether some are missing."""
        process = self._processes.get(key)
        transfers = None if process is None else process.transfers.get(comm)
        if transfers is None:
            return (), Standing.UNSEEN
        rows, transfers.rows = transfers.rows, []
        return rows, transfers.standing

    def forget(self, key: ProcessKey) -> None:
        """Let go of a process that has ended."""
        if self._processes.pop(key, None) is not None:
            for name in [name for name in self._rows if name[0] == key]:
                del self._rows[name]
            self._uncounted = {name for name in self._uncounted if name[0] != key}

    def _keep(self, key: ProcessKey, comm: int, op: int, calls: Calls, latest_ns: int) -> None:
        rows = np.empty(len(calls), _ROW)
        rows["first_seq"], rows["count"] = calls.first_seq, calls.count
        rows["start_ns"], rows["last_ns"] = calls.start_ns, _last_starts(calls)
        name = (key, comm, op)
        before = self._rows.pop(name, None)
        if before is not None and len(before) and rows["first_seq"][0] > before["first_seq"][-1]:
            rows = np.concatenate((before, rows))
        rows = rows[np.argsort(rows["first_seq"], kind="stable")][-ROWS_MAX:]
        self._rows[name] = rows[rows["last_ns"] >= latest_ns - SPAN_NS]
        while len(self._rows) > COUNTERS_MAX:
            self._rows.popitem(last=False)

    def _note_transfers(self, process: _Process, calls: Calls) -> None:
        columns: list[AnyArray] = [calls.comm, calls.op, calls.peer, calls.bytes, calls.count, calls.first_seq]
        columns += [calls.seq_known, calls.start_ns, _last_starts(calls)]
        for comm, op, peer, size, count, first_seq, seq_known, start_ns, last_ns in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            own = process.transfers.setdefault(comm, _Transfers())
            if not seq_known:
                own.standing = Standing.UNCOUNTED
            elif first_seq != own.next_seq.get(op, 0) and own.standing is Standing.WHOLE:
                own.standing = Standing.BROKEN
            own.next_seq[op] = first_seq + count
            if size < process.least_bytes or own.standing is not Standing.WHOLE:
                continue
            step_ns = (last_ns - start_ns) // max(count - 1, 1)
            own.rows += [
                Transfer(own.n_counted + i, op, peer, size, first_seq + i, start_ns + i * step_ns) for i in range(count)
            ]
            own.n_counted += count
            if len(own.rows) > TRANSFERS_MAX:
                del own.rows[:-TRANSFERS_MAX]
                own.standing = Standing.BROKEN


def _last_starts(calls: Calls) -> IntArray:
    """Return when the last call of each run began, (n,): as long before its end as a call takes on average."""
    mean_ns = calls.duration_ns // np.maximum(calls.count.astype("i8"), 1)
    starts: IntArray = np.maximum(calls.end_ns - mean_ns, calls.start_ns)
    return starts
