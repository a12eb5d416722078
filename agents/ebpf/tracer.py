"""Observes the calls of all processes to their NCCL and CUDA runtime libraries, from outside."""

import errno
import os

import numpy as np

from agents.collector import Limit, NotAvailable
from agents.ebpf import functions, selftest
from agents.ebpf.backend import SOURCES, Backend
from agents.ebpf.bcc_backend import BccBackend
from agents.ebpf.creations import Creations
from agents.ebpf.functions import Function
from agents.ebpf.kernel_state import KernelState
from agents.ebpf.libraries import Identity, Library
from agents.ebpf.probes import Prober, close_all
from agents.ebpf.records import RUN_DTYPE, SYNC_DTYPE, CommCreated, CommEnded, Records, Rows, What
from agents.ebpf.requirements import require
from agents.ebpf.symbols import NotALibrary, Symbol, read_image

ROWS_MAX = 2_000_000  # that wait to be taken
_REFUSED = (errno.EPERM, errno.EACCES)
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
        self._prober: Prober | None = None
        self._state: KernelState | None = None
        self._probes: dict[Identity, list[int]] = {}
        self._library_limits: dict[Identity, list[Limit]] = {}
        self._rows: list[Rows] = []
        self._n_rows = 0
        self._dropped: dict[int, int] = {}
        self._creations = Creations()
        self._told: list[CommCreated | CommEnded] = []
        self._lost_before: dict[int, int] = {}
        self._lost_other_before = 0
        self._launches_before: dict[int, int] = {}

    @property
    def has_return_probes(self) -> bool:
        """Whether calls have an end and a duration; known after open()."""
        return self._return_probes is not False

    def open(self) -> None:
        """Load the programs; nothing is probed yet. Raises NotAvailable."""
        require()
        self._prober = Prober()
        self._load()
        if self._return_probes is None:
            self._return_probes = selftest.are_return_probes_safe(self._prober, self._backend.program_fd("leave_call"))
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

    def attach(self, library: Library) -> list[Limit]:
        """Observe a library in all processes that have it mapped, or ever will; return what of it cannot be seen."""
        if library.identity in self._probes:
            return []
        wanted = self._wanted(library.kind)
        try:
            image = read_image(library.path, [function.symbol for function in wanted])
        except NotALibrary as error:
            return self._limit(library, [Limit(library.name or library.path, str(error), "restart the process")])
        limits = [limit for f in wanted if (limit := self._why_not(library, f, image.symbols.get(f.symbol)))]
        if not image.symbols:
            why = "it exports none of the functions that are observed"
            limits.append(Limit(library.name or library.path, why, "load a library that exports NCCL's functions"))
        probes = self._probes[library.identity] = []
        found = [f for f in wanted if f.symbol in image.symbols and self._is_wanted(f, image.symbols[f.symbol])]
        # Returns first: an entry whose return is not seen would look like a call that takes long.
        for program, is_return, group in _by_program(found, has_returns=self.has_return_probes):
            limits += self._attach(
                library, program, [image.symbols[f.symbol] for f in group], probes, is_return=is_return
            )
        return self._limit(library, limits)

    def detach(self, library: Library) -> None:
        """Remove the probes of a library."""
        self._library_limits.pop(library.identity, None)
        close_all(self._probes.pop(library.identity, []))

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
        lost_calls, lost_other, launches = self._losses()
        return Records(
            runs=rows[~is_sync],
            syncs=_syncs(rows[is_sync]),
            communicators=told,
            launches=launches,
            lost_calls=lost_calls,
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
        self._launches_before.pop(tgid, None)
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
        return own + [limit for limits in self._library_limits.values() for limit in limits]

    def close(self) -> None:
        """Remove all probes and programs; may be called twice, and without open()."""
        close_all(fd for probes in self._probes.values() for fd in probes)
        self._probes = {}
        if self._state is not None:
            self.poll()
            self._keep(self._state.open_runs(idle_ns=0))
            lost_calls, self._lost_other_before, self._launches_before = self._losses()
            _add(self._dropped, lost_calls)
            state, self._state = self._state, None
            state.close()
        self._backend.close()

    def _load(self) -> None:
        defines = self._defines if self.has_return_probes else [*self._defines, "ENTRY_ONLY"]
        wanted = self._wanted()
        programs = {function.entry for function in wanted}
        programs |= {function.leave for function in wanted if function.leave and self.has_return_probes}
        self._backend.load(_SOURCE, defines, sorted(programs))

    def _wanted(self, kind: str | None = None) -> list[Function]:
        """Return what is observed in a kind of library; NCCL has a CUDA runtime inside whose waits are its own."""
        bcast = [functions.BCAST] if self.has_return_probes else []
        launches = functions.LAUNCHES if self._count_launches else ()
        nccl = [*functions.NCCL, *bcast] if kind != "cudart" else []
        cuda = [*functions.SYNCS, *launches] if kind != "nccl" else []
        return nccl + cuda

    def _is_wanted(self, function: Function, symbol: Symbol) -> bool:
        return symbol.is_cheap is not False or not function.is_hot or self._probe_dear

    def _why_not(self, library: Library, function: Function, symbol: Symbol | None) -> Limit | None:
        if symbol is None or self._is_wanted(function, symbol) or function is functions.BCAST:
            return None
        return Limit(
            f"{function.symbol} of {library.name or library.path}",
            "a probe there would cost some 10 us per call, since the kernel cannot emulate its first instruction "
            f"({symbol.first[:4].hex(' ')})",
            "switch probe_dear_functions on if that is cheap enough for this job",
        )

    def _attach(
        self, library: Library, program: str, symbols: list[Symbol], probes: list[int], *, is_return: bool
    ) -> list[Limit]:
        """Probe all places at once; where that fails, one by one, so that one bad place costs no other."""
        assert self._prober is not None
        fd = self._backend.program_fd(program)
        try:
            probes += self._prober.attach(fd, library.path, [s.offset for s in symbols], is_return=is_return)
        except OSError as error:
            if len(symbols) > 1:
                return [
                    limit
                    for each in symbols
                    for limit in self._attach(library, program, [each], probes, is_return=is_return)
                ]
            what = f"{symbols[0].name} of {library.name or library.path}"
            remedy = (
                "run the agent as root, which probes need before Linux 6.6" if error.errno in _REFUSED else "see dmesg"
            )
            return [Limit(what, f"it cannot be probed: {error.strerror}", remedy)]
        return []

    def _limit(self, library: Library, limits: list[Limit]) -> list[Limit]:
        if limits:
            self._library_limits[library.identity] = limits
        return limits

    def _keep(self, rows: Rows) -> None:
        if len(rows):
            self._rows.append(rows)
            self._n_rows += len(rows)

    def _losses(self) -> tuple[dict[int, int], int, dict[int, int]]:
        lost, self._dropped = self._dropped, {}
        if self._state is None:
            other, self._lost_other_before = self._lost_other_before, 0
            launches, self._launches_before = self._launches_before, {}
            return lost, other, launches
        now = self._state.lost_calls()
        _add(lost, {tgid: n - self._lost_before.get(tgid, 0) for tgid, n in now.items()})
        self._lost_before = now
        other = self._state.lost_other()
        lost_other, self._lost_other_before = other - self._lost_other_before, other
        launched = self._state.launches()
        launches = {tgid: n - self._launches_before.get(tgid, 0) for tgid, n in launched.items()}
        self._launches_before = launched
        return {tgid: n for tgid, n in lost.items() if n}, lost_other, launches


def _by_program(found: list[Function], *, has_returns: bool) -> list[tuple[str, bool, list[Function]]]:
    """Return (program, is_return, functions), returns first."""
    groups: dict[tuple[str, bool], list[Function]] = {}
    for function in found if has_returns else ():
        if function.leave is not None:
            groups.setdefault((function.leave, True), []).append(function)
    for function in found:
        groups.setdefault((function.entry, False), []).append(function)
    return [(program, is_return, group) for (program, is_return), group in groups.items()]


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
