"""Real jobs of the testbed under real agents, a real broker and a real worker: what was said, against the truth.

with Observatory(bootstrap, nodes, folder) as observatory:
    seen = observatory.run(Workload(dp=4), lambda testbed: faults.cpu_quota(testbed, 2, share=0.1))
    assert seen.delay(seen.first) <= 10  # iterations that the ranks themselves counted
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from confluent_kafka import Consumer, TopicPartition

from pipeline import topics
from pipeline.settings import Settings
from schemas.alerts import Alert, AlertState, Resolution, Severity
from schemas.codec import decode_iterations
from schemas.events import Sensor
from schemas.table import IntArray
from schemas.topics import ALERTS, ITERATIONS
from tests.integration.live_tools import DEADLINE_S, REAL, Reader, Worker, alerts_of, dead_letters_of, wait_until
from tests.integration.node_agents import NodeAgents
from tests.testbed.launch import Testbed
from tests.testbed.workload import Workload

WARM_UP = 10
HEALTHY = 70  # iterations after the warm-up, before anything happens
DISTURBED = 35
AFTERWARDS = 35
# Every collective and transfer is timed, however small; the plug-in's own default leaves out those below 8 KiB.
INSPECTOR = {"NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES": "0", "NCCL_INSPECTOR_ENABLE_P2P": "1"}

_AUTOGROUP = Path("/proc/self/autogroup")

Disturbance = Callable[[Testbed], AbstractContextManager[object]]


def nothing(_: Testbed) -> AbstractContextManager[None]:
    """Disturb nobody."""
    return nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One job: when it was disturbed, by the clock of this machine, its iterations' ends, (n,), and its alerts."""

    job: str
    began_ns: int
    ended_ns: int
    ends_ns: IntArray
    alerts: list[Alert]
    sensors: Sensor

    @property
    def accusations(self) -> list[Alert]:
        """What was said of components, in the order of the topic."""
        return [alert for alert in self.alerts if alert.severity is not Severity.INFO]

    @property
    def first(self) -> Alert:
        """The first accusation."""
        firing = [alert for alert in self.accusations if alert.state is AlertState.FIRING]
        assert firing, f"nobody was accused: {self.told()}"
        return firing[0]

    @property
    def end(self) -> Alert:
        """How the first accusation's incident ended."""
        own = [alert for alert in self.alerts if alert.fingerprint == self.first.fingerprint]
        resolved = [alert for alert in own if alert.state is AlertState.RESOLVED]
        assert resolved, f"it was not resolved: {self.told()}"
        return resolved[0]

    def delay(self, alert: Alert) -> int:
        """Return how many iterations had ended between the beginning of the disturbance and an alert's making."""
        return self._count(self.began_ns, alert.as_of_time_ns)

    def late(self, alert: Alert) -> int:
        """Return how many iterations had ended between the end of the disturbance and an alert's making."""
        return self._count(self.ended_ns, alert.as_of_time_ns)

    def _count(self, since_ns: int, until_ns: int) -> int:
        # An iteration's end is known to the agents by its last call, which the rank's own end follows at once.
        slack_ns = 2_000_000
        return int(
            np.searchsorted(self.ends_ns, until_ns + slack_ns, "right") - np.searchsorted(self.ends_ns, since_ns)
        )

    def slowdown(self) -> float:
        """Return the mean iteration time while disturbed over the usual one before: some faults hit in bursts."""
        took = np.diff(self.ends_ns)
        before = took[WARM_UP : np.searchsorted(self.ends_ns, self.began_ns) - 1]
        during = took[np.searchsorted(self.ends_ns, self.began_ns) : np.searchsorted(self.ends_ns, self.ended_ns) - 1]
        return float(np.mean(during) / np.median(before))

    def told(self) -> str:
        """Return all alerts in short."""
        lines = [
            f"{a.state} {a.severity} {a.kind} {[(c.type.value, c.node, c.peer) for c in a.component.candidates]} "
            f"x{a.slowdown_ratio:.2f}, {self.delay(a)} after the beginning and {self.late(a)} after the end, "
            f"{a.resolution} {a.causes[:1]} {[(e.what, round(e.value, 4), e.reference) for e in a.evidence]}"
            for a in self.alerts
        ]
        return "\n".join([f"{self.job}: {self.slowdown():.2f} times as slow while disturbed", *lines])


