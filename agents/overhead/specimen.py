"""Two copies of a library whose functions do nothing: one to be observed, and one to compare it with.

They are files in memory, so that nothing has to be cleaned up and no mount option forbids to run them. Short blocks of
calls to the one and to the other take turns, in an order drawn anew each time, and the CPU time of the calling thread
is what is compared: others on the machine disturb both alike, and their own time does not count.
"""

import _ctypes
import ctypes
import mmap
import os
import random
import time
from pathlib import Path
from typing import Final, Self

from agents.collector import NotAvailable
from agents.ebpf.libraries import Identity, Library
from agents.overhead.machine_code import MachineCode, own
from agents.overhead.shared_object import shared_object

FUNCTIONS: Final = (
    "ncclAllReduce",
    "ncclGroupStart",
    "ncclGroupEnd",
    "cudaStreamSynchronize",
    "cudaLaunchKernel",
)
CACHE_BYTES_DEFAULT: Final = 1 << 20
_L2: Final = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")


class Specimen:
    """Calls to functions that cost a nanosecond by themselves."""

    def __init__(self) -> None:
        """Make both copies. Raises NotAvailable."""
        self.code = machine_code()
        self._random = random.Random(23)
        image = shared_object(self.code.elf_machine, *_laid_out(self.code))
        self.plain_fd, self._observed_fd = (_in_memory(image) for _ in range(2))
        self._plain, self._observed = (load(fd) for fd in (self.plain_fd, self._observed_fd))
        self._call = self._plain.call
        self._call.argtypes, self._call.restype = [ctypes.c_uint64] * 6, None
        self.cache_bytes = _cache_bytes()
        self._memory = mmap.mmap(-1, self.cache_bytes)
        self._buffer = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def library(self) -> Library:
        """The copy to be observed, NCCL and CUDA's runtime in one file."""
        stat = os.fstat(self._observed_fd)
        identity = Identity(stat.st_ino, stat.st_size, stat.st_mtime_ns, None)
        return Library(path_of(self._observed_fd), identity, "nccl-static", (os.getpid(),), "the functions to measure")

    def difference_ns(self, first: str, second: str, n: int, *, step: int = 0, cold: bool = False) -> float:
        """Return what being observed adds to one call, from a block of n calls to first and second in turn.

        With a `step` every call has another count than the one before. `cold`: before each call, as much memory is
        written as the processor's own caches hold.
        """
        copies = [self._observed, self._plain]
        took_ns = {}
        for copy in self._random.sample(copies, 2):
            addresses = [ctypes.cast(getattr(copy, name), ctypes.c_void_p).value for name in (first, second)]
            before_ns = time.thread_time_ns()
            self._call(*addresses, n, step, self._buffer, self.cache_bytes if cold else 0)
            took_ns[copy] = time.thread_time_ns() - before_ns
        return (took_ns[self._observed] - took_ns[self._plain]) / n

    def close(self) -> None:
        """Unload both, so that the loader does not take the next file of the same name for one of them."""
        for fd, copy in ((self.plain_fd, self._plain), (self._observed_fd, self._observed)):
            _ctypes.dlclose(copy._handle)  # noqa: SLF001 (ctypes has no public way to unload)
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def machine_code() -> MachineCode:
    """Return what runs on this machine. Raises NotAvailable."""
    code = own()
    if code is None:
        raise NotAvailable(
            f"the functions to measure are not written for this processor ({os.uname().machine})",
            "measure on x86-64 or aarch64",
        )
    return code


def load(fd: int) -> ctypes.CDLL:
    """Load a copy by its descriptor, which a child may have inherited. Raises NotAvailable."""
    try:
        return ctypes.CDLL(path_of(fd))
    except OSError as error:
        raise NotAvailable(f"a library in memory cannot be loaded ({error})", "set vm.memfd_noexec to 0") from error


def path_of(fd: int) -> str:
    """Return a name for an open file."""
    return f"/proc/self/fd/{fd}"


def _laid_out(code: MachineCode) -> tuple[bytes, dict[str, int]]:
    """Return the text with one copy of the probed function for each name, and where everything is."""
    text = code.text + bytes(-len(code.text) % 16)
    places = {"call": code.call, "pass_on": code.pass_on}
    for name in FUNCTIONS:
        places[name] = len(text)
        text += code.text[: code.call]
    return text, places


def _in_memory(image: bytes) -> int:
    fd = os.memfd_create("failslow-bench")
    os.write(fd, image)
    return fd


def _cache_bytes() -> int:
    """Return the size of a processor's own caches; a usual one where the kernel does not say."""
    try:
        return int(_L2.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return CACHE_BYTES_DEFAULT
