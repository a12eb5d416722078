"""Sends batches to the broker: in order, compressed, and without ever holding up whoever observes.

While the broker is away batches wait, here and in librdkafka, up to a bound; beyond it the oldest are dropped that have
not been handed to librdkafka, and their events counted into `lost_events` of their node's next batch. Readers see the
gap in the batches' sequence numbers as well, so a loss is never taken for health.
"""

import logging
import time
from collections import deque
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas.codec import decode_events, encode_events
from schemas.events import EventBatch
from schemas.topics import EVENTS, MAX_MESSAGE_BYTES, PARTITIONER, events_key

logger = logging.getLogger(__name__)

LINGER_MS = 5  # for batches of several nodes to share one request
CLOSE_S = 10.0
_IN_FLIGHT_MAX = 256  # batches with librdkafka, whose queue cannot drop its oldest
_IN_FLIGHT_SHARE = 4  # of the buffer's bytes at most the fourth part is with librdkafka
_FLUSH_S = 0.1


class Publisher:
    """An idempotent producer behind a bounded buffer; a context manager.

    buffer_bytes_max: of all batches that have not been acknowledged, encoded; a single batch may exceed it.
    """

    def __init__(self, bootstrap: str, *, buffer_bytes_max: int) -> None:
        self._n_delivered = 0
        self.n_dropped = 0  # for lack of room, or since librdkafka does not take them
        self.n_refused = 0  # by the broker, for good
        self._buffer_bytes_max = buffer_bytes_max
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._waiting_bytes = 0  # those in flight included
        self._in_flight_bytes = 0
        self._n_in_flight = 0  # with librdkafka, whose own count includes what it has to say
        self._said: set[str] = set()
        self._lost_events: dict[bytes, int] = {}  # by key, of batches dropped before the one that comes next
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "partitioner": PARTITIONER,
                "compression.type": "zstd",
                "linger.ms": LINGER_MS,
                "message.max.bytes": MAX_MESSAGE_BYTES,
                "message.timeout.ms": 0,  # the buffer's bound decides what is given up, not the time
                "reconnect.backoff.max.ms": 1000,
                "log_level": 0,
            }
        )

    @property
    def n_delivered(self) -> int:
        """How many batches the broker has acknowledged."""
        return self._n_delivered

    @property
    def n_waiting(self) -> int:
        """How many batches have not been acknowledged yet."""
        return len(self._waiting) + self._n_in_flight

    @property
    def n_in_flight(self) -> int:
        """How many of these are with librdkafka."""
        return self._n_in_flight

    def publish(self, batch: EventBatch) -> None:
        """Hand over one batch; returns at once."""
        key, value = events_key(batch.job_id, batch.node), encode_events(batch)
        self._waiting.append((key, value))
        self._waiting_bytes += len(value)
        # What is alone is sent in any case: otherwise a node that has much to say would never say anything.
        while self._waiting_bytes > self._buffer_bytes_max and self._waiting and self.n_waiting > 1:
            self._say_once(
                logging.WARNING, "the broker takes no batches and the buffer is full: the oldest are dropped"
            )
            self._drop_oldest()
        self.poll(0)

    def poll(self, timeout_s: float) -> None:
        """Send what waits, and take in acknowledgements for up to timeout_s."""
        self._send()
        self._producer.poll(timeout_s)
        self._send()

    def close(self, timeout_s: float | None = None) -> int:
        """Send what waits, for up to timeout_s, or CLOSE_S, where the broker is away.

        Returns how many batches could not be sent.
        """
        deadline_s = time.monotonic() + (CLOSE_S if timeout_s is None else timeout_s)
        self._send()
        while self.n_waiting:
            self._producer.flush(_FLUSH_S)
            self._send()
            if time.monotonic() >= deadline_s:
                break
        return self.n_waiting

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self) -> None:
        while self._waiting and self._has_room(len(self._waiting[0][1])):
            key, value = self._waiting[0]
            lost_events = self._lost_events.get(key, 0)
            sent = _with_lost_events(value, lost_events) if lost_events else value
            try:
                self._producer.produce(EVENTS, value=sent, key=key, on_delivery=partial(self._note, len(value)))
            except BufferError:
                return
            except KafkaException as error:
                reason = error.args[0]
                if reason.code() == KafkaError._FATAL:  # noqa: SLF001 (the producer is of no use any more)
                    raise
                self._say_once(logging.ERROR, f"batches that cannot be sent are dropped: {reason.str()}")
                self._drop_oldest()
                continue
            self._lost_events.pop(key, None)
            self._waiting.popleft()
            self._in_flight_bytes += len(value)
            self._n_in_flight += 1

    def _has_room(self, n_bytes: int) -> bool:
        """Whether librdkafka may be given so much more; one batch at a time it may, however large."""
        if not self._in_flight_bytes:
            return True
        most = self._buffer_bytes_max // _IN_FLIGHT_SHARE
        return self._n_in_flight < _IN_FLIGHT_MAX and self._in_flight_bytes + n_bytes <= most

    def _drop_oldest(self) -> None:
        """Drop the oldest batch that is not in flight; its node's next batch says how much is missing."""
        key, value = self._waiting.popleft()
        self._waiting_bytes -= len(value)
        self._lost_events[key] = self._lost_events.get(key, 0) + _count_events(decode_events(value))
        self.n_dropped += 1

    def _note(self, n_bytes: int, error: KafkaError | None, _: Message) -> None:
        self._waiting_bytes -= n_bytes
        self._in_flight_bytes -= n_bytes
        self._n_in_flight -= 1
        if error is None:
            self._n_delivered += 1
            return
        self._say_once(logging.ERROR, f"the broker refused a batch for good: {error.str()}")
        self.n_refused += 1

    def _say_once(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.log(level, "%s", text)


def _count_events(batch: EventBatch) -> int:
    """Return how many events go with a batch that is dropped; a run of equal calls is as many as it stands for."""
    tables = (
        batch.spans,
        batch.syncs,
        batch.gpu_samples,
        batch.host_samples,
        batch.markers,
        batch.peer_samples,
        batch.port_samples,
    )
    return batch.lost_events + int(batch.calls.count.sum()) + sum(len(table) for table in tables)


def _with_lost_events(value: bytes, lost_events: int) -> bytes:
    batch = decode_events(value)
    return encode_events(replace(batch, lost_events=batch.lost_events + lost_events))
