"""Sends batches to the broker: in order, compressed, and without ever holding up whoever observes.

While the broker is away batches wait here, up to a bound; beyond it the oldest are dropped, and their events counted
into `lost_events` of their node's next batch. Readers see the gap in the batches' sequence numbers as well, so a loss
is never taken for health.
"""

import logging
from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaError, Message, Producer

from schemas.codec import decode_events, encode_events
from schemas.events import EventBatch
from schemas.topics import EVENTS, MAX_MESSAGE_BYTES, PARTITIONER, events_key

logger = logging.getLogger(__name__)

LINGER_MS = 5  # for batches of several nodes to share one request
CLOSE_S = 10.0
_IN_FLIGHT_MAX = 256  # batches with librdkafka, whose queue cannot drop its oldest


class Publisher:
    """An idempotent producer behind a bounded buffer; a context manager."""

    def __init__(self, bootstrap: str, *, buffer_bytes_max: int) -> None:
        self._n_delivered = 0
        self.n_dropped = 0  # for lack of room
        self.n_refused = 0  # by the broker, for good
        self._buffer_bytes_max = buffer_bytes_max
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._waiting_bytes = 0
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
        return len(self._waiting) + len(self._producer)

    def publish(self, batch: EventBatch) -> None:
        """Hand over one batch; returns at once."""
        key, value = events_key(batch.job_id, batch.node), encode_events(batch)
        self._waiting.append((key, value))
        self._waiting_bytes += len(value)
        while self._waiting_bytes > self._buffer_bytes_max:
            lost_key, dropped = self._waiting.popleft()
            self._waiting_bytes -= len(dropped)
            self._lost_events[lost_key] = self._lost_events.get(lost_key, 0) + _count_events(decode_events(dropped))
            if not self.n_dropped:
                logger.warning("the broker takes no batches and the buffer is full: the oldest are dropped")
            self.n_dropped += 1
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
        self._send()
        rounds = max(1, round((CLOSE_S if timeout_s is None else timeout_s) / 0.1))
        for _ in range(rounds):
            if not self._waiting and not len(self._producer):
                break
            self._producer.flush(0.1)
            self._send()
        return len(self._waiting) + len(self._producer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self) -> None:
        while self._waiting and len(self._producer) < _IN_FLIGHT_MAX:
            key, value = self._waiting[0]
            lost_events = self._lost_events.get(key, 0)
            sent = _with_lost_events(value, lost_events) if lost_events else value
            try:
                self._producer.produce(EVENTS, value=sent, key=key, on_delivery=self._note)
            except BufferError:
                return
            self._lost_events.pop(key, None)
            self._waiting.popleft()
            self._waiting_bytes -= len(value)

    def _note(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self._n_delivered += 1
            return
        if not self.n_refused:
            logger.error("the broker refused a batch for good: %s", error.str())
        self.n_refused += 1


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
