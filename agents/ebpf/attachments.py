"""The probes in libraries: which functions get one, which do not and why, and how they go away again."""

import errno
import os
import time
from collections.abc import Sequence

from agents.collector import Limit
from agents.ebpf import functions
from agents.ebpf.backend import Backend
from agents.ebpf.functions import Function
from agents.ebpf.libraries import Identity, Library
from agents.ebpf.probes import Prober, close_all
from agents.ebpf.symbols import NotALibrary, Symbol, read_image

RETRY_S = 10.0
_PATHS_MAX = 64  # tried of one library in RETRY_S
_REFUSED = (errno.EPERM, errno.EACCES)


def wanted_functions(*, kind: str | None, has_returns: bool, count_launches: bool) -> list[Function]:
    """Return what is observed in a kind of library, or (None) in any; NCCL's own CUDA runtime waits for itself."""
    bcast = [functions.BCAST] if has_returns else []
    launches = functions.LAUNCHES if count_launches else ()
    nccl = [*functions.NCCL, *bcast] if kind != "cudart" else []
    cuda = [*functions.SYNCS, *launches] if kind != "nccl" else []
    return nccl + cuda


class Attachments:
    """Probes of the programs of one loaded backend, by library."""

    def __init__(
        self, backend: Backend, prober: Prober, *, has_returns: bool, count_launches: bool, probe_dear: bool
    ) -> None:
        self._backend = backend
        self._prober = prober
        self._has_returns = has_returns
        self._count_launches = count_launches
        self._probe_dear = probe_dear
        self._probes: dict[Identity, list[int]] = {}  # of those that there is no more to do about
        self._limits: dict[Identity, list[Limit]] = {}
        self._failed: dict[Identity, tuple[set[str], float]] = {}  # paths in vain, and when all may be tried again, s

    def is_attached(self, library: Library) -> bool:
        """Whether a library has its probes, or there is nothing in it to probe."""
        return library.identity in self._probes

    def attach(self, library: Library) -> list[Limit]:
        """Probe a library, once; return what of it cannot be seen.

        Where no probe could be placed, as by way of a process that has just ended, each other path is tried as soon as
        it is given, and the same one after RETRY_S.
        """
        if self.is_attached(library) or not self._is_due(library):
            return []
        limits = self._limits[library.identity] = self._attach(library)
        if self.is_attached(library):
            del self._failed[library.identity]
        elif _has_ended(library.path):
            limits.clear()  # it is another's to say what cannot be seen of it
        return list(limits)

    def _is_due(self, library: Library) -> bool:
        now_s = time.monotonic()
        paths, again_s = self._failed.get(library.identity, (set(), 0.0))
        if now_s >= again_s:
            paths, again_s = set(), now_s + RETRY_S
        is_due = library.path not in paths and len(paths) < _PATHS_MAX
        if is_due:
            self._failed[library.identity] = paths | {library.path}, again_s
        return is_due

    def _attach(self, library: Library) -> list[Limit]:
        limits: list[Limit] = []
        name = library.name or library.path
        wanted = wanted_functions(kind=library.kind, has_returns=self._has_returns, count_launches=self._count_launches)
        try:
            symbols = read_image(library.path, [function.symbol for function in wanted]).symbols
        except NotALibrary as error:
            return [Limit(name, str(error), "restart the process")]
        probes = self._probes[library.identity] = []
        if not symbols:
            why = "it exports none of the functions that are observed"
            limits.append(Limit(name, why, "load a library that exports NCCL's functions"))
        found = [function for function in wanted if function.symbol in symbols]
        limits += [limit for f in found if (limit := self._why_not(name, f, symbols[f.symbol])) is not None]
        cheap = [function for function in found if self._is_cheap(function, symbols[function.symbol])]
        # Returns first: an entry whose return is not seen would look like a call that takes long.
        for is_return in (True, False) if self._has_returns else (False,):
            n_before = len(probes)
            for program, group in _by_program(cheap, is_return=is_return).items():
                limits += self._probe(library, program, [symbols[f.symbol] for f in group], is_return=is_return)
        if cheap and len(probes) == n_before:  # no call would be seen
            close_all(self._probes.pop(library.identity))
        return limits

    def detach(self, library: Library) -> None:
        """Remove the probes of a library."""
        self._limits.pop(library.identity, None)
        self._failed.pop(library.identity, None)
        close_all(self._probes.pop(library.identity, []))

    def limits(self) -> list[Limit]:
        """Return what cannot be seen of all libraries."""
        return [limit for limits in self._limits.values() for limit in limits]

    def close(self) -> None:
        """Remove all probes."""
        close_all(fd for fds in self._probes.values() for fd in fds)
        self._probes = {}

    def _is_cheap(self, function: Function, symbol: Symbol) -> bool:
        return symbol.is_cheap is not False or not function.is_hot or self._probe_dear

    def _why_not(self, library: str, function: Function, symbol: Symbol) -> Limit | None:
        if self._is_cheap(function, symbol) or function is functions.BCAST:
            return None
        return Limit(
            f"{function.symbol} of {library}",
            "a probe there would cost some 10 us per call, since the kernel cannot emulate its first instruction "
            f"({symbol.first[:4].hex(' ')})",
            "switch probe_dear_functions on if that is cheap enough for this job",
        )

    def _probe(self, library: Library, program: str, symbols: Sequence[Symbol], *, is_return: bool) -> list[Limit]:
        """Probe all places at once; where that fails, one by one, so that one bad place costs no other."""
        fd, offsets = self._backend.program_fd(program), [symbol.offset for symbol in symbols]
        try:
            self._probes[library.identity] += self._prober.attach(fd, library.path, offsets, is_return=is_return)
        except OSError as error:
            if len(symbols) > 1:
                one_by_one = (self._probe(library, program, [each], is_return=is_return) for each in symbols)
                return [limit for limits in one_by_one for limit in limits]
            what = f"{symbols[0].name} of {library.name or library.path}"
            is_refused = error.errno in _REFUSED
            remedy = "run the agent as root, which probes need before Linux 6.6" if is_refused else "see dmesg"
            return [Limit(what, f"it cannot be probed: {error.strerror}", remedy)]
        return []


def _has_ended(path: str) -> bool:
    """Whether a path leads through a process that is no more."""
    parts = path.split("/")
    return parts[:2] == ["", "proc"] and parts[2].isdecimal() and not os.path.exists(f"/proc/{parts[2]}")


def _by_program(found: Sequence[Function], *, is_return: bool) -> dict[str, list[Function]]:
    groups: dict[str, list[Function]] = {}
    for function in found:
        program = function.leave if is_return else function.entry
        if program is not None:
            groups.setdefault(program, []).append(function)
    return groups
