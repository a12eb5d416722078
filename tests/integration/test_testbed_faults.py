"""Real processes that are really slowed down: agents on a real kernel, a real broker and worker, and the right answer.

A node has one rank. What happened, and when, is known from the ranks themselves; see tests/testbed/faults.py for what
each fault does to them.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest

from agents.collector import NotAvailable
from agents.ebpf.tracer import Tracer
from schemas.alerts import ComponentName, ComponentType, Kind, Resolution
from tests.conftest import give_up
from tests.integration.apache_kafka import ApacheKafka
from tests.integration.observed_jobs import Disturbance, Observatory, Seen, nothing
from tests.testbed import faults, libraries, nvml_stub
from tests.testbed.launch import Testbed, missing
from tests.testbed.workload import Workload

pytestmark = [pytest.mark.broker, pytest.mark.kernel]

N_NODES = 4
CULPRIT = 2
LEAST_SLOWDOWN = 1.2  # of the job's iteration: a fault that does less to these jobs is drowned by a machine's noise
MOST_DELAY = 10
MOST_LATE = 25  # 10 good iterations are asked for; samples and a backlog may hide when they began

# Four ranks, four agents, broker and worker share two processors, and are in each other's way for a few milliseconds:
# GPUs work for so long in an iteration that this is little, and still it is a hundredth of what it is in truth.
ON_GPU = Workload(dp=4, forward_ms=6.0)
ON_HOST = Workload(dp=4, forward_ms=9.0, host_ms=3.0)
# More in one call than sockets take in at once, and each node in two groups, so that its link can be told from others.
ON_NETWORK = Workload(tp=2, dp=2, forward_ms=6.0, dp_bytes=524_288, dp_calls=2)
# More in one read than the kernel lets through at once under the limit.
ON_DISK = Workload(dp=4, forward_ms=6.0, read_bytes=262_144)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done to a job, and what has to be said of it. cause: what is supposed first."""

    name: str
    workload: Workload
    disturb: Disturbance
    kind: Kind
    culprit: ComponentName
    cause: str | None = None
    prepare: Disturbance = nothing


NODE = ComponentName(type=ComponentType.HOST, node=f"node{CULPRIT}")
GPU = ComponentName(type=ComponentType.GPU, node=f"node{CULPRIT}", gpu="GPU-00000000-0000-0000-0000-000000000000")
LINK = ComponentName(type=ComponentType.LINK, node=f"node{CULPRIT}")

FAULTS = [
    Fault(
        name="quota",
        workload=ON_HOST,
        prepare=lambda testbed: faults.cpu_group(testbed, CULPRIT),
        disturb=lambda testbed: faults.cpu_quota(testbed, CULPRIT, share=0.025, period_ms=40),
        kind=Kind.SLOW_HOST,
        culprit=NODE,
        cause="CPU quota of its container or control group",
    ),
    Fault(
        name="hog",
        workload=ON_HOST,
        disturb=lambda testbed: faults.cpu_hog(testbed, CULPRIT, hogs=4, favour=8),
        kind=Kind.SLOW_HOST,
        culprit=NODE,
        cause="CPU contention by another process",
    ),
    Fault(
        name="stops",
        workload=ON_GPU,
        disturb=lambda testbed: faults.stopped_in_bursts(testbed, CULPRIT, stopped_ms=40, running_ms=15),
        kind=Kind.SLOW_HOST,
        culprit=NODE,
        cause="a debugger, checkpointer or operator that stops the process",
    ),
    Fault(
        name="disk",
        workload=ON_DISK,
        disturb=lambda testbed: faults.slow_disk(testbed, CULPRIT, bytes_per_s=2e6),
        kind=Kind.SLOW_HOST,
        culprit=NODE,
        cause="slow storage or data loading",
    ),
    Fault(
        name="link",
        workload=ON_NETWORK,
        disturb=lambda testbed: faults.slow_link(testbed, CULPRIT, bits_per_s=300e6),
        kind=Kind.SLOW_LINK,
        culprit=LINK,
    ),
    Fault(
        name="gpu",
        workload=ON_GPU,
        disturb=lambda testbed: faults.slow_gpu(testbed, CULPRIT, factor=1.5),
        kind=Kind.SLOW_GPU,
        culprit=GPU,
        cause="degraded memory or PCIe link",  # for NVML shows its clock as usual
    ),
    Fault(
        name="hot-gpu",
        workload=ON_GPU,
        disturb=lambda testbed: faults.slow_gpu(testbed, CULPRIT, factor=1.5, is_throttled=True),
        kind=Kind.SLOW_GPU,
        culprit=GPU,
        cause="thermal throttling",
    ),
]


