"""Finds the file that Inspector writes for a process, and reads what has been added to it.

The plug-in writes one file per process, HOSTNAME-pidPID.log in the folder of NCCL_INSPECTOR_DUMP_DIR, by the process's
own host name and PID namespace, and keeps it open. So the process's open files tell which it is, in whatever mount
namespace and whether or not the name still leads there; only where they do not is the folder searched.
"""

import errno
import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.collector import RankProcess
from agents.rooted_files import read_below

CONF_BYTES_MAX = 1 << 16
FOLDER_ENTRIES_MAX = 100_000
BACKLOG_MAX = 64 << 20  # bytes; a reader that is further behind leaves out the middle
TAIL_BYTES = 1 << 20  # of a file that was there before the agent, and after a leap

_NAME = re.compile(r"(?P<host>.+)-pid(?P<pid>\d+)\.(?:log|jsonl)")
_SETTING = re.compile(r"[A-Z][A-Z0-9_]*")


class Unreadable(Exception):
    """A process or file that the agent may not read; the message names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How NCCL was told to use Inspector, by the environment a process began with and NCCL's configuration files."""

    values: Mapping[str, str] = field(default_factory=dict)

    def _number(self, name: str) -> int | None:
        try:
            return int(self.values[name], 0)
        except (KeyError, ValueError):
            return None

    @property
    def is_on(self) -> bool:
        """Whether the plug-in is asked for; it may be set otherwise from within the process."""
        return self._number("NCCL_INSPECTOR_ENABLE") == 1

    @property
    def folder(self) -> str:
        """Where its files go, as the process names it."""
        if folder := self.values.get("NCCL_INSPECTOR_DUMP_DIR"):
            return folder
        job = self.values.get("SLURM_JOBID")
        if job is None:
            return "nccl-inspector-unknown-jobid"
        number = re.match(r"\s*[+-]?\d+", job)
        return f"nccl-inspector-{int(number.group()) if number else 0}"  # as C's strtol() reads it

    @property
    def interval_us(self) -> int:
        """Between dumps; negative: only when communicators end."""
        given = self._number("NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS")
        return -1 if given is None else given

    @property
    def least_bytes(self) -> int:
        """From which size on operations are recorded, from NCCL 2.30 on."""
        given = self._number("NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES")
        return 8192 if given is None else given

    @property
    def is_verbose(self) -> bool:
        """Whether records say when the operation ran."""
        return self._number("NCCL_INSPECTOR_DUMP_VERBOSE") == 1

    @property
    def is_for_prometheus(self) -> bool:
        """Whether it writes means for Prometheus instead of records."""
        return self._number("NCCL_INSPECTOR_PROM_DUMP") == 1


def read_settings(proc: Path) -> Settings:
    """Read what a process, given as its folder under /proc, was told.

    Raises Unreadable, and FileNotFoundError or ProcessLookupError where the process has ended.
    """
    try:
        content = (proc / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise
    except OSError as error:
        raise _unreadable(error, f"the environment of process {proc.name}") from error
    own = dict(_pairs(content.split(b"\0")))
    root = proc / "root"
    places = [own["NCCL_CONF_FILE"]] if "NCCL_CONF_FILE" in own else [f"{own.get('HOME', '/root')}/.nccl.conf"]
    values: dict[str, str] = {}
    for place in ("/etc/nccl.conf", *places):
        try:
            values |= dict(_pairs(read_below(root, place, CONF_BYTES_MAX).split(b"\n")))
        except (OSError, ValueError):  # the latter of a name that no file can have
            continue
    return Settings(values | own)


def _pairs(lines: list[bytes]) -> list[tuple[str, str]]:
    pairs = [line.decode(errors="replace").strip().partition("=") for line in lines]
    return [
        (name.strip(), value.strip()) for name, equals, value in pairs if equals and _SETTING.fullmatch(name.strip())
    ]


def find_file(proc: Path, rank: RankProcess, settings: Settings) -> Path | None:
    """Return a path by which the agent can open the file of a process; None while there is none. Raises Unreadable."""
    return _among_open_files(proc, rank.namespace_pid) or _in_folder(proc, rank.namespace_pid, settings)


def _among_open_files(proc: Path, namespace_pid: int) -> Path | None:
    ending = f"-pid{namespace_pid}."
    try:
        with os.scandir(proc / "fd") as entries:
            for entry in entries:
                try:
                    target = os.readlink(entry.path)
                except OSError:
                    continue
                # Of most files the name's end tells at once that it is another one.
                if ending in target and _is_own(Path(target.removesuffix(" (deleted)")).name, namespace_pid):
                    return Path(entry.path)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ESRCH}:
            return None
        raise _unreadable(error, f"the open files of process {proc.name}") from error
    return None


