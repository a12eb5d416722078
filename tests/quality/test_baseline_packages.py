"""The published detectors are pinned in one place, said with a reason, and kept out of the main environment."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

LOCK = Path("benchmarks/quality/baselines/requirements.lock")
PIN = re.compile(r"^([\w-]+)==([\w.]+)", re.MULTILINE)


@pytest.fixture(scope="module")
def pinned(repository: Path) -> dict[str, str]:
    """Version of each package of the group `baselines`."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    found = {}
    for requirement in project["dependency-groups"]["baselines"]:
        name, separator, version = requirement.partition("==")
        assert separator, f"{requirement} has no exact version: a comparison holds for one release"
        found[name] = version
    return found


def test_the_lock_holds_the_group_and_nothing_that_it_asks_for(repository: Path, pinned: dict[str, str]) -> None:
    text = (repository / LOCK).read_text()
    assert dict(PIN.findall(text)) == pinned, "pyproject.toml and the lock differ: `make lock` renews it"
    for paragraph in re.split(r"^(?=[\w-]+==)", text, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in paragraph


def test_the_main_environment_knows_none_of_them(repository: Path, pinned: dict[str, str]) -> None:
    locked = {name.lower() for name, _ in PIN.findall((repository / "requirements.lock").read_text())}
    installed = {str(one.metadata["Name"]).lower() for one in metadata.distributions()}
    assert set(pinned) & (locked | installed) == set()


def test_every_baseline_has_its_version_and_reason_in_the_decision(repository: Path, pinned: dict[str, str]) -> None:
    text = (repository / "docs" / "decisions" / "0002-dependencies.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` ([\d.]+) \| [^|]+ \|$", text, flags=re.MULTILINE))
    assert rows == pinned
