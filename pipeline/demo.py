"""The demo's cast: a broker inside this process, and recorder, Faust worker and simulated agents as real processes."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaException, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from pipeline.agent_process import agent_command
from pipeline.broker import EmbeddedBroker
from pipeline.settings import Settings
from pipeline.subscription import Subscription
from pipeline.verdict import Arrival
from schemas.codec import decode_alert
from schemas.topics import ALERTS, EVENTS, ITERATIONS, TOPICS

DRAIN_S_MAX = 45.0
END_S_MAX = 25.0
START_S_MAX = 60.0
_ANSWER_S = 5.0
_LOOK_S = 0.1
_CONSUMED = (EVENTS, ITERATIONS)
_METRICS_AT = re.compile(r"http://[\d.]+:\d+/metrics")


class DemoError(RuntimeError):
    """A process of the demo failed; the message has its last words."""


@dataclass(slots=True)
class Demo:
    """Everything that runs; a context manager that leaves no process behind. `folder` takes logs and state."""

    scenario: Path
    recording: Path
    folder: Path
    epoch_ns: int = 0  # when the simulated job began
    arrivals: list[Arrival] = field(default_factory=list)
    _broker: EmbeddedBroker | None = None
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self._broker = self._stack.enter_context(EmbeddedBroker(TOPICS))
        pipeline = [sys.executable, "-m", "pipeline"]
        where = ["--bootstrap", self._broker.bootstrap]
        out = ["--out", str(self.recording), "--force", "--from-beginning"]
        self._start("recorder", [*pipeline, "record", *where, *out])
        worker = ["--driver", "faust", "--metrics-port", "0", "--state-dir", str(self.folder)]
        self._start("worker", [*pipeline, "run", *where, *worker])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()

    @property
    def bootstrap(self) -> str:
        """Where the embedded broker listens."""
        if self._broker is None:
            raise DemoError("the demo has not been started")
        return self._broker.bootstrap

    def start_job(self) -> None:
        """Start the simulated job, once the worker holds all partitions: its delays are those of a running pipeline.

        Raises DemoError.
        """
        deadline_s = time.monotonic() + START_S_MAX
        while not self._is_worker_ready():
            if time.monotonic() > deadline_s:
                raise DemoError(f"the worker was not ready after {START_S_MAX:.0f} s: {self._last_words('worker')}")
            self._refuse_end("worker")
            self._refuse_end("recorder")
            time.sleep(_LOOK_S)
        self.epoch_ns = time.time_ns()
        simulate = ["--simulate", str(self.scenario), "--epoch", str(self.epoch_ns)]
        self._start("agents", agent_command("run", *simulate, "--bootstrap", self.bootstrap))

    def follow(self) -> Iterator[Arrival | None]:
        """Yield alerts as they come, None several times a second, until the job has ended and all is judged.

        Raises DemoError.
        """
        seen: set[tuple[str, str, int]] = set()
        with Subscription(self.bootstrap, [ALERTS], from_beginning=True) as subscription:
            drained_since_s: float | None = None
            ended_s: float | None = None
            while drained_since_s is None or time.monotonic() - drained_since_s < 1.0:
                for record in subscription.poll():
                    alert = decode_alert(record.value)
                    key = (alert.job_id, alert.fingerprint, alert.revision)
                    if key not in seen:
                        seen.add(key)
                        self.arrivals.append(Arrival(alert, record.time_ns))
                        yield self.arrivals[-1]
                yield None
                for name in ("recorder", "worker"):
                    self._refuse_end(name)
                if not self._has_ended("agents"):
                    continue
                ended_s = ended_s or time.monotonic()
                if drained_since_s is None and self._is_drained():
                    drained_since_s = time.monotonic()
                if drained_since_s is None and time.monotonic() - ended_s > DRAIN_S_MAX:
                    raise DemoError(f"the worker had not judged all {DRAIN_S_MAX:.0f} s after the job's end")

    def end(self) -> None:
        """End worker and recorder in good order: the recording is complete then. Raises DemoError."""
        for name in ("worker", "recorder"):
            process = self._processes[name]
            process.terminate()
            try:
                status = process.wait(END_S_MAX)
            except subprocess.TimeoutExpired as error:
                raise DemoError(f"the {name} did not end; its log: {self._last_words(name)}") from error
            if status:
                raise DemoError(f"the {name} ended with {status}: {self._last_words(name)}")

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603 - our own programs, without a shell
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def _has_ended(self, name: str) -> bool:
        status = self._processes[name].poll()
        if status:
            raise DemoError(f"the {name} ended with {status}: {self._last_words(name)}")
        return status is not None

    def _refuse_end(self, name: str) -> None:
        if self._has_ended(name):
            raise DemoError(f"the {name} ended before the job did: {self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _is_worker_ready(self) -> bool:
        """Whether the worker's own metrics say that it holds every partition."""
        said = _METRICS_AT.search((self.folder / "worker.log").read_text(errors="replace"))
        if said is None:
            return False
        try:
            with urllib.request.urlopen(said.group(), timeout=_ANSWER_S) as answer:  # noqa: S310 - our own worker
                families = list(text_string_to_metric_families(answer.read().decode()))
        except OSError:
            return False
        held = {
            sample.labels["topic"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "failslow_partitions_assigned"
        }
        return all(held.get(spec.name) == spec.partitions for spec in TOPICS if spec.name in _CONSUMED)

    def _is_drained(self) -> bool:
        """Whether the worker has committed all events and all iterations: nothing is left to be judged."""
        consumer = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": Settings().consumer_group, "log_level": 0}
        )
        try:
            for spec in TOPICS:
                if spec.name not in _CONSUMED:
                    continue
                partitions = [TopicPartition(spec.name, partition) for partition in range(spec.partitions)]
                for found in consumer.committed(partitions, timeout=_ANSWER_S):
                    _, end = consumer.get_watermark_offsets(found, timeout=_ANSWER_S)
                    if end and found.offset < end:
                        return False
        except KafkaException:
            return False
        finally:
            consumer.close()
        return True
