"""One thread per GPU that reads it again and again, so that one that hangs or is lost holds up no other.

A call into the driver cannot be ended. What is read too late is thrown away, because it says nothing of the time for
which it was asked; while a call does not return there is no reading at all, never the last one again.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from agents.clock import Clock
from agents.nvml_access import GpuAccess
from agents.nvml_library import GPU_IS_LOST, GpuProcess, NvmlFailure

logger = logging.getLogger(__name__)

READINGS_MAX = 64  # kept until they are collected; the oldest go first


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often what is done, in seconds."""

    sample_s: float = 0.5
    late_s: float = 1.0  # a reading that takes longer is thrown away
    processes_s: float = 2.0  # between two looks at a GPU's processes
    refused_s: float = 300.0  # before what is not supported is asked for again
    reopen_s_min: float = 1.0  # before NVML is initialised again, doubling up to:
    reopen_s_max: float = 60.0
    open_s: float = 2.0  # that open() waits for NVML to be initialised
    close_s: float = 2.0  # that close() waits for calls to return
    watch_s: float = 1.0  # between two looks at whether NVML as a whole works


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """Which GPU; the index is nvidia-smi's when NVML was opened, the UUID is for good."""

    index: int
    uuid: str
    name: str


class Reading(NamedTuple):
    """One GPU at one instant; what is not in `values`, by column of GpuSamples, is missing."""

    time_ns: int  # since the epoch
    values: dict[str, float]
    is_lost: bool = False


