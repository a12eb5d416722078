"""Parameters at half and at twice their defaults: on the same episodes, and without touching what is held out."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.quality.beside import Beside
from benchmarks.quality.corpus import CLASSES
from benchmarks.quality.layouts import LAYOUTS
from benchmarks.quality.sensitivity import chosen, draw, label, neighbours, points, varied
from pipeline.judge_params import DEFAULTS, JudgeParams

NAMES = ("least_slowdown", "warm_up_frames")


@pytest.fixture(scope="module")
def found() -> list[Beside]:
    """One small episode of a slow host, at the defaults twice over and at neighbours of two parameters."""
    (episode,) = chosen(per_fault=1, per_benign=0, classes=["host_step"])
    settings = {label(name, params): params for name in NAMES for params in neighbours(name)}
    return [varied(episode, settings | {"again": DEFAULTS, "blind": JudgeParams(warm_up_frames=1000)})]


def test_every_parameter_has_other_values_of_its_type_and_of_a_ratio_what_exceeds_one_changes() -> None:
    for name in JudgeParams.__struct_fields__:
        default = getattr(DEFAULTS, name)
        values = [getattr(params, name) for params in neighbours(name)]
        assert max(values) > default
        assert min(values) < default or default == 1
        assert {type(one) for one in values} == {type(default)}
    assert [params.least_slowdown for params in neighbours("least_slowdown")] == [1.025, 1.1]


def test_what_is_judged_is_development_small_and_the_same_every_time() -> None:
    episodes = list(chosen(per_fault=2, per_benign=1, classes=list(CLASSES)))
    assert episodes == list(chosen(per_fault=2, per_benign=1, classes=list(CLASSES)))
    assert len(episodes) > 40
    for episode in episodes:
        assert not episode.is_held_out
        assert LAYOUTS[episode.begun().layout_name].shape.world_size <= 16


def test_judging_again_at_the_defaults_says_the_same_and_elsewhere_something_else(found: list[Beside]) -> None:
    (one,) = found
    assert one.ours.openings
    assert one.others["again"] == one.ours.openings
    assert one.others["blind"] == ()


def test_points_are_in_the_order_of_values_and_are_drawn(found: list[Beside], tmp_path: Path) -> None:
    made = points(found, NAMES)
    assert [one.parameter for one in made] == [name for name in NAMES for _ in range(3)]
    assert [one.value for one in made[:3]] == [1.025, 1.05, 1.1]
    assert [one.is_default for one in made] == [False, True, False] * 2
    path = tmp_path / "sensitivity.png"
    draw(path, made, 1)
    assert path.read_bytes().startswith(b"\x89PNG")
