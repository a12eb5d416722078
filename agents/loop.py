"""What an agent does all day: looks for rank processes, reads its sources, and publishes one batch per job and flush.

This is the only place that decides when something is read. There are three paces: every POLL_S the kernel's ring is
emptied, every SCAN_S new processes are looked for, and every flush interval all sources are read and batches are cut.
"""

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agents.batches import Assembler
from agents.clock import Clock, clock_error_ns
from agents.collector import Limit, ProcessKey, RankProcess
from agents.ebpf.libraries import Identity, Library
from agents.job_identity import Discovery
from agents.nccl import NcclCollector
from agents.nvml import NvmlCollector
from agents.processes import Candidate, Processes
from agents.rank_gpu import Gpu
from agents.source import Source
from schemas.events import EventBatch, Sensor

logger = logging.getLogger(__name__)

POLL_S = 0.05
SCAN_S = 0.5
SILENT_BROKER_S = 10.0
UNUSED_S = 600.0  # after which a library is no longer observed
_LIMITS_SAID_MAX = 256
_NUMBER = re.compile(r"\d+")
_GPUS_EVERY = 5  # flushes between two looks at which process uses which GPU


class Outlet(Protocol):
    """Where batches go."""

    @property
    def n_delivered(self) -> int:
        """How many have been acknowledged."""

    @property
    def n_waiting(self) -> int:
        """How many have not been yet."""

    def publish(self, batch: EventBatch) -> None:
        """Hand over one batch; returns at once."""

    def poll(self, timeout_s: float) -> None:
        """Send what waits."""


