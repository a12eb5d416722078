"""Finds the place of Inspector's records in the stream of calls: their number, and when they began.

A collective has its number already; a send or receive gets the number of the host call that it belongs to. Records that
do not say when they began get the time of that host call, or of the end of the communicator's operation before, where
that is later, since those of one communicator run one after the other: the earliest at which it can have begun. Then
it ends, at the latest, when the record was dumped. What has no place by then is counted, and nothing is made up.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple

import numpy as np

from agents.collector import ProcessKey
from agents.inspector_records import Record
from agents.placing import CallTimes, Standing, Transfer
from schemas.events import Op

HOLD_NS = 6_000_000_000  # the host's call may become known so much later
WAITING_MAX = 1 << 16  # records of one process
QUEUE_MAX = 1 << 14  # sends or receives to or from one peer that have no record yet
MISSING_MAX = 4096  # numbers of sends and receives that are awaited
UNSEEN_MAX = 4096  # of one communicator; more are not looked for again
SLACK_NS = 20_000_000  # clocks are set, and a CPU thread sees a kernel begin late

_POINT_TO_POINT = (int(Op.SEND), int(Op.RECV))
_LOOK_AHEAD = 32
_LATE_NUMBERS = 512  # of a communicator; one that is further behind does not come any more
_DECAY, _DISAGREEING = 0.98, 8.0


class Placed(NamedTuple):
    """A record in its place; the number is counted from the creation unless is_known says otherwise."""

    record: Record
    seq: int
    is_known: bool
    start_ns: int
    end_ns: int


class Refusal(Enum):
    """Why a record has no place."""

    NOT_YET = 0
    NEVER = 1


class _Waiting(NamedTuple):
    record: Record
    since_ns: int


@dataclass(slots=True)
class Tally:
    """What became of the records of one communicator."""

    records: int = 0
    placed: int = 0
    on_calls: int = 0  # and the host's call is known
    unplaced: int = 0  # nobody knows when they ran
    contradicting: int = 0  # they ran before the host made the call of that number, or their like did
    numbers: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # by op of collectives: how many, from, to

    def note(self, record: Record) -> None:
        """Count a record."""
        self.records += 1
        if record.op not in _POINT_TO_POINT:
            n, first, last = self.numbers.get(record.op, (0, record.number, record.number))
            self.numbers[record.op] = n + 1, min(first, record.number), max(last, record.number)


@dataclass(slots=True)
class _Queue:
    """The host's sends to, or receives from, one peer that have no record yet."""

    calls: deque[Transfer] = field(default_factory=lambda: deque(maxlen=QUEUE_MAX))
    shift: int = 0  # of the call's place among the host's against the record's among NCCL's


@dataclass(slots=True)
class _Comm:
    """One communicator of one process."""

    tally: Tally = field(default_factory=Tally)
    end_ns: int = 0  # of the latest collective
    disagreement: dict[int, float] = field(default_factory=dict)  # by op: contradictions, the older the lighter
    standing: Standing = Standing.UNSEEN
    queues: dict[tuple[int, int], _Queue] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)  # by op, where the host does not count
    given: Counter[tuple[int, int]] = field(default_factory=Counter)  # by op and peer: numbers given out in this way
    first_number: int | None = None
    latest_number: int = 0
    missing: set[int] = field(default_factory=set)
    # Op and number of what was placed by its own time before the host's call was known.
    unseen: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=UNSEEN_MAX))