class GpuReader:
    """Reads one GPU from its own thread; any thread may call its methods.

    start() lets it find out which GPU it is, begin() lets it read, stop() ends it. `gpu` is None as long as NVML gives
    no handle; nvml_index is None for a GPU that NVML does not count any more.
    """

    def __init__(
        self,
        nvml_index: int | None,
        *,
        pace: Pace,
        clock: Clock,
        on_outage: Callable[[NvmlFailure], None],
    ) -> None:
        self.index = -1 if nvml_index is None else nvml_index  # that is reported
        self.gpu: Gpu | None = None
        self.nvml_index = nvml_index
        self.n_late = 0
        self.n_dropped = 0  # readings that nobody collected
        self.n_empty = 0  # readings without a value, since one with
        self.is_lost = False
        self._pace = pace
        self._clock = clock
        self._on_outage = on_outage
        self._access = GpuAccess(nvml_index, refused_s=pace.refused_s)
        self._readings: deque[Reading] = deque(maxlen=READINGS_MAX)
        self._errors: list[int] = []  # XIDs that are in no reading yet
        self._processes: tuple[float, list[GpuProcess]] = (float("-inf"), [])
        self._begun_s: float | None = None
        self._was_late = False
        self._last_s = time.monotonic()  # of the last reading
        self._lock = threading.Lock()  # of index and gpu
        self._identified = threading.Event()
        self._may_begin = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nvml-gpu-{nvml_index}", daemon=True)

    def start(self) -> None:
        """Find out which GPU it is."""
        self._thread.start()

    def wait_identified(self, timeout_s: float) -> None:
        """Wait until it is known which GPU it is, or that NVML does not say."""
        self._identified.wait(timeout_s)

    def begin(self, index: int, gpu: Gpu | None) -> None:
        """Begin to read, under this index; `gpu` is who it must be where NVML did not say."""
        with self._lock:
            self.index = index
            self.gpu = gpu if self.gpu is None else replace(self.gpu, index=index)
        self._last_s = time.monotonic()
        self._may_begin.set()

    def stop(self) -> None:
        """Ask the thread to end after the call that it is in."""
        self._stopped.set()
        self._may_begin.set()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the thread has ended, after waiting up to timeout_s."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def stuck_s(self) -> float:
        """How long the present reading has been overdue; 0 as long as it is not."""
        begun_s = self._begun_s
        over_s = 0.0 if begun_s is None else time.monotonic() - begun_s
        return over_s if over_s > self._pace.late_s else 0.0

    @property
    def silent_s(self) -> float:
        """How long ago the last reading was."""
        return time.monotonic() - self._last_s

    def take(self) -> list[Reading]:
        """Return the readings since the last call, oldest first."""
        taken = []
        while self._readings:
            taken.append(self._readings.popleft())
        return taken

    def processes(self) -> list[GpuProcess]:
        """Return its compute processes; none where they were not listed lately."""
        listed_s, found = self._processes
        is_fresh = time.monotonic() - listed_s < 2 * self._pace.processes_s + self._pace.late_s
        return found if is_fresh else []

    def troubles(self) -> dict[str, tuple[str, str]]:
        """Return what of it cannot be read: why, and the remedy."""
        return self._access.troubles()

    def _run(self) -> None:
        try:
            self._identify()
            self._may_begin.wait()
            self._read_on()
        except NvmlFailure as failure:  # of NVML as a whole
            self._on_outage(failure)
        finally:
            self._begun_s = None
            self._identified.set()
            self._access.let_go()

    def _identify(self) -> None:
        self._begun_s = time.monotonic()
        try:
            self._find()
        except NvmlFailure as failure:
            if failure.code != GPU_IS_LOST:
                raise
        self._begun_s = None
        self._identified.set()

    def _read_on(self) -> None:
        """Read until stop(). Raises NvmlFailure where NVML as a whole is gone."""
        next_s = time.monotonic()
        while not self._stopped.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + self._pace.sample_s, time.monotonic())
            self._begun_s = time.monotonic()
            self._read(self._begun_s)
            self._begun_s = None

    def _read(self, begun_s: float) -> None:
        time_ns = self._clock.now_ns()
        try:
            values = self._values()
        except NvmlFailure as failure:
            if failure.code != GPU_IS_LOST:
                raise
            self._lose()
            return
        if self.is_lost and values:
            logger.warning("GPU %d: NVML can read it again", self.index)
            self.is_lost = False
        if self._errors:
            values["xid"] = self._errors[-1]
        if self._is_late(time.monotonic() - begun_s):
            return
        if not values:
            self.n_empty += 1
            return
        self._errors.clear()
        self._keep(Reading(time_ns, values))

    def _values(self) -> dict[str, float]:
        self._take_errors()
        if not self._access.is_found and not self._find():
            return {}
        values = self._access.values()
        self._list_processes()
        return values

    def _find(self) -> bool:
        found = self._access.find()
        if found is None:
            return False
        with self._lock:
            self.gpu = Gpu(self.index, *found)
        return True

    def _is_late(self, took_s: float) -> bool:
        is_late = took_s > self._pace.late_s
        if is_late:
            self.n_late += 1
            if not self._was_late:
                logger.warning("GPU %d: a reading took NVML %.1f s and is thrown away", self.index, took_s)
        self._was_late = is_late
        return is_late

    def _keep(self, reading: Reading) -> None:
        self.n_dropped += len(self._readings) == READINGS_MAX
        self.n_empty = 0
        self._readings.append(reading)
        self._last_s = time.monotonic()

    def _take_errors(self) -> None:
        new = self._access.new_errors()
        for xid in new:
            logger.warning("GPU %d: Xid %d", self.index, xid)
        self._errors = [*self._errors, *new][-READINGS_MAX:]

    def _list_processes(self) -> None:
        listed_s, _ = self._processes
        now_s = time.monotonic()
        if now_s - listed_s < self._pace.processes_s or self.gpu is None:
            return
        found = self._access.processes(self.gpu.uuid)
        if found is not None:
            self._processes = (now_s, found)

    def _lose(self) -> None:
        if not self.is_lost:
            logger.error("GPU %d: NVML says that it is lost", self.index)
        self.is_lost = True
        self._take_errors()
        time_ns = self._clock.now_ns()  # the call may have taken long, and it is lost now
        if self._errors:  # came before, and says why
            self._keep(Reading(time_ns, {"xid": self._errors[-1]}))
            self._errors.clear()
        self._keep(Reading(time_ns, {}, is_lost=True))
        self._processes = (float("-inf"), [])
        self._access.lose()
