"""Puts the records of a topic's partitions in order of time while there is a backlog.

A client hands out whole stretches of one partition before the next, minutes of it where a worker has catching up to do.
The judge waits for a late node for seconds only, so records are merged by (time, partition, offset), the order in which
a replay reads them too. A worker that has caught up holds nothing back.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipeline.lookback import Partition
from pipeline.record import Record

HOLD_S = 1.0  # that a record waits at most for one of another partition, which may never come
RECORDS_MAX = 20_000
BYTES_MAX = 128 * 1024 * 1024


@dataclass(slots=True)
class Merge:
    """The records of one topic that have been fetched and not handled. `now_s` is any clock that does not go back."""

    hold_s: float = HOLD_S
    n_forced: int = 0  # records that were let go before all other partitions had been heard of
    _waiting: dict[Partition, deque[tuple[float, Record]]] = field(default_factory=dict)
    _next: dict[Partition, int] = field(default_factory=dict)
    _records: int = 0
    _bytes: int = 0

    def add(self, record: Record, now_s: float) -> None:
        """Take in a record; those of one partition come in its order."""
        partition = (record.topic, record.partition)
        self._waiting.setdefault(partition, deque()).append((now_s, record))
        self._next[partition] = record.offset + 1
        self._records += 1
        self._bytes += len(record.value)

    def pop(
        self, partitions: Iterable[Partition], is_behind: Callable[[Partition, int], bool], now_s: float
    ) -> Record | None:
        """Return the record that is next, or None while it is not known which.

        `partitions` are those assigned; `is_behind(partition, offset)` says whether the broker has the record of
        this offset.
        """
        heads = [(queue[0][1].time_ns, partition) for partition, queue in self._waiting.items() if queue]
        if not heads:
            return None
        _, first = min(heads)
        arrived_s, _ = self._waiting[first][0]
        is_known = all(
            self._waiting.get(partition) or not is_behind(partition, self._next.get(partition, 0))
            for partition in partitions
        )
        if not is_known:
            if now_s - arrived_s < self.hold_s and self._records <= RECORDS_MAX and self._bytes <= BYTES_MAX:
                return None
            self.n_forced += 1
        _, record = self._waiting[first].popleft()
        self._records -= 1
        self._bytes -= len(record.value)
        return record

    def clear(self) -> None:
        """Forget everything: partitions are about to be read from elsewhere."""
        self._waiting.clear()
        self._next.clear()
        self._records = self._bytes = 0