class Observatory:
    """Agents and a worker on a broker, started on entry; each job gets a name of its own."""

    def __init__(self, bootstrap: str, nodes: Sequence[str], folder: Path) -> None:
        self.bootstrap = bootstrap
        self._nodes = frozenset(nodes)
        self._folder = folder
        self._numbers = itertools.count()
        self._stack = ExitStack()
        self._n_read = 0
        self._ended: dict[str, set[str]] = {}
        self._sensors: dict[str, Sensor] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_before_other_sessions())
            topics.declare(self.bootstrap)
            settings = Settings(bootstrap=self.bootstrap, member="the-only-one", commit_interval_s=0.2, metrics_port=0)
            self.worker = stack.enter_context(Worker(settings, self._folder, REAL))
            self.agents = stack.enter_context(NodeAgents(sorted(self._nodes), self.bootstrap, self._folder))
            self._alerts = stack.enter_context(alerts_of(self))
            self._dead = stack.enter_context(dead_letters_of(self))
            self._iterations = stack.enter_context(Reader(self.bootstrap, ITERATIONS))
            self._group = Consumer(
                {"bootstrap.servers": self.bootstrap, "group.id": self.worker.settings.consumer_group, "log_level": 0}
            )
            stack.callback(self._group.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def run(
        self, name: str, workload: Workload, disturb: Disturbance = nothing, *, prepare: Disturbance = nothing
    ) -> Seen:
        """Let a job train, disturb it, let it recover and end, and return what was said of it.

        What prepare does is there from the beginning to the end.
        """
        job = f"{name}-{next(self._numbers)}"
        offset_ns = time.time_ns() - time.monotonic_ns()
        testbed = Testbed(
            workload,
            gpus_per_node=1,
            job=job,
            environment=self.agents.environment,
            gpu_folder=self.agents.gpu_folder,
            inspector=INSPECTOR,
        )
        with _before_broker_and_worker(), testbed:
            testbed.wait_until(1)  # all threads are there
            with prepare(testbed):
                testbed.wait_until(WARM_UP + HEALTHY)
                with disturb(testbed):
                    began_ns = time.time_ns()
                    testbed.wait_until(testbed.iteration + DISTURBED)
                ended_ns = time.time_ns()
                testbed.wait_until(testbed.iteration + AFTERWARDS)
            testbed.stop()
            ends_ns = testbed.truth()[0].iterations["end_ns"].astype(np.int64) + offset_ns
        wait_until(lambda: self._ended_on(job) == self._nodes, f"the last batch of {job} on all nodes")
        self._wait_until_judged()
        assert self._dead.messages == []
        return Seen(job, began_ns, ended_ns, ends_ns, self._alerts.alerts(job), self._sensors[job])

    def _ended_on(self, job: str) -> set[str]:
        """Return the nodes whose last batch of a job has come out of the window stage."""
        messages = self._iterations.messages
        while self._n_read < len(messages):
            batch = decode_iterations(messages[self._n_read].value() or b"")
            self._n_read += 1
            self._sensors[batch.job_id] = self._sensors.get(batch.job_id, Sensor(0)) | batch.sensors
            if batch.is_last:
                self._ended.setdefault(batch.job_id, set()).add(batch.node)
        return self._ended.get(job, set())

    def _wait_until_judged(self) -> None:
        """Wait until the worker has committed all iterations: nothing is, before its alerts are with the broker."""
        ends = self._ends(ITERATIONS)

        def is_judged() -> bool:
            wanted = [TopicPartition(ITERATIONS, number) for number, end in ends.items() if end > 0]
            found = self._group.committed(wanted, timeout=DEADLINE_S)
            return all(one.offset >= ends[one.partition] for one in found)

        wait_until(is_judged, "the worker to judge all iterations")
        self._alerts.wait_for(sum(self._ends(ALERTS).values()), "alerts")

    def _ends(self, topic: str) -> dict[int, int]:
        """Return the number of messages by partition."""
        partitions = self._group.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions
        return {
            number: self._group.get_watermark_offsets(TopicPartition(topic, number), timeout=DEADLINE_S)[1]
            for number in partitions
        }


@contextmanager
def _before_broker_and_worker() -> Iterator[None]:
    """Let what this thread starts run before those, which in truth are on machines of their own."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


@contextmanager
def _before_other_sessions() -> Iterator[None]:
    """Have the machine for ourselves, where the kernel shares it out between sessions before it looks at niceness."""
    told = _AUTOGROUP.read_text().split() if _AUTOGROUP.exists() else []  # "/autogroup-71 nice 0", or nothing
    with suppress(OSError):  # a container may show it read-only
        if told:
            _AUTOGROUP.write_text("-20")
    try:
        yield
    finally:
        with suppress(OSError):
            if told:
                _AUTOGROUP.write_text(told[-1])


def is_recovered(alert: Alert) -> bool:
    """Whether an incident ended because its cause did."""
    return alert.state is AlertState.RESOLVED and alert.resolution is Resolution.RECOVERED
