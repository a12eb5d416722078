"""Finds the libraries that processes really have mapped: their own copies, through their own mount namespaces.

A training process loads NCCL from a wheel in some virtual environment, maybe in a container, so that no search path
tells where it is; /proc/PID/maps does. One file may be reached on many ways (every container of an image maps the same
one), and is known by what it is.

A probe belongs to one inode of the kernel's, so that equal files on two file systems (a copy in each job's tmpfs, one
squashfs image that each job mounts for itself) are two libraries. Overlayfs is the exception: each container has a
mount of its own, with a device number of its own, over the layers of its image, and a probe by way of one mount works
in all that share the layer. There the device says nothing, and two images that happen to have equal inodes, sizes,
times and builds of NCCL on different file systems below are taken for one.

A file that some processes use through an overlay and others directly is probed twice, and its programs run twice at
each call. With return probes the second finds nothing left to do, except that it counts launches again and takes groups
for one deeper; without return probes, calls and the making of communicators are counted twice.
"""

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.collector import Limit
from agents.ebpf.symbols import NotALibrary, Unreadable, read_image

# A library that has NCCL in it, as custom builds of frameworks do, is at least as large as NCCL's code for GPUs.
STATIC_BYTES_MIN = 32 << 20
_KNOWN_MAX = 4096
_TELLTALES = ("ncclAllReduce", "cudaStreamSynchronize")
_OVERLAYFS = 0x794C7630  # OVERLAYFS_SUPER_MAGIC of linux/magic.h

_libc = ctypes.CDLL(None, use_errno=True)


class Identity(NamedTuple):
    """What makes a file one inode of the kernel's, whatever it is called."""

    inode: int
    size: int
    mtime_ns: int
    build_id: str | None
    device: int = 0  # 0: of a layer that any number of overlay mounts share


@dataclass(frozen=True, slots=True)
class Library:
    """A file with functions to observe."""

    path: str  # by which the agent can open it now, as through /proc/PID/root
    identity: Identity
    kind: str  # nccl, cudart, or nccl-static for NCCL within another file
    pids: tuple[int, ...] = ()  # of the processes asked about, those that have it mapped
    name: str = ""  # path as the process sees it, for people


class _Key(NamedTuple):
    """What is known of a file before it is looked into."""

    inode: int
    size: int
    mtime_ns: int
    device: int


class _Mapping(NamedTuple):
    range: str
    inode: int
    path: str


@dataclass(slots=True)
class LibraryFinder:
    """Looks at processes, and remembers the files that it has looked into."""

    limits: list[Limit] = field(default_factory=list)  # of the latest look
    _known: dict[_Key, tuple[str | None, str | None]] = field(default_factory=dict)

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
        key = _key(path, stat)
        own_kind, build_id = self._judge(path, key, kind)
        if own_kind is None:
            return None
        return path, _identity(key, build_id), own_kind, name

    def _judge(self, path: str, key: _Key, kind: str | None) -> tuple[str | None, str | None]:
        if key in self._known:
            return self._known[key]
        judged: tuple[str | None, str | None] = (None, None)
        try:
            image = read_image(path, _TELLTALES)
        except Unreadable as error:
            # Of a process that ended meanwhile, too many open files, a disk that failed: not known, so asked again.
            if kind is not None and not isinstance(error.__cause__, FileNotFoundError | ProcessLookupError):
                self._limit(path, str(error), "see whether the agent has too many open files, or the disk fails")
            return judged
        except NotALibrary as error:
            if kind is not None:
                self._limit(path, str(error), "replace the file")
        else:
            inside = "nccl-static" if _TELLTALES[0] in image.symbols else None
            inside = inside or ("cudart" if _TELLTALES[1] in image.symbols else None)
            judged = kind or inside, image.build_id
        if len(self._known) >= _KNOWN_MAX:
            self._known.pop(next(iter(self._known)))
        self._known[key] = judged
        return judged

    def _limit(self, what: str, why: str, remedy: str) -> None:
        self.limits.append(Limit(what, why, remedy))


def find_libraries(pids: Iterable[int]) -> dict[int, list[Library]]:
    """Look once, without memory; LibraryFinder says what could not be read."""
    return LibraryFinder().find(pids)


def identify(path: str, build_id: str | None) -> Identity:
    """Return what makes a file itself, as `find_libraries` would. Raises OSError."""
    return _identity(_key(path, os.stat(path)), build_id)


def _key(path: str, stat: os.stat_result) -> _Key:
    device = 0 if _is_on_overlay(path) else stat.st_dev
    return _Key(stat.st_ino, stat.st_size, stat.st_mtime_ns, device)


def _identity(key: _Key, build_id: str | None) -> Identity:
    return Identity(key.inode, key.size, key.mtime_ns, build_id, key.device)


def _is_on_overlay(path: str) -> bool:
    """Ask for the type of a file's file system, which no function of `os` tells; where it is not told, it is none."""
    # struct statfs begins with f_type, as wide as a register, and has 120 bytes.
    answer = (ctypes.c_long * 32)()
    return _libc.statfs(os.fsencode(path), answer) == 0 and answer[0] == _OVERLAYFS


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
