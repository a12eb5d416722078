"""How long NCCL's operations took on the GPU, from the files that its Inspector plug-in writes for each rank process.

The files are followed live and read within a budget of time, so that a large one delays nobody. Their records become
rows of Calls with the source GPU: first_seq is NCCL's own number, and duration_ns the execution on the GPU, waiting for
the other members included. start_ns is when the kernel began where the record says so (verbose files); else the time
of the host's call, or the end of the communicator's operation before where that is later: it ran then or after that.

What is missing here is not reported as lost events: those would mark what the host's calls say as incomplete too. The
numbers tell the pipeline which operations have no GPU time, and these are compared with nothing.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agents.clock import Clock
from agents.collector import Limit, NotAvailable, Observations, ProcessKey, RankProcess
from agents.inspector_advice import View, limits_of
from agents.inspector_files import Settings, Tail, Unreadable, find_file, read_settings
from agents.inspector_placing import Placed, Placer
from agents.inspector_records import Context, Parser, Record
from agents.placing import CallTimes
from schemas.events import Calls, CallSource, Communicators, Sensor

logger = logging.getLogger(__name__)

BUDGET_S = 0.05  # for reading, per collect(): some 15,000 records
CHUNK_BYTES = 1 << 17
LATE_NS = 4_000_000_000  # a reader that is so far behind leaves records out, since they would come too late anyway
JOIN_NS = 10_000_000_000  # records from so long before the agent's start are still placed
FRESH_NS = 60_000_000_000  # without a record for so long there is no sensor
_SOON_NS, _LATER_NS, _SETTLED_NS = 1_000_000_000, 10_000_000_000, 30_000_000_000
_YOUNG_NS = 120_000_000_000  # a process is looked at often for as long


@dataclass(frozen=True, slots=True)
class JoinRate:
    """How many records of one communicator, on this node, found their call, and how many calls a record."""

    job_id: str
    comm: int
    records: int
    placed: int
    on_calls: int
    calls: int  # of the host; 0 where they are not observed

    @property
    def placed_share(self) -> float | None:
        """Of the records, those of which it is known when they ran."""
        return self.placed / self.records if self.records else None

    @property
    def timed_share(self) -> float | None:
        """Of the host's calls, those of which it is known how long they took on the GPU."""
        return min(1.0, self.on_calls / self.calls) if self.calls else None


class _Position(msgspec.Struct, frozen=True):
    """How far a file has been read."""

    pid: int
    start_ticks: int
    device: int
    inode: int
    offset: int
    context: Context


@dataclass(slots=True)
class _Follower:
    """The file of one process."""

    rank: RankProcess
    placer: Placer
    seen_ns: int
    settings: Settings = field(default_factory=Settings)
    parser: Parser = field(default_factory=Parser)
    tail: Tail | None = None
    next_path: Path | None = None  # of the file that has taken its place
    next_look_ns: int = 0
    trouble: str = ""
    record_ns: int | None = None  # when the latest was read
    placed_ns: int | None = None  # when the latest found its place
    n_old: int = 0
    n_skipped: int = 0  # bytes


