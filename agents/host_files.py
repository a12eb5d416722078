"""What the files of /proc and of the control groups say about rank processes. No kernel program is needed for it."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents import cgroups
from agents.collector import Limit, ProcessKey
from agents.deltas import NAN, Deltas

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SOFTIRQ, _STEAL = 7, 8  # fields of a line of /proc/stat, from 0 for its name


@dataclass(frozen=True, slots=True)
class ProcessFiles:
    """Totals of one process, and the names of what it shares with others."""

    page_faults: float
    cpus: frozenset[int]  # that it may run on
    network: int  # its network namespace
    quotas: tuple[Path, ...]  # folders of the control groups whose CPU quota it is under
    pressure: Path


def after_name(stat: str) -> list[str]:
    """Return the fields of a stat file from the third one, the state, on: the second may contain anything."""
    return stat.rpartition(") ")[2].split(" ")


@dataclass(slots=True)
class Readings:
    """All totals of one moment; what several processes share is read once."""

    processes: dict[ProcessKey, ProcessFiles] = field(default_factory=dict)
    retransmits: dict[int, float] = field(default_factory=dict)  # by network namespace
    throttled_s: dict[Path, float] = field(default_factory=dict)
    stalled_s: dict[Path, float] = field(default_factory=dict)
    cpus: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds by CPU and _SOFTIRQ or _STEAL


@dataclass(slots=True)
class FilesReader:
    """Reads the files of some processes."""

    proc: Path
    hierarchies: dict[str, cgroups.Mount]
    _n_without_quota: int = 0

    def read(self, keys: Sequence[ProcessKey]) -> Readings:
        """Read what there is; a process that has ended is left out."""
        readings = Readings(cpus=_cpu_times((self.proc / "stat").read_text()))
        for key in keys:
            try:
                files = self._process(key.pid)
                if files.network not in readings.retransmits:
                    readings.retransmits[files.network] = _retransmits(self.proc / str(key.pid) / "net/snmp")
            except (OSError, ValueError, IndexError):
                continue
            readings.processes[key] = files
            for folder in files.quotas:
                if folder not in readings.throttled_s:
                    readings.throttled_s[folder] = cgroups.throttled_s(folder)
            if files.pressure not in readings.stalled_s:
                readings.stalled_s[files.pressure] = cgroups.stalled_s(files.pressure)
        self._n_without_quota = sum(not files.quotas for files in readings.processes.values())
        return readings

    def limits(self) -> Iterator[Limit]:
        """Yield what the files do not say."""
        if self._n_without_quota:
            yield Limit(
                f"CPU quotas of {self._n_without_quota} rank processes",
                "their control groups lie outside of those that the agent sees",
                "run the agent's container in the node's control group namespace, with /sys/fs/cgroup mounted",
            )
        system = self.proc / "pressure/memory"
        if cgroups.stalled_s(system) != cgroups.stalled_s(system):
            yield Limit("memory pressure", f"{system} cannot be read", "boot the kernel with psi=1")

    def _process(self, pid: int) -> ProcessFiles:
        folder = self.proc / str(pid)
        stat = after_name((folder / "stat").read_text())
        membership = (folder / "cgroup").read_text()
        quota = cgroups.group(membership, "cpu", self.hierarchies)
        unified = cgroups.group(membership, cgroups.UNIFIED, self.hierarchies)
        own = unified and unified.folder / "memory.pressure"
        return ProcessFiles(
            page_faults=float(int(stat[7]) + int(stat[9])),
            cpus=frozenset(os.sched_getaffinity(pid)),
            network=(folder / "ns/net").stat().st_ino,
            quotas=tuple(quota.and_above()) if quota else (),
            pressure=own if own and own.exists() else self.proc / "pressure/memory",
        )


@dataclass(slots=True)
class Growth:
    """By how much everything grew between the last two readings."""

    _page_faults: Deltas[ProcessKey] = field(default_factory=Deltas)
    _retransmits: Deltas[int] = field(default_factory=Deltas)
    _throttled_s: Deltas[Path] = field(default_factory=Deltas)
    _stalled_s: Deltas[Path] = field(default_factory=Deltas)
    _cpus: Deltas[tuple[int, int]] = field(default_factory=Deltas)

    def update(self, readings: Readings) -> "Grown":
        """Compare with the last reading."""
        page_faults = {key: files.page_faults for key, files in readings.processes.items()}
        return Grown(
            page_faults=self._page_faults.update(page_faults),
            retransmits=self._retransmits.update(readings.retransmits),
            throttled_s=self._throttled_s.update(readings.throttled_s),
            stalled_s=self._stalled_s.update(readings.stalled_s),
            cpus=self._cpus.update(readings.cpus),
        )


@dataclass(frozen=True, slots=True)
class Grown:
    """What Growth found; what is missing is not known."""

    page_faults: dict[ProcessKey, float]
    retransmits: dict[int, float]
    throttled_s: dict[Path, float]
    stalled_s: dict[Path, float]
    cpus: dict[tuple[int, int], float]

    def columns(self, key: ProcessKey, files: ProcessFiles, interval_s: float) -> dict[str, float]:
        """Return the columns of HostSamples that come from files."""
        return {
            "softirq_ratio": self._cpu_s(files.cpus, _SOFTIRQ) / interval_s,
            "steal_ratio": self._cpu_s(files.cpus, _STEAL) / interval_s,
            "memory_pressure_ratio": self.stalled_s.get(files.pressure, NAN) / interval_s,
            "tcp_retransmits": self.retransmits.get(files.network, NAN),
            # The tightest of the quotas that are in force; those around it hold up the same threads.
            "throttled_ratio": max(
                (self.throttled_s[folder] for folder in files.quotas if folder in self.throttled_s), default=NAN
            )
            / interval_s,
            "page_faults": self.page_faults.get(key, NAN),
        }

    def _cpu_s(self, cpus: Iterable[int], which: int) -> float:
        """Return the mean over CPUs."""
        values = [self.cpus[cpu, which] for cpu in cpus if (cpu, which) in self.cpus]
        return sum(values) / len(values) if values else NAN


def _cpu_times(stat: str) -> dict[tuple[int, int], float]:
    times = {}
    for line in stat.splitlines():
        if not line.startswith("cpu"):
            break  # lines of interrupts follow, which are long
        name, *_ = fields = line.split()
        if name != "cpu":
            for which in (_SOFTIRQ, _STEAL):
                times[int(name[3:]), which] = int(fields[which]) / _TICKS_PER_S
    return times


def _retransmits(snmp: Path) -> float:
    """Return the TCP segments that were sent again in a network namespace."""
    names, values = (line.split(" ") for line in snmp.read_text().splitlines() if line.startswith("Tcp:"))
    return float(values[names.index("RetransSegs")])
