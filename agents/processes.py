"""Which processes of this node may be ranks: they map an NCCL library, or their launcher gave them a rank.

Looking at a process costs tens of microseconds and more, so a process is looked at when it is new, then ever more
seldom as it grows old, since libraries are mapped long after the start. In between a scan only lists /proc: an entry's
inode number stays for as long as its process lives, so a number that is used again is noticed without opening anything.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agents.collector import Limit, ProcessKey
from agents.ebpf.libraries import Library, LibraryFinder

ENVIRONMENT_BYTES_MAX = 1 << 20
MAPS_BYTES_MAX = 16 << 20
# In one scan; the others wait for the next. A second look at a process that has not changed takes microseconds.
FIRST_LOOKS_MAX = 256
LOOKS_MAX = 64
LOOK_AGAIN_NS_MIN = 400_000_000
LOOK_AGAIN_NS_MAX = 60_000_000_000
EXPECTANT_NS = 600_000_000_000  # for so long a process with a rank and without NCCL is looked at in every scan
LIMITS_MAX = 16  # processes whose troubles are told one by one
GONE_MAX = 4096  # ended processes whose records may still come

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TICK_NS = 1_000_000_000 // _TICKS_PER_S  # starts are known no better
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_KUBERNETES_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_RANK_MARKS = (b"RANK=", b"RANK_", b"PROCID=", b"RANKID=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A process that may be a rank, or the ancestor or helper of one."""

    key: ProcessKey
    parent: int
    start_ns: int  # since the epoch
    namespace_pid: int  # its number in its own PID namespace
    environment: Mapping[str, str]  # as it was started, of the names asked for
    libraries: tuple[Library, ...]
    unmapped_ns: int | None = None  # when a look last found it without NCCL; None: it always had it

    @property
    def started_ns(self) -> int:
        """By the monotonic clock, as long as the machine has not slept."""
        return started_ns(self.key)

    @property
    def maps_nccl(self) -> bool:
        """Whether it could call NCCL."""
        return any(library.kind.startswith("nccl") for library in self.libraries)


@dataclass(slots=True)
class _Known:
    """What is remembered of one process, candidate or not."""

    inode: int
    key: ProcessKey | None
    seen_ns: int
    next_look_ns: int | None  # None: never again
    candidate: Candidate | None = None
    unmapped_ns: int | None = None
    size: int = -1  # bytes of address space at the last look
    code: tuple[int, bytes] = (-1, b"")  # mappings with code, and the first mapping


FindLibraries = Callable[[Sequence[int]], Mapping[int, Sequence[Library]]]