@pytest.fixture(scope="module")
def observatory(running_kafka: ApacheKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observatory]:
    """Agents of four nodes and a worker, shared by all jobs."""
    if reason := missing():
        give_up(reason)
    tracer = Tracer()
    try:
        nvml_stub.build()
        libraries.build()
        tracer.open()
    except (NotAvailable, nvml_stub.StubMissing, libraries.StubMissing) as error:
        give_up(str(error))
    finally:
        tracer.close()
    running_kafka.clear()
    nodes = [f"node{number}" for number in range(N_NODES)]
    with Observatory(running_kafka.bootstrap, nodes, tmp_path_factory.mktemp("observatory")) as made:
        yield made


def assert_nobody_is_accused(seen: Seen) -> None:
    accused = [alert for alert in seen.accusations if alert.component.type is not ComponentType.JOB]
    assert not accused, seen.told()


def upheld(check: Callable[[], None]) -> None:
    """Run a check on a job; where it fails, two of the next three have to succeed.

    Jobs, agents, broker and worker share two processors here with whatever else the machine does, and that slows a job
    as really as what we do to it.
    """
    failures: list[AssertionError] = []
    n_runs = 0
    while True:
        try:
            check()
        except AssertionError as error:
            logging.getLogger(__name__).warning("not as it should be: %s", error)
            failures.append(error)
        n_runs += 1
        if len(failures) > 2:
            raise failures[-1]
        if n_runs - len(failures) >= (2 if failures else 1):
            return


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_culprit_of_a_real_fault_is_named_first_and_resolved(observatory: Observatory, fault: Fault) -> None:
    upheld(lambda: check_fault(observatory, fault))


def check_fault(observatory: Observatory, fault: Fault) -> None:
    seen = observatory.run(fault.name, fault.workload, fault.disturb, prepare=fault.prepare)
    told = seen.told()
    assert seen.slowdown() >= LEAST_SLOWDOWN, told
    first = seen.first
    assert (first.kind, first.component.candidates) == (fault.kind, (fault.culprit,)), told
    assert 0 <= seen.delay(first) <= MOST_DELAY, told
    assert seen.end.resolution is Resolution.RECOVERED, told
    assert 0 <= seen.late(seen.end) <= MOST_LATE, told
    if fault.cause is not None:
        assert seen.end.causes[0] == fault.cause, told
    if fault.kind is Kind.SLOW_HOST:
        assert first.causes[0] == fault.cause, told


def test_when_all_ranks_are_slowed_alike_it_is_the_job(observatory: Observatory) -> None:
    upheld(lambda: check_job(observatory))


def check_job(observatory: Observatory) -> None:
    seen = observatory.run("all", ON_GPU, lambda testbed: faults.all_slow(testbed, factor=1.5))
    assert seen.slowdown() >= LEAST_SLOWDOWN, seen.told()
    assert_nobody_is_accused(seen)
    assert seen.first.kind is Kind.SLOW_JOB, seen.told()
    assert seen.delay(seen.first) >= 0, seen.told()
    assert seen.end.resolution is Resolution.RECOVERED, seen.told()


def test_a_checkpoint_is_nobody_s_fault(observatory: Observatory) -> None:
    @contextmanager
    def checkpoint(testbed: Testbed) -> Iterator[None]:
        faults.checkpoint(testbed, duration_s=1.0)
        yield

    upheld(lambda: assert_nobody_is_accused(observatory.run("checkpoint", ON_GPU, checkpoint)))


def test_a_rank_that_has_less_to_do_is_no_fault(observatory: Observatory) -> None:
    def disturb(testbed: Testbed) -> AbstractContextManager[None]:
        return faults.less_work(testbed, [CULPRIT], share=0.6)

    upheld(lambda: assert_nobody_is_accused(observatory.run("less", ON_GPU, disturb)))


@pytest.mark.parametrize(
    "workload", [ON_GPU, ON_HOST, ON_NETWORK, ON_DISK], ids=["on-gpu", "on-host", "on-network", "on-disk"]
)
def test_nobody_is_accused_in_a_healthy_job(observatory: Observatory, workload: Workload) -> None:
    upheld(lambda: assert_nobody_is_accused(observatory.run("healthy", workload, nothing)))
