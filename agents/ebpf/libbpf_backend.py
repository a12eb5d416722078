"""Loads programs by libbpf, from an object that clang makes beforehand: no compiler inside the agent's process.

It takes a sixth of the memory that bcc does. It needs libbpf 1 and clang on the node.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.collector import NotAvailable
from agents.ebpf.backend import HEADERS
from agents.ebpf.probes import UPROBE_MULTI

_LIBRARY = "libbpf.so.1"
_TARGETS = {"x86_64": "x86", "aarch64": "arm64"}
_MESSAGE_MAX = 500
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "libbpf_set_print": (ctypes.c_void_p, [ctypes.c_void_p]),
    "bpf_object__open_file": (ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_void_p]),
    "bpf_object__next_program": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
    "bpf_object__load": (ctypes.c_int, [ctypes.c_void_p]),
    "bpf_object__close": (None, [ctypes.c_void_p]),
    "bpf_object__find_map_fd_by_name": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]),
    "bpf_program__name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "bpf_program__fd": (ctypes.c_int, [ctypes.c_void_p]),
    "bpf_program__set_autoload": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_bool]),
    "bpf_program__set_expected_attach_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
}


class LibbpfBackend:
    """Programs compiled by clang, loaded by libbpf."""

    name = "libbpf"

    def __init__(self) -> None:
        self._libbpf: Any = None
        self._object: int | None = None
        self._programs: dict[str, int] = {}

    def load(self, source: Path, defines: Sequence[str], programs: Sequence[str]) -> None:
        """Compile and load. Raises NotAvailable."""
        self._libbpf = _load_library()
        with tempfile.TemporaryDirectory(prefix="failslow-") as folder:
            built = Path(folder) / "programs.o"
            _compile(source, defines, built)
            self._object = self._libbpf.bpf_object__open_file(os.fsencode(built), None)
            if not self._object:
                raise NotAvailable(f"libbpf cannot read what clang made of {source.name}", "install a newer libbpf1")
            try:
                self._load(source, programs)
            except NotAvailable:
                self.close()
                raise

    def program_fd(self, name: str) -> int:
        """Return the file descriptor of a loaded program."""
        return int(self._libbpf.bpf_program__fd(self._programs[name]))

    def map_fd(self, name: str) -> int:
        """Return the file descriptor of a map."""
        return int(self._libbpf.bpf_object__find_map_fd_by_name(self._object, name.encode()))

    def close(self) -> None:
        """Unload."""
        loaded, self._object = self._object, None
        self._programs = {}
        if loaded is not None:
            self._libbpf.bpf_object__close(loaded)

    def _load(self, source: Path, programs: Sequence[str]) -> None:
        program = self._libbpf.bpf_object__next_program(self._object, None)
        while program:
            name = self._libbpf.bpf_program__name(program).decode()
            self._libbpf.bpf_program__set_autoload(program, name in programs)
            self._libbpf.bpf_program__set_expected_attach_type(program, UPROBE_MULTI)
            self._programs[name] = program
            program = self._libbpf.bpf_object__next_program(self._object, program)
        error = self._libbpf.bpf_object__load(self._object)
        if error:
            raise NotAvailable(
                f"the kernel refuses {source.name} ({os.strerror(-error)})",
                "a kernel of 5.12 or later with CONFIG_BPF_SYSCALL and CONFIG_BPF_JIT is needed",
            )


def _load_library() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NotAvailable(f"{_LIBRARY} is not installed ({error})", "install it with `apt install libbpf1`") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.libbpf_set_print(None)  # it would write to standard error
    return library


def _compile(source: Path, defines: Sequence[str], built: Path) -> None:
    clang = shutil.which("clang")
    if clang is None:
        raise NotAvailable("there is no clang", "install it with `apt install clang`, or use bcc")
    own = [f"-D{define}" for define in (*defines, f"__TARGET_ARCH_{_TARGETS[os.uname().machine]}")]
    options = ["-g", "-O2", "-Wall", "-mcpu=v3", "-target", "bpf", "-I", str(HEADERS / "include")]
    said = subprocess.run(  # noqa: S603 (our own source)
        [clang, *options, *own, "-c", str(source), "-o", str(built)], capture_output=True, text=True, check=False
    )
    if said.returncode:
        raise NotAvailable(
            f"clang cannot compile {source.name} ({said.stderr.strip()[-_MESSAGE_MAX:]})", "use clang 14 or later"
        )
