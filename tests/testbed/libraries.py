"""Builds the stub libnccl.so.2 and libcudart.so.12, once for each content of their sources."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NCCL_SOURCES = ("stub_nccl.c", "stub_nccl_wire.c", "stub_nccl_inspector.c")
_SOURCES = (*NCCL_SOURCES, "stub_nccl.h", "stub_cudart.c", "stub_cudart.h", "stub_cudart.map")
_FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")
# The real libraries' functions begin with a push, which uprobes emulate; anything else is single-stepped.
_FRAMES = ("-fno-omit-frame-pointer", "-fno-shrink-wrap", "-fno-schedule-insns2", "-fno-optimize-sibling-calls")
_PLAIN = (*_FRAMES, "-fcf-protection=none")
_BRANCH_PROTECTED = (*_FRAMES, "-fcf-protection=full")


class StubMissing(RuntimeError):
    """There is no compiler; the message says what to do."""


def build(*, branch_protected: bool = False) -> Path:
    """Return the folder that holds both libraries and nothing else.

    With `branch_protected` their functions begin with endbr64, as those of some distributions do. Raises StubMissing.
    """
    flags = (*_FLAGS, *(_BRANCH_PROTECTED if branch_protected else _PLAIN))
    recipe = hashlib.sha256("\0".join(flags).encode())
    for name in _SOURCES:
        recipe.update((HERE / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "failslow"
    folder = cache / f"nccl-stub-{recipe.hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    if shutil.which("cc") is None:
        raise StubMissing("no C compiler: install Debian's gcc and libc6-dev")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        built = Path(name) / "built"
        built.mkdir()
        _compile(built, flags)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise somebody else was first
                raise
    return folder


def _compile(folder: Path, flags: tuple[str, ...]) -> None:
    cuda = folder / "libcudart.so.12"
    version_script = f"-Wl,--version-script={HERE / 'stub_cudart.map'}"
    _run("cc", *flags, version_script, f"-Wl,-soname,{cuda.name}", "-o", str(cuda), str(HERE / "stub_cudart.c"))
    nccl = folder / "libnccl.so.2"
    sources = [str(HERE / name) for name in NCCL_SOURCES]
    linking = ("-fvisibility=hidden", f"-Wl,-soname,{nccl.name}", "-Wl,-rpath,$ORIGIN")
    _run("cc", *flags, *linking, "-o", str(nccl), *sources, str(cuda))


def _run(*command: str) -> None:
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{said.stderr}")
