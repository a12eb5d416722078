"""Real faults for a running testbed, as context managers: within the block the fault is there, after it, it is not.

    with faults.cpu_quota(testbed, rank=2, share=0.1):
        testbed.wait_until(testbed.iteration + 20)

Each says in its docstring what it does to which process, link, GPU or disk.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from tests.testbed import cgroup
from tests.testbed.launch import Testbed
from tests.testbed.network import run

THERMAL_SLOWDOWN = 0x40  # NVML's clocks event reason: hardware, too hot
SLOW_CLOCK_MHZ = 1095
_HOG = "while True: pass"

Direction = Literal["sends", "receives", "both"]


@contextmanager
def cpu_quota(testbed: Testbed, rank: int, *, share: float, period_ms: float = 20.0) -> Iterator[None]:
    """Let the host threads of a rank run for a share of each period only, by the scheduler's bandwidth control.

    The kernel accepts no quota below 1 ms.
    """
    period_us, quota_us = round(period_ms * 1e3), round(period_ms * 1e3 * share)
    with cpu_group(testbed, rank), cgroup.group("cpu", testbed.pids[rank]) as (folder, is_v2):
        limit = folder / ("cpu.max" if is_v2 else "cpu.cfs_quota_us")
        if not is_v2:
            (folder / "cpu.cfs_period_us").write_text(str(period_us))
        limit.write_text(f"{quota_us} {period_us}" if is_v2 else str(quota_us))
        try:
            yield
        finally:
            limit.write_text("max" if is_v2 else "-1")


@contextmanager
def cpu_group(testbed: Testbed, rank: int) -> Iterator[None]:
    """Give the host threads of a rank a control group of their own, as a container does; a quota may follow."""
    with cgroup.group("cpu", testbed.pids[rank]) as (folder, is_v2):
        # Where there is too little for all it gets as much as one thread of the same niceness, as before.
        share = 1.25 ** -os.getpriority(os.PRIO_PROCESS, testbed.pids[rank])
        (folder / ("cpu.weight" if is_v2 else "cpu.shares")).write_text(str(round((100 if is_v2 else 1024) * share)))
        yield


@contextmanager
def cpu_hog(testbed: Testbed, rank: int, *, processor: int = 0, hogs: int = 1, favour: int = 0) -> Iterator[None]:
    """Pin the host threads of a rank to one processor, with endless loops beside them.

    The other ranks are kept to the other processors, as on a node with a core for each. Needs two. favour: by how many
    levels the loops are less nice than the rank; each gives them 1.25 times as much of the processor.
    """
    others = os.sched_getaffinity(0) - {processor}
    if not others:
        raise RuntimeError("a hog beside one rank needs a second processor for the others")
    with ExitStack() as stack:
        for other in range(testbed.world_size):
            stack.enter_context(_pinned(testbed.pids[other], {processor} if other == rank else others))
        for _ in range(hogs):
            process = subprocess.Popen([sys.executable, "-c", _HOG])
            stack.callback(process.wait)
            stack.callback(process.kill)
            os.sched_setaffinity(process.pid, {processor})
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, testbed.pids[rank]) - favour)
        yield


@contextmanager
def _pinned(pid: int, processors: set[int]) -> Iterator[None]:
    """Keep the host threads of a rank to some processors."""
    before = {thread: os.sched_getaffinity(thread) for thread in cgroup.host_threads(pid)}
    for thread in before:
        os.sched_setaffinity(thread, processors)
    try:
        yield
    finally:
        for thread, processors_before in before.items():
            if Path(f"/proc/{thread}").exists():
                os.sched_setaffinity(thread, processors_before)


@contextmanager
def stopped_in_bursts(testbed: Testbed, rank: int, *, stopped_ms: float, running_ms: float) -> Iterator[None]:
    """Stop and continue a rank's process again and again, GPU threads included."""
    process, is_over = testbed.processes[rank], threading.Event()

    def stop_and_go() -> None:
        while not is_over.is_set():
            process.send_signal(signal.SIGSTOP)
            is_over.wait(stopped_ms / 1e3)
            process.send_signal(signal.SIGCONT)
            is_over.wait(running_ms / 1e3)

    thread = threading.Thread(target=stop_and_go, name="stop-and-go")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        process.send_signal(signal.SIGCONT)