@dataclass(slots=True)
class Placer:
    """The records of one process that wait for their place."""

    key: ProcessKey
    times: CallTimes
    comms: dict[int, _Comm] = field(default_factory=dict)
    _waiting: deque[_Waiting] = field(default_factory=deque)

    def add(self, records: Sequence[Record], now_ns: int) -> None:
        """Take in records in the order of the file."""
        for record in records:
            comm = self.comms.get(record.comm)
            if comm is None:
                comm = self.comms[record.comm] = _Comm()
            comm.tally.note(record)
            self._waiting.append(_Waiting(record, now_ns))
        while len(self._waiting) > WAITING_MAX:
            self.comms[self._waiting.popleft().record.comm].tally.unplaced += 1

    @property
    def gap_share(self) -> float:
        """Of the numbers of collectives from the first to the last record, those that have no record."""
        spans = [span for comm in self.comms.values() for span in comm.tally.numbers.values()]
        n_numbers = sum(last - first + 1 for _, first, last in spans)
        return max(0.0, 1 - sum(n for n, _, _ in spans) / n_numbers) if n_numbers else 0.0

    def take(self, now_ns: int) -> list[Placed]:
        """Return the records that have found their place, in the order of the file; give up those that cannot."""
        if self._is_in_vain(now_ns):
            return []
        placed: list[Placed] = []
        still: deque[_Waiting] = deque()
        self._pull_transfers()
        for waiting, host_ns in zip(self._waiting, self._host_starts(), strict=True):
            record, since_ns = waiting
            comm = self.comms[record.comm]
            is_overdue = now_ns - since_ns >= HOLD_NS
            place = self._transfer if record.op in _POINT_TO_POINT else self._collective
            found = place(comm, record, host_ns, is_overdue=is_overdue)
            if isinstance(found, Placed):
                comm.tally.placed += 1
                placed.append(found)
            elif found is Refusal.NOT_YET and not is_overdue:
                still.append(waiting)
            elif found is Refusal.NOT_YET:
                comm.tally.unplaced += 1
        self._waiting = still
        return placed

    def settle(self) -> None:
        """Count the host's calls that have become known after the record was placed."""
        for name, comm in self.comms.items():
            for op in {op for op, _ in comm.unseen}:
                numbers = [number for own, number in comm.unseen if own == op]
                _, is_known = self.times.find_all(self.key, name, op, np.array(numbers, np.int64))
                found = {(op, n) for n, known in zip(numbers, is_known.tolist(), strict=True) if known}
                comm.tally.on_calls += len(found)
                comm.unseen = deque((u for u in comm.unseen if u not in found), maxlen=UNSEEN_MAX)

    def _is_in_vain(self, now_ns: int) -> bool:
        """Whether nothing can be placed; where no host calls are seen, what has waited for them for long is let go."""
        if not self._waiting:
            return True
        if self._waiting[-1].record.start_ns is not None or self.times.observes(self.key):
            return False
        while self._waiting and now_ns - self._waiting[0].since_ns >= HOLD_NS:
            self.comms[self._waiting.popleft().record.comm].tally.unplaced += 1
        return True

    def _host_starts(self) -> list[int | None]:
        """Return when the host called, for each waiting collective of which that is known."""
        starts: list[int | None] = [None] * len(self._waiting)
        places: dict[tuple[int, int], list[int]] = {}
        for place, (record, _) in enumerate(self._waiting):
            if record.op not in _POINT_TO_POINT:
                places.setdefault((record.comm, record.op), []).append(place)
        for (comm, op), own in places.items():
            numbers = np.array([self._waiting[place].record.number for place in own], np.int64)
            found, is_known = self.times.find_all(self.key, comm, op, numbers)
            for place, start_ns, known in zip(own, found.tolist(), is_known.tolist(), strict=True):
                if known:
                    starts[place] = start_ns
        return starts

    def _collective(self, comm: _Comm, record: Record, host_ns: int | None, *, is_overdue: bool) -> Placed | Refusal:
        if not self._agrees(comm, record, host_ns):
            comm.tally.contradicting += 1
            return Refusal.NEVER
        start_ns = record.start_ns
        if host_ns is None:
            standing = self.times.standing(self.key, record.comm, record.op)
            # Where the host's call may yet become known it is waited for, to see whether the two counts agree.
            if not is_overdue and (standing is Standing.WHOLE or (start_ns is None and standing is Standing.UNSEEN)):
                return Refusal.NOT_YET
            if start_ns is None:
                comm.tally.unplaced += 1
                return Refusal.NEVER
            comm.unseen.append((record.op, record.number))
        else:
            comm.tally.on_calls += 1
            if start_ns is None:
                start_ns = max(host_ns, comm.end_ns)
                if record.dump_ns is not None:
                    start_ns = max(host_ns, min(start_ns, record.dump_ns - record.duration_ns))
        end_ns = start_ns + record.duration_ns
        comm.end_ns = max(comm.end_ns, end_ns)
        return Placed(record, record.number, is_known=True, start_ns=start_ns, end_ns=end_ns)

    def _agrees(self, comm: _Comm, record: Record, host_ns: int | None) -> bool:
        """Whether NCCL seems to count as the host's calls are counted: it runs nothing before the host has called."""
        score = comm.disagreement.get(record.op, 0.0)
        if host_ns is None:
            return score < _DISAGREEING
        is_early = record.start_ns is not None and record.start_ns < host_ns - SLACK_NS
        is_early |= record.dump_ns is not None and record.dump_ns < host_ns + record.duration_ns - SLACK_NS
        comm.disagreement[record.op] = score = score * _DECAY + is_early
        return not is_early and score < _DISAGREEING

    def _pull_transfers(self) -> None:
        """Fetch the host's sends and receives on the communicators that have records of such."""
        for name in {record.comm for record, _ in self._waiting if record.op in _POINT_TO_POINT}:
            comm = self.comms[name]
            rows, comm.standing = self.times.take_transfers(self.key, name)
            if comm.standing is not Standing.WHOLE:
                comm.queues.clear()
                continue
            for row in rows:
                if comm.given[row.op, row.peer]:  # counted here before the host's calls became known
                    comm.given[row.op, row.peer] -= 1
                else:
                    comm.queues.setdefault((row.op, row.peer), _Queue()).calls.append(row)

    def _transfer(self, comm: _Comm, record: Record, _: int | None, *, is_overdue: bool) -> Placed | Refusal:
        own_ns = record.start_ns
        if comm.standing is Standing.WHOLE:
            queue = comm.queues.get((record.op, record.peer or 0))
            call = None if queue is None else _matching(queue, record)
            if call is None:
                return Refusal.NOT_YET
            comm.tally.on_calls += 1
            start_ns = call.start_ns if own_ns is None else own_ns
            return Placed(record, call.seq, is_known=True, start_ns=start_ns, end_ns=start_ns + record.duration_ns)
        is_awaited = comm.standing is Standing.UNSEEN and not is_overdue and self.times.observes(self.key)
        if own_ns is None or comm.standing is Standing.BROKEN or is_awaited:
            return Refusal.NOT_YET
        seq = _own_number(comm, record)
        comm.unseen.append((record.op, seq))
        is_known = comm.first_number == 1
        return Placed(record, seq, is_known=is_known, start_ns=own_ns, end_ns=own_ns + record.duration_ns)


