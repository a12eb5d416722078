"""One partition under one stage: its state, how far it has come, and what leaves it. Both drivers run lanes.

A stage is made anew for every partition that is assigned, so what a partition's records have built up goes when the
partition goes. docs/decisions/0006-live-recovery.md says how a lane begins again where another one ended.
"""

import logging
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from pipeline.dead_letters import Cause, encode, letter
from pipeline.lookback import Lookback, Partition
from pipeline.metrics import Metrics, PartitionObserver
from pipeline.observer import Observer
from pipeline.poison import ENDS_MAX, Hand, Ledger
from pipeline.record import Record
from pipeline.resume import Published, rewind_time_ns
from pipeline.settings import Settings
from schemas.alerts import Alert
from schemas.codec import InvalidRecord, decode_alert, encode_alert, encode_iterations
from schemas.iterations import IterationBatch
from schemas.topics import ALERTS, DEAD_LETTERS, ITERATIONS, TOPICS, job_key

logger = logging.getLogger(__name__)

_READ_BACK_NS = next(spec.retention_ms for spec in TOPICS if spec.name == ITERATIONS) * 1_000_000


class Stage(Protocol):
    """Window or judge: synchronous, deterministic; InvalidRecord says that a record cannot be read."""

    def handle(self, record: Record, /) -> Iterator[IterationBatch] | Iterator[Alert]:
        """Take in one record and yield what follows from it."""
        ...


