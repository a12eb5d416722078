"""A detector's own page and its section in docs/detectors.md: source, formula, what it misses, and its defaults."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

SECTIONS = {
    "bocpd": ("Bocpd",),
    "cusum": ("Cusum",),
    "evidence": ("strongest_split",),
    "verify": ("shift", "confirm"),
    "peer": ("Peer",),
    "period": ("period", "anchor"),
    "null": ("Null",),
    "adwin": ("Adwin",),
    "page_hinkley": ("PageHinkley",),
    "river_bocpd": ("BOCPD",),
}
# Given in any call and explained by the text of the section, not by a row of its table.
ARGUMENTS = {"before", "after", "found", "logs"}


@pytest.mark.parametrize("name", [*SECTIONS, "per_series", "robust"])
def test_a_module_gives_its_source_and_what_it_cannot_see(name: str) -> None:
    page = importlib.import_module(f"detectors.{name}").__doc__ or ""
    assert re.search(r"^Source: ", page, flags=re.MULTILINE)
    assert re.search(r"^Blind to: ", page, flags=re.MULTILINE)
    assert re.search(r"\b(19|20)\d\d\b", page) or "ours" in page


def section(repository: Path, name: str) -> str:
    parts = re.split(r"^## `(\w+)`\n", (repository / "docs" / "detectors.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[name]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_a_formula_a_source_and_what_it_cannot_see(repository: Path, name: str) -> None:
    text = section(repository, name)
    assert "\nSource: " in text
    assert "\nBlind to: " in text
    assert re.search(r"^    \S.*=|^    \S.*[<>]|^    drift detected", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_names_every_parameter_with_its_default(repository: Path, name: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| *([^|]*?) *\|", section(repository, name), flags=re.MULTILINE))
    module: Any = importlib.import_module(f"detectors.{name}")
    expected = {}
    for member in SECTIONS[name]:
        for parameter in inspect.signature(getattr(module, member)).parameters.values():
            if parameter.name not in ARGUMENTS:
                expected[parameter.name] = parameter.default
    if name == "null":
        assert list(expected) == ["n_series"]
        return
    assert rows.keys() == expected.keys()
    for parameter_name, default in expected.items():
        said = rows[parameter_name]
        if default is inspect.Parameter.empty:
            assert said == ""
        elif default is None:
            assert said == "all"
        else:
            numerator, _, denominator = said.partition("/")
            assert float(numerator) / float(denominator or 1) == pytest.approx(default)
