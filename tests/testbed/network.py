"""Network namespaces, one for each rank, joined by veth pairs to a bridge in a namespace of its own."""

import itertools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_numbers = itertools.count()


class Network:
    """Makes the namespaces on entry and removes them on exit. Needs root, and touches no network but its own.

    In a rank's namespace the interface is eth0; the bridge's port to rank N is called portN.
    """

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self._prefix = f"failslow-{os.getpid()}-{next(_numbers)}"
        self.switch = f"{self._prefix}-switch"

    def namespace(self, rank: int) -> str:
        """Return the name of a rank's namespace."""
        return f"{self._prefix}-rank{rank}"

    def namespace_file(self, rank: int) -> Path:
        """Return the file to enter a rank's namespace by."""
        return Path("/run/netns") / self.namespace(rank)

    def address(self, rank: int) -> str:
        """Return a rank's address."""
        return f"10.99.0.{rank + 1}"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _make(self) -> None:
        run("ip", "netns", "add", self.switch)
        for rank in range(self.n_ranks):
            run("ip", "netns", "add", self.namespace(rank))
        switch_side = ["link add bridge type bridge", "link set bridge up"]
        for rank in range(self.n_ranks):
            pair = f"link add port{rank} type veth peer name eth0 netns {self.namespace(rank)}"
            switch_side += [pair, f"link set port{rank} master bridge", f"link set port{rank} up"]
        run("ip", "-n", self.switch, "-batch", "-", said=switch_side)
        for rank in range(self.n_ranks):
            own_side = [f"addr add {self.address(rank)}/24 dev eth0", "link set eth0 up", "link set lo up"]
            run("ip", "-n", self.namespace(rank), "-batch", "-", said=own_side)

    def _remove(self) -> None:
        for name in (*map(self.namespace, range(self.n_ranks)), self.switch):
            if (Path("/run/netns") / name).exists():
                run("ip", "netns", "del", name)


def run(*command: str, said: Sequence[str] = ()) -> str:
    """Run a command, with lines on its standard input, and return what it says. Raises RuntimeError with its error."""
    text = "".join(f"{line}\n" for line in said)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
