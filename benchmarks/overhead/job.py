"""The job that is slowed down by being observed: two ranks, each with some 2,000 calls to NCCL a second."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from agents.collector import ProcessKey
from agents.ebpf.libraries import Library, identify
from agents.ebpf.records import Records
from agents.ebpf.symbols import read_image
from agents.ebpf.tracer import Tracer
from agents.host_files import after_name
from agents.host_programs import HostPrograms
from agents.host_tracer import HostTracer
from agents.overhead.measuring import SYNC
from agents.overhead.rates import call_hits, context_switches, switch_hits, switched
from schemas.table import AnyArray
from tests.testbed import libraries
from tests.testbed.launch import Testbed
from tests.testbed.truth import RankTruth
from tests.testbed.workload import Workload

CALLS_PER_S = 2_000.0
_NEAR = 1.15  # what is measured is converted to CALLS_PER_S, from not further away
_WARM_UP, _TIMED = 20, 100  # iterations
_STAND_IN = "stub-gpu"  # name of the threads that are the stub's GPU
_POLL_S = 0.05
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Counted:
    """What one rank of the observed job did, and how long its iterations took.

    Hits are converted to those of a job that does the same in iterations of such a length that CALLS_PER_S come out.
    """

    hits_per_s: dict[str, float]  # of its own threads, by the names of agents.overhead.measuring
    stand_in_hits_per_s: dict[str, float]  # of the threads that stand for its GPU
    calls_per_s: float
    iteration_ms: float


def own_libraries(folder: Path) -> Path:
    """Return copies of the stub libraries, which nobody else on this machine can be observing."""
    copies = folder / "libraries"
    shutil.copytree(libraries.build(), copies)
    return copies


def calibrated(copies: Path) -> Workload:
    """Return a workload of about CALLS_PER_S on this machine, as far as it goes."""
    workload = Workload(tp=2, dp=1, tp_calls=23, tp_bytes=1024, forward_ms=4.0, optimizer_ms=1.0)
    for _ in range(_TRIES):
        with Testbed(workload, library_folder=copies) as testbed:
            testbed.wait_until(_WARM_UP + _TIMED)
            testbed.stop()
            truth = testbed.truth()[0]
        n_calls, iteration_s = (
            len(truth.calls) / len(truth.iterations),
            float(np.mean(truth.iteration_ms(_WARM_UP))) / 1e3,
        )
        if CALLS_PER_S / _NEAR < n_calls / iteration_s < CALLS_PER_S * _NEAR:
            break
        # A rank computes two micro-batches forward and, taking twice as long, backward.
        forward_ms = workload.forward_ms + (n_calls / CALLS_PER_S - iteration_s) * 1e3 / 6
        workload = msgspec.structs.replace(workload, forward_ms=max(0.05, forward_ms))
    return workload


def libraries_in(copies: Path) -> list[Library]:
    """Return the copies as the agent knows libraries."""
    found = []
    for path in sorted(copies.iterdir()):
        identity = identify(str(path), read_image(str(path), ()).build_id)
        found.append(Library(str(path), identity, "nccl" if "nccl" in path.name else "cudart", name=str(path)))
    return found


def keys_of(testbed: Testbed) -> list[ProcessKey]:
    """Return the ranks' processes as the agent knows them."""
    stats = {pid: Path(f"/proc/{pid}/stat").read_text() for pid in testbed.pids}
    return [ProcessKey(pid, int(after_name(stat)[19])) for pid, stat in stats.items()]


class Observer:
    """All probes that are on by default, which can be switched on and off."""

    def __init__(self, libraries: Sequence[Library]) -> None:
        """Choose what is observed."""
        self.tracer, self._programs = Tracer(), HostPrograms()
        self._libraries = libraries

    @contextmanager
    def open(self) -> Iterator[None]:
        """Load everything; nothing is probed yet."""
        with ExitStack() as stack:
            self.tracer.open()
            stack.callback(self.tracer.close)
            self._programs.open()
            stack.callback(self._programs.close)
            self._host = HostTracer(self._programs)
            self._programs.detach()
            yield

    def switch_on(self) -> None:
        """Observe whoever calls, and every context switch."""
        for library in self._libraries:
            limits = self.tracer.attach(library)
            assert not limits, limits
        self._programs.attach()

    def follow(self, keys: Sequence[ProcessKey]) -> None:
        """Add up what the kernel does to these processes."""
        self._host.follow(keys)
        self._host.find_threads()

    def switch_off(self) -> None:
        """Do not observe."""
        self._host.follow([])
        self._programs.detach()
        for library in self._libraries:
            self.tracer.detach(library)

    def poll_for(self, seconds: float) -> None:
        """Let time pass, emptying the ring as an agent does."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self.tracer.poll()
            time.sleep(min(_POLL_S, left_s))


def count(observer: Observer, workload: Workload, copies: Path, seconds: float) -> list[Counted]:
    """Observe a job from before its first call to after its last; return what each rank did in the middle of it.

    What was recorded of a rank has to be what the rank says that it did, call for call.
    """
    observer.switch_on()
    with Testbed(workload, library_folder=copies) as testbed:
        testbed.wait_until_training()
        observer.follow(keys_of(testbed))
        testbed.wait_until(_WARM_UP)
        before = [context_switches(pid) for pid in testbed.pids]
        begin_ns = time.monotonic_ns()
        observer.poll_for(seconds)
        end_ns = time.monotonic_ns()
        after = [context_switches(pid) for pid in testbed.pids]
        testbed.stop()
        pids, truths = testbed.pids, testbed.truth()
    for pid in pids:
        observer.tracer.forget(pid)
    records = observer.tracer.take(flush_open=False)
    observer.switch_off()
    _compare(records, truths)
    lasted_s = (end_ns - begin_ns) / 1e9
    found = []
    for pid, truth, switches_before, switches_after in zip(pids, truths, before, after, strict=True):
        own = [rows[(rows["tgid"] == pid) & _began(rows, begin_ns, end_ns)] for rows in (records.runs, records.syncs)]
        n_calls, n_rows, n_syncs = int(own[0]["count"].sum()), len(own[0]), len(own[1])
        by_name = switched(switches_before, switches_after)
        stand_in = by_name.pop(_STAND_IN, 0)
        converted_s = n_calls / CALLS_PER_S
        hits = call_hits(n_calls, n_rows, converted_s) | {SYNC: n_syncs / converted_s}
        iterations = truth.iterations[_began(truth.iterations, begin_ns, end_ns)]
        found.append(
            Counted(
                hits_per_s=hits | switch_hits(sum(by_name.values()) / converted_s),
                stand_in_hits_per_s=switch_hits(stand_in / converted_s),
                calls_per_s=n_calls / lasted_s,
                iteration_ms=float(np.mean(iterations["end_ns"] - iterations["start_ns"])) / 1e6,
            )
        )
    return found


def _began(rows: AnyArray, begin_ns: int, end_ns: int) -> AnyArray:
    return np.asarray((rows["start_ns"] >= begin_ns) & (rows["start_ns"] < end_ns))


def _compare(records: Records, truths: Sequence[RankTruth]) -> None:
    assert not records.lost_calls, records.lost_calls
    assert not records.lost_other, records.lost_other
    for truth in truths:
        n_calls = int(records.runs["count"][records.runs["tgid"] == truth.pid].sum())
        n_syncs = int(np.count_nonzero(records.syncs["tgid"] == truth.pid))
        said = f"rank {truth.rank}: {n_calls} calls and {n_syncs} synchronisations were recorded"
        assert (n_calls, n_syncs) == (len(truth.calls), len(truth.syncs)), said
