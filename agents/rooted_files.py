"""Reads files by the names that a process has for them, which may be chosen by whoever runs it.

A name is followed within the process's own root: a link there that begins with "/" means that root, not the agent's,
and ".." ends at it. Only regular files are opened, so that no pipe blocks the agent and no device does anything.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

_LINKS_MAX = 40  # as many as Linux follows
_STEPS_MAX = 1000


def read_below(root: Path, name: str, bytes_max: int) -> bytes:
    """Return the first bytes of a file, named from `root`. Raises OSError, for what is no regular file as well."""
    with contextlib.ExitStack() as opened:
        place = _walk(root, name, opened)
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        descriptor = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        return os.read(descriptor, bytes_max)


def _walk(root: Path, name: str, opened: contextlib.ExitStack) -> int:
    """Return what names a file without having it open for reading; `opened` closes it."""

    def enter(path: Path | str, flags: int, folder: int | None = None) -> int:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | flags, dir_fd=folder)
        opened.callback(os.close, descriptor)
        return descriptor

    above = [enter(root, os.O_DIRECTORY)]
    ahead = name.split("/")[::-1]
    n_links = 0
    for _ in range(_STEPS_MAX):
        if not ahead:
            return above[-1]
        part = ahead.pop()
        if part in {"", "."}:
            continue
        if part == "..":
            del above[max(1, len(above) - 1) :]
            continue
        found = enter(part, os.O_NOFOLLOW, above[-1])
        if not stat.S_ISLNK(os.fstat(found).st_mode):
            above.append(found)
            continue
        n_links += 1
        if n_links > _LINKS_MAX:
            break
        target = os.readlink("", dir_fd=found)
        ahead += target.split("/")[::-1]
        if target.startswith("/"):
            del above[1:]
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