@contextmanager
def slow_link(
    testbed: Testbed, rank: int, *, bits_per_s: float, burst_bytes: int = 16384, direction: Direction = "both"
) -> Iterator[None]:
    """Limit the rate of a rank's link by a token bucket: on its own interface for what it sends, on the bridge's port
    for what it receives. The queue is long enough to lose nothing at once: the sender is held up.
    """
    network = testbed.network
    if network is None:
        raise ValueError("this testbed has no network of its own: Testbed(network=True)")
    ends = [(network.namespace(rank), "eth0")] if direction != "receives" else []
    ends += [(network.switch, f"port{rank}")] if direction != "sends" else []
    bucket = ["rate", f"{round(bits_per_s)}bit", "burst", str(burst_bytes), "limit", "4mb"]
    with ExitStack() as stack:
        for namespace, interface in ends:
            run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *bucket)
            stack.callback(run, "tc", "-n", namespace, "qdisc", "del", "dev", interface, "root")
        yield


@contextmanager
def slow_gpu(testbed: Testbed, rank: int, *, factor: float, is_throttled: bool = False) -> Iterator[None]:
    """Let the kernels of a rank's GPU take `factor` times as long; NVML tells of it only if `is_throttled`."""
    gpu = rank % testbed.gpus_per_node
    state = testbed.gpus[rank // testbed.gpus_per_node]
    state.put(gpu, slowdown=str(factor))
    if is_throttled:
        state.put(gpu, reasons=THERMAL_SLOWDOWN, clock__sm=SLOW_CLOCK_MHZ, temperature=91)
    try:
        yield
    finally:
        state.remove(gpu, "slowdown", "reasons", "clock.sm", "temperature")


@contextmanager
def all_slow(testbed: Testbed, *, factor: float) -> Iterator[None]:
    """Let the kernels of all GPUs take `factor` times as long."""
    with ExitStack() as stack:
        for rank in range(testbed.world_size):
            stack.enter_context(slow_gpu(testbed, rank, factor=factor))
        yield


@contextmanager
def slow_disk(testbed: Testbed, rank: int, *, bytes_per_s: float) -> Iterator[None]:
    """Limit the rate at which a rank's host threads read from the disk that holds the training data.

    Only a rate below what the rank asks for holds it up: read_bytes times iterations in a second.
    """
    device = _disk_of(testbed.directory / "data")
    with cgroup.group("blkio", testbed.pids[rank]) as (folder, is_v2):
        limit = folder / ("io.max" if is_v2 else "blkio.throttle.read_bps_device")
        limit.write_text(f"{device} rbps={round(bytes_per_s)}" if is_v2 else f"{device} {round(bytes_per_s)}")
        try:
            yield
        finally:  # what waits in the group's queue goes on at once
            limit.write_text(f"{device} rbps=max" if is_v2 else f"{device} 0")


@contextmanager
def less_work(testbed: Testbed, ranks: Sequence[int], *, share: float) -> Iterator[None]:
    """Let some ranks compute a share of what the others do: not a fault, the others wait for nobody."""
    for rank in ranks:
        testbed.control.set_work(rank, share)
    try:
        yield
    finally:
        for rank in ranks:
            testbed.control.set_work(rank, 1.0)


def checkpoint(testbed: Testbed, *, duration_s: float) -> int:
    """Let all ranks stand still once, as for a checkpoint, before an iteration soon to come: its number."""
    iteration = max(testbed.control.done(rank) for rank in range(testbed.world_size)) + testbed.workload.sync_every + 2
    testbed.control.pause(iteration, duration_s)
    return iteration


def _disk_of(path: Path) -> str:
    """Return "major:minor" of the whole disk that holds a file."""
    number = os.stat(path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    device = Path("/sys/dev/block") / name
    if not device.exists():
        raise RuntimeError(f"{path} is on no disk (device {name}); set TMPDIR to a folder on one")
    return (device.resolve().parent / "dev").read_text().strip() if (device / "partition").exists() else name
