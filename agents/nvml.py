"""Samples all GPUs of the node by NVML: clocks, throttle reasons, temperature, power, links and errors.

Reading happens in threads of its own (nvml_session.py, nvml_gpu.py), so nothing here waits for the driver. A value that
NVML does not give now is missing now, whatever it was before.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agents.clock import Clock
from agents.collector import CollectorError, Limit, NotAvailable, Observations, RankProcess
from agents.nvml_gpu import Gpu, GpuReader, Pace, Reading
from agents.nvml_library import GPU_IS_LOST, GpuProcess, NvmlFailure, remedy
from agents.nvml_session import DRIVER_GPUS, Session
from schemas.events import GpuSamples, Sensor
from schemas.table import column_specs

logger = logging.getLogger(__name__)

_VALUES = [name for name in column_specs(GpuSamples) if name not in {"gpu", "time_ns", "is_lost"}]
_STUCK = "NVML's last call about it has not returned"
_STUCK_REMEDY = (
    "look for Xid and hung tasks in the kernel's log; where nvidia-smi hangs as well, drain and reboot the node"
)
_NO_ANSWER = NotAvailable("NVML does not answer: a call into the driver has not returned", _STUCK_REMEDY)


class NvmlCollector:
    """GPUs by NVML; `library` is the path of libnvidia-ml.so.1 where the system's loader does not find it.

    One per process, since a process has NVML once.
    """

    name = "nvml"

    def __init__(
        self,
        library: str | None = None,
        *,
        pace: Pace | None = None,
        clock: Clock | None = None,
        driver_gpus: Path = DRIVER_GPUS,
    ) -> None:
        self._library = library
        self._pace = pace or Pace()
        self._clock = clock or Clock()
        self._driver_gpus = driver_gpus
        self._session: Session | None = None
        self._ending: Session | None = None  # closed, but a call has not returned
        self._said_stuck: set[int] = set()  # and no reading since

    @property
    def sensors(self) -> Sensor:
        """NVML, as long as at least one GPU answers."""
        session = self._session
        is_seen = session is not None and any(not reader.stuck_s for reader in session.readers)
        return Sensor.NVML if is_seen else Sensor(0)

    def open(self) -> None:
        """Initialise NVML and begin to read every GPU. Raises NotAvailable."""
        if self._ending is not None and not self._ending.has_ended:
            raise _NO_ANSWER
        self._ending = None
        session = self._session
        if session is None:
            session = self._session = self._new_session()
            session.start(self._pace.open_s)
        if not session.has_answered:
            raise _NO_ANSWER
        if session.failure is not None and session.has_ended:
            self._session = None
            raise NotAvailable(_sentence(session.failure), session.failure.remedy)

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:  # noqa: ARG002 (GPUs are the node's)
        """Return the readings since the last call. Raises CollectorError where no GPU can be read."""
        session = self._session
        if session is None:
            raise CollectorError("NVML is not open")
        readings = session.take()
        readers, failure = session.readers, session.failure
        self._say_stuck(readers)
        if not readings:
            if failure is not None:
                raise CollectorError(f"{_sentence(failure)}: {failure.remedy}")
            if readers and all(reader.stuck_s for reader in readers):
                raise CollectorError(f"{_NO_ANSWER.reason}: {_STUCK_REMEDY}")
        return Observations(gpu_samples=_table(readings))

    def limits(self) -> Sequence[Limit]:
        """Return what of which GPUs cannot be read."""
        session = self._session
        if session is None:
            return []
        gpus: dict[Limit, list[int]] = defaultdict(list)
        for reader in session.readers:
            for limit in _limits_of(reader):
                gpus[limit].append(reader.index)
        found = [
            Limit(f"{limit.what} of GPU {_spelled(indexes)}", limit.why, limit.remedy)
            for limit, indexes in gpus.items()
        ]
        if session.failure is not None:
            found.append(Limit("all GPUs", _sentence(session.failure), session.failure.remedy))
        if session.is_renumbered:
            why = "NVML counts other GPUs than before; the agent keeps their old numbers"
            found.append(Limit("nvidia-smi's numbers of GPUs", why, "go by the UUIDs, or restart the agent"))
        return found

    def gpus(self) -> list[Gpu]:
        """Return (index, UUID, name) of the node's GPUs, lost ones included where they were known before."""
        readers = self._session.readers if self._session is not None else ()
        return sorted(reader.gpu for reader in readers if reader.gpu is not None)

    def gpu_by_pid(self) -> dict[int, tuple[int, str]]:
        """Return index and UUID of the GPU of each process that computes on one, by its pid as the agent sees it.

        The UUID is the MIG device's where there is one. A process on several GPUs has the one where it holds most
        memory, and is left out where that cannot be told. Listed every few seconds; what is older is left out.
        """
        readers = self._session.readers if self._session is not None else ()
        found: dict[int, list[tuple[int, GpuProcess]]] = defaultdict(list)
        for reader in readers:
            for process in reader.processes():
                found[process.pid].append((reader.index, process))
        chosen = {pid: _main_gpu(places) for pid, places in found.items()}
        return {pid: place for pid, place in chosen.items() if place is not None}

    def close(self) -> None:
        """End all reading; a call that does not return is left to itself."""
        session, self._session = self._session, None
        if session is not None and not session.stop(self._pace.close_s):
            logger.warning("NVML cannot be closed: a call into the driver has not returned")
            self._ending = session
        self._said_stuck.clear()

    def _new_session(self) -> Session:
        return Session(self._library, pace=self._pace, clock=self._clock, driver_gpus=self._driver_gpus)

    def _say_stuck(self, readers: Iterable[GpuReader]) -> None:
        stuck = {reader.index for reader in readers if reader.stuck_s}
        for index in sorted(stuck - self._said_stuck):
            logger.warning("GPU %d: %s: %s", index, _STUCK, _STUCK_REMEDY)
        back = {reader.index for reader in readers if reader.silent_s < self._pace.late_s} - stuck
        for index in sorted(self._said_stuck & back):
            logger.info("GPU %d: NVML answers again", index)
        self._said_stuck = (self._said_stuck | stuck) - back


