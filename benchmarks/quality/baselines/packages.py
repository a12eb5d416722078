"""Packages that only baselines use: kept in a folder of their own, and put on the path only while they are imported.

One of them (bocd) installs a top-level package `tests`, which would hide ours; another (nvidia-resiliency-ext) asks for
torch, half a gigabyte that its scoring does not use. So they are installed without what they ask for beside numpy and
scipy, in a folder that the interpreter does not search by itself.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[3]
REMEDY = "`make baselines` installs it"


class Missing(Exception):
    """A package is not installed; the message says what installs it."""


def folder() -> Path:
    """Return where the group `baselines` is installed; FAILSLOW_BASELINES names another folder."""
    return Path(os.environ.get("FAILSLOW_BASELINES", REPOSITORY / ".venv" / "baselines"))


def load(module: str) -> ModuleType:
    """Import a module of the group, or of the environment. Raises Missing with the remedy."""
    path = str(folder())
    sys.path.append(path)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Missing(f"no package {error.name} for the baseline: {REMEDY}") from error
    finally:
        sys.path.remove(path)