@dataclass(slots=True)
class Processes:
    """The node's processes from scan to scan.

    names: the environment variables that are kept; find: what finds libraries in place of a LibraryFinder.
    """

    names: Collection[str]
    find: FindLibraries | None = None
    n_looks: int = 0
    _finder: LibraryFinder = field(default_factory=LibraryFinder)
    _limits: dict[int, list[Limit]] = field(default_factory=dict)  # of the libraries of processes
    _known: dict[int, _Known] = field(default_factory=dict)
    _gone: dict[int, ProcessKey] = field(default_factory=dict)
    _ended: list[ProcessKey] = field(default_factory=list)
    _unreadable: set[ProcessKey] = field(default_factory=set)
    _unlisted: Limit | None = None  # why the latest scan saw nothing
    _boot_ns: int = field(default_factory=lambda: time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME))

    def scan(self, now_ns: int) -> list[Candidate]:
        """Return the candidates that run now, by pid. now_ns: by the monotonic clock.

        Where /proc cannot be listed this time, as with too many open files, those of the last time stand.
        """
        try:
            listed = _list_processes()
        except OSError as error:
            self._unlisted = Limit("which processes run", str(error), "see whether the agent has too many open files")
            return self._candidates()
        self._unlisted = None
        for pid in self._known.keys() - listed.keys():
            self._end(pid)
        due = []
        for pid, inode in listed.items():
            known = self._known.get(pid)
            if known is not None and (known.inode != inode or known.candidate is not None):
                known = self._still(pid, known, inode)
            if known is None:
                known = self._known[pid] = _Known(inode, None, now_ns, now_ns)
            if known.next_look_ns is not None and known.next_look_ns <= now_ns:
                due.append(pid)
        self._look(self._in_turn(due), now_ns)
        return self._candidates()

    def take_ended(self) -> list[ProcessKey]:
        """Return the candidates that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def key_of(self, pid: int) -> ProcessKey | None:
        """Return the process that has this number, or had it last; it is looked at soon where it was not known."""
        known = self._known.get(pid)
        if known is not None and known.key is not None:
            if known.candidate is None:
                known.next_look_ns = 0
            return known.key
        return read_key(pid) or self._gone.get(pid)

    def limits(self) -> list[Limit]:
        """Return what could not be read."""
        limits = [limit for pid in sorted(self._limits)[:LIMITS_MAX] for limit in self._limits[pid]]
        if self._unlisted is not None:
            limits.append(self._unlisted)
        if not self._unreadable:
            return limits
        some = ", ".join(str(key.pid) for key in sorted(self._unreadable)[:5])
        return [
            *limits,
            Limit(
                what=f"whether {len(self._unreadable)} processes are ranks (pid {some})",
                why="/proc does not show the agent what they are",
                remedy="run the agent as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
            ),
        ]

    def _candidates(self) -> list[Candidate]:
        return [k.candidate for _, k in sorted(self._known.items()) if k.candidate is not None]

    def _in_turn(self, due: Sequence[int]) -> list[int]:
        """Return which of those that are due to look at now: all candidates, and the others by their turn."""
        candidates = [pid for pid in due if self._known[pid].candidate is not None]
        new = [pid for pid in due if self._known[pid].key is None]
        rest = [pid for pid in due if self._known[pid].candidate is None and self._known[pid].key is not None]
        rest.sort(key=lambda pid: self._known[pid].next_look_ns or 0)
        return [*candidates, *new[:FIRST_LOOKS_MAX], *rest[:LOOKS_MAX]]

    def _still(self, pid: int, known: _Known, inode: int) -> _Known | None:
        """Return a process if it has this number still; None where the number is used again, or by a zombie."""
        if known.key is not None and read_key(pid) == known.key:
            known.inode = inode  # the kernel may make an entry anew for the same process
            return known
        self._end(pid)
        return None

    def _end(self, pid: int) -> None:
        known = self._known.pop(pid)
        self._limits.pop(pid, None)
        if known.key is None:
            return
        self._unreadable.discard(known.key)
        self._gone.pop(pid, None)
        self._gone[pid] = known.key
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        if known.candidate is not None:
            self._ended.append(known.key)

    def _look(self, pids: Sequence[int], now_ns: int) -> None:
        self.n_looks += len(pids)
        stats = {}
        for pid in pids:
            stat = _read_stat(pid)
            if stat is None:  # a zombie, or gone meanwhile
                self._known[pid].next_look_ns = now_ns + LOOK_AGAIN_NS_MAX
            else:
                stats[pid] = stat
        changed = [pid for pid, s in stats.items() if not s.is_kernel_thread and self._has_changed(pid, s)]
        libraries = self._find(changed)
        for pid, stat in stats.items():
            known = self._known[pid]
            if known.key is not None and known.key.start_ticks != stat.start_ticks:
                self._end(pid)
                self._known[pid] = _Known(known.inode, None, now_ns, now_ns)  # looked at in the next scan
                continue
            known.key = ProcessKey(pid, stat.start_ticks)
            if stat.is_kernel_thread:
                known.next_look_ns = None
                continue
            if pid in libraries:
                known.candidate = self._candidate(known, stat, tuple(libraries[pid]))
            if known.candidate is None or not known.candidate.maps_nccl:
                known.unmapped_ns = now_ns
            known.next_look_ns = now_ns + _pause_ns(known, now_ns)

    def _find(self, pids: Sequence[int]) -> Mapping[int, Sequence[Library]]:
        if self.find is not None:
            return self.find(pids)
        found: dict[int, list[Library]] = {}
        for pid in pids:
            found |= self._finder.find([pid])
            self._limits.pop(pid, None)
            if self._finder.limits:
                self._limits[pid] = self._finder.limits
        return found

    def _has_changed(self, pid: int, stat: "_Stat") -> bool:
        """Whether a process has mapped code since it was looked at last, or has begun another program."""
        known = self._known[pid]
        if stat.size == known.size:
            return False
        try:
            maps = _read(f"/proc/{pid}/maps", MAPS_BYTES_MAX)
        except OSError:
            maps = b""
        before, known.code = known.code, (maps.count(b" r-xp "), maps[: maps.find(b"\n")])
        known.size = stat.size
        return known.code != before

    def _candidate(self, known: _Known, stat: "_Stat", libraries: tuple[Library, ...]) -> Candidate | None:
        assert known.key is not None
        pid = known.key.pid
        try:
            raw = _read(f"/proc/{pid}/environ", ENVIRONMENT_BYTES_MAX)
            self._unreadable.discard(known.key)
        except PermissionError:
            self._unreadable.add(known.key)
            raw = b""
        except OSError:
            return None  # has ended meanwhile
        if not libraries and not any(mark in raw for mark in _RANK_MARKS):
            return None
        return Candidate(
            key=known.key,
            parent=stat.parent,
            start_ns=self._boot_ns + started_ns(known.key),
            namespace_pid=_namespace_pid(pid),
            environment=_parse_environment(raw, self.names) | _read_namespace(pid, raw),
            libraries=libraries,
            unmapped_ns=known.unmapped_ns,
        )


def _pause_ns(known: _Known, now_ns: int) -> int:
    """Return for how long not to look again."""
    assert known.key is not None
    age_ns = now_ns - started_ns(known.key)
    candidate = known.candidate
    if candidate is not None and not candidate.maps_nccl and age_ns < EXPECTANT_NS:
        return LOOK_AGAIN_NS_MIN
    return min(max(age_ns // 16, LOOK_AGAIN_NS_MIN), LOOK_AGAIN_NS_MAX)


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    start_ticks: int
    is_kernel_thread: bool
    size: int  # bytes of address space


def started_ns(key: ProcessKey) -> int:
    """Return when a process started, from the machine's start on."""
    return key.start_ticks * 1_000_000_000 // _TICKS_PER_S


