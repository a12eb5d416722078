"""Limits on the code that a linter does not know: sizes, leftovers, and what may name a machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("agents", "benchmarks", "detectors", "pipeline", "schemas", "tests")
MODULES = sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 50
LEFTOVERS = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
# Folders of one person's or one build machine's disk; /tmp, /proc, /sys, /usr and the like are on every machine.
MACHINE_PATHS = re.compile(r"(?<![\w.}])/(?:home|root|work|Users|mnt/data)/\w")

DETECTOR_IMPORTS = {
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "detectors", "enum", "functools", "itertools",
    "math", "numpy", "operator", "river", "statistics", "typing",
}  # fmt: skip


def module_name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
    return [REPOSITORY / name for name in listing.split("\0") if name]


def imported_packages(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level or (node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_has_a_docstring_and_is_of_readable_size(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree)
    assert docstring, f"{module_name(path)} has no docstring"
    assert len(text.splitlines()) <= FILE_LINES_MAX
    too_long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert too_long == []


def test_nothing_is_left_for_later_in_any_text_file() -> None:
    leftovers = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in tracked_files()
        if path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".sh"} or path.name == "Makefile"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if LEFTOVERS.search(line)
    ]
    assert leftovers == []


def test_no_file_names_a_folder_of_one_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a recording
        found += [f"{path.relative_to(REPOSITORY)}: {match.group()}" for match in MACHINE_PATHS.finditer(text)]
    assert found == []


@pytest.mark.parametrize("path", sorted((REPOSITORY / "detectors").rglob("*.py")), ids=module_name)
def test_a_detector_imports_numpy_river_and_pure_standard_modules_only(path: Path) -> None:
    assert imported_packages(ast.parse(path.read_text())) - DETECTOR_IMPORTS == set()


@pytest.mark.parametrize("package", ["bcc", "pynvml"])
def test_a_driver_of_the_node_is_imported_by_one_module_at_most(package: str) -> None:
    importers = [
        module_name(path)
        for path in MODULES
        if path.relative_to(REPOSITORY).parts[0] != "tests"
        and package in imported_packages(ast.parse(path.read_text()))
    ]
    assert len(importers) <= 1


def test_only_the_driver_of_the_live_pipeline_imports_faust() -> None:
    importers = {
        module_name(path)
        for path in MODULES
        if path.relative_to(REPOSITORY).parts[0] == "pipeline"
        and "faust" in imported_packages(ast.parse(path.read_text()))
    }
    assert len(importers) <= 1


def drawing(tree: ast.Module) -> list[str]:
    """Names in the code (not in its docstrings) that stand for random numbers."""
    names = [
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
    ]
    return [
        name
        for name in [*names, *imported_packages(tree)]
        if name in {"random", "default_rng", "secrets", "uuid4", "urandom"}
    ]


@pytest.mark.parametrize("folder", ["detectors", "pipeline", "schemas"])
def test_nothing_between_decoding_and_encoding_draws_a_random_number(folder: str) -> None:
    found = {module_name(path): drawing(ast.parse(path.read_text())) for path in (REPOSITORY / folder).rglob("*.py")}
    assert {name: drawn for name, drawn in found.items() if drawn} == {}
