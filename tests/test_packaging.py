"""The four plain package names are ours, and an installed distribution brings them and both commands.

Why plain names at the top level: docs/decisions/0001-plain-top-level-packages.md.
"""

import importlib
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

PACKAGES = ("agents", "detectors", "pipeline", "schemas")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_name_is_imported_from_this_checkout(package: str, repository: Path) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == repository / package / "__init__.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_ships_a_package_of_our_name(package: str) -> None:
    # An editable installation may list no files of its own; any other owner is a clash.
    owners = {
        distribution.metadata["Name"]
        for distribution in metadata.distributions()
        for file in distribution.files or ()
        if file.parts[0] == package
    }
    assert owners <= {"failslow"}


def test_no_tests_folder_is_a_package_that_could_shadow_ours(repository: Path) -> None:
    assert sorted((repository / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize(
    ("command", "target"),
    [("failslow", "pipeline.__main__:main"), ("failslow-agent", "agents.__main__:main")],
)
def test_a_command_is_installed_and_loads(command: str, target: str) -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name=command)
    assert entry.value == target
    assert callable(entry.load())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_that_it_is_typed_and_is_part_of_the_wheel(package: str, repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    assert package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (repository / package / "py.typed").is_file()


def test_the_distribution_cannot_be_uploaded(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    assert "Private :: Do Not Upload" in project["project"]["classifiers"]


def test_the_lock_file_pins_every_direct_dependency_by_hash_and_names_no_host(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    lock = (repository / "requirements.lock").read_text()
    entries = [line for line in lock.splitlines() if line and not line.startswith((" ", "#"))]
    pinned = {entry.split("==")[0] for entry in entries}
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    names = {requirement.split(">")[0].split("<")[0].split("=")[0].strip() for requirement in wanted}
    assert names <= pinned
    assert all("==" in entry and entry.endswith("\\") for entry in entries)
    assert lock.count("--hash=sha256:") >= len(entries)
    assert "://" not in lock
    assert not any(line.lstrip().startswith(("--index", "--find-links", "--extra-index")) for line in lock.splitlines())