class InspectorCollector:
    """Rows of Calls, by the GPU's clock, and of Communicators."""

    name = "inspector"

    def __init__(
        self,
        times: CallTimes,
        clock: Clock,
        *,
        proc: Path = Path("/proc"),
        state_file: Path | None = None,
        budget_s: float = BUDGET_S,
    ) -> None:
        self._times = times
        self._clock = clock
        self._proc = proc
        self._state_file = state_file
        self._budget_s = budget_s
        self._is_open = False
        self._start_ns = 0
        self._turn = 0
        self._followers: dict[ProcessKey, _Follower] = {}
        self._known: dict[tuple[int, int, int, int], _Position] = {}
        self._saved: list[_Position] = []

    @property
    def sensors(self) -> Sensor:
        """GPU times, while some process's file tells them."""
        now_ns = self._clock.now_ns()
        placed = [f.placed_ns for f in self._followers.values() if f.placed_ns is not None]
        return Sensor.GPU if self._is_open and placed and now_ns - max(placed) < FRESH_NS else Sensor(0)

    def open(self) -> None:
        """Begin. Raises NotAvailable."""
        if not (self._proc / "self").exists():
            raise NotAvailable(f"no processes are to be seen under {self._proc}", "mount the proc file system there")
        self._start_ns = self._clock.now_ns()
        self._known = {(p.pid, p.start_ticks, p.device, p.inode): p for p in self._load()}
        self._is_open = True

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        """Return the records that found their place since the last time."""
        deadline_s = time.perf_counter() + self._budget_s
        now_ns = self._clock.now_ns()
        followers = self._attend(ranks, now_ns)
        self._read(followers, now_ns, deadline_s)
        places: list[int] = []
        placed: list[Placed] = []
        communicators = []
        for place, follower in enumerate(followers):
            found = follower.placer.take(now_ns)
            follower.placed_ns = now_ns if found else follower.placed_ns
            placed += found
            places += [place] * len(found)
            communicators.append(_memberships(place, follower.parser))
        self._save()
        return Observations(calls=_rows(places, placed), communicators=Communicators.concatenate(communicators))

    def join_rates(self) -> list[JoinRate]:
        """Return what became of the records so far, by job and communicator."""
        sums: dict[tuple[str, int], list[int]] = {}
        for key, follower in self._followers.items():
            calls = self._times.n_calls(key)
            follower.placer.settle()
            for comm, state in follower.placer.comms.items():
                tally = state.tally
                row = [tally.records, tally.placed, tally.on_calls, calls.get(comm, 0)]
                before = sums.get((follower.rank.job_id, comm), [0] * len(row))
                sums[follower.rank.job_id, comm] = [a + b for a, b in zip(before, row, strict=True)]
        return [JoinRate(job_id, comm, *row) for (job_id, comm), row in sorted(sums.items())]

    def limits(self) -> Sequence[Limit]:
        """Return what keeps GPU times from being known, for each rank process."""
        now_ns = self._clock.now_ns()
        return limits_of([self._view(follower, now_ns) for follower in self._followers.values()])

    def close(self) -> None:
        """Let go of all files."""
        if self._is_open:
            self._save()
            self._is_open = False
        for follower in self._followers.values():
            if follower.tail is not None:
                follower.tail.close()
        self._followers.clear()

    def _attend(self, ranks: Sequence[RankProcess], now_ns: int) -> list[_Follower]:
        """Return who follows each rank's file; those of ended processes are let go."""
        present = {rank.key for rank in ranks}
        for key in [key for key in self._followers if key not in present]:
            gone = self._followers.pop(key)
            self._known = {name: p for name, p in self._known.items() if name[:2] != key}
            if gone.tail is not None:
                gone.tail.close()
        for rank in ranks:
            follower = self._followers.get(rank.key)
            if follower is None:
                follower = _Follower(rank, Placer(rank.key, self._times), now_ns)
                self._followers[rank.key] = follower
            if now_ns >= follower.next_look_ns:
                self._look(follower, now_ns)
        return [self._followers[rank.key] for rank in ranks]

    def _look(self, follower: _Follower, now_ns: int) -> None:
        """Find the file of a process, or another one in its place."""
        proc = self._proc / str(follower.rank.key.pid)
        is_young = now_ns - follower.seen_ns < _YOUNG_NS
        follower.next_look_ns = now_ns + (_SOON_NS if is_young else _LATER_NS)
        try:
            follower.settings = read_settings(proc)
            self._times.count_transfers_from(follower.rank.key, follower.settings.least_bytes)
            path = find_file(proc, follower.rank, follower.settings)
            follower.trouble = ""
            if path is None:
                return
            status = path.stat()
            if follower.tail is None:
                self._begin(follower, path)
            elif follower.tail.identity != (status.st_dev, status.st_ino):
                follower.next_path = path
            follower.next_look_ns = now_ns + _SETTLED_NS
        except (FileNotFoundError, ProcessLookupError):
            return
        except (Unreadable, OSError) as error:
            if str(error) != follower.trouble:
                follower.trouble = str(error)
                logger.warning("no GPU times of rank %d: %s", follower.rank.rank, error)

    def _begin(self, follower: _Follower, path: Path) -> None:
        """Open a file; where an agent before this one has read it, go on from there."""
        known = {(p.device, p.inode): p for p in self._known.values() if (p.pid, p.start_ticks) == follower.rank.key}
        tail = Tail(path)
        is_continued = tail.open({identity: position.offset for identity, position in known.items()})
        follower.parser.restart(is_cut=False)
        if is_continued:
            follower.parser.context = known[tail.identity].context
            del self._known[*follower.rank.key, *tail.identity]
        follower.tail = tail

    def _read(self, followers: Sequence[_Follower], now_ns: int, deadline_s: float) -> None:
        """Read all files in turn until the time is over; the next time begins with the one after the last."""
        hungry = [f for f in followers if f.tail is not None]
        while hungry:
            self._turn = (self._turn + 1) % len(hungry)
            follower = hungry[self._turn]
            if not self._read_from(follower, now_ns):
                hungry.remove(follower)
            if time.perf_counter() >= deadline_s:
                return

    def _read_from(self, follower: _Follower, now_ns: int) -> bool:
        """Read a piece of one file; returns whether there may be more."""
        if follower.tail is None:
            return False
        try:
            chunk = follower.tail.read(CHUNK_BYTES)
        except Unreadable as error:
            follower.trouble = str(error)
            self._set_aside(follower)
            return False
        if chunk is None:
            return self._go_on(follower)
        if chunk.is_new:
            follower.parser.restart(is_cut=chunk.is_cut)
        records = follower.parser.feed(chunk.content)
        fresh = [r for r in records if not self._is_old(r)]
        follower.n_old += len(records) - len(fresh)
        if fresh:
            follower.record_ns = now_ns
            follower.placer.add(fresh, now_ns)
        if records and now_ns - (records[-1].dump_ns or now_ns) > LATE_NS:
            follower.tail.catch_up()
        return len(chunk.content) == CHUNK_BYTES or follower.next_path is not None

    def _set_aside(self, follower: _Follower) -> None:
        """Close a file that cannot be read for now, and remember how far it has been."""
        if (position := _position(follower)) is None or follower.tail is None:
            return
        self._known[*follower.rank.key, position.device, position.inode] = position
        follower.n_skipped += follower.tail.n_skipped
        follower.tail.close()
        follower.tail = follower.next_path = None

    def _is_old(self, record: Record) -> bool:
        return record.dump_ns is not None and record.dump_ns < self._start_ns - JOIN_NS

    def _go_on(self, follower: _Follower) -> bool:
        """At the end of a file, go on with the one that has taken its place; returns whether there is one."""
        path, follower.next_path = follower.next_path, None
        if path is None or follower.tail is None:
            return False
        follower.n_skipped += follower.tail.n_skipped
        follower.tail.close()
        follower.tail = None
        try:
            self._begin(follower, path)
        except (OSError, Unreadable) as error:
            follower.trouble = str(error)
            return False
        return True

    def _view(self, follower: _Follower, now_ns: int) -> View:
        follower.placer.settle()
        tail, tallies = follower.tail, [comm.tally for comm in follower.placer.comms.values()]
        return View(
            rank=follower.rank.rank,
            pid=follower.rank.key.pid,
            settings=follower.settings,
            trouble=follower.trouble,
            has_file=tail is not None,
            age_ns=now_ns - follower.seen_ns,
            is_silent=follower.record_ns is None or now_ns - follower.record_ns > FRESH_NS,
            has_calls=self._times.observes(follower.rank.key),
            counts=follower.parser.counts,
            n_skipped=follower.n_skipped + (0 if tail is None else tail.n_skipped),
            records=sum(tally.records for tally in tallies),
            unplaced=sum(tally.unplaced for tally in tallies),
            contradicting=sum(tally.contradicting for tally in tallies),
            gap_share=follower.placer.gap_share,
            calls=sum(self._times.n_calls(follower.rank.key).values()),
            on_calls=sum(tally.on_calls for tally in tallies),
        )

    def _load(self) -> list[_Position]:
        if self._state_file is None or not self._state_file.exists():
            return []
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=list[_Position])
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s is ignored, and its records may be reported twice: %s", self._state_file, error)
            return []

    def _save(self) -> None:
        if self._state_file is None:
            return
        positions = [p for p in map(_position, self._followers.values()) if p is not None]
        positions += [p for p in self._known.values() if ProcessKey(p.pid, p.start_ticks) in self._followers]
        if positions == self._saved:
            return
        new = self._state_file.with_name(self._state_file.name + ".new")
        try:
            new.write_bytes(msgspec.json.encode(positions))
            os.replace(new, self._state_file)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._state_file, error)
        self._saved = positions


