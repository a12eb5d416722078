"""What the tracer hands on: rows as the kernel wrote them, and what happened to communicators.

Times are CLOCK_MONOTONIC nanoseconds. Processes and threads go by their numbers in the agent's PID namespace, and
communicators by their address in the process, which means something from its creation to its destruction.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]


class What(IntEnum):
    """What a record of the kernel is."""

    CALL = 0
    SYNC = 1


class SyncKind(IntEnum):
    """What the host waited for."""

    STREAM = 0
    EVENT = 1
    DEVICE = 2


# A run of equal calls by one thread, in the order in which the runs of a process ended. Without return probes the end
# is the entry of the last call, and there is no duration.
RUN_DTYPE = np.dtype(
    [
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("op", "u1"),  # schemas.events.Op
        ("depth", "u1"),  # of groups around the call; 0: none
        ("what", "<u2"),  # always What.CALL
        ("result", "<i4"),  # ncclResult_t of the first; one that failed is a run of its own
        ("peer", "<u4"),  # of SEND and RECV; the root where there is one, else 0
        ("count", "<u4"),
        ("comm", "<u8"),
        ("bytes", "<u8"),  # of one call: its count times the size of its type
        # Per process, communicator and op, from 0 at its creation, or when we attached. What failed or moves nothing is
        # not counted, since NCCL does not: it has the number of the call that follows.
        ("first_seq", "<u8"),
        ("start_ns", "<u8"),  # entry of the first call
        ("end_ns", "<u8"),  # return of the last
        ("total_ns", "<u8"),
        ("least_ns", "<u8"),
    ]
)

SYNC_DTYPE = np.dtype([("tgid", "<u4"), ("tid", "<u4"), ("kind", "u1"), ("start_ns", "<u8"), ("end_ns", "<u8")])

# struct creation of agents/ebpf/nccl.bpf.c.
CREATION_DTYPE = np.dtype(
    [
        ("time_ns", "<u8"),
        ("comm", "<u8"),
        ("parent", "<u8"),
        ("out", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("n_ranks", "<i4"),
        ("rank", "<i4"),
        ("color", "<i4"),
        ("key", "<i4"),
        ("result", "<i4"),
        ("function", "u1"),
        ("has_id", "u1"),
        ("is_resolved", "u1"),
        ("is_waiting", "u1"),
        ("id", "V128"),
        ("name", "S64"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCreated:
    """A communicator was asked for; None is what the function has no argument for.

    A communicator that NCCL finishes later, as in a group, is told when it is used for the first time, with the time
    at which the function returned. Its place among the children of its parent is that of the call, not of the telling.
    """

    tgid: int
    tid: int
    time_ns: int  # of the return
    comm: int  # address; 0: none, because the call failed or this rank takes no part
    function: str
    parent: int | None
    unique_id: bytes | None  # (128,); the first of several
    n_ranks: int | None
    rank: int | None
    color: int | None
    key: int | None
    name: str | None
    result: int
    nth_child: int | None  # among the splits and shrinks of its parent that we saw this process ask for, from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommEnded:
    """A communicator was destroyed or aborted: its address may be used again."""

    tgid: int
    time_ns: int
    comm: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What was recorded since the last time."""

    runs: Rows = field(default_factory=lambda: np.empty(0, RUN_DTYPE))
    syncs: Rows = field(default_factory=lambda: np.empty(0, SYNC_DTYPE))
    communicators: list[CommCreated | CommEnded] = field(default_factory=list)
    launches: dict[int, int] = field(default_factory=dict)
    lost_calls: dict[int, int] = field(default_factory=dict)  # calls, not rows, by process
    lost_creations: int = 0  # that a communicator was made, or that it ended
    lost_other: int = 0  # synchronisations, and calls of processes and threads beyond the kernel's tables
