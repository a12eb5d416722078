"""What tests of the live pipeline share: a worker as a process, and a producer and a consumer that are not ours."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition

from pipeline.settings import Settings, to_argument
from schemas.alerts import Alert
from schemas.codec import decode_alert, encode_events
from schemas.events import EventBatch
from schemas.topics import ALERTS, DEAD_LETTERS, EVENTS, PARTITIONER, events_key

REPOSITORY = Path(__file__).resolve().parents[2]
FAKE = (sys.executable, "-m", "tests.integration.fake_stages")
REAL = (sys.executable, "-m", "pipeline.worker")
DEADLINE_S = 60.0
POLL_S = 0.05


class Broker(Protocol):
    """Embedded or Apache Kafka."""

    bootstrap: str


def wait_until(holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return as soon as the condition holds; fail, naming it, when it does not in time."""
    until_s = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > until_s:
            raise AssertionError(f"waited {deadline_s:g} s in vain for: {what}")
        time.sleep(POLL_S)


class Sender:
    """Sends events as an agent would, with a producer of the test's own."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, "partitioner": PARTITIONER, "log_level": 0})

    def send(self, batches: Iterable[EventBatch]) -> None:
        """Send and wait for the acknowledgement."""
        for one in batches:
            self.send_raw(EVENTS, events_key(one.job_id, one.node), encode_events(one))
        self.flush()

    def send_raw(self, topic: str, key: bytes, value: bytes) -> None:
        """Send any bytes; flush() waits."""
        self._producer.produce(topic, value, key)

    def flush(self) -> None:
        """Wait for all acknowledgements."""
        assert self._producer.flush(DEADLINE_S) == 0


class Reader:
    """Everything on one topic, from its beginning, read by a thread with a consumer of the test's own."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.messages: list[Message] = []
        self.arrived_s: list[float] = []
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "test-reader",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 50,
                "log_level": 0,
            }
        )
        partitions = self._consumer.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions
        self._consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"reader of {topic}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._is_closing.is_set():
            for message in self._consumer.consume(100, POLL_S):
                if message.error() is None:
                    self.messages.append(message)
                    self.arrived_s.append(time.monotonic())

    def alerts(self, job_id: str | None = None) -> list[Alert]:
        """The alerts read so far, of one job or of all."""
        alerts = [decode_alert(message.value() or b"") for message in list(self.messages)]
        return [alert for alert in alerts if job_id in {None, alert.job_id}]

    def wait_for(self, count: int, what: str = "messages") -> None:
        """Return when so many messages have been read."""
        wait_until(lambda: len(self.messages) >= count, f"{count} {what}")

    def close(self) -> None:
        """Stop reading."""
        self._is_closing.set()
        self._thread.join()
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def alerts_of(broker: Broker) -> Reader:
    """A reader of the alerts topic."""
    return Reader(broker.bootstrap, ALERTS)


def dead_letters_of(broker: Broker) -> Reader:
    """A reader of the dead letters."""
    return Reader(broker.bootstrap, DEAD_LETTERS)


class Worker:
    """A worker process that is ended by its pid; its log is shown where a test fails."""

    def __init__(
        self, settings: Settings, folder: Path, command: Sequence[str] = FAKE, *, stop_before: int | None = None
    ) -> None:
        """Start it; `stop_before` has FakeJudge stop when it has made the alert of that batch."""
        self.settings = msgspec.structs.replace(
            settings, state_dir=str(folder / "state"), consumer_group=f"failslow-{folder.name}"
        )
        self.log = folder / "worker.log"
        self.barriers = folder
        self._command = command
        self.process: subprocess.Popen[bytes] | None = None
        if stop_before is not None:
            (self.barriers / f"wait-{stop_before}").touch()
        self.start()

    def start(self) -> None:
        """Start it, or start it anew."""
        assert self.process is None or self.process.poll() is not None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, to_argument(self.settings)],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"BARRIER": str(self.barriers)},
            )

    def wait_for_stop(self, seq: int) -> None:
        """Return when it has stopped there."""
        wait_until((self.barriers / f"reached-{seq}").exists, f"the alert of batch {seq}")

    def go_on(self, seq: int) -> None:
        """Let it go on."""
        (self.barriers / f"wait-{seq}").unlink()

    def kill(self) -> None:
        """End it as SIGKILL does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Tell it to end, and return its status."""
        assert self.process is not None
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait for it to end by itself, and return its status."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def lines(self) -> list[str]:
        """What it has logged so far."""
        return self.log.read_text().splitlines()

    def wait_for_line(self, text: str, count: int = 1) -> None:
        """Return when it has logged so many lines with this text."""
        wait_until(lambda: sum(text in line for line in self.lines()) >= count, f"{text!r} in the worker's log")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if error is not None:
            print(self.log.read_text()[-6000:])  # noqa: T201 - pytest shows it with the failure
