"""NVIDIA's own libnccl.so.2, from the wheels on PyPI; no GPU is needed to call it with invalid arguments."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NEWEST = "2.32.3"
OLDER = "2.21.5"  # as PyTorch 2.4 and 2.5 require
_MEMBER = "nvidia/nccl/lib/libnccl.so.2"


class NcclMissing(RuntimeError):
    """The wheel is not to be had; the message says why."""


def real_library(version: str) -> Path:
    """Return the library of a version, fetched once. Raises NcclMissing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "failslow"
    folder = cache / f"nccl-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            _fetch(version, Path(name))
            try:
                (Path(name) / "nccl").rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise somebody else was first
                    raise
    return folder / "libnccl.so.2"


def _fetch(version: str, folder: Path) -> None:
    wanted = f"nvidia-nccl-cu12=={version}"
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    said = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, wanted], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if said.returncode or not wheels:
        raise NcclMissing(f"pip could not download {wanted}:\n{said.stderr[-2000:]}")
    (folder / "nccl").mkdir()
    target = folder / "nccl" / "libnccl.so.2"
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_MEMBER) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
