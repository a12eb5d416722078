"""The calls of one node as integer matrices, one column per row of Calls: what the window's stages hand on.

The (rank, communicator, op, peer) of a call gets a small number, its key; the (rank, communicator, op), within which
NCCL counts, another one, its counter. A token stands for the key and the size of a call.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from schemas.events import Calls, Op
from schemas.table import AnyArray, BoolArray, IntArray

# Lines of a matrix of calls.
KEY, COUNTER, TOKEN, SEQ, KNOWN, COUNT, START, END, TOTAL, LEAST, BYTES, SOURCE, PIECE, TIMED = range(14)
N_LINES = 14

POINT_TO_POINT = (int(Op.SEND), int(Op.RECV))
NO_CALLS: IntArray = np.empty((N_LINES, 0), np.int64)

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: spreads small numbers over all bits
_SHIFT = np.uint64(29)
Hashes = npt.NDArray[np.uint64]


def mixed(*columns: AnyArray) -> Hashes:
    """Return (n,) one 64-bit number for each row of the columns, equal for equal rows."""
    value = np.full(len(columns[0]), _ODD, np.uint64)
    for column in columns:
        value ^= column.astype(np.uint64)
        value *= _ODD
        value ^= value >> _SHIFT
    return value


@dataclass(slots=True, eq=False)
class Keys:
    """Small numbers for what makes calls on one node, in the order of their appearance.

    rank, comm, op, peer, counter: (n_keys,), by key; counter_rank: (n_counters,).
    """

    limit: int
    rank: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    comm: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    op: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    peer: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    counter: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    counter_rank: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    _counters: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _hashes: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))  # sorted
    _keys: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # in the same order

    def lines(self, calls: Calls, piece: int) -> tuple[IntArray, int]:
        """Return calls as a matrix, (N_LINES, n), and how many found no room among the keys."""
        peer = np.where((calls.op == POINT_TO_POINT[0]) | (calls.op == POINT_TO_POINT[1]), calls.peer, 0)
        hashes = mixed(calls.rank, calls.comm, calls.op, peer)
        key = self._find(hashes)
        if (key < 0).any():
            self._add(calls, peer, hashes, np.flatnonzero(key < 0))
            key = self._find(hashes)
        lines = np.empty((N_LINES, len(calls)), np.int64)
        lines[KEY] = key
        lines[COUNTER] = self.counter[key] if len(self.counter) else -1
        lines[TOKEN] = mixed(hashes, calls.bytes).view(np.int64)
        for line, column in (
            (SEQ, calls.first_seq),
            (KNOWN, calls.seq_known != 0),
            (COUNT, calls.count),
            (START, calls.start_ns),
            (END, calls.end_ns),
            (TOTAL, calls.duration_ns),
            (LEAST, calls.duration_min_ns),
            (BYTES, calls.bytes),
            (SOURCE, calls.source),
            (TIMED, calls.is_timed != 0),
        ):
            lines[line] = column
        lines[PIECE] = piece
        has_room: BoolArray = key >= 0
        if has_room.all():
            return lines, 0
        return lines[:, has_room], int(np.count_nonzero(~has_room))

    def _find(self, hashes: Hashes) -> IntArray:
        if not len(self._hashes):
            return np.full(len(hashes), -1, np.int64)
        place = np.minimum(self._hashes.searchsorted(hashes), len(self._hashes) - 1)
        return np.where(self._hashes[place] == hashes, self._keys[place], -1)

    def _add(self, calls: Calls, peer: AnyArray, hashes: Hashes, rows: IntArray) -> None:
        _, first = np.unique(hashes[rows], return_index=True)
        new = rows[np.sort(first)][: self.limit - len(self.rank)]
        names = zip(calls.rank[new].tolist(), calls.comm[new].tolist(), calls.op[new].tolist(), strict=True)
        counters = []
        for name in names:
            counters.append(self._counters.setdefault(name, len(self._counters)))
            if counters[-1] == len(self.counter_rank):
                self.counter_rank = np.append(self.counter_rank, name[0])
        keys = np.arange(len(self.rank), len(self.rank) + len(new))
        self.rank = np.append(self.rank, calls.rank[new].astype(np.int64))
        self.comm = np.append(self.comm, calls.comm[new].astype(np.uint64))
        self.op = np.append(self.op, calls.op[new].astype(np.int64))
        self.peer = np.append(self.peer, peer[new].astype(np.int64))
        self.counter = np.append(self.counter, np.array(counters, np.int64))
        order = np.argsort(all_hashes := np.append(self._hashes, hashes[new]))
        self._hashes, self._keys = all_hashes[order], np.append(self._keys, keys)[order]


def by_rank(ranks: AnyArray) -> list[tuple[int, IntArray]]:
    """Return each rank with the places of its rows, in their order."""
    if not len(ranks):
        return []
    order = np.argsort(ranks, kind="stable")
    ranks = ranks[order]
    starts = np.concatenate(([0], np.flatnonzero(ranks[1:] != ranks[:-1]) + 1))
    return list(zip(ranks[starts].tolist(), np.split(order, starts[1:]), strict=True))


def in_order(lines: IntArray, line: int) -> IntArray:
    """Return the matrix sorted by one of its lines, itself where it is so already."""
    times = lines[line]
    if (times[1:] >= times[:-1]).all():
        return lines
    return lines[:, np.argsort(times, kind="stable")]