@dataclass(slots=True)
class Loop:
    """One agent at work."""

    sources: Sequence[Source]
    processes: Processes
    discovery: Discovery
    assembler: Assembler
    publisher: Outlet
    clock: Clock
    flush_interval_s: float
    nccl: NcclCollector | None = None
    nvml: NvmlCollector | None = None
    libraries: Sequence[Library] = ()  # to be observed before any process uses them
    setup_limits: Sequence[Limit] = ()  # what the settings ask for in vain
    candidates: list[Candidate] = field(default_factory=list)
    ranks: list[RankProcess] = field(default_factory=list)  # that run now
    _ending: dict[ProcessKey, tuple[RankProcess, int]] = field(default_factory=dict)  # flushes that are left
    _attached: dict[Identity, tuple[Library, float]] = field(default_factory=dict)  # and when it was used last, s
    _gpus_by_pid: dict[int, list[Gpu]] = field(default_factory=dict)
    _n_flushes: int = 0
    _said: set[str] = field(default_factory=set)
    _delivered: tuple[int, float] = (0, 0.0)
    _is_broker_silent: bool = False

    def run(self, stopped: threading.Event) -> None:
        """Go on until told to stop; what was seen until then is published."""
        self.open()
        now_s = time.monotonic()
        next_scan_s, next_flush_s = now_s, now_s + self.flush_interval_s
        self._delivered = (0, now_s)
        while not stopped.is_set():
            now_s = time.monotonic()
            if now_s >= next_scan_s:
                self.scan()
                next_scan_s = now_s + SCAN_S
            if self.nccl is not None:
                self.nccl.poll()
            if now_s >= next_flush_s:
                self.open()
                self.flush()
                next_flush_s += self.flush_interval_s
                if next_flush_s < now_s:  # the machine slept, or we were stopped
                    next_flush_s = now_s + self.flush_interval_s
            self.publisher.poll(0)
            stopped.wait(max(0.0, min(POLL_S, next_scan_s - time.monotonic(), next_flush_s - time.monotonic())))
        self.flush()
        self.close()

    def close(self) -> None:
        """Close all sources."""
        for source in self.sources:
            source.close()

    def scan(self) -> None:
        """Look for processes that may be ranks, and observe the libraries that they use."""
        self.candidates = self.processes.scan(time.monotonic_ns())
        self.discovery.observes_calls = self.nccl is not None and self.nccl.is_open
        if self.nccl is None or not self.nccl.is_open:
            self._attached.clear()
            return
        now_s = time.monotonic()
        wanted = [c for c in self.candidates if self.discovery.is_selected(c)]
        for library in (*self.libraries, *(library for c in wanted for library in c.libraries)):
            if self.nccl.attach(library):
                if library.identity not in self._attached:
                    self.discovery.note_observed(library, time.monotonic_ns())
                    logger.info("%s is observed", library.name or library.path)
                self._attached[library.identity] = (library, now_s)
        # Every container has files of its own: what nobody uses any more is not observed for ever.
        for identity, (library, used_s) in list(self._attached.items()):
            if now_s - used_s > UNUSED_S:
                del self._attached[identity]
                self.nccl.detach(library)
                self.discovery.note_unobserved(library)
                logger.info("%s is not used any more", library.name or library.path)

    def flush(self) -> None:
        """Read all sources and publish what they saw."""
        if self.clock.check():
            logger.warning("the node's clock was set: times before and after do not compare")
        if self.nccl is not None:
            self.nccl.absorb()
        alive = self._look_up()
        ranks = [*alive, *(rank for rank, _ in self._ending.values())]
        for key, (_, left) in self._ending.items():
            if left == 0 and self.nccl is not None:
                self.nccl.conclude(key)
        observations = []
        for source in self.sources:
            observations.append(source.collect(ranks))
            if self.nccl is not None and source.name == "inspector":
                self.nccl.learn(ranks, observations[-1])
        sensors = Sensor(0)
        for source in self.sources:
            sensors |= source.sensors
        batches = self.assembler.assemble(
            ranks,
            alive,
            observations,
            sensors=sensors,
            flush_ns=self.clock.now_ns(),
            clock_error_ns=clock_error_ns(),
        )
        for batch in batches:
            self.publisher.publish(batch)
        self._forget_ended()
        self._say_limits()
        self._watch_broker()
        self._n_flushes += 1

    def open(self) -> None:
        """Open the sources that are not open and due to be tried."""
        now_s = time.monotonic()
        for source in self.sources:
            source.try_open(now_s)

    def _look_up(self) -> list[RankProcess]:
        """Return the ranks that run now; those that have ended since are read to their end."""
        if self.nvml is not None and self._n_flushes % _GPUS_EVERY == 0:
            self.discovery.gpus = [Gpu(gpu.index, gpu.uuid) for gpu in self.nvml.gpus()]
            self._gpus_by_pid = {pid: [Gpu(*gpu)] for pid, gpu in self.nvml.gpu_by_pid().items()}
        alive = self.discovery.update(self.candidates, self._gpus_by_pid, time.monotonic_ns())
        keys = {rank.key for rank in alive}
        for key in keys & self._ending.keys():
            del self._ending[key]  # it was only not seen for a moment
        for rank in self.ranks:
            if rank.key not in keys:
                self._ending[rank.key] = (rank, self.assembler.linger_flushes)
        for rank in alive:
            if all(rank.key != known.key for known in self.ranks):
                logger.info(
                    "rank %d of %d of job %s (%s) is process %d",
                    rank.rank, rank.world_size, rank.job_id, rank.incarnation, rank.key.pid,
                )  # fmt: skip
        self.ranks = alive
        return alive

    def _forget_ended(self) -> None:
        for key, (rank, left) in list(self._ending.items()):
            if left > 0:
                self._ending[key] = (rank, left - 1)
                continue
            del self._ending[key]
            logger.info("rank %d of job %s has ended", rank.rank, rank.job_id)
            if self.nccl is not None:
                self.nccl.forget(key)
        for key in self.processes.take_ended():
            if key not in self._ending and self.nccl is not None:
                self.nccl.forget(key)

    def _say_limits(self) -> None:
        """Say what cannot be seen, once, when it becomes known."""
        for limit in self.limits():
            text = f"{limit.what} cannot be seen: {limit.why}: {limit.remedy}"
            kind = _NUMBER.sub("", text)  # counts and process numbers change all the time
            if kind not in self._said and len(self._said) < _LIMITS_SAID_MAX:
                self._said.add(kind)
                logger.info("%s", text)

    def limits(self) -> list[Limit]:
        """Return what cannot be seen of this node and its jobs."""
        found = [*self.setup_limits, *self.processes.limits(), *self.discovery.limits()]
        for source in self.sources:
            if source.is_open:
                found += source.collector.limits()
        return found

    def _watch_broker(self) -> None:
        now_s = time.monotonic()
        if self.publisher.n_delivered != self._delivered[0] or not self.publisher.n_waiting:
            if self._is_broker_silent:
                logger.info("the broker takes batches again")
            self._is_broker_silent = False
            self._delivered = (self.publisher.n_delivered, now_s)
        elif not self._is_broker_silent and now_s - self._delivered[1] > SILENT_BROKER_S:
            self._is_broker_silent = True
            logger.warning(
                "%d batches wait for a broker that does not answer: is the address in [agent] bootstrap right, and the "
                "broker running? They are kept up to buffer_bytes_max",
                self.publisher.n_waiting,
            )
