"""Documentation and code say the same: detectors, metrics, commands, dependencies, links and printed examples."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from pipeline.metrics import Metrics
from schemas.alerts import fingerprint
from schemas.codec import decode_alert

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CONSUMER_LINES_MAX = 12

# Parts of detectors/ that are no detector: the protocol, and arithmetic that several share.
NOT_DETECTORS = {"__init__", "detector", "per_series", "robust"}


def read(name: str) -> str:
    path = REPOSITORY / name
    assert path.is_file(), f"{name} is missing"
    return path.read_text()


def anchor(heading: str) -> str:
    """The fragment under which a heading is reached: lower case, no punctuation, blanks as hyphens."""
    words = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower())
    return words.strip().replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {anchor(heading) for heading in HEADING.findall(FENCE.sub("", path.read_text()))}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with the words that call it."""
    for program in ("failslow", "failslow-agent"):
        (entry,) = metadata.entry_points(group="console_scripts", name=program)
        pending: list[tuple[str, click.Command]] = [(program, entry.load())]
        while pending:
            words, command = pending.pop()
            if not isinstance(command, click.Group):
                yield words, command
                continue
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                if not child.hidden:
                    pending.append((f"{words} {name}", child))


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_link_leads_to_a_file_and_heading_that_exist(page: Path) -> None:
    broken = []
    for plain, picture in LINK.findall(FENCE.sub("", page.read_text())):
        target, _, fragment = (plain or picture).partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (fragment and fragment not in anchors(path)):
            broken.append(plain or picture)
    assert broken == []


def test_every_detector_has_a_section_and_every_section_a_detector() -> None:
    modules = {path.stem for path in (REPOSITORY / "detectors").glob("*.py")} - NOT_DETECTORS
    modules = {name for name in modules if not name.startswith("_")}
    sections = set(re.findall(r"^## `?(\w+)`?", read("docs/detectors.md"), flags=re.MULTILINE))
    assert sections == modules


def declared_metrics() -> dict[str, tuple[str, frozenset[str]]]:
    """Kind and labels of every metric, as a worker registers them."""
    metrics = Metrics(CollectorRegistry())
    declared = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    return {
        metric._name + ("_total" if metric._type == "counter" else ""): (
            str(metric._type),
            frozenset(metric._labelnames),
        )
        for metric in declared
    }


def test_every_metric_is_described_with_its_kind_and_labels_and_no_other() -> None:
    rows = re.findall(r"^\| *`(failslow_\w+)` *\|([^|]*)\|([^|]*)\|", read("docs/metrics.md"), flags=re.MULTILINE)
    described = {name: (kind.strip(), frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    declared = declared_metrics()
    assert declared
    assert described == declared


def test_every_command_is_mentioned_and_explains_itself() -> None:
    pages = read("README.md") + read("docs/cli.md")
    for words, command in commands():
        assert re.search(rf"\b{re.escape(words)}\b", pages), f"{words} is mentioned neither in README nor docs/cli.md"
        assert command.help, f"{words} has no help text"


def test_every_command_that_the_pages_call_exists() -> None:
    known = {words for words, _ in commands()}
    programs = {words.split()[0] for words in known}
    called = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?(failslow(?:-agent)?) ([a-z][a-z-]*)", re.MULTILINE)
    fences = "\n".join(fence for page in PAGES for fence in FENCE.findall(page.read_text()))
    for program, word in called.findall(fences):
        assert program in programs
        assert any(f"{words} ".startswith(f"{program} {word} ") for words in known), f"no command {program} {word}"


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads(read("pyproject.toml"))
    reasons = read("docs/decisions/0002-dependencies.md")
    rows = set(re.findall(r"^\| ([a-z-]+) \|", reasons, flags=re.MULTILINE)) - {"dependency"}
    names = {re.split(r"[<>=]", requirement)[0] for requirement in project["project"]["dependencies"]}
    assert rows == names
    for requirement in project["dependency-groups"]["dev"]:
        name = re.split(r"[<>=]", requirement)[0]
        assert name in reasons or (name.startswith("types-") and "type stubs" in reasons)


def consumer() -> str:
    """The alert consumer as the README prints it: the first Python block after the words."""
    _, found, after = read("README.md").partition("alert consumer")
    assert found, "README.md shows no alert consumer"
    block = re.search(r"^```python\n(.*?)^```", after, flags=re.MULTILINE | re.DOTALL)
    assert block, "README.md has no Python block after the words"
    return block.group(1)


def test_the_alert_consumer_in_the_readme_is_short_and_compiles() -> None:
    code = consumer()
    compile(code, "README.md", "exec")
    assert len(code.splitlines()) <= CONSUMER_LINES_MAX


def test_the_alert_consumer_in_the_readme_needs_nothing_of_ours() -> None:
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(consumer()))
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (node.module or "").split(".")[0]
        for node in ast.walk(ast.parse(consumer()))
        if isinstance(node, ast.ImportFrom)
    }
    assert imported.isdisjoint({"agents", "detectors", "pipeline", "schemas"})


def test_the_changelog_has_the_released_version_or_is_still_unreleased() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    headings = re.findall(r"^## \[([^\]]+)\]", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert len(headings) == 1 or headings[1] == version


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs" / "decisions").glob("*.md")), ids=name_of)
def test_a_decision_is_one_page_of_context_decision_and_consequences(page: Path) -> None:
    text = page.read_text()
    number, _ = page.stem.split("-", 1)
    assert text.startswith(f"# {int(number)}. ")
    assert "\nStatus: " in text
    positions = [text.find(f"\n## {heading}\n") for heading in ("Context", "Decision", "Consequences")]
    assert -1 not in positions
    assert positions == sorted(positions)


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = sorted(int(page.stem.split("-")[0]) for page in (REPOSITORY / "docs" / "decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_decision_that_the_code_names_exists() -> None:
    named = {
        reference
        for folder in ("agents", "detectors", "pipeline", "schemas", "tests", "benchmarks")
        for path in (REPOSITORY / folder).rglob("*.py")
        for reference in re.findall(r"docs/decisions/(\d{4}-[\w-]+\.md)", path.read_text())
    }
    assert {reference for reference in named if not (REPOSITORY / "docs" / "decisions" / reference).is_file()} == set()


def test_the_alert_in_the_readme_is_one_that_the_schema_allows() -> None:
    _, _, after = read("README.md").partition("```json\n")
    alert = decode_alert(after.partition("```")[0].encode())
    assert alert.component.candidates == (alert.component.name,)
    assert alert.fingerprint == fingerprint(alert.job_id, alert.kind, alert.component)
