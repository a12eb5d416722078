"""How often ranks hit the probes: of the job that runs on this node now, or of one that is assumed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from agents.config import AgentConfig
from agents.ebpf.libraries import LibraryFinder
from agents.ebpf.records import Records
from agents.ebpf.tracer import Tracer
from agents.loop import POLL_S, SCAN_S
from agents.overhead.measuring import CALL_LIKE, CALL_UNLIKE, GROUP, LAUNCH, SWITCH, SWITCH_OTHER, SYNC
from agents.overhead.program_runs import counted_runs, runs_by_name
from agents.processes import Candidate, Processes
from agents.rank_variables import read_claim

CALLS_PER_S: Final = 2_000.0
SWITCHES_PER_S: Final = 500.0
# What the kernel calls enter_group_start and enter_group_end.
GROUP_PROGRAMS: Final = ("enter_group_sta", "enter_group_end")

Switches = Mapping[int, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Hits per second of one rank, by the names of measuring.py, of all its threads together."""

    title: str
    hits_per_s: Mapping[str, float]
    is_observed: bool


def assumed(calls_per_s: float = CALLS_PER_S, switches_per_s: float = SWITCHES_PER_S) -> Rates:
    """Return a busy rank, no call of which is like the one before.

    One call in ten has a group of its own, and 20 times a second it waits for its GPU.
    """
    hits = {CALL_UNLIKE: calls_per_s, GROUP: calls_per_s / 5, SYNC: 20.0}
    return Rates("an assumed rank", hits | switch_hits(switches_per_s), is_observed=False)


def call_hits(calls: int, rows: int, seconds: float) -> dict[str, float]:
    """Return what calls hit: a row is begun by a call unlike the one before it, and continued by calls like it."""
    return {CALL_LIKE: (calls - rows) / seconds, CALL_UNLIKE: rows / seconds}


def switch_hits(switches_per_s: float) -> dict[str, float]:
    """Return what a rank's switches hit: one from it to somebody else, and later one from somebody else to it."""
    return {SWITCH: switches_per_s, SWITCH_OTHER: switches_per_s}


def context_switches(pid: int) -> dict[int, tuple[str, int]]:
    """Return what the kernel has counted for each thread of a process: its name, and how often it left a CPU."""
    found = {}
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return {}  # it has ended
    for task in tasks:
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        counts = (int(fields[f"{kind}_ctxt_switches"]) for kind in ("voluntary", "nonvoluntary"))
        found[int(task.name)] = fields["Name"], sum(counts)
    return found


def switched(before: Switches, after: Switches) -> dict[str, int]:
    """Return how many switches came to pass in between, by the name of the thread."""
    grown: dict[str, int] = {}
    for tid, (name, n) in after.items():
        grown[name] = grown.get(name, 0) + n - before.get(tid, ("", 0))[1]
    return grown


def observe(config: AgentConfig, seconds: float, progress: Callable[[str], None] = lambda _: None) -> list[Rates]:
    """Look at this node's processes that call NCCL, as an agent does. Raises NotAvailable."""
    processes = Processes(config.identity.names, find=LibraryFinder().find)
    candidates = _users(processes)
    if not candidates:
        return []
    progress(f"looking at {len(candidates)} processes for {seconds:g} s")
    tracer = Tracer(count_launches=config.nccl.count_launches, ring_bytes=config.nccl.ring_bytes)
    tracer.open()
    try:
        for candidate in candidates:
            for library in candidate.libraries:
                tracer.attach(library)
        with counted_runs():
            return _observe(tracer, candidates, config, seconds)
    finally:
        tracer.close()


def _users(processes: Processes) -> list[Candidate]:
    """Return the processes with NCCL; a first scan looks at no more than some hundreds, so there is a second."""
    processes.scan(time.monotonic_ns())
    time.sleep(SCAN_S)
    return [candidate for candidate in processes.scan(time.monotonic_ns()) if candidate.maps_nccl]


def _observe(tracer: Tracer, candidates: Sequence[Candidate], config: AgentConfig, seconds: float) -> list[Rates]:
    pids = [candidate.key.pid for candidate in candidates]
    tracer.take(flush_open=False)  # what came while probes were attached one by one
    before, runs_before, begin_s = {pid: context_switches(pid) for pid in pids}, runs_by_name(), time.monotonic()
    while (left_s := begin_s + seconds - time.monotonic()) > 0:
        tracer.poll()
        time.sleep(min(POLL_S, left_s))
    records, runs, lasted_s = tracer.take(), runs_by_name() - runs_before, time.monotonic() - begin_s
    after = {pid: context_switches(pid) for pid in pids}
    callers = [candidate for candidate in candidates if (records.runs["tgid"] == candidate.key.pid).any()]
    groups_per_s = sum(runs[name] for name in GROUP_PROGRAMS) / lasted_s / max(1, len(callers))
    found = []
    for candidate in callers:
        pid = candidate.key.pid
        n_switches = sum(switched(before[pid], after[pid]).values())
        hits = _hits(records, pid, lasted_s) | {GROUP: groups_per_s} | switch_hits(n_switches / lasted_s)
        claim = read_claim(candidate.environment, config.identity.spellings)
        title = f"process {pid}" if claim.rank is None else f"rank {claim.rank} (process {pid})"
        found.append(Rates(title, hits, is_observed=True))
    return found


def _hits(records: Records, pid: int, seconds: float) -> dict[str, float]:
    rows = records.runs[records.runs["tgid"] == pid]
    n_syncs = int(np.count_nonzero(records.syncs["tgid"] == pid))
    launches = records.launches.get(pid, 0)
    hits = call_hits(int(rows["count"].sum()), len(rows), seconds) | {SYNC: n_syncs / seconds}
    return hits | ({LAUNCH: launches / seconds} if launches else {})
