"""Asks, before any training process is touched, whether return probes are safe on this kernel.

On x86-64 since Linux 6.11 a return probe makes the thread issue a system call of its own, and until that was repaired a
seccomp filter that did not expect it ended the process. So a child of ours gets such a filter and such a probe first.
"""

import select
import subprocess
import sys
from pathlib import Path

from agents.ebpf.probes import Prober, close_all
from agents.ebpf.symbols import NotALibrary, read_image

FUNCTION = "a64l"  # of the C library: hardly ever called, and only the child's is probed
TIMEOUT_S = 10.0
_CHILD = Path(__file__).with_name("selftest_child.py")


def are_return_probes_safe(prober: Prober, program_fd: int) -> bool:
    """Let a child under a seccomp filter return through a probe; False if it dies of that or cannot be asked."""
    try:
        started = subprocess.Popen(  # noqa: S603 (our own file)
            [sys.executable, "-I", "-S", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            close_fds=True,
        )
    except OSError:
        return False
    with started as child:
        try:
            return _ask(child, prober, program_fd)
        except (OSError, NotALibrary, subprocess.TimeoutExpired):
            return False
        finally:
            child.kill()


def _ask(child: "subprocess.Popen[bytes]", prober: Prober, program_fd: int) -> bool:
    assert child.stdin is not None
    assert child.stdout is not None
    if not select.select([child.stdout], [], [], TIMEOUT_S)[0]:
        return False
    library = child.stdout.readline().decode().strip()
    symbol = read_image(library, [FUNCTION]).symbols.get(FUNCTION) if library else None
    if symbol is None:
        return False
    probes = prober.attach(program_fd, library, [symbol.offset], is_return=True, pid=child.pid)
    try:
        child.stdin.write(b"go\n")
        child.stdin.close()
        return child.wait(TIMEOUT_S) == 0
    finally:
        close_all(probes)
