"""What the scheduler counts by itself for each thread: less than kernel programs see, but it needs none."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents.collector import ProcessKey
from agents.deltas import NAN, Deltas
from agents.host_tracer import Sums

_RUN, _WAIT, _SLICES = "run", "wait", "slices"


@dataclass(slots=True)
class Scheduled:
    """Reads /proc/PID/task/TID/schedstat."""

    proc: Path
    _deltas: Deltas[tuple[ProcessKey, int, str]] = field(default_factory=Deltas)
    _owed_s: dict[ProcessKey, float] = field(default_factory=dict)  # that was told as sleep and was none
    _read_ns: int = 0

    def read(self, keys: Sequence[ProcessKey]) -> tuple[int, dict[ProcessKey, Sums]]:
        """Return the monotonic time, and what happened since the last reading to the threads that were there at both.

        Time off the CPUs is what is left when the time on them and the time in their queues are taken away.
        """
        now = time.monotonic_ns()
        interval_s, self._read_ns = (now - self._read_ns) / 1e9, now
        readings: dict[tuple[ProcessKey, int, str], float] = {}
        for key in keys:
            for task in _threads(self.proc / str(key.pid) / "task"):
                try:
                    run_ns, wait_ns, slices = (task / "schedstat").read_text().split()
                except (OSError, ValueError):
                    continue  # it has ended, or this kernel does not count
                tid = int(task.name)
                readings[key, tid, _RUN] = int(run_ns) / 1e9
                readings[key, tid, _WAIT] = int(wait_ns) / 1e9
                readings[key, tid, _SLICES] = int(slices)
        totals = {key: {_RUN: 0.0, _WAIT: 0.0, _SLICES: 0.0, "threads": 0.0} for key in keys}
        for (key, _, what), grown in self._deltas.update(readings).items():
            totals[key][what] += grown
            totals[key]["threads"] += what == _RUN
        sums = {}
        owed_s, self._owed_s = self._owed_s, {}
        for key, total in totals.items():
            if total["threads"]:
                # A wait for a CPU is counted when it ends; until then it looks like sleep, and is taken back later.
                rest_s = total["threads"] * interval_s - total[_RUN] - total[_WAIT] - owed_s.get(key, 0.0)
                self._owed_s[key] = max(-rest_s, 0.0)
                sums[key] = _sums(total, max(rest_s, 0.0))
        return now, sums


def _threads(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # the process has ended


def _sums(total: dict[str, float], off_cpu_s: float) -> Sums:
    return Sums(
        run_queue_s=total[_WAIT],
        off_cpu_s=off_cpu_s,
        blocked_s=NAN,
        stopped_s=NAN,
        reclaim_s=NAN,
        switches=total[_SLICES],
        io_s=NAN,
        io_requests=NAN,
    )
