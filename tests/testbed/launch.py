"""Real processes that train nothing: a job of rank processes on stub NCCL and CUDA, to observe and to slow down.

    from tests.testbed.launch import Testbed
    from tests.testbed.workload import Workload

    with Testbed(Workload(tp=2, dp=2)) as testbed:       # four ranks, each in its own network namespace
        testbed.wait_until(20)                            # all have finished iteration 20
        with faults.slow_gpu(testbed, rank=2, factor=1.5):
            testbed.wait_until(testbed.iteration + 10)
        testbed.stop()                                    # all end after the same iteration
        truths = testbed.truth()                          # one RankTruth per rank: what it really did

`testbed.pids[rank]` are the processes; `testbed.gpus[node]` is the state that stub CUDA and stub NVML share, in which
NVML is also told which process is on which GPU; it lies in `gpu_folder`, if given, for readers that are there before
the job. `testbed.inspector` is the folder of NCCL Inspector's files, which `inspector={...}` switches on (see
stub_nccl_inspector.c). Ranks are numbered over nodes of `gpus_per_node`; a node is a name, in the environment and as
host name, and a state file: all processes are on this machine. Leaving the block ends the processes and removes
namespaces and files, whatever happened. Needs root.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec

from tests.testbed import control, libraries
from tests.testbed.control import Control
from tests.testbed.network import Network
from tests.testbed.nvml_stub import StubState
from tests.testbed.rank import HOST_BLOCK
from tests.testbed.truth import RankTruth
from tests.testbed.workload import RankPlan, Workload

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 60.0
_READS_IN_FILE = 32
_LOOK_S = 0.005


def missing() -> str | None:
    """Return what keeps a testbed from running on this machine, and the remedy; None where nothing does."""
    if os.geteuid() != 0:
        return "the testbed makes network namespaces and control groups: run it as root"
    lacking = [program for program in ("cc", "ip", "tc") if shutil.which(program) is None]
    if lacking:
        return f"the testbed needs {', '.join(lacking)}: install Debian's gcc, libc6-dev and iproute2"
    return None


class RankFailed(RuntimeError):
    """A rank process ended by itself and not well; the message holds the end of what it said."""


class Testbed:
    """A job's processes, started on entry."""

    __test__ = False  # not a test, whatever pytest makes of the name

    def __init__(
        self,
        workload: Workload,
        *,
        gpus_per_node: int = 8,
        job: str = "testbed",
        environment: Mapping[str, str] | None = None,
        rank_environment: Mapping[int, Mapping[str, str]] | None = None,
        inspector: Mapping[str, str] | None = None,
        library_folder: Path | None = None,
        gpu_folder: Path | None = None,
        network: bool = True,
    ) -> None:
        self.workload = workload
        self.world_size = workload.world_size
        self.job = job
        self.gpus_per_node = min(gpus_per_node, self.world_size)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.gpus: list[StubState] = []
        self._library_folder = library_folder
        self._gpu_folder = gpu_folder
        self._environment = {**(environment or {}), **self._inspector_variables(inspector)}
        self._rank_environment = rank_environment or {}
        self._has_network = network
        self._stack = ExitStack()

    def _inspector_variables(self, inspector: Mapping[str, str] | None) -> dict[str, str]:
        if inspector is None:
            return {}
        every = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "100000"}
        return {**every, **inspector}

    # ---- starting and ending ----

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(tempfile.mkdtemp(prefix="failslow-testbed-"))
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self.inspector = self.directory / "inspector"
            self.network = stack.enter_context(Network(self.world_size)) if self._has_network else None
            self.control = Control(self.directory / "control", self.world_size, create=True)
            stack.callback(self.control.close)
            self.libraries = self._library_folder or libraries.build()
            self._prepare()
            stack.callback(self.kill)
            for rank in range(self.world_size):
                self.processes.append(self._start(rank))
                gpu = rank % self.gpus_per_node
                self.gpus[rank // self.gpus_per_node].put(gpu, pids=str(self.pids[rank]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _prepare(self) -> None:
        workload = self.workload
        n_nodes = -(-self.world_size // self.gpus_per_node)
        gpu_folder = self._gpu_folder or self.directory
        self.gpus = [StubState(gpu_folder / f"gpus{node}", self.gpus_per_node) for node in range(n_nodes)]
        data_file = self.directory / "data" if workload.read_bytes else None
        if data_file:
            piece = os.urandom(workload.read_bytes)
            with data_file.open("wb") as file:
                for _ in range(_READS_IN_FILE):
                    file.write(piece)
                os.fsync(file.fileno())
        host_loops = _loops(workload.host_ms) if workload.host_ms else 0
        for rank in range(self.world_size):
            plan = RankPlan(
                workload=workload,
                directory=str(self.directory),
                libraries=str(self.libraries),
                network_namespace=str(self.network.namespace_file(rank)) if self.network else None,
                hostname=self.node(rank),
                host_loops=host_loops,
                data_file=str(data_file) if data_file else None,
            )
            (self.directory / f"rank{rank}.plan").write_bytes(msgspec.json.encode(plan))

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.testbed.rank", str(self.directory / f"rank{rank}.plan")]
        log = self.directory / f"rank{rank}.log"
        with log.open("wb") as said:
            return subprocess.Popen(
                command, cwd=REPOSITORY, env=self.environment(rank), stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def environment(self, rank: int) -> dict[str, str]:
        """Return a rank's environment: torchrun's variables, the stubs', and what the test adds."""
        local_rank, node = rank % self.gpus_per_node, rank // self.gpus_per_node
        variables = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.gpus_per_node,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": len(self.gpus),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": 29500,
            "TORCHELASTIC_RUN_ID": self.job,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "STUB_NCCL_DIR": self.directory,
            "STUB_NCCL_ADDRESS": self.address(rank),
            "STUB_NCCL_NODE": self.node(rank),
            "STUB_GPU_COUNT": self.gpus_per_node,
            "NCCL_INSPECTOR_DUMP_DIR": self.inspector,
            **self.gpus[node].environment,
        }
        said = {name: str(value) for name, value in variables.items()}
        inherited = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME", "LANG", "TMPDIR"}}
        return {**inherited, **said, **self._environment, **self._rank_environment.get(rank, {})}

    def stop(self, patience_s: float = PATIENCE_S) -> None:
        """Let all ranks end after the same iteration, and wait for it. Raises RankFailed."""
        self.control.ask_to_stop()
        self.wait(patience_s)

    def wait(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all ranks have ended by themselves. Raises RankFailed."""
        until_s = time.monotonic() + patience_s
        while any(process.poll() is None for process in self.processes):
            self._check(until_s, "the ranks to end")
            time.sleep(_LOOK_S)
        self._check(until_s, "the ranks to end")

    def kill(self) -> None:
        """End what still runs, at once."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    # ---- looking ----

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self.processes]

    @property
    def iteration(self) -> int:
        """How many iterations all ranks have finished."""
        return min(self.control.done(rank) for rank in range(self.world_size))

    def node(self, rank: int) -> str:
        """Return the name of a rank's node."""
        return f"node{rank // self.gpus_per_node}"

    def address(self, rank: int) -> str:
        """Return a rank's address."""
        return self.network.address(rank) if self.network else "127.0.0.1"

    def wait_until_training(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all communicators are made. Raises RankFailed or TimeoutError."""
        until_s = time.monotonic() + patience_s
        while any(self.control.state(rank) == control.STARTING for rank in range(self.world_size)):
            self._check(until_s, "the ranks to begin training")
            time.sleep(_LOOK_S)

    def wait_until(self, iteration: int, patience_s: float = PATIENCE_S) -> None:
        """Wait until all ranks have finished an iteration. Raises RankFailed or TimeoutError."""
        until_s = time.monotonic() + patience_s
        while self.iteration < iteration:
            self._check(until_s, f"iteration {iteration}; {self.iteration} are done")
            time.sleep(_LOOK_S)

    def truth(self) -> list[RankTruth]:
        """Return what each rank did; complete after stop() or wait()."""
        return [RankTruth(self.directory, rank) for rank in range(self.world_size)]

    def _check(self, until_s: float, what: str) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll():
                said = (self.directory / f"rank{rank}.log").read_text(errors="replace")
                raise RankFailed(f"rank {rank} ended with {process.returncode}:\n{said[-4000:]}")
        if time.monotonic() > until_s:
            raise TimeoutError(f"waited in vain for {what}")


def _loops(milliseconds: float) -> int:
    """Return how many rounds of the host work take so long on a free core: the fastest of many counts."""
    rounds, fastest_s = 20, float("inf")
    for _ in range(50):
        start_s = time.perf_counter()
        for _ in range(rounds):
            hashlib.sha256(HOST_BLOCK).digest()
        fastest_s = min(fastest_s, (time.perf_counter() - start_s) / rounds)
    return max(1, round(milliseconds / 1e3 / fastest_s))
