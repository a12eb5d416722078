"""Which record a worker had in its hands when it ended, and which records have ended workers before.

Both outlive the worker: `Hand` is a page of a file that is written to before a record is handled, so that even a worker
that was killed from outside leaves its last word; `Ledger` is what the supervisor makes of it.
"""

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from pipeline.record import Record

ENDS_MAX = 3
_LAYOUT = struct.Struct("<?iqq256s")  # held, partition, offset, time_ns, topic (Kafka's names have 249 bytes at most)
_MOST_ENTRIES = 4096


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a record lies. Its time tells it from another topic's record of the same name."""

    topic: str
    partition: int
    offset: int
    time_ns: int


def place(record: Record) -> Place:
    """Return where a record lies."""
    return Place(topic=record.topic, partition=record.partition, offset=record.offset, time_ns=record.time_ns)


class Hand:
    """The record that is being handled, written where the supervisor finds it; a context manager."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with path.open("r+b") as file:
            file.truncate(_LAYOUT.size)
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.release()

    def hold(self, record: Record) -> None:
        """Write down what is about to be handled."""
        _LAYOUT.pack_into(self._page, 0, 1, record.partition, record.offset, record.time_ns, record.topic.encode())

    def release(self) -> None:
        """Say that nothing is being handled."""
        self._page[0] = 0

    def close(self) -> None:
        """Let go of the file; what was held stays written."""
        self._page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def held(path: Path) -> Place | None:
    """Return what a worker that has ended left in its hand, or None."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) != _LAYOUT.size:
        return None
    is_held, partition, offset, time_ns, topic = _LAYOUT.unpack(content)
    if not is_held:
        return None
    return Place(topic=topic.rstrip(b"\0").decode(), partition=partition, offset=offset, time_ns=time_ns)


class _Entry(msgspec.Struct, kw_only=True):
    place: Place
    ends: int


@dataclass(slots=True)
class Ledger:
    """How often each record has ended a worker, as a small file; a file that cannot be read is an empty one."""

    path: Path
    _ends: dict[Place, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            entries = msgspec.json.decode(self.path.read_bytes(), type=list[_Entry])
        except (FileNotFoundError, msgspec.DecodeError):
            entries = []
        self._ends = {entry.place: entry.ends for entry in entries}

    def count(self, where: Place) -> int:
        """Write down that this record has ended a worker; returns how often it has by now."""
        self._ends[where] = self._ends.pop(where, 0) + 1
        while len(self._ends) > _MOST_ENTRIES:
            del self._ends[next(iter(self._ends))]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".new")
        written.write_bytes(msgspec.json.encode([_Entry(place=p, ends=n) for p, n in self._ends.items()]))
        written.replace(self.path)
        return self._ends[where]

    def is_poison(self, record: Record) -> bool:
        """Whether a record has ended so many workers that it is not to be handled again."""
        return bool(self._ends) and self._ends.get(place(record), 0) >= ENDS_MAX
