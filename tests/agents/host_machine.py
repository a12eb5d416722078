"""Real processes for the tests of host signals, and what the kernel itself says about them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from agents.collector import Collector, ProcessKey, RankProcess
from agents.host_files import after_name
from schemas.events import HostSamples

DEADLINE_S = 30.0
BUSY = "while True: pass"
# Threads on order: one line of input makes it so many threads more, which sleep; an empty one ends them all.
THREADS = """
import sys, threading
stop = threading.Event()
print("ready", flush=True)
for line in sys.stdin:
    if line.strip():
        for _ in range(int(line)):
            threading.Thread(target=stop.wait).start()
    else:
        stop.set()
    print("done", flush=True)
"""


def cpu() -> int:
    """Return a CPU that tests may load."""
    return max(os.sched_getaffinity(0))


def rank_process(pid: int, rank: int = 0) -> RankProcess:
    """Take a process for a rank."""
    start_ticks = int(after_name(Path(f"/proc/{pid}/stat").read_text())[19])
    return RankProcess(
        key=ProcessKey(pid, start_ticks),
        job_id="job",
        incarnation="first",
        world_size=2,
        rank=rank,
        local_rank=rank,
        namespace_pid=pid,
        start_ns=0,
    )


@contextmanager
def running(
    text: str,
    *,
    arguments: tuple[str, ...] = (),
    on: int | None = None,
    prefix: tuple[str, ...] = (),
    group: Path | None = None,
    **options: Any,
) -> Iterator[subprocess.Popen[str]]:
    """Run a text of Python, on one CPU or in a control group if so wished, and end it."""
    if group is not None:
        # It joins before it does anything: pages that it had touched before would stay with the group it came from.
        prefix = ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *prefix)
    process = subprocess.Popen([*prefix, sys.executable, "-c", text, *arguments], text=True, **options)
    try:
        if on is not None:
            os.sched_setaffinity(process.pid, {on})
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def talking(text: str, *, waits: bool = True, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a text of Python that prints a line when it is ready, and then waits."""
    with running(text, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if waits:
            wait_for_state(process.pid, "S")
        yield process


def order(process: subprocess.Popen[str], line: str) -> None:
    """Say a line to a process and wait for its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until something is so. Raises TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.005)


def state(pid: int) -> str:
    """Return the letter of a process's state."""
    return after_name(Path(f"/proc/{pid}/stat").read_text())[0]


def wait_for_state(pid: int, letters: str) -> None:
    """Wait until a process is in one of these states. Raises TimeoutError."""
    wait_for(lambda: state(pid) in letters, f"process {pid} in state {letters}")


class Scheduled(NamedTuple):
    """What the scheduler has counted of a process's main thread."""

    run_s: float
    wait_s: float
    switches: float

    def since(self, before: "Scheduled") -> "Scheduled":
        """Return the difference."""
        return Scheduled(*(now - then for now, then in zip(self, before, strict=True)))


def scheduled(pid: int) -> Scheduled:
    """Ask the scheduler, which counts for itself."""
    run_ns, wait_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    switches = int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
    return Scheduled(int(run_ns) / 1e9, int(wait_ns) / 1e9, switches)


def read(collector: Collector, *ranks: RankProcess) -> HostSamples:
    """Read a collector of host samples."""
    return collector.collect(ranks).host_samples


def rows_until(
    collector: Collector, ranks: list[RankProcess], enough: Callable[[dict[str, float]], bool], pause_s: float = 0.2
) -> list[dict[str, float]]:
    """Read until the first rank's row is as wished; return all its rows. Raises TimeoutError with the last ones."""
    rows: list[dict[str, float]] = []

    def look() -> bool:
        time.sleep(pause_s)  # an interval to look at
        table = read(collector, *ranks)
        rows.extend({name: float(getattr(table, name)[0]) for name in table.__slots__} for _ in range(len(table) > 0))
        return bool(rows) and enough(rows[-1])

    try:
        wait_for(look, "")
    except TimeoutError:
        raise TimeoutError(f"never as wished: {rows[-3:]}") from None
    return rows


@contextmanager
def group(folder: Path, **settings: object) -> Iterator[Path]:
    """Make a control group, and remove it when its processes have ended."""
    folder.mkdir()
    try:
        for name, value in settings.items():
            (folder / name.replace("__", ".")).write_text(str(value))
        yield folder
    finally:
        wait_for(lambda: not (folder / "cgroup.procs").read_text(), f"processes in {folder}")
        folder.rmdir()
