"""What the kernel programs cost at every context switch: of threads of no interest, and of rank processes.

Two processes on one CPU pass a byte to and fro, so that every byte is a switch and a wake-up. Short rounds without the
programs, with them, and with them following the two processes take turns; what is compared is the CPU time of the two,
which other processes on the machine disturb least. The kernel's own clock around each program is read in rounds of its
own, since it costs as much as it measures.

Usage: overhead_switches.py [ROUNDS], as root; a C compiler is needed.
"""

import ctypes
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agents.collector import ProcessKey
from agents.ebpf.bpf_call import bpf
from agents.host_files import after_name
from agents.host_programs import HostPrograms
from agents.host_tracer import HostTracer
from agents.kernel_types import BTF

ROUNDS = 60
SWITCHES = 4_000  # of one round
_BPF_ENABLE_STATS = 32

# Prints the CPU time of both processes, in nanoseconds for each switch, once for each byte that it reads.
PING_PONG = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static long cpu_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

int main(int n_arguments, char **arguments)
{
    long rounds = atol(arguments[n_arguments - 1]) / 2;
    int there[2], back[2];
    char byte = 0;
    if (pipe(there) || pipe(back))
        return 1;
    pid_t child = fork();
    if (!child) {
        close(there[1]);
        while (read(there[0], &byte, 1) == 1 && write(back[1], &byte, 1) == 1)
            ;
        _exit(0);
    }
    clockid_t its;
    clock_getcpuclockid(child, &its);
    printf("%d\\n", child);
    fflush(stdout);
    while (read(0, &byte, 1) == 1) {
        long before = cpu_ns(CLOCK_PROCESS_CPUTIME_ID) + cpu_ns(its);
        for (long i = 0; i < rounds; i++)
            if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
                return 1;
        printf("%.1f\\n", (cpu_ns(CLOCK_PROCESS_CPUTIME_ID) + cpu_ns(its) - before) / (2.0 * rounds));
        fflush(stdout);
    }
    return 0;
}
"""


class _Stats(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint32),)


class PingPong:
    """The two processes, on one CPU."""

    def __init__(self, folder: Path) -> None:
        """Build and start them."""
        source, program = folder / "ping_pong.c", folder / "ping_pong"
        source.write_text(PING_PONG)
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            sys.exit("no C compiler: `apt install gcc`")
        subprocess.run([compiler, "-O2", "-o", program, source], check=True)
        cpu = max(os.sched_getaffinity(0))
        self._process = subprocess.Popen(
            [program, str(SWITCHES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),  # noqa: PLW1509 - this program has one thread
        )
        pids = self._process.pid, int(self._line())
        self.keys = [ProcessKey(pid, int(after_name(Path(f"/proc/{pid}/stat").read_text())[19])) for pid in pids]

    def round_ns(self) -> float:
        """Return the CPU time of a switch in one round."""
        assert self._process.stdin is not None
        self._process.stdin.write("x")
        self._process.stdin.flush()
        return float(self._line())

    def end(self) -> None:
        """End both."""
        self._process.kill()  # the other one then reads the end of its pipe
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def kernel_clock() -> Iterator[None]:
    """Have the kernel time its programs."""
    fd = bpf(_BPF_ENABLE_STATS, _Stats())
    try:
        yield
    finally:
        os.close(fd)


def timed(before: dict[str, tuple[int, int]] | None = None) -> dict[str, tuple[int, int]]:
    """Return for each scheduler program of this process the nanoseconds and runs, since `before`."""
    found = {}
    for info in Path("/proc/self/fdinfo").iterdir():
        try:
            lines = dict(re.findall(r"^(\w+):\s+(\d+)$", info.read_text(), re.MULTILINE))
        except FileNotFoundError:
            continue  # of the listing itself
        if "run_time_ns" in lines:
            found[lines["prog_id"]] = int(lines["run_time_ns"]), int(lines["run_cnt"])
    if before is None:
        return found
    return {key: (ns - before[key][0], runs - before[key][1]) for key, (ns, runs) in found.items()}


def confidence(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval, from the order of the values."""
    ordered = sorted(values)
    spread = 0.98 * len(ordered) ** 0.5
    low, high = int(len(ordered) / 2 - spread), int(len(ordered) / 2 + spread)
    return statistics.median(ordered), ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


def measure(kind: str, programs: HostPrograms, pair: PingPong, n_rounds: int) -> None:
    """Print what one kind of programs costs."""
    programs.open()
    tracer = HostTracer(programs)
    programs.detach()
    untargeted, targeted, base = [], [], []
    try:
        for _ in range(n_rounds):
            first = pair.round_ns()
            programs.attach()
            others = pair.round_ns()
            tracer.follow(pair.keys)
            tracer.find_threads()
            its = pair.round_ns()
            tracer.follow([])
            programs.detach()
            last = pair.round_ns()
            base += [first, last]
            untargeted.append(others - (first + last) / 2)
            targeted.append(its - (first + last) / 2)
        print(f"{kind}: a switch and a wake-up without programs take {statistics.median(base):.0f} ns of CPU time")
        for who, values in (("of no interest", untargeted), ("followed", targeted)):
            print("  threads {}: {:+.0f} ns (95 %: {:+.0f} to {:+.0f})".format(who, *confidence(values)))
        programs.attach()
        for who, keys in (("of no interest", []), ("followed", pair.keys)):
            tracer.follow(keys)
            tracer.find_threads()
            with kernel_clock():
                before = timed()
                for _ in range(10):
                    pair.round_ns()
                runs = {key: value for key, value in timed(before).items() if value[1] >= 5 * SWITCHES}
            costs = " + ".join(f"{ns / n:.0f}" for ns, n in runs.values())
            print(f"  threads {who}: {costs} ns by the kernel's clock, which is in it itself")
    finally:
        programs.close()


def main() -> None:
    """Measure both kinds of programs."""
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        pair = PingPong(Path(folder))
        try:
            measure("typed tracepoints", HostPrograms(btf=BTF), pair, n_rounds)
            measure("trace records", HostPrograms(btf=Path("/nowhere")), pair, n_rounds)
        finally:
            pair.end()


if __name__ == "__main__":
    main()
