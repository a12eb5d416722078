"""Observes the calls of all processes to their NCCL and CUDA runtime libraries, from outside."""

import os

import numpy as np

from agents.collector import Limit, NotAvailable
from agents.ebpf import selftest
from agents.ebpf.attachments import Attachments, wanted_functions
from agents.ebpf.backend import SOURCES, Backend
from agents.ebpf.bcc_backend import BccBackend
from agents.ebpf.creations import Creations
from agents.ebpf.kernel_state import KernelState
from agents.ebpf.libraries import Library
from agents.ebpf.probes import Prober
from agents.ebpf.records import RUN_DTYPE, SYNC_DTYPE, CommCreated, CommEnded, Records, Rows, What
from agents.ebpf.requirements import require

ROWS_MAX = 2_000_000  # that wait to be taken
_SOURCE = SOURCES / "nccl.bpf.c"


class Tracer:
    """Programs in the kernel, their probes, and what they have recorded.

    open(), then attach() for each library as it is found, poll() every few tens of milliseconds, and take() now and
    then. After close(), take() still returns what was recorded last.
    """

    def __init__(
        self,
        *,
        aggregate: bool = True,
        count_launches: bool = False,
        ring_bytes: int = 8 << 20,
        return_probes: bool | None = None,
        probe_dear: bool = False,
        backend: Backend | None = None,
    ) -> None:
        """Choose what to observe.

        Without `aggregate` every call is a row. `return_probes` None means: as far as they are safe on this kernel.
        `probe_dear` probes also what the kernel would have to execute in single steps. `ring_bytes` is a power of two.
        """
        self._defines = [f"RING_BYTES={ring_bytes}", *([] if aggregate else ["RAW"])]
        self._count_launches = count_launches
        self._ring_bytes = ring_bytes
        self._return_probes = return_probes
        self._probe_dear = probe_dear
        self._backend: Backend = backend or BccBackend()
        self._attachments: Attachments | None = None
        self._state: KernelState | None = None
        self._rows: list[Rows] = []
        self._n_rows = 0
        self._dropped: dict[int, int] = {}
        self._dropped_creations = 0
        self._dropped_other = 0
        self._creations = Creations()
        self._told: list[CommCreated | CommEnded] = []
        self._lost_before: dict[int, int] = {}
        self._lost_creations_before = 0
        self._lost_other_before = 0
        self._launched: dict[int, int] = {}
        self._launches_before: dict[int, int] = {}

    @property
    def has_return_probes(self) -> bool:
        """Whether calls have an end and a duration; known after open()."""
        return self._return_probes is not False

    def open(self) -> None:
        """Load the programs; nothing is probed yet. Raises NotAvailable."""
        require()
        prober = Prober()
        self._load()
        if self._return_probes is None:
            self._return_probes = selftest.are_return_probes_safe(prober, self._backend.program_fd("leave_call"))
            if not self._return_probes:
                self._backend.close()
                self._load()
        try:
            self._state = KernelState(self._backend, self._ring_bytes)
        except OSError as error:
            self._backend.close()
            raise NotAvailable(
                f"the kernel's ring buffer cannot be mapped ({error})", "run Linux 5.12 or later"
            ) from None
        self._attachments = Attachments(
            self._backend,
            prober,
            has_returns=self.has_return_probes,
            count_launches=self._count_launches,
            probe_dear=self._probe_dear,
        )

    def attach(self, library: Library) -> list[Limit]:
        """Observe a library in all processes that have it mapped, or ever will; return what of it cannot be seen.

        It may be told again and again, at once and with other paths, until is_attached(): it costs nothing after that,
        and before, it tries each path once in a while.
        """
        assert self._attachments is not None, "open() comes first"
        return self._attachments.attach(library)

    def is_attached(self, library: Library) -> bool:
        """Whether a library is observed, as far as it can be."""
        return self._attachments is not None and self._attachments.is_attached(library)

    def detach(self, library: Library) -> None:
        """Remove the probes of a library."""
        if self._attachments is not None:
            self._attachments.detach(library)

    def poll(self) -> None:
        """Take what the kernel has recorded into memory."""
        if self._state is None:
            return
        rows = self._state.read_runs()
        if len(rows):
            self._rows.append(rows)
            self._n_rows += len(rows)
        while self._n_rows > ROWS_MAX and len(self._rows) > 1:
            dropped = self._rows.pop(0)
            self._n_rows -= len(dropped)
            _add(self._dropped, _count_by_process(dropped))
            self._dropped_other += int((dropped["what"] == What.SYNC).sum())
        creations = self._state.read_creations()
        if len(creations):
            self._told += self._creations.read(creations)

    def take(self, *, flush_open: bool = True) -> Records:
        """Return what is new. With `flush_open` also runs that are still open, but have been idle for a second."""
        self.poll()
        if self._state is not None:
            for tgid in self._state.processes():
                if not os.path.exists(f"/proc/{tgid}"):
                    self.forget(tgid)
            if flush_open:
                self._keep(self._state.open_runs())
        rows = np.concatenate(self._rows) if self._rows else np.empty(0, RUN_DTYPE)
        told = sorted(self._told, key=lambda said: said.time_ns)
        self._rows, self._n_rows, self._told = [], 0, []
        is_sync = rows["what"] == What.SYNC
        lost_creations, lost_other = self._other_losses()
        lost_calls, launches = self._losses()
        return Records(
            runs=rows[~is_sync],
            syncs=_syncs(rows[is_sync]),
            communicators=told,
            launches=launches,
            lost_calls=lost_calls,
            lost_creations=lost_creations,
            lost_other=lost_other,
        )

    def forget(self, tgid: int) -> None:
        """Let go of a process that has ended; what it did last is in what take() returns next."""
        if self._state is None:
            return
        self.poll()
        self._keep(self._state.open_runs(idle_ns=0, only=tgid))
        lost = self._state.lost_calls().get(tgid, 0) - self._lost_before.pop(tgid, 0)
        if lost:
            _add(self._dropped, {tgid: lost})
        launched = self._state.launches().get(tgid, 0) - self._launches_before.pop(tgid, 0)
        _add(self._launched, {tgid: launched})
        self._state.forget(tgid)
        self._creations.forget(tgid)

    def limits(self) -> list[Limit]:
        """Return what cannot be seen, of the kernel and of the libraries attached to."""
        own = []
        if not self.has_return_probes:
            own.append(
                Limit(
                    "how long calls and synchronisations take",
                    "a process of ours under a seccomp filter did not survive a return probe on this kernel",
                    "update the kernel: Linux 6.11 to 6.13 have this fault unless their distribution repaired it",
                )
            )
        return own + (self._attachments.limits() if self._attachments is not None else [])

    def close(self) -> None:
        """Remove all probes and programs; may be called twice, and without open()."""
        if self._attachments is not None:
            self._attachments.close()
        if self._state is not None:
            self.poll()
            self._keep(self._state.open_runs(idle_ns=0))
            self._dropped_creations, self._dropped_other = self._other_losses()
            self._dropped, self._launched = self._losses()
            state, self._state = self._state, None
            state.close()
        self._backend.close()

    def _load(self) -> None:
        has_returns = self.has_return_probes
        wanted = wanted_functions(kind=None, has_returns=has_returns, count_launches=self._count_launches)
        programs = {function.entry for function in wanted}
        programs |= {function.leave for function in wanted if function.leave and has_returns}
        defines = self._defines if has_returns else [*self._defines, "ENTRY_ONLY"]
        self._backend.load(_SOURCE, defines, sorted(programs))

    def _keep(self, rows: Rows) -> None:
        if len(rows):
            self._rows.append(rows)
            self._n_rows += len(rows)

    def _other_losses(self) -> tuple[int, int]:
        creations, self._dropped_creations = self._dropped_creations, 0
        other, self._dropped_other = self._dropped_other, 0
        if self._state is not None:
            creations_now, other_now = self._state.lost_creations(), self._state.lost_other()
            creations += creations_now - self._lost_creations_before
            other += other_now - self._lost_other_before
            self._lost_creations_before, self._lost_other_before = creations_now, other_now
        return creations, other

    def _losses(self) -> tuple[dict[int, int], dict[int, int]]:
        lost, self._dropped = self._dropped, {}
        launches = self._launched
        self._launched = {}
        if self._state is not None:
            now = self._state.lost_calls()
            _add(lost, {tgid: n - self._lost_before.get(tgid, 0) for tgid, n in now.items()})
            self._lost_before = now
            launched = self._state.launches()
            _add(launches, {tgid: n - self._launches_before.get(tgid, 0) for tgid, n in launched.items()})
            self._launches_before = launched
        return {tgid: n for tgid, n in lost.items() if n}, {tgid: n for tgid, n in launches.items() if n}


def _syncs(rows: Rows) -> Rows:
    syncs = np.empty(len(rows), SYNC_DTYPE)
    for name, source in (
        ("tgid", "tgid"),
        ("tid", "tid"),
        ("kind", "depth"),
        ("start_ns", "start_ns"),
        ("end_ns", "end_ns"),
    ):
        syncs[name] = rows[source]
    return syncs


def _count_by_process(rows: Rows) -> dict[int, int]:
    return {int(tgid): int(rows["count"][rows["tgid"] == tgid].sum()) for tgid in np.unique(rows["tgid"])}


def _add(totals: dict[int, int], more: dict[int, int]) -> None:
    for tgid, n in more.items():
        totals[tgid] = totals.get(tgid, 0) + n
