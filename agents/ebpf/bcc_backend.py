"""Compiles and loads programs by bcc, as distributions package it; the only module that imports it.

bcc is not on PyPI (what is there under its name is another project), and a virtual environment does not see the
distribution's packages, so that one package is loaded from where distributions put it.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agents.collector import NotAvailable
from agents.ebpf import bpf_call as call
from agents.ebpf.backend import HEADERS
from agents.ebpf.bpf_call import Program
from agents.ebpf.probes import UPROBE_MULTI

INSTALL = "install it with `apt install python3-bpfcc` (Debian, Ubuntu) or `dnf install python3-bcc` (Fedora, RHEL)"
_PLACES = ("/usr/lib/python3/dist-packages", "/usr/lib/python3*/site-packages", "/usr/lib/python3*/dist-packages")
_MAP_CALL = re.compile(r"\b(LOOKUP|UPDATE|DELETE|OUTPUT)\((\w+), ")
_BCC_NAMES = {"LOOKUP": "lookup", "UPDATE": "update", "DELETE": "delete", "OUTPUT": "ringbuf_output"}
_BPF_PROG_TYPE_KPROBE = 2  # uprobes are of this type too
_LOG_BYTES = 1 << 24
_MESSAGE_MAX = 500
_compiling = threading.Lock()  # the headers' place goes through the environment, which all threads share


def import_bcc() -> ModuleType:
    """Return the distribution's bcc. Raises NotAvailable."""
    loaded = sys.modules.get("bcc")
    if loaded is not None and hasattr(loaded, "BPF"):
        return loaded
    found = [path for place in _PLACES for path in sorted(Path("/").glob(f"{place[1:]}/bcc/__init__.py"))]
    if not found:
        raise NotAvailable("the Python package of bcc is not installed", INSTALL)
    path = found[0]
    spec = importlib.util.spec_from_file_location("bcc", path, submodule_search_locations=[str(path.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its regular expressions are not raw strings
            spec.loader.exec_module(module)
    except Exception as error:
        for name in [name for name in sys.modules if name == "bcc" or name.startswith("bcc.")]:
            del sys.modules[name]
        raise NotAvailable(f"bcc at {path.parent} cannot be loaded ({error})", f"repair it, or {INSTALL}") from error
    if not hasattr(module, "BPF"):
        del sys.modules["bcc"]
        raise NotAvailable(f"{path.parent} is not the BPF Compiler Collection", INSTALL)
    return module


def to_bcc(source: str) -> str:
    """Return our portable C with its map functions spelled in bcc's way."""
    return _MAP_CALL.sub(lambda found: f"{found[2]}.{_BCC_NAMES[found[1]]}(", source)


def _load(bcc: ModuleType, bpf: Any, name: str) -> int:
    """Load a compiled program for links of uprobes, which bcc itself does not know. Raises OSError."""
    start = ctypes.cast(bcc.lib.bpf_function_start(bpf.module, name.encode()), ctypes.c_void_p)
    size = bcc.lib.bpf_function_size(bpf.module, name.encode())
    license_ = ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(_LOG_BYTES)
    attributes = Program(
        type=_BPF_PROG_TYPE_KPROBE,
        n_instructions=size // 8,
        instructions=start.value,
        license=ctypes.addressof(license_),
        name=name.encode()[:15],
        attach_type=UPROBE_MULTI,
    )
    try:
        return call.bpf(call.PROG_LOAD, attributes)
    except OSError as error:
        attributes.log_level, attributes.log_bytes, attributes.log = 1, _LOG_BYTES, ctypes.addressof(log)
        with contextlib.suppress(OSError):
            os.close(call.bpf(call.PROG_LOAD, attributes))
        reasons = log.value.decode(errors="replace").strip().splitlines()[-4:]
        raise OSError(error.errno, f"{name}: {error.strerror}: {' / '.join(reasons)}") from None


class BccBackend:
    """Programs compiled at load time."""

    name = "bcc"

    def __init__(self) -> None:
        self._bpf: Any = None
        self._program_fds: dict[str, int] = {}
        self._own_fds: list[int] = []  # that bcc knows nothing of

    def load(self, source: Path, defines: Sequence[str], programs: Sequence[str]) -> None:
        """Compile and load. Raises NotAvailable."""
        bcc = import_bcc()
        text = "#define FAILSLOW_BCC\n" + to_bcc(source.read_text())
        flags = [f"-D{define}" for define in (*defines, f"PAGE_BYTES={os.sysconf('SC_PAGESIZE')}")]
        with _compiling:
            before = os.environ.get("BCC_KERNEL_SOURCE")
            os.environ["BCC_KERNEL_SOURCE"] = str(HEADERS)
            try:
                self._bpf = bcc.BPF(text=text.encode(), cflags=[*flags, "-Wno-macro-redefined"])
                for name in programs:
                    self._program_fds[name] = _load(bcc, self._bpf, name)
                    self._own_fds.append(self._program_fds[name])
            except Exception as error:
                self.close()
                raise NotAvailable(
                    f"bcc could not load {source.name} ({str(error)[-_MESSAGE_MAX:]})",
                    "it says why; a kernel of 5.12 or later with CONFIG_BPF_SYSCALL and CONFIG_BPF_JIT is needed",
                ) from error
            finally:
                if before is None:
                    del os.environ["BCC_KERNEL_SOURCE"]
                else:
                    os.environ["BCC_KERNEL_SOURCE"] = before
        # The compiler has taken some 50 MB, most of which is free by now.
        ctypes.CDLL(None).malloc_trim(0)

    def program_fd(self, name: str) -> int:
        """Return the file descriptor of a loaded program."""
        return self._program_fds[name]

    def map_fd(self, name: str) -> int:
        """Return the file descriptor of a map."""
        return int(self._bpf[name.encode()].map_fd)

    def close(self) -> None:
        """Unload."""
        bpf, self._bpf = self._bpf, None
        self._program_fds = {}
        while self._own_fds:
            os.close(self._own_fds.pop())
        if bpf is not None:
            bpf.cleanup()
