"""What the operating system does to rank processes: from kernel programs where they work, and from /proc.

What the kernel counts by itself is read from files (page faults, quotas, pressure, retransmits, steal). Kernel programs
are there for what it does not count: for how long threads were off the CPUs and why, and what their requests to block
devices took. Without them the scheduler's own figures have to do, and less is known.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from agents import cgroups
from agents.clock import Clock
from agents.collector import Limit, NotAvailable, Observations, ProcessKey, RankProcess
from agents.host_files import FilesReader, Growth
from agents.host_programs import PROCESSES_MAX, THREADS_MAX, HostPrograms
from agents.host_scheduled import Scheduled
from agents.host_tracer import HostTracer, Sums
from schemas.events import HostSamples, Sensor

_LOOK_AGAIN = 16  # readings after which threads are looked for that the kernel programs did not see begin


class HostCollector:
    """Rows of HostSamples: one per rank process and reading, from the second reading of a process on."""

    name = "host"

    def __init__(self, *, clock: Clock, programs: HostPrograms | None, proc: Path = Path("/proc")) -> None:
        """Say where times come from, what kernel programs to use, if any, and where the files are."""
        self._clock = clock
        self._programs = programs
        self._proc = proc
        self._tracer: HostTracer | None = None
        self._without_programs: NotAvailable | None = None
        self._files: FilesReader | None = None
        self._growth = Growth()
        self._scheduled = Scheduled(proc)
        self._known: frozenset[ProcessKey] = frozenset()
        self._read_ns = 0
        self._n_readings = 0

    @property
    def sensors(self) -> Sensor:
        """What it observes."""
        return Sensor(0) if self._files is None else Sensor.HOST

    def open(self) -> None:
        """Begin. Raises NotAvailable where there is no /proc."""
        try:
            hierarchies = cgroups.mounts((self._proc / "self/mountinfo").read_text())
        except OSError as error:
            raise NotAvailable(f"{self._proc} cannot be read ({error.strerror})", "mount the node's /proc") from error
        self._files = FilesReader(self._proc, hierarchies)
        if self._programs is None:
            self._without_programs = NotAvailable("kernel programs are switched off", "switch them on")
            return
        try:
            self._programs.open()
        except NotAvailable as error:
            self._without_programs = error
        else:
            self._without_programs = None
            self._tracer = HostTracer(self._programs, self._proc)

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        """Return a row for each process that was there at the last reading too."""
        assert self._files is not None, "open() comes first"
        keys = [rank.key for rank in ranks]
        if self._tracer is not None:
            self._tracer.follow(keys)
            if not self._known.issuperset(keys) or self._n_readings % _LOOK_AGAIN == 0:
                self._tracer.find_threads()
        now_ns, sums = self._scheduled.read(keys) if self._tracer is None else self._tracer.read()
        interval_s = (now_ns - self._read_ns) / 1e9
        readings = self._files.read(keys)
        grown, files = self._growth.update(readings), readings.processes
        rows = [
            {"rank": place, **_columns(sums[key], interval_s), **grown.columns(key, files[key], interval_s)}
            for place, key in enumerate(keys)
            if key in self._known and key in files and key in sums
        ]
        self._known, self._read_ns, self._n_readings = frozenset(files), now_ns, self._n_readings + 1
        return Observations(host_samples=_table(rows, now_ns + self._clock.offset_ns))

    def limits(self) -> Sequence[Limit]:
        """Return what is not seen of rank processes."""
        return list(self._limits())

    def close(self) -> None:
        """Detach."""
        if self._programs is not None:
            self._programs.close()
        self._tracer = self._files = None
        self._known = frozenset()

    def _limits(self) -> Iterator[Limit]:
        if self._without_programs is not None:
            what = "blocked and stopped time, memory reclaim and block requests of rank processes"
            yield Limit(what, self._without_programs.reason, self._without_programs.remedy)
        if self._programs is not None:
            yield from self._programs.limits
        if self._tracer is not None and self._tracer.n_unfollowed:
            yield Limit(
                f"the threads of {self._tracer.n_unfollowed} rank processes",
                f"no more than {PROCESSES_MAX} processes are followed on one node",
                "none: let the agent know fewer ranks",
            )
        if self._tracer is not None and self._tracer.n_lost_threads:
            yield Limit(
                f"{self._tracer.n_lost_threads} threads of rank processes, at first",
                f"no more than {THREADS_MAX} threads are followed on one node",
                "none: they are found later, if others have ended",
            )
        if self._files is not None:
            yield from self._files.limits()


def _columns(sums: Sums, interval_s: float) -> dict[str, float]:
    return {
        "run_queue_ratio": sums.run_queue_s / interval_s,
        "off_cpu_ratio": sums.off_cpu_s / interval_s,
        "blocked_ratio": sums.blocked_s / interval_s,
        "stopped_ratio": sums.stopped_s / interval_s,
        "reclaim_ratio": sums.reclaim_s / interval_s,
        "context_switches": sums.switches,
        "block_io_s": sums.io_s / sums.io_requests if sums.io_requests > 0 else float("nan"),
    }


def _table(rows: Sequence[dict[str, float]], time_ns: int) -> HostSamples:
    if not rows:
        return HostSamples.empty()
    return HostSamples.build(len(rows), time_ns=time_ns, **{name: [row[name] for row in rows] for name in rows[0]})
