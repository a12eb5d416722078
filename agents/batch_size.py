"""Cuts a batch that is too large for one message into several, whose numbers follow each other."""

from dataclasses import replace
from typing import Any

import numpy as np

from schemas.codec import encode_events
from schemas.events import Communicators, EventBatch, GpuSamples, PortSamples
from schemas.table import column_specs

BYTES_MAX = 4 << 20  # before compression: what the broker takes is twice as much (schemas.topics.MAX_MESSAGE_BYTES)

_HEAD_BYTES = 16384  # names of columns, of the job and the node, numbers
_RANK_BYTES = 256

_CUT = {  # by the column of time
    "calls": "start_ns",
    "spans": "start_ns",
    "syncs": "start_ns",
    "host_samples": "time_ns",
    "markers": "time_ns",
    "peer_samples": "time_ns",
}


def split(batch: EventBatch, bytes_max: int = BYTES_MAX) -> list[EventBatch]:
    """Return the batch itself, or pieces of it with the numbers batch.seq, batch.seq + 1, ..., at least one.

    The encoding of each piece has at most bytes_max bytes; more only where it has a single row of a rank, and that is
    too much already. All tables are cut at the same times, so that what belongs together stays together, and within a
    piece rows keep their order. Each piece names all ranks. What is of the node, or said once, is in the first:
    memberships, samples of GPUs and ports, lost events. Only the last one is the job's last.

    The next batch of the job takes the number batch.seq + len(pieces).
    """
    if _bytes_at_most(batch) <= bytes_max:
        return [batch]
    pieces = _halved(batch, bytes_max)
    return [
        replace(piece, seq=batch.seq + number, is_last=batch.is_last and number == len(pieces) - 1)
        for number, piece in enumerate(pieces)
    ]


def _bytes_at_most(batch: EventBatch) -> int:
    """Return a bound on the size of the encoding, without making it."""
    tables = [getattr(batch, name) for name in (*_CUT, "communicators", "gpu_samples", "port_samples")]
    columns = [getattr(table, name) for table in tables for name in column_specs(type(table))]
    names = sum(len(info.gpu_uuid or "") + _RANK_BYTES for info in batch.ranks) + sum(map(len, batch.ports))
    return _HEAD_BYTES + names + sum(int(column.nbytes) for column in columns)


def _halved(batch: EventBatch, bytes_max: int) -> list[EventBatch]:
    times = {name: getattr(getattr(batch, name), time) for name, time in _CUT.items()}
    every = np.concatenate(list(times.values()))
    if len(every) <= 1 or len(encode_events(batch)) <= bytes_max:
        return [batch]
    # Of several rows at one and the same time the first go with what was before.
    place = np.empty(len(every), np.int64)
    place[np.argsort(every, kind="stable")] = np.arange(len(every))
    early: dict[str, Any] = {}
    late: dict[str, Any] = {
        "communicators": Communicators.empty(),
        "gpu_samples": GpuSamples.empty(),
        "ports": (),
        "port_samples": PortSamples.empty(),
        "lost_events": 0,
    }
    is_early = np.split(place < len(every) // 2, np.cumsum([len(time) for time in times.values()])[:-1])
    for name, chosen in zip(_CUT, is_early, strict=True):
        table = getattr(batch, name)
        early[name], late[name] = table.take(chosen), table.take(~chosen)
    return [*_halved(replace(batch, **early), bytes_max), *_halved(replace(batch, **late), bytes_max)]
