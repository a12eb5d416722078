"""What the tracer tells of communicators, made up for tests."""

import itertools
from typing import Any

from agents.collector import ProcessKey
from agents.communicators import Membership, Registry
from agents.ebpf.records import CommCreated, CommEnded
from agents.nccl_hash import unique_id_hash

A, B, C = (ProcessKey(1009, 7), ProcessKey(1013, 11), ProcessKey(1019, 13))
TIMES = itertools.count(1)


def an_id(seed: int) -> bytes:
    return bytes((place * seed + 5) % 256 for place in range(128))


def created(process: ProcessKey, comm: int, /, **fields: Any) -> CommCreated:
    values: dict[str, Any] = dict.fromkeys(
        ("parent", "unique_id", "n_ranks", "rank", "color", "key", "name", "nth_child")
    )
    values |= {"function": "ncclCommInitRank", "result": 0, "time_ns": next(TIMES)} | fields
    return CommCreated(tgid=process.pid, tid=process.pid, comm=comm, **values)


def ended(key: ProcessKey, comm: int) -> CommEnded:
    return CommEnded(tgid=key.pid, time_ns=next(TIMES), comm=comm, function="ncclCommDestroy")


def make_world(registry: Registry, keys: list[ProcessKey], *, seed: int = 3, size: int | None = None) -> int:
    for rank, key in enumerate(keys):
        registry.note(key, created(key, 0x1000, unique_id=an_id(seed), rank=rank, n_ranks=size or len(keys)))
    return unique_id_hash(an_id(seed))


def split(registry: Registry, key: ProcessKey, comm: int, *, nth: int, color: int, place: int = 0) -> None:
    registry.note(
        key,
        created(key, comm, function="ncclCommSplit", parent=0x1000, color=color, key=place, nth_child=nth),
    )


def found(registry: Registry, key: ProcessKey, pointer: int) -> Membership:
    membership = registry.find(key, pointer)
    assert membership is not None
    return membership
