"""Builds the stub libnvidia-ml.so.1 and writes the file that it answers from; stub_nvml.c lists the keys.

NVIDIA's own header, which declares every function that the stub defines, comes from PyPI and is kept in the cache.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "stub_nvml.c"
HEADER_PACKAGE = "nvidia-nvml-dev==13.5.37"
HEADER_SHA256 = "2b404c6e6e22d0098031a15352d888a3ab92238cad9980e962907795662c4be7"
LIBRARY = "libnvidia-ml.so.1"
STATE_VARIABLE = "STUB_NVML_STATE"
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}")

# An H100 at work. Values are NVML's: MHz, mW, percent, degrees Celsius; field 91 is the number of NVLinks.
HEALTHY: dict[str, str | int] = {
    "name": "NVIDIA H100 80GB HBM3",
    "clock.sm": 1950,
    "clock_max.sm": 1980,
    "reasons": 0,
    "temperature": 61,
    "power": 613_000,
    "power_limit": 700_000,
    "utilization": 97,
    "pcie_generation": 5,
    "pcie_width": 16,
    "pcie_replays": 0,
    "ecc_uncorrected": 0,
    "remapped": 0,
    "field91": 18,
    "field165": 1,  # state of NVLink 0
    **{f"field165.{link}": 1 for link in range(1, 18)},
    **{f"field{total}": 0 for total in (38, 45, 52, 59, 160)},
}


class StubMissing(RuntimeError):
    """The compiler or NVIDIA's header is not to be had; the message says what to do."""


def build(*, old: bool = False) -> Path:
    """Return the path of the library, built once per content; `old` leaves out what later drivers brought.

    Its folder holds nothing else, so it can stand in LD_LIBRARY_PATH. Raises StubMissing.
    """
    define = ("-DSTUB_OLD",) if old else ()
    recipe = "\0".join((HEADER_SHA256, *_FLAGS, *define)).encode() + SOURCE.read_bytes()
    folder = _cache() / f"nvml-stub-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if (folder / LIBRARY).exists():
        return folder / LIBRARY
    if shutil.which("cc") is None:
        raise StubMissing("no C compiler: install Debian's gcc and libc6-dev")
    include = f"-I{_header().parent}"
    with _placed(folder) as built:
        command = ["cc", *_FLAGS, *define, include, "-o", str(built / LIBRARY), str(SOURCE)]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile:\n{said.stderr}")
    return folder / LIBRARY


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "failslow"


def _header() -> Path:
    """Return NVIDIA's nvml.h, fetched once. Raises StubMissing."""
    folder = _cache() / f"nvml-header-{HEADER_SHA256[:12]}"
    if (folder / "nvml.h").exists():
        return folder / "nvml.h"
    with _placed(folder) as fetched:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(fetched), HEADER_PACKAGE]
        said = subprocess.run(pip, capture_output=True, text=True, check=False)
        if said.returncode:
            raise StubMissing(f"pip could not fetch {HEADER_PACKAGE}:\n{said.stderr[-2000:]}")
        (wheel,) = fetched.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/nvml.h"))
            content = archive.read(name)
        wheel.unlink()
        if hashlib.sha256(content).hexdigest() != HEADER_SHA256:
            raise StubMissing(f"nvml.h of {HEADER_PACKAGE} is not the file that it was")
        (fetched / "nvml.h").write_bytes(content)
    return folder / "nvml.h"


@contextmanager
def _placed(folder: Path) -> Iterator[Path]:
    """Give a new folder to fill, which then takes its place at once; of two runs at a time, one is first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        filled = Path(name) / "filled"
        filled.mkdir()
        yield filled
        try:
            filled.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


class StubState:
    """What the stub says, as a file that every change replaces at once.

    An owner is a GPU's number, "0.1" for its MIG device, or "*" for all GPUs and the library.
    """

    def __init__(self, path: Path, n_gpus: int = 0) -> None:
        self.path = path
        self._entries: dict[tuple[str, str], str] = {}
        self.put("*", count=n_gpus, **HEALTHY)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process that shall see this state."""
        return {STATE_VARIABLE: str(self.path)}

    def put(self, owner: int | str, **values: str | int) -> None:
        """Say something of an owner; two underscores in a name stand for a dot."""
        for key, value in values.items():
            self._entries[str(owner), key.replace("__", ".")] = str(value)
        self._write()

    def fail(self, owner: int | str, key: str, code: int) -> None:
        """Let the calls for a key, or those for "all", return this nvmlReturn_t."""
        self._entries[str(owner), key] = f"E{code}"
        self._write()

    def remove(self, owner: int | str, *keys: str) -> None:
        """Say no longer what was said of an owner."""
        for key in keys:
            self._entries.pop((str(owner), key), None)
        self._write()

    def _write(self) -> None:
        lines = [f"{owner} {key} {value}\n" for (owner, key), value in self._entries.items()]
        written = self.path.with_name(f"{self.path.name}.new")
        written.write_text("".join(lines))
        written.replace(self.path)
