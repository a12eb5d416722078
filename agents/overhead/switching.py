"""What the kernel programs add to context switches, of threads of no interest and of rank processes.

Two processes on one CPU pass a byte to and fro: each byte is a switch and a wake-up. Rounds without the programs, with
them, and with them following the two processes take turns; what is compared is the CPU time of both processes.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from agents.collector import NotAvailable, ProcessKey
from agents.host_files import after_name
from agents.host_programs import HostPrograms
from agents.host_tracer import HostTracer
from agents.overhead.specimen import Specimen

BYTES: Final = 1_000  # of one round; each is two switches
_CHILD: Final = Path(__file__).with_name("switching_child.py")
_PROCESS_CPU_TIME: Final = 2  # CPUCLOCK_SCHED


class Pair:
    """The two processes."""

    def __init__(self, specimen: Specimen, cpu: int) -> None:
        """Start them. Raises NotAvailable."""
        code = specimen.code
        there, back = os.pipe(), os.pipe()
        try:
            self._children = [
                _start(
                    specimen.plain_fd, cpu, (code.write, there[1], code.read, back[0]), pass_fds=(there[1], back[0])
                ),
                _start(
                    specimen.plain_fd, cpu, (code.read, there[0], code.write, back[1]), pass_fds=(there[0], back[1])
                ),
            ]
        finally:
            for fd in (*there, *back):
                os.close(fd)
        if any(child.stdout is None or child.stdout.readline() != b"ready\n" for child in self._children):
            self.close()
            raise NotAvailable("the processes that switch contexts did not start", "see what they say on stderr")
        pids = [child.pid for child in self._children]
        self.keys = [ProcessKey(pid, int(after_name(Path(f"/proc/{pid}/stat").read_text())[19])) for pid in pids]

    def round_ns(self) -> float:
        """Return the CPU time of one switch and wake-up."""
        before_ns = self._cpu_ns()
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(b"%d\n" % BYTES)
            child.stdin.flush()
        for child in self._children:
            assert child.stdout is not None
            if child.stdout.readline() != b"0\n":
                raise NotAvailable("a process that switches contexts has ended", "measure again")
        return (self._cpu_ns() - before_ns) / (2 * BYTES)

    def close(self) -> None:
        """End them."""
        for child in self._children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _cpu_ns(self) -> int:
        return sum(time.clock_gettime_ns(~child.pid << 3 | _PROCESS_CPU_TIME) for child in self._children)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def switch_costs_ns(pair: Pair, programs: HostPrograms, n_rounds: int) -> tuple[list[float], list[float]]:
    """Return what loaded programs add to a switch of threads of no interest, and of rank processes, by round.

    The programs are detached before and afterwards.
    """
    tracer = HostTracer(programs)
    others, ranks = [], []
    for _ in range(n_rounds):
        before = pair.round_ns()
        programs.attach()
        try:
            of_others = pair.round_ns()
            tracer.follow(pair.keys)
            tracer.find_threads()
            of_ranks = pair.round_ns()
        finally:
            tracer.follow([])
            programs.detach()
        without = (before + pair.round_ns()) / 2
        others.append(of_others - without)
        ranks.append(of_ranks - without)
    return others, ranks


def _start(
    library_fd: int, cpu: int, arguments: Sequence[int], *, pass_fds: Sequence[int]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(  # noqa: S603 (our own file)
        [sys.executable, "-I", "-S", str(_CHILD), *(str(each) for each in (library_fd, cpu, *arguments))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(library_fd, *pass_fds),
    )
