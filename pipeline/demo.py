"""The demo's cast: a broker inside this process, and recorder, Faust worker and simulated agents as real processes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaException, TopicPartition

from pipeline.agent_process import ExpectedIncident, agent_command
from pipeline.broker import EmbeddedBroker
from pipeline.replay import Incident, incidents
from pipeline.settings import Settings
from pipeline.subscription import Subscription
from schemas.alerts import Alert
from schemas.codec import decode_alert
from schemas.topics import ALERTS, EVENTS, ITERATIONS, TOPICS

DRAIN_S_MAX = 45.0
END_S_MAX = 25.0
_ANSWER_S = 5.0


class DemoError(RuntimeError):
    """A process of the demo failed; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An alert, and when the broker had it."""

    alert: Alert
    time_ns: int


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
        self.epoch_ns = time.time_ns()
        simulate = ["--simulate", str(self.scenario), "--epoch", str(self.epoch_ns)]
        self._start("agents", agent_command("run", *simulate, *where))
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

    def _is_drained(self) -> bool:
        """Whether the worker has committed all events and all iterations: nothing is left to be judged."""
        consumer = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": Settings().consumer_group, "log_level": 0}
        )
        try:
            for spec in TOPICS:
                if spec.name not in (EVENTS, ITERATIONS):
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What was injected, beside what was said of it; `found` is None where nothing right was said."""

    expected: ExpectedIncident
    found: Incident | None
    delay_iterations: int | None
    delay_s: float | None  # from the first faulty iteration's begin to the broker having the alert

    @property
    def is_right(self) -> bool:
        """Whether the right component was flagged, and the incident has ended."""
        return self.found is not None and self.found.last.resolution is not None


def answers(
    expected: list[ExpectedIncident], arrivals: list[Arrival], epoch_ns: int
) -> tuple[list[Answer], list[Incident]]:
    """Return an answer for each injected fault, and the incidents above info that nobody injected.

    An incident answers one fault: of those that name its set of components, the one whose onset is the nearest.
    """
    found = incidents(arrival.alert for arrival in arrivals)
    time_ns_by_revision = {(a.alert.fingerprint, a.alert.revision): a.time_ns for a in reversed(arrivals)}
    pairs = sorted(
        (abs(incident.first.onset_iteration - fault.onset_iteration), number, place)
        for number, fault in enumerate(expected)
        for place, incident in enumerate(found)
        if incident.last.kind == fault.kind and frozenset(incident.last.component.candidates) == fault.candidates
    )
    place_by_fault: dict[int, int] = {}
    for _, number, place in pairs:
        if number not in place_by_fault and place not in place_by_fault.values():
            place_by_fault[number] = place
    given = []
    for number, fault in enumerate(expected):
        if number not in place_by_fault:
            given.append(Answer(fault, None, None, None))
            continue
        first = found[place_by_fault[number]].first
        arrived_ns = time_ns_by_revision[first.fingerprint, first.revision]
        delay_s = (arrived_ns - epoch_ns) / 1e9 - fault.onset_s
        delay_iterations = first.detected_iteration - fault.onset_iteration
        given.append(Answer(fault, found[place_by_fault[number]], delay_iterations, delay_s))
    left = [incident for place, incident in enumerate(found) if place not in place_by_fault.values()]
    return given, [incident for incident in left if incident.is_above_info]