StageFactory = Callable[[Observer], Stage]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish; `alert` is what it says where it is an alert."""

    topic: str
    key: bytes
    value: bytes
    alert: Alert | None = None


@dataclass(slots=True)
class Lane:
    """One assigned partition. `handle`, publish what it returns, then `done`: in this order for every record."""

    partition: Partition
    stage: Stage
    position: int  # the offset of the next record: what is committed
    committed: int  # what came before has been published by somebody already
    end: int  # of the partition when it was assigned: all that alerts published before can stand on
    published: Published | None  # of the judge's lanes alone
    metrics: Metrics
    observer: PartitionObserver
    hand: Hand
    ledger: Ledger
    _is_settled: bool = False

    def handle(self, record: Record) -> list[Outgoing]:
        """Give one record to the stage and return what to publish; nothing for a record that came before.

        Any exception but InvalidRecord leaves the record in the hand, and is the end of the process.
        """
        if record.offset < self.position:
            return []
        if record.offset > self.position and record.offset > self.committed:
            self.metrics.counted("records_skipped", record.offset - self.position)  # the broker let go of them
        is_rebuilding = record.offset < self.committed
        self.metrics.record_handled(record.topic, record.time_ns, is_rebuilding=is_rebuilding)
        if self.ledger.is_poison(record):
            reason = f"it has ended the {record.topic} worker {ENDS_MAX} times"
            return self._set_aside(record, Cause.POISON, reason)
        self.hand.hold(record)
        try:
            outgoing = self._encoded(record)
        except InvalidRecord as error:
            outgoing = self._set_aside(record, Cause.UNREADABLE, str(error))
        self.hand.release()
        return outgoing + self._settled(record)

    def done(self, record: Record, outgoing: list[Outgoing]) -> None:
        """Take note that the broker has all that came of a record."""
        self.position = max(self.position, record.offset + 1)
        for message in outgoing:
            self.metrics.published.labels(message.topic).inc()
            if message.alert is not None:
                self.metrics.alert_published(message.alert)
                _log_alert(message.alert)
        if self.published is not None and self.published.n_forgotten:
            self.metrics.counted("incidents_forgotten", self.published.n_forgotten)
            self.published.n_forgotten = 0

    def _encoded(self, record: Record) -> list[Outgoing]:
        outgoing = []
        for output in self.stage.handle(record):
            if isinstance(output, IterationBatch):
                if record.offset >= self.committed:
                    outgoing.append(Outgoing(ITERATIONS, job_key(output.job_id), encode_iterations(output)))
            else:
                assert self.published is not None, f"a stage on {self.partition[0]} has made an alert"
                if record.offset < self.committed:
                    self.published.remake(output)
                elif (alert := self.published.admit(output, record.time_ns)) is not None:
                    outgoing.append(_alert(alert))
        return outgoing

    def _settled(self, record: Record) -> list[Outgoing]:
        """End what no record speaks of any more, once everything has been read again."""
        if self._is_settled or self.published is None or record.offset + 1 < self.end:
            return []
        self._is_settled = True
        return [_alert(alert) for alert in self.published.settle(record.time_ns)]

    def _set_aside(self, record: Record, cause: Cause, reason: str) -> list[Outgoing]:
        if record.offset < self.committed:
            return []  # as it was before
        self.metrics.dead_lettered(record.topic, cause)
        logger.warning(
            "%s/%d offset %d goes to %s: %s", record.topic, record.partition, record.offset, DEAD_LETTERS, reason
        )
        return [Outgoing(DEAD_LETTERS, record.key, encode(letter(record, cause, reason)))]


def _alert(alert: Alert) -> Outgoing:
    return Outgoing(ALERTS, job_key(alert.job_id), encode_alert(alert), alert)


def _log_alert(alert: Alert) -> None:
    logger.info(
        "%s %s of job %s, revision %d (%s), onset at iteration %d, slowdown %.2f",
        alert.kind,
        alert.state,
        alert.job_id,
        alert.revision,
        alert.fingerprint,
        alert.onset_iteration,
        alert.slowdown_ratio,
    )


class Lanes:
    """The lanes of one worker. assign() blocks on the broker and may be called from another thread, one at a time."""

    def __init__(
        self,
        settings: Settings,
        stages: Mapping[str, StageFactory],
        metrics: Metrics,
        hand: Hand,
        ledger: Ledger,
    ) -> None:
        self._settings = settings
        self._stages = stages
        self._metrics = metrics
        self._hand = hand
        self._ledger = ledger
        self._lanes: dict[Partition, Lane] = {}
        self._alerts_read: dict[int, int] = {}  # partition of the alerts topic -> offset up to which it was read
        self._lock = threading.Lock()

    def get(self, partition: Partition) -> Lane | None:
        """Return the lane of a partition, None where it is not assigned."""
        return self._lanes.get(partition)

    def is_behind(self, partition: Partition, offset: int, end: int | None) -> bool:
        """Whether the broker has more of an assigned partition than what came before `offset`, of what was fetched.

        `end` is what the client knows of the partition's end; what was known when it was assigned counts as well.
        """
        lane = self._lanes.get(partition)
        return lane is not None and max(end or 0, lane.end) > max(offset, lane.position)

    def assigned(self, topic: str) -> list[Partition]:
        """Return the partitions of one topic that have a lane."""
        return [partition for partition in list(self._lanes) if partition[0] == topic]

    @property
    def positions(self) -> dict[Partition, int]:
        """What may be committed: of every lane that has come past what was committed before."""
        return {p: lane.position for p, lane in list(self._lanes.items()) if lane.position > lane.committed}

    def assign(self, committed: Mapping[Partition, int | None]) -> dict[Partition, int]:
        """Take over exactly these partitions and return where to read each of them from.

        A lane that was here before goes on where it is; a new one is rewound. Raises BrokerUnreachable.
        """
        with self._lock, Lookback(self._settings.bootstrap) as lookback:
            for partition in self._lanes.keys() - committed.keys():
                self._lanes.pop(partition).observer.forget()
            new = {partition: offset or 0 for partition, offset in committed.items() if partition not in self._lanes}
            kept = {p: lane.published for (t, p), lane in self._lanes.items() if t == ITERATIONS and lane.published}
            fresh = {p: Published() for t, p in new if t == ITERATIONS}
            self._read_back(lookback, kept | fresh, fresh.keys())
            for partition, (start, offset, end) in self._starts(lookback, new, fresh).items():
                published = fresh[partition[1]] if partition[0] == ITERATIONS else None
                observer = PartitionObserver(self._metrics)
                self._lanes[partition] = Lane(
                    partition=partition,
                    stage=self._stages[partition[0]](observer),
                    position=start,
                    committed=offset,
                    end=end,
                    published=published,
                    metrics=self._metrics,
                    observer=observer,
                    hand=self._hand,
                    ledger=self._ledger,
                )
            self._metrics.show_assignment(committed, self._settings.stage.topics)
            self.show_firing()
            _log_assignment(self._settings, len(committed), {p: (self._lanes[p].position, new[p]) for p in new})
            return {partition: self._lanes[partition].position for partition in committed}

    def done(self, lane: Lane, record: Record, outgoing: list[Outgoing]) -> None:
        """Take note that the broker has all that came of a record."""
        lane.done(record, outgoing)
        if any(message.alert is not None for message in outgoing):
            self.show_firing()

    def blame(self, record: Record) -> None:
        """Say that this record is the end of the process."""
        self._hand.hold(record)

    def show_firing(self) -> None:
        """Bring the metric of open incidents up to date."""
        published = [lane.published for lane in list(self._lanes.values()) if lane.published is not None]
        self._metrics.show_firing(alert for one in published for alert in one.firing)

    def _starts(
        self, lookback: Lookback, new: Mapping[Partition, int], published: Mapping[int, Published]
    ) -> dict[Partition, tuple[int, int, int]]:
        """Return (where to begin, what is committed, the end) of each new partition."""
        bounds = {partition: lookback.bounds(partition) for partition in new}
        committed = {p: min(max(offset, bounds[p][0]), bounds[p][1]) for p, offset in new.items()}
        last = {p: offset - 1 for p, offset in committed.items() if offset > bounds[p][0]}
        warmup_ns = int(self._settings.warmup_s * 1e9)
        wanted = {}
        for partition, time_ns in lookback.times(last).items():
            incidents = published[partition[1]].incidents if partition[0] == ITERATIONS else []
            wanted[partition] = rewind_time_ns(time_ns, warmup_ns, incidents)
        found = lookback.offsets(wanted)
        starts = {}
        for partition, offset in committed.items():
            start = found.get(partition)
            # The committed record is not older than the time asked for: a broker that finds nothing does not know
            # times, and all that it has is read.
            starts[partition] = (
                bounds[partition][0] if start is None else min(start, offset),
                offset,
                bounds[partition][1],
            )
        return starts

    def _read_back(self, lookback: Lookback, published: Mapping[int, Published], fresh: Container[int]) -> None:
        """Read what the alerts topic has said of these partitions since they were read last."""
        partitions: dict[int, Partition] = {p: (ALERTS, p) for p in published}
        bounds = {p: lookback.bounds(partition) for p, partition in partitions.items()}
        last = {
            partition: bounds[p][1] - 1
            for p, partition in partitions.items()
            if p in fresh and bounds[p][0] < bounds[p][1]
        }
        # Older incidents than the iterations topic reaches back to cannot be rebuilt, whatever was said of them.
        horizons = {partition: time_ns - _READ_BACK_NS for partition, time_ns in lookback.times(last).items()}
        starts = lookback.offsets(horizons)
        ranges = {}
        for p, partition in partitions.items():
            low, high = bounds[p]
            start = starts.get(partition) if p in fresh else self._alerts_read.get(p)
            ranges[partition] = (low if start is None else max(low, start), high)
            self._alerts_read[p] = high
        for record in lookback.read(ranges):
            try:
                alert = decode_alert(record.value)
            except InvalidRecord:
                self._metrics.counted("alerts_unreadable", 1)
                continue
            published[record.partition].note(alert, record.time_ns)


def _log_assignment(settings: Settings, held: int, rewound: Mapping[Partition, tuple[int, int]]) -> None:
    again = sum(committed - start for start, committed in rewound.values() if committed > start)
    logger.info(
        "%s holds %d partitions of group %s, %d of them new; %d records are read again to rebuild their state",
        settings.stage,
        held,
        settings.consumer_group,
        len(rewound),
        again,
    )
