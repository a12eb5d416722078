"""Markers: what the training itself says of its iterations and pauses, so that nothing has to be inferred.

Any process can say it in one line, without importing anything of ours, on a Unix datagram socket; docs/markers.md shows
how. Or nothing is changed at all, and the agent reads the log (marker_log.py). marker_text.py knows what a line may be.
"""

import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agents.collector import Limit, NotAvailable, Observations, ProcessKey, RankProcess
from agents.marker_log import MEGATRON, LogFollower
from agents.marker_socket import MESSAGES_PER_S_MAX, MarkerSocket, Message
from agents.marker_text import Said, read_line
from schemas.events import MarkerKind, Markers, Sensor

HELD_NS = 180_000_000_000  # for a sender to become known as a rank
HELD_MAX = 4096
LINES_MAX = 16  # of one message
LOOK_S = 0.02  # between two looks at logs


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One log file; its iterations are those of all ranks of the job on this node."""

    path: str  # {job_id} stands for the job's name
    pattern: str = MEGATRON  # a regular expression with the group `iteration`, and maybe `time`
    job_id: str = ""  # whose log it is; empty: of every job whose name the path has, or of the only job

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name the log file")
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from error
        if "iteration" not in groups:
            raise ValueError("pattern has no group for the number: put (?P<iteration>\\d+) where it stands")


class MarkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where markers come from."""

    socket: str = "/run/failslow/markers.sock"  # empty: none
    logs: tuple[LogConfig, ...] = ()


@dataclass(frozen=True, slots=True)
class _Row:
    place: int
    kind: MarkerKind
    iteration: int
    time_ns: int
    duration_ns: int


@dataclass(slots=True)
class _Pauses:
    """What one process said before: its last iteration, and pauses that have begun."""

    iteration: int = 0
    has_iteration: bool = False
    begun_ns: dict[MarkerKind, int] = field(default_factory=dict)


