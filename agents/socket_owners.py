"""Whose a socket is: the processes' lists of open files, read again only when there are new sockets."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents.collector import ProcessKey

SEARCH_S_MIN = 5.0  # between two searches of a process, which may have thousands of files
_PREFIX = "socket:["


@dataclass(slots=True)
class Owners:
    """Finds the owners of the sockets of one network namespace."""

    proc: Path
    refused: dict[ProcessKey, str] = field(default_factory=dict)  # processes whose files cannot be read, and why
    _inodes: dict[ProcessKey, frozenset[int]] = field(default_factory=dict)
    _searched_s: float = float("-inf")
    _seen: set[int] = field(default_factory=set)
    _has_new: bool = False

    def follow(self, keys: Sequence[ProcessKey], now_s: float) -> None:
        """Care for these processes and no others; search those that may have sockets that are not known yet."""
        is_due = self._has_new and now_s - self._searched_s >= SEARCH_S_MIN
        if is_due:
            self._has_new, self._searched_s = False, now_s
        self._inodes = {
            key: self._search(key) if is_due or key not in self._inodes else self._inodes[key] for key in keys
        }
        self.refused = {key: why for key, why in self.refused.items() if key in self._inodes}

    def by_inode(self) -> dict[int, ProcessKey]:
        """Return the owner of each socket; the first, where processes share one."""
        owners: dict[int, ProcessKey] = {}
        for key, inodes in self._inodes.items():
            for inode in inodes:
                owners.setdefault(inode, key)
        return owners

    def note(self, inodes: set[int]) -> None:
        """Take note of all sockets that are there."""
        self._has_new = self._has_new or not inodes <= self._seen
        self._seen = inodes

    def _search(self, key: ProcessKey) -> frozenset[int]:
        folder = self.proc / str(key.pid) / "fd"
        found = []
        try:
            for entry in os.scandir(folder):
                try:
                    target = os.readlink(entry.path)
                except OSError:
                    continue  # closed meanwhile
                if target.startswith(_PREFIX):
                    found.append(int(target[len(_PREFIX) : -1]))
        except FileNotFoundError:
            pass  # the process has ended
        except OSError as error:
            self.refused[key] = f"{folder}: {error.strerror}"
        else:
            self.refused.pop(key, None)
        return frozenset(found)
