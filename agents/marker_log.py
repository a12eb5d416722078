"""Ends of iterations from the log of a training process, such as Megatron-LM's.

A line is written every so many iterations. Only where that is every iteration does a line end one: what is concluded
otherwise would be an iteration as long as several. So a line counts when the one before it had the number before.
"""

import contextlib
import os
import re
import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

READ_BYTES_MAX = 1 << 20  # at one look; what is more is left out
LINE_BYTES_MAX = 1 << 16
ENDS_MAX = 10_000
ZONE_NS = 900_000_000_000  # time zones differ by quarters of an hour
STAMP_ERROR_NS_MAX = 120_000_000_000  # between the time in a line and its arrival, once the zone is taken off

MEGATRON = r"(?:\[(?P<time>[\d\-]+ [\d:]+\.\d{3,6})\S*\]\s+)?iteration\s+(?P<iteration>\d+)/\s*\d+\s*\|"


@dataclass(slots=True)
class LogFollower:
    """Follows one file over rotation and truncation; look() runs in a thread of its own, take() wherever one likes."""

    path: str
    pattern: re.Pattern[str]
    n_dropped_bytes: int = 0
    interval: int | None = None  # iterations between two lines, as far as it is known
    problem: str = ""
    _handle: int = -1
    _inode: int = 0
    _offset: int = 0
    _rest: bytes = b""
    _was_there: bool = False
    _previous: tuple[int, int] | None = None  # number and time of the last line
    _is_counting: bool = False
    _is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ends: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ENDS_MAX))

    def look(self, now_ns: int) -> None:
        """Read what was written. now_ns: since the epoch, the arrival of the lines that are new."""
        with self._lock:
            if not self._is_closed:
                try:
                    self._look(now_ns)
                    self.problem = ""
                except OSError as error:
                    self.problem = error.strerror or str(error)

    def take(self) -> list[tuple[int, int]]:
        """Return number and end, since the epoch in nanoseconds, of the iterations that ended since the last time."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._ends.popleft())
        return taken

    def close(self) -> None:
        """Let go of the file for good."""
        with self._lock:
            self._is_closed = True
            self._release()

    def _look(self, now_ns: int) -> None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._was_there = True  # what comes to be later is read from its begin
            raise
        if self._handle < 0 or found.st_ino != self._inode:
            self._read(now_ns)  # the rest of the file that was there before
            self._open()
        elif found.st_size < self._offset:
            self._offset, self._rest = 0, b""
        self._read(now_ns)

    def _release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _open(self) -> None:
        self._release()
        self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        now = os.fstat(self._handle)
        self._inode, self._rest = now.st_ino, b""
        # What was written before anybody looked has no time of arrival.
        self._offset = 0 if self._was_there else now.st_size
        self._was_there = True

    def _read(self, now_ns: int) -> None:
        if self._handle < 0:
            return
        size = os.fstat(self._handle).st_size
        if size - self._offset > READ_BYTES_MAX:
            self.n_dropped_bytes += size - self._offset - READ_BYTES_MAX
            self._offset, self._rest, self._previous = size - READ_BYTES_MAX, b"", None
        text = os.pread(self._handle, READ_BYTES_MAX, self._offset)
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            self._rest = b""
        for line in lines:
            self._take_line(line, now_ns)

    def _take_line(self, line: bytes, now_ns: int) -> None:
        found = self.pattern.search(line[:LINE_BYTES_MAX].decode("utf-8", "replace"))
        if found is None:
            return
        groups = found.groupdict()
        number = groups.get("iteration") or ""
        if not number.isdecimal() or len(number) > 12:
            return
        this = (int(number), _time_of(groups.get("time"), now_ns))
        before, self._previous = self._previous, this
        if before is None or this[0] <= before[0]:
            self._is_counting = False
            return
        self.interval = this[0] - before[0]
        if self.interval != 1:
            self._is_counting = False
            return
        if not self._is_counting:
            self._ends.append(before)
        self._is_counting = True
        self._ends.append(this)


def _time_of(stamp: str | None, arrival_ns: int) -> int:
    """Return the time that a line gives, whatever its zone, if it is near its arrival; else that."""
    if not stamp:
        return arrival_ns
    try:
        told = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC)
    except ValueError:
        return arrival_ns
    told_ns = int(told.timestamp()) * 1_000_000_000 + told.microsecond * 1000
    told_ns += round((arrival_ns - told_ns) / ZONE_NS) * ZONE_NS
    return told_ns if abs(told_ns - arrival_ns) <= STAMP_ERROR_NS_MAX else arrival_ns
