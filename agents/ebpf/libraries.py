"""Finds the libraries that processes really have mapped: their own copies, through their own mount namespaces.

A training process loads NCCL from a wheel in some virtual environment, maybe in a container, so that no search path
tells where it is; /proc/PID/maps does. One file may be reached on many ways (every container of an image maps the same
one), and is known by what it is.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.collector import Limit
from agents.ebpf.symbols import NotALibrary, read_image

# A library that has NCCL in it, as custom builds of frameworks do, is at least as large as NCCL's code for GPUs.
STATIC_BYTES_MIN = 32 << 20
_KNOWN_MAX = 4096
_TELLTALES = ("ncclAllReduce", "cudaStreamSynchronize")


class Identity(NamedTuple):
    """What makes a file itself, whatever it is called and wherever it is mounted."""

    inode: int
    size: int
    mtime_ns: int
    build_id: str | None


@dataclass(frozen=True, slots=True)
class Library:
    """A file with functions to observe."""

    path: str  # by which the agent can open it now, as through /proc/PID/root
    identity: Identity
    kind: str  # nccl, cudart, or nccl-static for NCCL within another file
    pids: tuple[int, ...] = ()  # of the processes asked about, those that have it mapped
    name: str = ""  # path as the process sees it, for people


class _Mapping(NamedTuple):
    range: str
    inode: int
    path: str


@dataclass(slots=True)
class LibraryFinder:
    """Looks at processes, and remembers the files that it has looked into."""

    limits: list[Limit] = field(default_factory=list)  # of the latest look
    _known: dict[tuple[int, int, int], tuple[str | None, str | None]] = field(default_factory=dict)

    def find(self, pids: Iterable[int]) -> dict[int, list[Library]]:
        """Return the libraries of each process that can be read; `limits` says what could not be."""
        self.limits = []
        found: dict[int, list[tuple[str, Identity, str, str]]] = {}
        owners: dict[Identity, list[int]] = {}
        for pid in pids:
            mappings = self._mappings(pid)
            if mappings is None:
                continue
            found[pid] = [file for mapping in mappings if (file := self._look(pid, mapping)) is not None]
            for _, identity, _, _ in found[pid]:
                owners.setdefault(identity, []).append(pid)
        return {
            pid: [Library(path, identity, kind, tuple(owners[identity]), name) for path, identity, kind, name in files]
            for pid, files in found.items()
        }

    def _mappings(self, pid: int) -> list[_Mapping] | None:
        """Return a process's files with code, each once; None for a process that has ended."""
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
                lines = [line.rstrip("\n").split(maxsplit=5) for line in file]
        except (FileNotFoundError, ProcessLookupError):
            return None
        except OSError as error:
            self._limit(f"libraries of process {pid}", str(error), "run the agent as root, or with CAP_SYS_PTRACE")
            return None
        with_code = (line for line in lines if len(line) == 6 and "x" in line[1] and line[5].startswith("/"))
        return list({line[4]: _Mapping(line[0], int(line[4]), line[5]) for line in with_code}.values())

    def _look(self, pid: int, mapping: _Mapping) -> tuple[str, Identity, str, str] | None:
        name = mapping.path.removesuffix(" (deleted)")
        base = os.path.basename(name)
        kind = "nccl" if base.startswith("libnccl.so") else "cudart" if base.startswith("libcudart.so") else None
        try:
            path, stat = _open_path(pid, mapping)
            if kind is None and stat.st_size < STATIC_BYTES_MIN and not _is_executable(pid, stat):
                return None
        except (FileNotFoundError, ProcessLookupError):
            if kind is not None and os.path.exists(f"/proc/{pid}"):
                self._limit(f"{name} of process {pid}", "it was replaced while in use", "restart the process")
            return None
        except OSError as error:
            if kind is not None:
                self._limit(
                    f"{name} of process {pid}",
                    str(error),
                    "run the agent as root, or with CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE",
                )
            return None
        own_kind, build_id = self._judge(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns), kind)
        if own_kind is None:
            return None
        return path, Identity(stat.st_ino, stat.st_size, stat.st_mtime_ns, build_id), own_kind, name

    def _judge(self, path: str, key: tuple[int, int, int], kind: str | None) -> tuple[str | None, str | None]:
        if key not in self._known:
            if len(self._known) >= _KNOWN_MAX:
                self._known.pop(next(iter(self._known)))
            try:
                image = read_image(path, _TELLTALES)
            except NotALibrary as error:
                if kind is not None:
                    self._limit(path, str(error), "replace the file")
                self._known[key] = (None, None)
            else:
                inside = "nccl-static" if _TELLTALES[0] in image.symbols else None
                inside = inside or ("cudart" if _TELLTALES[1] in image.symbols else None)
                self._known[key] = (kind or inside, image.build_id)
        return self._known[key]

    def _limit(self, what: str, why: str, remedy: str) -> None:
        self.limits.append(Limit(what, why, remedy))


def find_libraries(pids: Iterable[int]) -> dict[int, list[Library]]:
    """Look once, without memory; LibraryFinder says what could not be read."""
    return LibraryFinder().find(pids)


def _open_path(pid: int, mapping: _Mapping) -> tuple[str, os.stat_result]:
    """Return a way to the very file that is mapped: by its name, unless another file has that name by now."""
    if not mapping.path.endswith(" (deleted)"):
        path = f"/proc/{pid}/root{mapping.path}"
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            pass
        else:
            if stat.st_ino == mapping.inode:
                return path, stat
    path = f"/proc/{pid}/map_files/{mapping.range}"
    return path, os.stat(path)


def _is_executable(pid: int, stat: os.stat_result) -> bool:
    return os.path.samestat(os.stat(f"/proc/{pid}/exe"), stat)
