"""Several commands write one file of results, each its own part."""

from pathlib import Path

from benchmarks.quality import results


def test_a_command_replaces_its_own_sections_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "build" / "quality.json"
    results.write(path, {"held_out": {"recall": 0.5, "baselines": {"nvrx": 1}}, "share": 1.0})
    results.write(path, {"held_out": {"recall": float("nan")}, "real_traces": [1, 2]})
    assert results.read(path) == {
        "held_out": {"recall": None, "baselines": {"nvrx": 1}},
        "share": 1.0,
        "real_traces": [1, 2],
    }