class MarkerCollector:
    """Rows of Markers from the socket and from logs."""

    name = "markers"

    def __init__(self, config: MarkerConfig) -> None:
        self.n_not_understood = 0  # lines
        self.n_unplaced = 0  # messages of processes that are no ranks
        self._config = config
        self._socket = MarkerSocket(Path(config.socket)) if config.socket else None
        self._logs: dict[tuple[int, str], LogFollower] = {}  # by place in the configuration, and job
        self._held: list[Message] = []
        self._said: dict[ProcessKey, _Pauses] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._wake = -1  # eventfd that ends the thread's wait
        self._trouble: Limit | None = None

    @property
    def sensors(self) -> Sensor:
        """Markers, while somebody listens."""
        return Sensor.MARKER if self._thread is not None and self._thread.is_alive() else Sensor(0)

    def open(self) -> None:
        """Listen. Raises NotAvailable."""
        if self._socket is None and not self._config.logs:
            raise NotAvailable("markers are switched off", "set socket or logs in [agent.markers]")
        self._trouble = None
        if self._socket is not None:
            try:
                self._socket.open()
            except NotAvailable as error:
                if not self._config.logs:
                    raise
                self._trouble = Limit(what="the marker socket", why=error.reason, remedy=error.remedy)
        self._stopped.clear()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._listen, name="markers", daemon=True)
        self._thread.start()

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        """Return the markers of these ranks since the last time."""
        places = {rank.key.pid: place for place, rank in enumerate(ranks)}
        alive = {rank.key for rank in ranks}
        self._said = {key: said for key, said in self._said.items() if key in alive}
        rows: list[_Row] = []
        if self._socket is not None:
            self._socket.own_pids = frozenset(places)
            for message in self._take_messages():
                rows += self._read_message(message, places, ranks)
        rows += self._read_logs(ranks)
        return Observations(markers=_table(rows))

    def limits(self) -> Sequence[Limit]:
        """Return what was not understood or could not be placed, and what logs do not tell."""
        return [*self._socket_limits(), *self._log_limits()]

    def close(self) -> None:
        """Stop listening, and remove the socket."""
        self._stopped.set()
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self._thread = None
        if self._socket is not None:
            self._socket.close()
        for log in self._logs.values():
            log.close()
        self._logs = {}

    def _listen(self) -> None:
        """Take messages and lines as they come; however many come, the agent does not spend a core on them."""
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        if self._socket is not None and self._socket.fileno() >= 0:
            waiting.register(self._socket.fileno(), select.POLLIN)
        share = max(1, round(MESSAGES_PER_S_MAX * LOOK_S))
        pause_ms = LOOK_S * 1000 if self._config.logs else None
        while not self._stopped.is_set():
            if waiting.poll(pause_ms) and self._socket is not None and self._socket.receive(share) >= share:
                self._stopped.wait(LOOK_S)
            for log in list(self._logs.values()):
                log.look(time.time_ns())

    def _take_messages(self) -> list[Message]:
        """Return messages in the order of their arrival, with those that waited for their sender to become known."""
        assert self._socket is not None
        messages = [*self._held, *self._socket.take()]
        self._held = []
        return messages

    def _read_message(self, message: Message, places: dict[int, int], ranks: Sequence[RankProcess]) -> list[_Row]:
        lines = message.text.split(b"\n")[:LINES_MAX]
        said = [read_line(line, message.arrival_ns) for line in lines if line.strip(b" \t\r\0")]
        own = next((places[pid] for pid in message.pids if pid in places), None)
        meant = [(own if own is not None else _place_of(one.rank, ranks), one) for one in said if one is not None]
        if any(place is None for place, _ in meant):
            self._hold(message)
            return []
        self.n_not_understood += said.count(None) or int(not said)
        rows = [
            self._row(place, ranks[place].key, one, message.arrival_ns) for place, one in meant if place is not None
        ]
        return [row for row in rows if row is not None]

    def _hold(self, message: Message) -> None:
        if time.time_ns() - message.arrival_ns < HELD_NS and len(self._held) < HELD_MAX:
            self._held.append(message)
        else:
            self.n_unplaced += 1

    def _row(self, place: int, key: ProcessKey, said: Said, arrival_ns: int) -> _Row | None:
        before = self._said.setdefault(key, _Pauses())
        time_ns = arrival_ns if said.at_ns is None else said.at_ns
        if said.kind is MarkerKind.ITERATION_END:
            assert said.iteration is not None
            is_repeated = before.has_iteration and before.iteration == said.iteration
            before.iteration, before.has_iteration = said.iteration, True
            return None if is_repeated else _Row(place, said.kind, said.iteration, time_ns, 0)
        iteration = before.iteration if said.iteration is None else said.iteration
        if said.is_begin:
            before.begun_ns[said.kind] = time_ns
            return None
        duration_ns = said.duration_ns
        if duration_ns is None:
            begun_ns = before.begun_ns.pop(said.kind, None)
            if begun_ns is None or begun_ns >= time_ns:
                return None
            duration_ns = time_ns - begun_ns
        return _Row(place, said.kind, iteration, time_ns, duration_ns)

    def _read_logs(self, ranks: Sequence[RankProcess]) -> Iterable[_Row]:
        jobs = {rank.job_id for rank in ranks}
        wanted: dict[tuple[int, str], LogFollower] = {}
        for number, config in enumerate(self._config.logs):
            for job in _jobs_of(config, jobs):
                name = (number, job)
                follower = self._logs.get(name)
                path = config.path.replace("{job_id}", job)
                wanted[name] = follower or LogFollower(path, re.compile(config.pattern))
        for name in self._logs.keys() - wanted.keys():
            ended = self._logs[name]
            self._logs = {other: log for other, log in self._logs.items() if other != name}
            ended.close()
        self._logs = wanted
        for (_, job), log in wanted.items():
            for iteration, time_ns in log.take():
                for place, rank in enumerate(ranks):
                    if rank.job_id == job:
                        yield _Row(place, MarkerKind.ITERATION_END, iteration, time_ns, 0)

    def _socket_limits(self) -> list[Limit]:
        limits = [] if self._trouble is None else [self._trouble]
        for n, what, why in (
            (self.n_not_understood, "lines on the marker socket", "they say nothing that a marker can say"),
            (
                0 if self._socket is None else self._socket.n_dropped,
                "messages on the marker socket",
                "they were too many",
            ),
            (self.n_unplaced, "messages on the marker socket", "their senders are no rank processes of this node"),
        ):
            if n:
                remedy = "send lines such as `iteration 123`, from a rank's process or with rank=N"
                limits.append(Limit(what=f"{n} {what}", why=why, remedy=remedy))
        return limits

    def _log_limits(self) -> list[Limit]:
        limits = []
        for log in self._logs.values():
            if log.problem:
                limits.append(Limit(what=f"iterations in {log.path}", why=log.problem, remedy="check path and rights"))
            elif log.interval is not None and log.interval != 1:
                why = f"only every {log.interval}th has a line, whose end is not told"
                limits.append(
                    Limit(what=f"iterations in {log.path}", why=why, remedy="log every iteration (--log-interval 1)")
                )
        return limits


def _place_of(rank: int | None, ranks: Sequence[RankProcess]) -> int | None:
    """Return the only place with a rank."""
    if rank is None or Counter(r.rank for r in ranks)[rank] != 1:
        return None
    return next(place for place, r in enumerate(ranks) if r.rank == rank)


def _jobs_of(config: LogConfig, jobs: set[str]) -> set[str]:
    if config.job_id:
        return jobs & {config.job_id}
    if "{job_id}" in config.path or len(jobs) == 1:
        return jobs
    return set()


def _table(rows: Sequence[_Row]) -> Markers:
    rows = sorted(rows, key=lambda row: (row.place, row.time_ns))
    return Markers.build(
        len(rows),
        rank=[row.place for row in rows],
        kind=[int(row.kind) for row in rows],
        iteration=[row.iteration for row in rows],
        time_ns=[row.time_ns for row in rows],
        duration_ns=[row.duration_ns for row in rows],
    )
