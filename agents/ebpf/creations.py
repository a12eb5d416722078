"""From the kernel's records of communicators to what they say, in the words of NCCL's functions."""

import numpy as np

from agents.ebpf.functions import CHILDREN, COMMUNICATOR_FUNCTIONS, ENDS
from agents.ebpf.records import CommCreated, CommEnded, Rows

_WAITING_MAX = 4096
_HAS_SIZE = {
    "ncclCommInitRank",
    "ncclCommInitRankConfig",
    "ncclCommInitRankScalable",
    "ncclCommInitAll",
    "ncclCommGrow",
}
_HAS_PARENT = {"ncclCommSplit", "ncclCommShrink", "ncclCommGrow"}


class Creations:
    """Numbers the children of each communicator, and holds back what has no address yet."""

    def __init__(self) -> None:
        self._n_children: dict[tuple[int, int], int] = {}
        self._waiting: dict[tuple[int, int, int], int | None] = {}

    def read(self, rows: Rows) -> list[CommCreated | CommEnded]:
        """Return what the rows say, in the order of time."""
        told = [said for row in rows if (said := self._read(row)) is not None]
        return sorted(told, key=lambda said: said.time_ns)

    def forget(self, tgid: int) -> None:
        """Let go of a process that has ended."""
        self._n_children = {key: n for key, n in self._n_children.items() if key[0] != tgid}
        self._waiting = {key: nth for key, nth in self._waiting.items() if key[0] != tgid}

    def _read(self, row: np.void) -> CommCreated | CommEnded | None:
        tgid, function = int(row["tgid"]), COMMUNICATOR_FUNCTIONS[int(row["function"])]
        if function in ENDS:
            comm = int(row["comm"])
            self._n_children.pop((tgid, comm), None)
            return CommEnded(tgid=tgid, time_ns=int(row["time_ns"]), comm=comm, function=function)
        key = tgid, int(row["tid"]), int(row["time_ns"])
        if row["is_resolved"]:
            return _created(row, function, self._waiting.pop(key, None))
        nth = self._next_child(row, tgid, function)
        if not row["is_waiting"]:
            return _created(row, function, nth)
        self._waiting[key] = nth
        if len(self._waiting) > _WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
        return None

    def _next_child(self, row: np.void, tgid: int, function: str) -> int | None:
        if function not in CHILDREN or row["result"] not in {0, 7}:
            return None
        parent = tgid, int(row["parent"])
        nth = self._n_children.get(parent, 0)
        self._n_children[parent] = nth + 1
        return nth


def _created(row: np.void, function: str, nth_child: int | None) -> CommCreated:
    has_size = function in _HAS_SIZE
    is_split = function == "ncclCommSplit"
    rank = int(row["rank"])
    return CommCreated(
        tgid=int(row["tgid"]),
        tid=int(row["tid"]),
        time_ns=int(row["time_ns"]),
        comm=int(row["comm"]),
        function=function,
        parent=(int(row["parent"]) or None) if function in _HAS_PARENT else None,
        unique_id=row["id"].tobytes() if row["has_id"] else None,
        n_ranks=int(row["n_ranks"]) if has_size else None,
        rank=rank if has_size and rank >= 0 else None,
        color=int(row["color"]) if is_split else None,
        key=int(row["key"]) if is_split else None,
        name=bytes(row["name"]).decode(errors="replace") or None,
        result=int(row["result"]),
        nth_child=nth_child,
    )
