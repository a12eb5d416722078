"""Rank-iterations per second and core of the judge stage, against the same logic with one River detector per rank.

Run: .venv/bin/python benchmarks/bench_judge.py   (make bench runs all benchmarks)

Both decode the same records, assemble the same frames and follow the same iteration time. The baseline replaces the
vectorised comparison of ranks by one River ADWIN per rank and signal (computation, host time), fed in a loop: what one
writes first with River.
"""

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from river.drift import ADWIN

from benchmarks.synthetic_job import SyntheticJob
from pipeline import judge as judge_module
from pipeline.job import Job
from pipeline.judge import Judge
from pipeline.record import Record
from schemas.alerts import Alert

LAYOUTS = ((8, 2, 4), (8, 8, 16), (8, 8, 160))
N_WARM, N_MEASURED = 22, 9


@dataclass(slots=True)
class RiverJob(Job):
    """A job whose ranks are compared with their own past by River, one object per rank and signal."""

    rivers: list[Any] = field(default_factory=list)

    def _look_at_peers(self, _structure: Any) -> Iterator[Alert]:
        now = self.history.n_frames
        signals = (self.history.compute(now - 1, now)[0], self.history.host(now - 1, now)[0])
        if not self.rivers:
            self.rivers = [[ADWIN() for _ in range(self.identity.world_size)] for _ in signals]
        for detectors, values in zip(self.rivers, signals, strict=True):
            for detector, value in zip(detectors, values.tolist(), strict=True):
                if value == value:  # noqa: PLR0124 -- NaN is missing
                    detector.update(value)
        return iter(())


def measure(job_class: type[Job], rounds: list[list[Record]]) -> float:
    """Return the median seconds of CPU that one iteration of all ranks takes."""
    original = vars(judge_module)["Job"]
    setattr(judge_module, "Job", job_class)  # noqa: B010
    try:
        judge, spent = Judge(), []
        for records in rounds:
            start = time.process_time()
            for record in records:
                for _ in judge.handle(record):
                    pass
            spent.append(time.process_time() - start)
    finally:
        setattr(judge_module, "Job", original)  # noqa: B010
    return float(np.median(spent[N_WARM:]))


def main() -> None:
    """Print one line per size."""
    print(f"{'ranks':>6} {'judge rank-it/s':>16} {'River rank-it/s':>16} {'ratio':>6} {'bytes/rank':>11}")
    for tensor, pipeline, data in LAYOUTS:
        job = SyntheticJob(tensor, pipeline, data, seed=7)
        rounds = [list(job.records(i)) for i in range(N_WARM + N_MEASURED)]
        before = _resident_bytes()
        ours = measure(Job, rounds)
        grown = max(_resident_bytes() - before, 0)
        theirs = measure(RiverJob, rounds)
        n = job.world_size
        print(f"{n:>6} {n / ours:>16,.0f} {n / theirs:>16,.0f} {theirs / ours:>6.2f} {grown / n:>11,.0f}")
        sys.stdout.flush()


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
