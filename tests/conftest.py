"""What all tests share: where the recordings are, and seeds that are said and repeat."""

import os
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("FAILSLOW_DATA", REPOSITORY.parent / "shared" / "data"))

# The same examples in every run, so that a failure repeats; "explore" looks for new ones.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=1009, deadline=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeat")
hypothesis.settings.load_profile(PROFILE)


def pytest_report_header() -> list[str]:
    """Say what a run depends on beside the code."""
    found = "found" if DATA.is_dir() else "missing"
    return [f"recordings: {DATA} ({found}; FAILSLOW_DATA names another folder)", f"hypothesis profile: {PROFILE}"]


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of real recordings; without it a test is skipped on a person's machine and fails in CI."""
    if not DATA.is_dir():
        reason = f"no recordings at {DATA}: set FAILSLOW_DATA to the folder that holds them"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return DATA
