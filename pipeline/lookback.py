"""Looks back into topics without joining a group: where to begin again, and what has been published."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from pipeline.record import Record
from pipeline.topics import BrokerUnreachable

Partition = tuple[str, int]  # (topic, partition)

TIMEOUT_S = 30.0
_BATCH = 500
_POLL_S = 0.2


def to_record(message: Message) -> Record:
    """Return a client's message as a Record."""
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1] * 1_000_000,
        message.key() or b"",
        message.value() or b"",
    )


class Lookback:
    """Reads by offset and time; a context manager. Everything raises BrokerUnreachable where the broker is away."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "failslow-lookback",  # librdkafka insists on a name; nothing is joined or committed
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
                "log_level": 0,
            }
        )

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the oldest offset that is still held, and the one that the next record will have."""
        low, high = self._asked(self._consumer.get_watermark_offsets, TopicPartition(*partition), timeout=TIMEOUT_S)
        return int(low), int(high)

    def times(self, offsets: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return the record time, ns, of one existing offset of each partition."""
        wanted = {partition: (offset, offset + 1) for partition, offset in offsets.items()}
        return {(record.topic, record.partition): record.time_ns for record in self.read(wanted)}

    def offsets(self, times_ns: Mapping[Partition, int]) -> dict[Partition, int | None]:
        """Return the first offset of each partition whose record is not older than the time.

        None where there is no such record, or the broker (the embedded one) cannot look up times.
        """
        asked = [TopicPartition(*partition, max(0, ns // 1_000_000)) for partition, ns in times_ns.items()]
        if not asked:
            return {}
        answers = self._asked(self._consumer.offsets_for_times, asked, timeout=TIMEOUT_S)
        return {(a.topic, a.partition): a.offset if a.offset >= 0 else None for a in answers}

    def read(self, ranges: Mapping[Partition, tuple[int, int]]) -> Iterator[Record]:
        """Yield the records of each partition with start <= offset < end, in order within a partition."""
        pending = {partition: end for partition, (start, end) in ranges.items() if start < end}
        self._consumer.assign([TopicPartition(*partition, ranges[partition][0]) for partition in pending])
        silent_s = 0.0
        while pending:
            messages = self._consumer.consume(_BATCH, _POLL_S)
            silent_s = 0.0 if messages else silent_s + _POLL_S
            if silent_s > TIMEOUT_S:
                raise BrokerUnreachable(
                    f"{self._bootstrap} does not hand out {', '.join(f'{t}/{p}' for t, p in pending)}"
                )
            for message in messages:
                self._raise_fatal(message.error())
                partition = (message.topic(), message.partition())
                if message.error() or partition not in pending:
                    continue
                if message.offset() < pending[partition]:
                    yield to_record(message)
                if message.offset() >= pending[partition] - 1:
                    del pending[partition]
        self._consumer.unassign()

    def close(self) -> None:
        """Let go of the connection."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, ask: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            answer = ask(*arguments, **keywords)
        except KafkaException as error:
            raise BrokerUnreachable(f"{self._bootstrap} does not answer: {error.args[0].str()}") from error
        if answer is None:
            raise BrokerUnreachable(f"{self._bootstrap} does not answer within {TIMEOUT_S:g} s")
        return answer

    def _raise_fatal(self, error: KafkaError | None) -> None:
        if error is not None and error.fatal():
            raise BrokerUnreachable(f"{self._bootstrap}: {error.str()}")
