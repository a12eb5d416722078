"""Publishes to the broker and says when it has it: what iteration batches, alerts and dead letters leave through.

A broker that is away is waited for, without bound: nothing published is given up or goes to the dead letters for that.
Only what the broker itself refuses for good (a message too large, a topic that is gone) is an error.
"""

import logging
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas.topics import MAX_MESSAGE_BYTES, PARTITIONER

logger = logging.getLogger(__name__)

POLL_S = 0.1
CLOSE_S = 5.0


class PublishError(RuntimeError):
    """The broker has refused a message for good."""


class Publisher:
    """An idempotent producer whose acknowledgements are futures; a context manager.

    Messages with one key keep their order. Callbacks run in a thread of the publisher's own.
    """

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._is_away = False
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "partitioner": PARTITIONER,
                "compression.type": "zstd",
                "message.max.bytes": MAX_MESSAGE_BYTES,
                "message.timeout.ms": 0,  # for ever
                "linger.ms": 0,  # every message is waited for
                "reconnect.backoff.max.ms": 1000,
                "log_level": 0,
                "error_cb": self._note_error,
            }
        )
        self._is_closing = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="publisher", daemon=True)
        self._poller.start()

    def publish(self, topic: str, key: bytes | None, value: bytes) -> "Future[None]":
        """Hand one message over; the future is done once the broker has it, or fails with PublishError."""
        future: Future[None] = Future()

        def delivered(error: KafkaError | None, _: Message) -> None:
            if future.cancelled():
                return
            if error is None:
                self._note_delivery()
                future.set_result(None)
            else:
                future.set_exception(PublishError(f"{self._bootstrap} refused a message to {topic}: {error.str()}"))

        while True:
            try:
                self._producer.produce(topic, value=value, key=key, on_delivery=delivered)
            except BufferError:  # too much is waiting for an acknowledgement: so does the caller
                self._producer.poll(POLL_S)
            except KafkaException as error:
                raise PublishError(f"a message to {topic} was refused: {error.args[0].str()}") from error
            else:
                return future

    def close(self) -> None:
        """Wait a moment for what is on its way, and stop."""
        self._producer.flush(CLOSE_S)
        self._is_closing.set()
        self._poller.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _poll(self) -> None:
        while not self._is_closing.is_set():
            self._producer.poll(POLL_S)

    def _note_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN and not self._is_away:  # noqa: SLF001
            self._is_away = True
            logger.warning("broker %s does not answer; what is to be published waits for it", self._bootstrap)

    def _note_delivery(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.warning("broker %s is back", self._bootstrap)
