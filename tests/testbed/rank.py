"""One rank of the testbed's training job: `python -m tests.testbed.rank PLAN`, started by launch.py.

It calls NCCL and CUDA as a training framework does, in the order of a pipeline with tensor and data parallelism, and
writes down each call itself. RANK, LOCAL_RANK and WORLD_SIZE are taken from the environment, as torchrun sets them.
"""

import contextlib
import ctypes
import hashlib
import mmap
import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from tests.testbed import control
from tests.testbed.communicators import Communicators
from tests.testbed.control import Control
from tests.testbed.device import Device
from tests.testbed.truth import ITERATION, RankFacts, TruthWriter
from tests.testbed.workload import RankPlan

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_PR_SET_TIMERSLACK = 29
HOST_BLOCK = bytes(16384)


def enter_node(plan: RankPlan) -> None:
    """Move into the rank's own network namespace and host name, before there are threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    if plan.network_namespace:
        descriptor = os.open(plan.network_namespace, os.O_RDONLY)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {plan.network_namespace}")
        os.close(descriptor)
    if plan.hostname:
        if libc.unshare(_CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "cannot take a host name of its own")
        socket.sethostname(plan.hostname)


def host_work(loops: int) -> None:
    """Do a fixed amount of work on the processor."""
    for _ in range(loops):
        hashlib.sha256(HOST_BLOCK).digest()


class DataFile:
    """Training data, read past the page cache so that the disk's speed shows."""

    def __init__(self, path: str, bytes_per_iteration: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._size = os.fstat(self._descriptor).st_size
        self._buffer = mmap.mmap(-1, bytes_per_iteration)
        self._offset = 0

    def read(self) -> None:
        """Read what one iteration needs; the file begins again at its end."""
        if self._offset + len(self._buffer) > self._size:
            self._offset = 0
        read = os.preadv(self._descriptor, [self._buffer], self._offset)
        assert read == len(self._buffer), f"{read} bytes of {len(self._buffer)}"
        self._offset += read


class Rank:
    """The training loop of one process."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.rank = int(os.environ["RANK"])
        directory = Path(plan.directory)
        self.control = Control(directory / "control", plan.workload.world_size)
        self._facts_file = directory / f"rank{self.rank}.json"
        self.truth = TruthWriter(directory / f"rank{self.rank}.rows")
        self.communicators = Communicators(plan, self.rank)
        self.device = Device(plan, self.communicators, self.truth, int(os.environ["LOCAL_RANK"]))
        self._parent = os.getppid()
        data = plan.data_file
        self.data = DataFile(data, plan.workload.read_bytes) if data and plan.workload.read_bytes else None
        self.markers = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if plan.workload.marker_socket else None

    def write_facts(self, *, is_complete: bool) -> None:
        """Write what there is one of, whole or not at all."""
        facts = RankFacts(
            rank=self.rank,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            communicators=self.communicators.truths,
            launches=self.device.n_launches,
            is_complete=is_complete,
        )
        draft = self._facts_file.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(facts))
        draft.replace(self._facts_file)

    def train(self) -> None:
        """Run until the last iteration."""
        self.communicators.create()
        self.write_facts(is_complete=False)
        self.control.set_state(self.rank, control.TRAINING)
        iteration = 0
        while self.is_to_go_on(iteration):
            iteration += 1
            self.iterate(iteration)
        self.device.finish()
        self.communicators.destroy()
        self.truth.flush()
        self.write_facts(is_complete=True)
        self.control.set_state(self.rank, control.ENDED)

    def is_to_go_on(self, done: int) -> bool:
        """Whether there is another iteration after so many: the same answer on all ranks."""
        if os.getppid() != self._parent:
            raise RuntimeError("the test that started this rank is gone")
        workload = self.plan.workload
        if self.rank == 0 and not self.control.last:
            if self.control.is_asked_to_stop:
                # Between two synchronisations ranks may be that far apart.
                self.control.set_last(done + 2 * workload.sync_every + 1)
            elif workload.iterations and done == 0:
                self.control.set_last(workload.iterations)
        last = self.control.last or workload.iterations
        return not last or done < last

    def iterate(self, iteration: int) -> None:
        """Do one iteration and write it down."""
        start_ns = time.monotonic_ns()
        pause_s = self.control.pause_s(iteration)
        if pause_s:
            time.sleep(pause_s)
            self.mark(f"checkpoint {pause_s}s")
        if self.data:
            self.data.read()
        share = self.control.work(self.rank)
        host_work(round(self.plan.host_loops * share))
        self.device.iterate(iteration, share)
        end_ns = time.monotonic_ns()
        self.truth.add(ITERATION, 0, 0, 0, 0, 0, 0, 0, 0, start_ns, end_ns, iteration)
        self.mark(f"iteration {iteration}")
        self.control.set_done(self.rank, iteration)

    def mark(self, line: str) -> None:
        """Tell whoever listens, if someone does, and never wait for it."""
        if self.markers and self.plan.workload.marker_socket:
            with contextlib.suppress(OSError):
                self.markers.sendto(line.encode(), socket.MSG_DONTWAIT, self.plan.workload.marker_socket)


def main() -> None:
    """Run the rank whose plan the first argument names."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankPlan)
    enter_node(plan)
    rank = Rank(plan)
    signal.signal(signal.SIGTERM, lambda *_: rank.control.ask_to_stop())
    rank.train()


if __name__ == "__main__":
    main()
