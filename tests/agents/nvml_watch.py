"""What tests of NVML share: a stub per test, a collector that reads it fast, and waiting for what shall be seen."""

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agents.collector import CollectorError
from agents.nvml import NvmlCollector
from agents.nvml_gpu import Pace
from agents.nvml_library import unload_library
from schemas.events import GpuSamples
from schemas.table import column_specs
from tests.conftest import give_up
from tests.testbed.nvml_stub import StubMissing, StubState, build

N_GPUS = 3
SEEN_S_MAX = 20.0
VALUES = set(column_specs(GpuSamples)) - {"gpu", "time_ns", "is_lost", "xid"}
FAST = Pace(
    sample_s=0.01, late_s=0.5, processes_s=0.01, reopen_s_min=0.02, reopen_s_max=0.1, open_s=5.0, watch_s=0.02
)  # fmt: skip


def rows_of(samples: GpuSamples, gpu: int) -> GpuSamples:
    return samples.take(samples.gpu == gpu)


def missing(row: GpuSamples) -> set[str]:
    """Columns of a row that have no value."""
    absent = {name for name in VALUES if math.isnan(getattr(row, name)[0])}
    return absent | ({"throttle_reasons", "throttle_known"} if not row.throttle_known[0] else set())


def is_lost(row: GpuSamples) -> bool:
    return bool(row.is_lost[0])


def is_whole(row: GpuSamples) -> bool:
    return not missing(row)


@dataclass(slots=True)
class Watched:
    """A collector on a stub that answers from `state`."""

    collector: NvmlCollector
    state: StubState
    driver_gpus: Path

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


@dataclass(slots=True)
class Opener:
    """Makes collectors on copies of the stub: each is loaded anew, with nothing of another test in its memory."""

    folder: Path
    state: StubState
    made: list[NvmlCollector] = field(default_factory=list)

    def __call__(self, pace: Pace = FAST, library: Path | None = None, *, is_open: bool = True) -> Watched:
        driver_gpus = self.folder / "gpus"
        driver_gpus.mkdir(exist_ok=True)
        copy = shutil.copy(library or stub(), self.folder / f"{len(self.made)}.so")
        collector = NvmlCollector(str(copy), pace=pace, driver_gpus=driver_gpus)
        self.made.append(collector)
        if is_open:
            collector.open()
        return Watched(collector, self.state, driver_gpus)


def stub(*, old: bool = False) -> Path:
    """Build the stub; give up where that cannot be."""
    try:
        return build(old=old)
    except StubMissing as error:
        give_up(str(error))


@contextmanager
def stubbed(folder: Path, environment: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Give an opener of collectors; at the end all calls return and all threads end."""
    opener = Opener(folder, StubState(folder / "state", N_GPUS))
    for name, value in opener.state.environment.items():
        environment.setenv(name, value)
    try:
        yield opener
    finally:
        for owner in ("*", *range(N_GPUS)):
            opener.state.remove(owner, "hang")
        for collector in opener.made:
            collector.close()
        deadline_s = time.monotonic() + SEEN_S_MAX
        while any(thread.name.startswith("nvml") for thread in threading.enumerate()):
            assert time.monotonic() < deadline_s, "a thread of NVML has not ended"
            time.sleep(0.005)
        unload_library()