def _position(follower: _Follower) -> _Position | None:
    """Return how far a process's file has been read, by whole lines; None while it is not open."""
    tail, parser = follower.tail, follower.parser
    if tail is None:
        return None
    return _Position(*follower.rank.key, *tail.identity, tail.offset - parser.n_kept, parser.context)


def _rows(places: Sequence[int], placed: Sequence[Placed]) -> Calls:
    records = [p.record for p in placed]
    columns: dict[str, Any] = {
        "rank": np.array(places, np.uint32),
        "comm": np.array([r.comm for r in records], np.uint64),
        "op": np.array([r.op for r in records], np.uint8),
        "bytes": np.array([r.bytes for r in records], np.int64),
        "peer": np.array([r.peer or 0 for r in records], np.uint32),
        "first_seq": np.array([p.seq for p in placed], np.int64),
        "seq_known": np.array([p.is_known for p in placed], np.uint8),
        "start_ns": np.array([p.start_ns for p in placed], np.int64),
        "end_ns": np.array([p.end_ns for p in placed], np.int64),
        "is_timed": np.array([r.start_ns is not None for r in records], np.uint8),
        "duration_ns": (durations := np.array([r.duration_ns for r in records], np.int64)),
    }
    calls = Calls.build(len(placed), source=int(CallSource.GPU), count=1, duration_min_ns=durations, **columns)
    return calls.take(np.argsort(calls.start_ns, kind="stable"))


def _memberships(place: int, parser: Parser) -> Communicators:
    known = parser.memberships
    return Communicators.build(
        len(known),
        rank=place,
        comm=np.array(list(known), np.uint64),
        comm_rank=np.array([member.rank for member in known.values()], np.uint32),
        size=np.array([member.size for member in known.values()], np.uint32),
    )