def _sentence(failure: NvmlFailure) -> str:
    return f"NVML cannot be used: {failure}"


def _table(readings: list[tuple[int, Reading]]) -> GpuSamples:
    """Return the readings in the order of their times."""
    ordered = sorted(readings, key=lambda item: item[1].time_ns)
    columns: dict[str, Any] = {
        name: [reading.values.get(name, spec.missing) for _, reading in ordered]
        for name, spec in column_specs(GpuSamples).items()
        if name in _VALUES
    }
    return GpuSamples.build(
        len(ordered),
        gpu=np.array([index for index, _ in ordered], np.uint16),
        time_ns=np.array([reading.time_ns for _, reading in ordered], np.int64),
        is_lost=np.array([reading.is_lost for _, reading in ordered], np.uint8),
        **columns,
    )


def _limits_of(reader: GpuReader) -> list[Limit]:
    found = [Limit(what, why, remedy) for what, (why, remedy) in reader.troubles().items()]
    if reader.stuck_s:
        found.append(Limit("everything", _STUCK, _STUCK_REMEDY))
    if reader.is_lost:
        found.append(Limit("everything", "NVML says that it is lost", remedy(GPU_IS_LOST)))
    if reader.n_late:
        why = "readings took NVML too long and were thrown away"
        found.append(Limit("some samples", why, "compare with how long nvidia-smi takes"))
    if reader.n_dropped:
        found.append(Limit("some samples", "nobody collected them in time", "give the agent more processor time"))
    return found


def _main_gpu(places: list[tuple[int, GpuProcess]]) -> tuple[int, str] | None:
    by_gpu: dict[int, tuple[int, str]] = {}  # memory and UUID
    for index, process in places:
        memory = -1 if process.memory_bytes is None else process.memory_bytes
        by_gpu[index] = max(by_gpu.get(index, (-2, "")), (memory, process.uuid))
    most = max(memory for memory, _ in by_gpu.values())
    chosen = [(index, uuid) for index, (memory, uuid) in by_gpu.items() if memory == most]
    return chosen[0] if len(chosen) == 1 else None


def _spelled(indexes: list[int]) -> str:
    return ", ".join(map(str, sorted(indexes)))
