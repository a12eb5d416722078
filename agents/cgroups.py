"""The control groups of a process, version 1 and 2 alike: its CPU quota, and the pressure on its memory."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

UNIFIED = ""  # stands for version 2 where version 1 has the name of a controller


class Mount(NamedTuple):
    """One mounted hierarchy of groups."""

    folder: Path
    root: PurePosixPath  # the group that is mounted there; not "/" inside many containers


class Group(NamedTuple):
    """One group, as a folder below the top of its hierarchy."""

    folder: Path
    top: Path

    def and_above(self) -> Iterator[Path]:
        """Yield the folders of the group and of all those around it: a quota may be set on any of them."""
        folder = self.folder
        while folder != self.top:
            yield folder
            folder = folder.parent
        yield folder


def mounts(mountinfo: str) -> dict[str, Mount]:
    """Return the hierarchies by controller, from the text of /proc/self/mountinfo."""
    found: dict[str, Mount] = {}
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind not in {"cgroup", "cgroup2"}:
            continue
        root, folder = fields.split(" ")[3:5]
        names = options.rpartition(" ")[2].split(",") if kind == "cgroup" else [UNIFIED]
        for name in names:
            found.setdefault(name, Mount(Path(folder), PurePosixPath(root)))
    return found


def group(membership: str, controller: str, hierarchies: dict[str, Mount]) -> Group | None:
    """Return the group of a process, from the text of its /proc/PID/cgroup; None where it lies out of sight.

    Version 2 is meant where no version 1 hierarchy has the controller.
    """
    paths: dict[str, PurePosixPath] = {}
    for line in membership.splitlines():
        _, names, where = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), PurePosixPath(where))
    for name in (controller, UNIFIED):
        if name in hierarchies and name in paths:
            top, root = hierarchies[name]
            path = paths[name]
            if not path.is_relative_to(root) or ".." in path.parts:
                return None
            return Group(top / path.relative_to(root), top)
    return None


def throttled_s(folder: Path) -> float:
    """Return how long a group's own quota kept its threads off the CPUs, summed over CPUs; NaN where it is unknown."""
    try:
        text = (folder / "cpu.stat").read_text()
    except OSError:
        return float("nan")
    values = dict(line.split(" ", 1) for line in text.splitlines())
    if "throttled_usec" in values:
        return int(values["throttled_usec"]) / 1e6
    return int(values["throttled_time"]) / 1e9 if "throttled_time" in values else float("nan")


def stalled_s(pressure: Path) -> float:
    """Return for how long some thread waited, from a pressure file (PSI); NaN where the kernel does not count it."""
    try:
        text = pressure.read_text()
    except OSError:
        return float("nan")
    some = text.partition("some ")[2].partition("\n")[0]
    return int(some.rpartition("total=")[2]) / 1e6 if "total=" in some else float("nan")
