"""A control group of its own for the threads of a rank, under version 1 or 2 of the kernel's interface.

The threads that stand for the GPU stay where they are: a GPU is not slowed down by what slows its host.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GPU_THREAD = "stub-gpu"
_MOUNTS = Path("/proc/self/mounts")
_numbers = itertools.count()


class NoController(RuntimeError):
    """The kernel or the container offers no such controller; the message says where it was looked for."""


def host_threads(pid: int) -> list[int]:
    """Return the threads of a rank that do not stand for its GPU."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(thread.name) for thread in threads if (thread / "comm").read_text().strip() != GPU_THREAD]


@contextmanager
def group(controller: str, pid: int) -> Iterator[tuple[Path, bool]]:
    """Make a group with a controller and move a rank into it: its folder, and whether it is of version 2.

    A rank that is in one of these already stays there.
    """
    parent, is_v2 = _mount_of(controller)
    present = _current(parent, controller, pid)
    if present.name.startswith(f"failslow-{os.getpid()}-"):
        yield present, is_v2
        return
    folder = parent / f"failslow-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    try:
        _move(folder, pid, is_v2=is_v2)
        try:
            yield folder, is_v2
        finally:
            if Path(f"/proc/{pid}/task").exists():
                _move(present, pid, is_v2=is_v2)
    finally:
        folder.rmdir()


def _mount_of(controller: str) -> tuple[Path, bool]:
    """Return where a controller's groups are made, and whether that is version 2. Raises NoController."""
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    for _, path, kind, options, *_ in mounts:
        if kind == "cgroup" and controller in options.split(","):
            return Path(path), False
    name = {"blkio": "io"}.get(controller, controller)
    for _, path, kind, *_ in mounts:
        if kind == "cgroup2" and name in (Path(path) / "cgroup.controllers").read_text().split():
            (Path(path) / "cgroup.subtree_control").write_text(f"+{name}")
            return Path(path), True
    raise NoController(f"no cgroup controller {controller} (of version 1 or 2) in {_MOUNTS}")


def _current(parent: Path, controller: str, pid: int) -> Path:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(",") or not names:
            return parent / path.lstrip("/")
    return parent


def _move(folder: Path, pid: int, *, is_v2: bool) -> None:
    if is_v2:
        (folder / "cgroup.procs").write_text(str(pid))  # real-time threads are not throttled there
        return
    for thread in host_threads(pid):
        (folder / "tasks").write_text(str(thread))
