"""NVML as a whole: initialised, watched, and initialised again after an outage, from one thread of its own.

A GPU keeps its index for as long as the driver stays loaded: who vanishes from NVML's list is reported as lost under
its old index, and the others do not move up, although nvidia-smi then counts them anew.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agents.clock import Clock
from agents.nvml_gpu import Gpu, GpuReader, Pace, Reading
from agents.nvml_library import (
    DRIVER_NOT_LOADED,
    LIBRARY_MISMATCH,
    UNKNOWN,
    NvmlFailure,
    close_library,
    count_gpus,
    open_library,
    unload_library,
    versions,
)

logger = logging.getLogger(__name__)

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # one folder per GPU that the driver has
_LEFT_MAX = 1024
_EMPTY_MAX = 20  # readings of each GPU without any value, and NVML is initialised again


def place(found: Sequence[str | None], known: Mapping[str, int]) -> list[int]:
    """Return the index of each GPU in NVML's list: its old one if it has one, else NVML's, else the lowest free one.

    found: UUIDs in NVML's order, None where NVML does not say; known: the indexes that UUIDs have had.
    """
    reserved = set(known.values())
    held = {known[uuid] for uuid in found if uuid is not None and uuid in known}
    used: set[int] = set()
    indexes = []
    for nvml_index, uuid in enumerate(found):
        index = known.get(uuid) if uuid is not None else None
        if index is None or index in used:
            # Where NVML does not say who it is, it may be the one that is missing at this place.
            avoided = used | held if uuid is None else used | reserved
            free = (i for i in range(len(found) + len(known) + 1) if i not in used | reserved)
            index = next(free) if nvml_index in avoided else nvml_index
        used.add(index)
        indexes.append(index)
    return indexes


class Session:
    """One thread that keeps NVML open; the attributes may be read from any other."""

    def __init__(self, library: str | None, *, pace: Pace, clock: Clock, driver_gpus: Path) -> None:
        self.failure: NvmlFailure | None = None  # why NVML is not open
        self.readers: tuple[GpuReader, ...] = ()
        self.is_renumbered = False  # nvidia-smi counts otherwise
        self._library = library
        self._pace = pace
        self._clock = clock
        self._driver_gpus = driver_gpus
        self._known: dict[str, Gpu] = {}
        self._left: list[tuple[int, Reading]] = []  # of readers that have ended
        self._outage: NvmlFailure | None = None
        self._listing: frozenset[tuple[str, int]] | None = None
        self._answered = threading.Event()
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self, timeout_s: float) -> bool:
        """Begin to open NVML; returns whether it answered in time: then it is open, or `failure` says why not."""
        self._thread.start()
        return self._answered.wait(timeout_s)

    @property
    def has_answered(self) -> bool:
        """Whether the first attempt to open NVML is over."""
        return self._answered.is_set()

    def stop(self, timeout_s: float) -> bool:
        """Close NVML; returns whether all calls have returned in time. Until they have, nobody may open it again."""
        self._is_stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether its thread has ended."""
        return not self._thread.is_alive()

    def take(self) -> list[tuple[int, Reading]]:
        """Return (index, reading) of all GPUs since the last call."""
        left, self._left = self._left, []
        return left + [(reader.index, reading) for reader in self.readers for reading in reader.take()]

    def _run(self) -> None:
        wait_s = self._pace.reopen_s_min
        while not self._is_stopped:
            try:
                self._open()
            except NvmlFailure as failure:
                self._fail(failure)
                if not self._answered.is_set():  # open() says so, and may be called again
                    self._answered.set()
                    return
            else:
                self._answered.set()
                opened_s = time.monotonic()
                self._watch()
                self._close()
                if time.monotonic() - opened_s > self._pace.reopen_s_max:
                    wait_s = self._pace.reopen_s_min
            self._pause(wait_s)
            wait_s = min(2 * wait_s, self._pace.reopen_s_max)

    def _open(self) -> None:
        """Initialise NVML and begin to read each GPU. Raises NvmlFailure."""
        self._outage, self._listing = None, self._list()
        open_library(self._library)
        try:
            count = count_gpus()
            logger.info("%s: %d GPUs", versions(), count)
        except NvmlFailure:
            self._close_library()
            raise
        readers = [self._reader(nvml_index) for nvml_index in range(count)]
        for reader in readers:
            reader.start()
        deadline_s = time.monotonic() + self._pace.late_s
        for reader in readers:
            reader.wait_identified(max(0.0, deadline_s - time.monotonic()))
        self.readers = (*readers, *self._number(readers))
        self.failure = None

    def _reader(self, nvml_index: int | None) -> GpuReader:
        return GpuReader(nvml_index, pace=self._pace, clock=self._clock, on_outage=self._note_outage)

    def _number(self, readers: Sequence[GpuReader]) -> list[GpuReader]:
        """Let the readers begin under their indexes; returns more of them, for GPUs that have vanished."""
        found = [reader.gpu.uuid if reader.gpu else None for reader in readers]
        indexes = place(found, {uuid: gpu.index for uuid, gpu in self._known.items()})
        missing = {gpu.index: gpu for uuid, gpu in self._known.items() if uuid not in found}
        self.is_renumbered = indexes != list(range(len(indexes)))
        for reader, index in zip(readers, indexes, strict=True):
            reader.begin(index, missing.pop(index, None))
        self._learn(readers)
        vanished = []
        for index, gpu in missing.items():
            logger.error("GPU %d (%s): NVML no longer counts it", index, gpu.uuid)
            reader = self._reader(None)
            reader.start()
            reader.begin(index, gpu)
            vanished.append(reader)
        return vanished

    def _learn(self, readers: Sequence[GpuReader]) -> bool:
        """Take note of who is who; returns whether somebody turned out to be another than was thought."""
        is_other = False
        for gpu in [reader.gpu for reader in readers if reader.gpu is not None]:
            known = self._known.setdefault(gpu.uuid, gpu)
            is_other = is_other or known.index != gpu.index
        return is_other

    def _note_outage(self, failure: NvmlFailure) -> None:
        self._outage = failure
        self._wake.set()

    def _watch(self) -> None:
        """Return when NVML has to be opened again, or closed."""
        before = self._listing
        while not self._is_stopped:
            self._wake.wait(self._pace.watch_s)
            self._wake.clear()
            if self._outage is not None:
                self._fail(self._outage)
                return
            listing = self._list()
            if listing == before != self._listing:
                logger.warning("the driver has other GPUs than before: NVML is opened again")
                return
            before = listing
            if self._learn(self.readers):
                return
            if min((reader.n_empty for reader in self.readers if not reader.is_lost), default=0) > _EMPTY_MAX:
                self._fail(NvmlFailure(UNKNOWN, "NVML gives no value of any GPU", "all functions"))
                return

    def _close(self) -> None:
        """End all readers and close NVML; waits for calls that have not returned, however long."""
        for reader in self.readers:
            reader.stop()
        while not all(reader.has_ended(self._pace.watch_s) for reader in self.readers):
            stuck = [reader.index for reader in self.readers if not reader.has_ended()]
            text = f"calls about GPU {', '.join(map(str, stuck))} have not returned"
            self.failure = NvmlFailure(UNKNOWN, text, "waiting to open NVML again")
        self._left = self.take()[-_LEFT_MAX:]
        self.readers = ()
        self._close_library()
        if self._outage is not None and self._outage.code == LIBRARY_MISMATCH:
            unload_library()

    def _close_library(self) -> None:
        try:
            close_library()
        except NvmlFailure as failure:
            logger.debug("NVML could not be closed: %s", failure)

    def _fail(self, failure: NvmlFailure) -> None:
        self.failure = failure
        if failure.code in {DRIVER_NOT_LOADED, LIBRARY_MISMATCH}:
            self._known.clear()  # what is loaded next counts anew

    def _pause(self, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        while not self._is_stopped and time.monotonic() < deadline_s:
            self._wake.wait(deadline_s - time.monotonic())
            self._wake.clear()

    def _list(self) -> frozenset[tuple[str, int]] | None:
        """Return what tells GPUs apart that the driver has: a folder that is made anew has another inode number."""
        try:
            return frozenset((entry.name, entry.stat().st_ino) for entry in self._driver_gpus.iterdir())
        except OSError:
            return None
