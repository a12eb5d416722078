"""Looks at one process with all the privileges that it was started with, and prints what it saw.

Run as a program: confined.py PID, and the numbers of capabilities to do without. It says "ready" once all is attached,
and looks when it is told to go on.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.clock import Clock, _Timex
from agents.collector import NotAvailable
from agents.ebpf.bcc_backend import import_bcc
from agents.ebpf.libraries import LibraryFinder
from agents.ebpf.tracer import Tracer
from agents.host import HostCollector
from agents.host_programs import HostPrograms
from agents.socket_diag import SocketDiag

_CAPABILITY_VERSION_3 = 0x20080522


def tried(look: Callable[[], Any]) -> Any:
    """Return what a look finds, or the error's name."""
    try:
        return look()
    except (NotAvailable, OSError) as error:
        return type(error).__name__


def host() -> list[str]:
    """Return what of the host is not seen."""
    collector = HostCollector(clock=Clock(), programs=HostPrograms())
    collector.open()
    found = [limit.what for limit in collector.limits()]
    collector.close()
    return found


def connections(pid: int) -> bool:
    """Return whether the connections in a process's network namespace can be listed."""
    diag = SocketDiag(Path(f"/proc/{pid}/ns/net"))
    try:
        return len(list(diag.read(frozenset()))) >= 0
    finally:
        diag.close()


def give_away(capability: int) -> None:
    """Do without a capability from here on; Python itself may have needed it to be found."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of which the lower halves come first
    assert libc.capget(header, sets) == 0
    for place in range(3):
        sets[3 * (capability // 32) + place] &= ~(1 << capability % 32)
    assert libc.capset(header, sets) == 0


def main() -> None:
    """Look."""
    pid = int(sys.argv[1])
    import_bcc()  # and what it imports in its turn
    for capability in sys.argv[2:]:
        give_away(int(capability))
    if not os.access(sys.executable, os.X_OK):
        sys.executable = "/usr/bin/python3"  # for the self-test's child
    tracer = Tracer()
    found: dict[str, Any] = {"user": os.geteuid(), "tracer": tried(tracer.open)}
    finder = LibraryFinder()
    libraries = finder.find([pid]).get(pid, [])
    found["libraries"] = sorted(library.kind for library in libraries)
    if found["tracer"] is None:
        found["returns"] = tracer.has_return_probes
        found["attached"] = [limit.what for library in libraries for limit in tracer.attach(library)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    if found["tracer"] is None:
        tracer.close()
        records = tracer.take()
        found["calls"] = int(records.runs["count"][records.runs["tgid"] == pid].sum())
    found["environment"] = tried(lambda: len(Path(f"/proc/{pid}/environ").read_bytes()) > 0)
    found["host"] = tried(host)
    found["connections"] = tried(lambda: connections(pid))
    found["mapped file"] = tried(lambda: len([os.stat(e) for e in os.scandir(f"/proc/{pid}/map_files")]) > 0)
    found["clock"] = ctypes.CDLL(None).adjtimex(ctypes.byref(_Timex())) >= 0
    sys.stdout.write(repr(found) + "\n")


if __name__ == "__main__":
    main()
