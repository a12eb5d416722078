"""The stages under a plain confluent-kafka loop: what the Faust driver is compared with, and a fallback."""

import logging
import signal
import time
from concurrent.futures import Future
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from pipeline.lookback import Partition, to_record
from pipeline.merging import Merge
from pipeline.record import Record
from pipeline.settings import Settings
from pipeline.wiring import Parts, Stages, parts
from schemas.topics import EVENTS

logger = logging.getLogger(__name__)

POLL_S = 0.1
_BATCH = 100
_FOR_GOOD = {KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID}  # noqa: SLF001 - the client's own, not the broker's


def run(settings: Settings, stages: Stages | None = None) -> None:
    """Run one worker until it is told to end (SIGTERM, SIGINT).

    Raises TopicsMissing, BrokerUnreachable or InvalidSettings at the start. Later, whatever is no InvalidRecord ends
    the process at once and without a commit.
    """
    with parts(settings, stages) as made:
        _Loop(settings, made).run()


class _Ended(Exception):
    """It was told to end while the broker was away: what is on its way does not count as done."""


class _Loop:
    def __init__(self, settings: Settings, made: Parts) -> None:
        self._settings = settings
        self._parts = made
        self._is_ending = False
        self._fatal: KafkaError | None = None
        self._merge = Merge()
        self._next_commit_s = 0.0
        self._last_committed: dict[Partition, int] = {}
        self._consumer = Consumer(
            {
                "bootstrap.servers": settings.bootstrap,
                "group.id": settings.consumer_group,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "roundrobin",  # as Faust's, so that both can be of one group
                "session.timeout.ms": int(settings.session_timeout_s * 1000),
                "heartbeat.interval.ms": int(settings.session_timeout_s * 1000 / 4),
                "fetch.wait.max.ms": settings.fetch_wait_ms,
                "log_level": 0,
                "error_cb": self._note_error,
                **({"group.instance.id": settings.member} if settings.member else {}),
            }
        )

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        record: Record | None = None
        try:
            self._consumer.subscribe(list(self._settings.stage.topics), on_assign=self._assign, on_revoke=self._revoke)
            while not self._is_ending:
                for message in self._consumer.consume(_BATCH, POLL_S):
                    if message.error() is not None:
                        self._note_error(message.error())
                    else:
                        record = to_record(message)
                        if record.topic == EVENTS:
                            self._merge.add(record, time.monotonic())
                        else:  # a job's iterations are all in one partition; its events are in many
                            self._handle(record)
                        record = None
                self._refuse_fatal()
                while (record := self._next()) is not None:
                    self._handle(record)
                    self._commit_when_due()
                self._commit_when_due()
            self._commit()
            self._consumer.close()
        except _Ended:
            logger.warning("ended while the broker was away")
        except BaseException as error:  # noqa: BLE001 - caught any further out, closing the consumer would commit
            self._parts.end_at_once(record, error)

    def _next(self) -> Record | None:
        if self._is_ending:
            return None
        assigned = [
            partition for topic in self._settings.stage.topics for partition in self._parts.lanes.assigned(topic)
        ]
        return self._merge.pop(assigned, self._is_behind, time.monotonic())

    def _is_behind(self, partition: Partition, offset: int) -> bool:
        return self._parts.lanes.is_behind(partition, offset, self._highwater(partition))

    def _handle(self, record: Record) -> None:
        lane = self._parts.lanes.get((record.topic, record.partition))
        if lane is None:
            return  # it was fetched before the partition went to another worker
        outgoing = lane.handle(record)
        for published in [self._parts.publisher.publish(m.topic, m.key, m.value) for m in outgoing]:
            self._wait_for(published)
        self._parts.lanes.done(lane, record, outgoing)

    def _wait_for(self, published: "Future[None]") -> None:
        while True:
            try:
                return published.result(POLL_S)
            except TimeoutError:
                if self._is_ending:
                    raise _Ended from None

    def _assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        known = consumer.committed(partitions, timeout=self._settings.session_timeout_s)
        committed: dict[Partition, int | None] = {(p.topic, p.partition): max(p.offset, 0) for p in known}
        self._merge.clear()
        starts = self._parts.lanes.assign(committed)
        self._last_committed = {}
        consumer.assign([TopicPartition(*partition, start) for partition, start in starts.items()])

    def _revoke(self, *_: Any) -> None:
        self._commit()

    def _commit_when_due(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_commit_s:
            self._next_commit_s = now_s + self._settings.commit_interval_s
            self._commit()
            self._parts.metrics.show_lags(self._parts.lanes.positions, self._highwater)

    def _commit(self) -> None:
        positions = self._parts.lanes.positions
        if positions == self._last_committed:
            return
        try:
            self._consumer.commit(
                offsets=[TopicPartition(*partition, offset) for partition, offset in positions.items()],
                asynchronous=False,
            )
            self._last_committed = positions
        except KafkaException as error:  # the broker is away or the group is being rebuilt: less counts as done
            self._note_error(error.args[0])
            logger.debug("offsets were not committed: %s", error)

    def _highwater(self, partition: Partition) -> int | None:
        bounds = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
        return None if bounds is None else int(bounds[1])

    def _note_error(self, error: KafkaError) -> None:
        """Take note of what the client will not recover from.

        What a heartbeat was told comes as a message and as the answer to every later commit, both times with a code
        that says so and with fatal() False.
        """
        if error.fatal() or error.code() in _FOR_GOOD:
            self._fatal = error

    def _refuse_fatal(self) -> None:
        """Raise what the client will not recover from, such as another worker of the same member name."""
        if self._fatal is not None:
            raise KafkaException(self._fatal)

    def _end(self, *_: Any) -> None:
        self._is_ending = True