def read_key(pid: int) -> ProcessKey | None:
    """Return who has this number now; None if nobody has."""
    stat = _read_stat(pid)
    return None if stat is None else ProcessKey(pid, stat.start_ticks)


def read_parent(pid: int) -> int | None:
    """Return a process's parent now; None if there is no such process."""
    stat = _read_stat(pid)
    return None if stat is None else stat.parent


def _list_processes() -> dict[int, int]:
    with os.scandir("/proc") as entries:
        return {int(entry.name): entry.inode() for entry in entries if entry.name.isdecimal()}


def _read(path: str, n_bytes_max: int) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts, n_bytes = [], 0
        while n_bytes < n_bytes_max and (part := os.read(handle, min(n_bytes_max - n_bytes, 1 << 16))):
            parts.append(part)
            n_bytes += len(part)
        return b"".join(parts)
    finally:
        os.close(handle)


def _read_stat(pid: int) -> _Stat | None:
    try:
        raw = _read(f"/proc/{pid}/stat", 4096)
        # The name in parentheses may hold anything, blanks and parentheses included.
        fields = raw[raw.rindex(b")") + 2 :].split()
        if fields[0] in {b"Z", b"X"}:
            return None
        return _Stat(int(fields[1]), int(fields[19]), bool(int(fields[6]) & _KERNEL_THREAD), int(fields[20]))
    except (OSError, ValueError, IndexError):
        return None


def _namespace_pid(pid: int) -> int:
    try:
        raw = _read(f"/proc/{pid}/status", 1 << 16)
    except OSError:
        return pid
    for line in raw.splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return pid


def _read_namespace(pid: int, environment: bytes) -> dict[str, str]:
    """Return a pod's namespace, which its processes are not told by a variable: names mean something within one."""
    if b"KUBERNETES_SERVICE_HOST=" not in environment:
        return {}
    try:
        raw = _read(f"/proc/{pid}/root{_KUBERNETES_NAMESPACE}", 256)
    except OSError:
        return {}
    return {"KUBERNETES_NAMESPACE": raw.decode("ascii", "replace").strip()}


def _parse_environment(raw: bytes, names: Collection[str]) -> dict[str, str]:
    """Return the wanted variables; bytes that are no UTF-8 are kept as escapes, of a name given twice the first."""
    found: dict[str, str] = {}
    for item in raw.split(b"\0"):
        name, separator, value = item.partition(b"=")
        text = name.decode("ascii", "replace")
        if separator and text in names and text not in found:
            found[text] = value.decode("utf-8", "backslashreplace")
    return found
