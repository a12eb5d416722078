"""What all tests share: where the recordings are, and seeds that are said and repeat."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("FAILSLOW_DATA", REPOSITORY.parent / "shared" / "data"))
COMPUTING = {"detectors", "pipeline", "quality", "schemas"}

# The same examples in every run, so that a failure repeats; "explore" looks for new ones.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=1009, deadline=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeat")
hypothesis.settings.load_profile(PROFILE)


def pytest_report_header() -> list[str]:
    """Say what a run depends on beside the code."""
    found = "found" if DATA.is_dir() else "missing"
    return [f"recordings: {DATA} ({found}; FAILSLOW_DATA names another folder)", f"hypothesis profile: {PROFILE}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what only computes: it is not disturbed by others that do the same, and there is much of it."""
    for item in items:
        folder = item.path.relative_to(REPOSITORY).parts[1]
        if folder in COMPUTING and not any(item.iter_markers("broker")) and not any(item.iter_markers("kernel")):
            item.add_marker("apart")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


def give_up(reason: str) -> NoReturn:
    """Skip on a person's machine, where something may be missing; fail in CI, where nothing may."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of real recordings."""
    if not DATA.is_dir():
        give_up(f"no recordings at {DATA}: set FAILSLOW_DATA to the folder that holds them")
    return DATA


@pytest.fixture(scope="session")
def debian_tool() -> Callable[[str], str]:
    """Find a program that `make tools` brings, such as prometheus: its full path."""

    def find(name: str) -> str:
        found = shutil.which(name) or shutil.which(name, path=str(REPOSITORY / ".venv" / "debian" / "usr" / "bin"))
        return found or give_up(f"no {name}: `make tools` brings it")

    return find