def _matching(queue: _Queue, record: Record) -> Transfer | None:
    """Take the host's call of a record from the queue: the first, unless records before it were lost.

    Then the place among all sends and receives tells; it may be off by one, by what NCCL sorts within a group.
    """
    wanted = record.number - 1 + queue.shift
    best, least = None, 0
    for place, call in enumerate(islice(queue.calls, _LOOK_AHEAD)):
        distance = abs(call.order - wanted)
        if call.bytes == record.bytes and (best is None or distance + 1 < least):
            best, least = place, distance
    if best is None:
        return None
    for _ in range(best):
        queue.calls.popleft()
    call = queue.calls.popleft()
    queue.shift = call.order - (record.number - 1)
    return call


def _own_number(comm: _Comm, record: Record) -> int:
    """Count a send or receive where the host does not; records that are missing for good leave holes."""
    number = record.number
    if comm.first_number is None:
        comm.first_number, comm.latest_number = number, number - 1
    comm.first_number = min(comm.first_number, number)
    comm.missing.discard(number)
    if number > comm.latest_number:
        comm.missing.update(range(max(comm.latest_number + 1, number - MISSING_MAX), number))
        comm.latest_number = number
    lost = {missing for missing in comm.missing if missing < comm.latest_number - _LATE_NUMBERS}
    comm.missing -= lost
    for op in _POINT_TO_POINT:  # of which it was, nobody knows
        comm.counts[op] = comm.counts.get(op, 0) + len(lost)
    comm.counts[record.op] += 1
    comm.given[record.op, record.peer or 0] += 1
    return comm.counts[record.op] - 1