def _is_own(name: str, namespace_pid: int) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and int(match["pid"]) == namespace_pid


def _in_folder(proc: Path, namespace_pid: int, settings: Settings) -> Path | None:
    given = settings.folder
    folder = proc / "root" / given.lstrip("/") if given.startswith("/") else proc / "cwd" / given
    found: dict[str, Path] = {}
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(FOLDER_ENTRIES_MAX), entries, strict=False):
                if _is_own(entry.name, namespace_pid):
                    found[entry.name.rpartition("-pid")[0]] = Path(entry.path)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ESRCH}:
            return None
        raise _unreadable(error, f"the folder {given} of process {proc.name}") from error
    # On a file system that nodes share, other hosts have processes of the same number.
    for host in (settings.values.get("HOSTNAME", ""), socket.gethostname()):
        if host in found:
            return found[host]
    return None


def _unreadable(error: OSError, what: str) -> Unreadable:
    return Unreadable(f"{what} cannot be read ({error.strerror})")


@dataclass(slots=True)
class Chunk:
    """Some bytes of a file; is_new says that they do not continue the last ones, is_cut that they begin in a line."""

    content: bytes
    is_new: bool = False
    is_cut: bool = False


@dataclass(slots=True)
class Tail:
    """One file, read on from `offset`; it is held open, so that it can be read to its end when it has been renamed."""

    path: Path
    offset: int = 0
    n_skipped: int = 0  # bytes
    identity: tuple[int, int] = (0, 0)  # device and inode
    _descriptor: int = -1
    _is_new: bool = True
    _is_cut: bool = False

    def open(self, known: Mapping[tuple[int, int], int]) -> bool:
        """Begin at the line that `known` says, by identity, and return True; else at the file's begin, or near its end.

        Raises Unreadable, FileNotFoundError.
        """
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unreadable(error, str(self.path)) from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise Unreadable(f"{self.path} is not a regular file")
        self.identity = status.st_dev, status.st_ino
        offset = known.get(self.identity, -1)
        if 0 <= offset <= status.st_size:
            self.offset, self._is_new = offset, False
            return True
        self._leap(status.st_size)
        return False

    def read(self, n_bytes: int) -> Chunk | None:
        """Return what comes next, at most so much of it; None at the end. Raises Unreadable."""
        try:
            size = os.fstat(self._descriptor).st_size
            if size < self.offset:  # truncated: by its writer who begins anew, or by others under its writer
                self.offset, self._is_new, self._is_cut = 0, True, False
            if size - self.offset > BACKLOG_MAX:
                self.n_skipped += self._leap(size)
            if self.offset == 0 and size:
                # What was truncated under its writer begins with a hole.
                self.offset = os.lseek(self._descriptor, 0, os.SEEK_DATA)
                self._is_cut = self.offset > 0
            content = os.pread(self._descriptor, n_bytes, self.offset)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise _unreadable(error, str(self.path)) from error
        if not content:
            return None
        chunk = Chunk(content, is_new=self._is_new, is_cut=self._is_cut)
        self._is_new = self._is_cut = False
        self.offset += len(content)
        return chunk

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def catch_up(self) -> None:
        """Leave out all but the end of the file."""
        self.n_skipped += self._leap(os.fstat(self._descriptor).st_size)

    def _leap(self, size: int) -> int:
        n_bytes = size - TAIL_BYTES - self.offset
        if n_bytes <= 0:
            return 0
        self.offset, self._is_new, self._is_cut = size - TAIL_BYTES, True, True
        return n_bytes
