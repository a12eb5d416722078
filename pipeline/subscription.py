"""Reads topics from a broker without joining a group: for recorders and people, who disturb no worker."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, TopicPartition

from pipeline.record import Record
from pipeline.topics import TopicsMissing, partition_counts

POLL_S = 0.2
ANSWER_S = 10.0  # that people wait for a broker's first answer
_BATCH = 500
# librdkafka reports these with an underscore, as they do not come from the broker; the last three pass by themselves.
_AT_END = KafkaError._PARTITION_EOF  # noqa: SLF001
_PASSING = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._RESOLVE}  # noqa: SLF001


class SubscriptionError(RuntimeError):
    """The broker lost what was asked for, or refuses it."""


class Subscription:
    """All partitions of some topics, from their beginning or from now on; a context manager.

    Raises TopicsMissing or BrokerUnreachable, with a remedy.
    """

    def __init__(self, bootstrap: str, topics: Sequence[str], *, from_beginning: bool) -> None:
        counts = partition_counts(bootstrap, timeout_s=ANSWER_S)
        missing = [topic for topic in topics if topic not in counts]
        if missing:
            raise TopicsMissing(
                f"{bootstrap} has no topic {', '.join(missing)}: run `failslow init --bootstrap {bootstrap}`"
            )
        self.bootstrap = bootstrap
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "failslow-reader",  # librdkafka insists on a name; nothing is joined or committed
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
                "log_level": 0,
            }
        )
        partitions = [(topic, partition) for topic in topics for partition in range(counts[topic])]
        start = OFFSET_BEGINNING if from_beginning else OFFSET_END
        self._behind = set(partitions)
        self._consumer.assign([TopicPartition(topic, partition, start) for topic, partition in partitions])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._consumer.close()

    @property
    def has_caught_up(self) -> bool:
        """Whether every partition has been read to where its end was when it was last looked at."""
        return not self._behind

    def poll(self) -> Iterator[Record]:
        """Yield what arrives within POLL_S, which may be nothing. Raises SubscriptionError."""
        for message in self._consumer.consume(_BATCH, POLL_S):
            error = message.error()
            if error is None:
                kind, time_ms = message.timestamp()
                self._behind.add((message.topic(), message.partition()))
                yield Record(
                    message.topic(),
                    message.partition(),
                    message.offset(),
                    0 if kind == TIMESTAMP_NOT_AVAILABLE else time_ms * 1_000_000,
                    message.key() or b"",
                    message.value() or b"",
                )
            elif error.code() == _AT_END:
                self._behind.discard((message.topic(), message.partition()))
            elif not error.retriable() and error.code() not in _PASSING:
                raise SubscriptionError(f"{self.bootstrap}: {error.str()}")
