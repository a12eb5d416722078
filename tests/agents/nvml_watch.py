"""What tests of NVML share: a stub per test, a collector that reads it fast, and waiting for what shall be seen."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agents.collector import CollectorError
from agents.nvml import NvmlCollector
from agents.nvml_gpu import Pace
from schemas.events import GpuSamples
from tests.testbed.nvml_stub import StubState

SEEN_S_MAX = 20.0
FAST = Pace(
    sample_s=0.01, late_s=0.5, processes_s=0.01, reopen_s_min=0.02, reopen_s_max=0.1, open_s=5.0, watch_s=0.02
)  # fmt: skip


def rows_of(samples: GpuSamples, gpu: int) -> GpuSamples:
    return samples.take(samples.gpu == gpu)


@dataclass(slots=True)
class Watched:
    """A collector on a stub that answers from `state`."""

    collector: NvmlCollector
    state: StubState

    def next(self) -> GpuSamples:
        """What is new; nothing where nothing can be read."""
        try:
            return self.collector.collect([]).gpu_samples
        except CollectorError:
            return GpuSamples.empty()

    def until(self, is_seen: Callable[[GpuSamples], bool]) -> GpuSamples:
        """Collect until what is new satisfies a condition, and return it."""
        deadline_s = time.monotonic() + SEEN_S_MAX
        while time.monotonic() < deadline_s:
            new = self.next()
            if len(new) and is_seen(new):
                return new
            time.sleep(0.002)
        raise AssertionError(f"not seen within {SEEN_S_MAX} s: {self.collector.limits()}")

    def gather(self, n_rows: int) -> GpuSamples:
        """Return the next n_rows or more, from now on."""
        self.next()
        found: list[GpuSamples] = []
        while sum(map(len, found)) < n_rows:
            found.append(self.until(lambda _: True))
        return GpuSamples.concatenate(found)

    def row(self, gpu: int, is_seen: Callable[[GpuSamples], bool] = lambda _: True) -> GpuSamples:
        """Return the first new row of a GPU that satisfies a condition, as a table of one row."""
        found: list[GpuSamples] = []

        def has_row(samples: GpuSamples) -> bool:
            own = rows_of(samples, gpu)
            each = [own.take(own.time_ns == t) for t in own.time_ns]
            found.extend(row for row in each if is_seen(row))
            return bool(found)

        self.until(has_row)
        return found[0]

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition, collecting all the time."""
        deadline_s = time.monotonic() + SEEN_S_MAX
        while not is_so():
            assert time.monotonic() < deadline_s, f"not so within {SEEN_S_MAX} s: {self.collector.limits()}"
            self.next()
            time.sleep(0.002)

    def why(self, what: str) -> str:
        """Return the reason and remedy of the limits that name something."""
        return "; ".join(f"{lim.what}: {lim.why}: {lim.remedy}" for lim in self.collector.limits() if what in lim.what)


def own_copy(stub: Path, folder: Path) -> str:
    """Copy the stub, so that it is loaded anew and nothing of another test is left in its memory."""
    return shutil.copy(stub, folder / f"{len(list(folder.iterdir()))}-{stub.name}")
