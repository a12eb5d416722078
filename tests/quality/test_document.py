"""The page of results holds what was measured, where a baseline is better included, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.quality import results
from benchmarks.quality.compare import Compared
from benchmarks.quality.curves import Outcomes, Scored, resampled
from benchmarks.quality.document import BEGIN, END, PAGE, better, block, main, replaced
from benchmarks.quality.paired import OURS, defaults, paired
from benchmarks.quality.score import Share, headline
from benchmarks.quality.unseen import unseen
from tests.quality.test_matching import answer, matched, opening
from tests.quality.test_unseen import blind


def method(name: str, **changes: Any) -> Compared:
    given: dict[str, Any] = {
        "method": name,
        "sees": 1.0,
        "recall": 0.9,
        "recall_where_seen": 0.9,
        "precision": 0.99,
        "component_first": 0.9,
        "kind": float("nan"),
        "delay_iterations_median": 3.0,
        "delay_iterations_p95": 9.0,
        "false_incidents_per_10000": 0.5,
        "openings_per_fault": 1.0,
        "intervals": {"recall": (0.8, 0.95)},
        "recall_by_class": {"gpu_step": Share.of([True, True, False])},
        "false_per_10000_by_class": {"gpu_step": 0.5},
    }
    return Compared(**(given | changes))


def outcomes(extra: int, missed: int) -> list[Outcomes]:
    delays = [float("nan") if i % missed == 0 else 3.0 for i in range(53)]
    return [Outcomes.of("one", [Scored(before=extra, after=0, delay=d, iterations=1000) for d in delays])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Results of a small run of everything."""
    episodes = [matched([answer()], opening()), matched([answer()]), blind(opening(unreported=4))]
    found = {OURS: outcomes(0, 20), "bocd": outcomes(1, 2)}
    rows = paired(found, resampled(53, 1))
    series: dict[str, Any] = {
        "cv": 0.1,
        "shift": 1.1,
        "splices": 53,
        "before": 200,
        "after": 100,
        "seed": 1,
        "bound_iterations": 20.2,
    }
    series |= {"defaults": defaults(found, {OURS: 0, "bocd": 0}, resampled(53, 1))}
    series |= {"paired": rows, "paired_before_onset": rows}
    methods = {OURS: method(OURS), "bocd": method("bocd", recall=0.95, false_incidents_per_10000=40.0)}
    baselines = {"code": "abc", "share": 0.05, "seeds": "all", "most_ranks": 64, "episodes": 31, "methods": methods}
    scores = headline(episodes)
    fields = {name: getattr(scores, name) for name in scores.__struct_fields__}
    part = fields | {"unseen": unseen(episodes), "baselines": baselines, "series": {"cv 10%": series}}
    path = tmp_path / "quality.json"
    results.write(path, {"code": "def", "share": 1.0, "seeds": "all", "held_out": part})
    return path


def test_a_part_is_told_with_its_commands_intervals_and_counts(path: Path) -> None:
    text = block(results.read(path), "held_out")
    for expected in (
        "python -m benchmarks.quality --part held-out --share 1 --seeds all",
        "python -m benchmarks.quality.compare --part held-out --share 0.05 --seeds all --most-ranks 64",
        "python -m benchmarks.quality.compare_series --held-out --cv 0.1 --shift 1.1 --splices 53",
        "| agent missing | 1 | 1.000 (0.207-1.000) |",
        "| bocd | 1.00 | 0.95 (0.80-0.95) |",
        "| gpu step | 3 | 0.67 | 0.67 |",
    ):
        assert expected in text
    for line in text.splitlines():
        assert "None" not in line
        assert "nan" not in line.split()


def test_where_a_baseline_is_better_is_said_and_where_it_is_not_is_not(path: Path) -> None:
    text = block(results.read(path), "held_out")
    assert "- recall (0.90): bocd 0.95" in text
    assert "- false incidents" not in text
    assert better(results.read(path)["held_out"]["baselines"]["methods"])[0].startswith("- recall (")
    assert "Significantly better than failslow: none." in text


def test_only_what_stands_between_the_markers_changes(path: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    done = CliRunner().invoke(main, ["--results", str(path), "--page", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    first = page.read_text()
    assert first.startswith(f"# Before\n\n{BEGIN}\n\n### Results: held out\n")
    assert first.endswith(f"\n{END}\n\nafter\n")
    assert "old" not in first
    CliRunner().invoke(main, ["--results", str(path), "--page", str(page)], catch_exceptions=False)
    assert page.read_text() == first


def test_a_part_that_was_not_measured_is_an_error_with_its_remedy(path: Path) -> None:
    done = CliRunner().invoke(main, ["--part", "development", "--results", str(path)])
    assert done.exit_code != 0
    assert "make quality" in done.output


def test_the_page_has_both_markers_once() -> None:
    assert replaced(PAGE.read_text(), "").count(BEGIN) == 1
    with pytest.raises(ValueError, match="one line"):
        replaced("no markers", "")
