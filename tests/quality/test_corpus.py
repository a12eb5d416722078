"""The corpus: the same from the same seed, its labels those of the simulator, its held-out parts out of the way."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from agents.simulated.labels import expected
from benchmarks.quality.answers import answers, clock, table
from benchmarks.quality.corpus import CLASSES, Episode, episodes, held_out
from benchmarks.quality.draw import SETTINGS, calibrated
from benchmarks.quality.faults import FAULTS
from benchmarks.quality.intervals import bootstrap_rate, wilson
from benchmarks.quality.layouts import LAYOUTS
from schemas.alerts import Severity

COMPARED = 3
ONE_FAULT = sorted(set(FAULTS) - {"gpu_restart", "rank_restart", "compound_two", "compound_three"})


def test_the_corpus_is_as_large_and_as_wide_as_it_says() -> None:
    whole = list(episodes(classes=list(CLASSES), share=1.0, seeds="all", part="all"))
    assert len(whole) >= 2_000
    assert len(set(whole)) == len(whole)
    ranks = [layout.shape.world_size for layout in LAYOUTS.values()]
    assert (min(ranks), max(ranks)) == (8, 1024)
    assert sum(one.weight for one in CLASSES.values()) > 0


def test_a_small_share_is_a_part_of_a_larger_one() -> None:
    names = ["gpu_step", "healthy"]
    small, large = (set(episodes(classes=names, share=share, seeds="all", part="all")) for share in (0.05, 0.2))
    assert small < large


def test_development_and_held_out_episodes_are_the_corpus_and_share_none() -> None:
    names = ["gpu_step", "compound_three", "elastic"]
    parts = [set(episodes(classes=names, share=0.2, seeds="all", part=part)) for part in ("development", "held-out")]
    assert parts[0] | parts[1] == set(episodes(classes=names, share=0.2, seeds="all", part="all"))
    assert not parts[0] & parts[1]
    assert {one.class_name for one in parts[0]} == {"gpu_step"}
    assert all(one.seed % 2 == 0 for one in parts[0])
    assert all(one.draw()[0].layout_name not in held_out()["layouts"] for one in list(parts[0])[:8])


def test_episodes_that_were_looked_at_are_left_out() -> None:
    def drawn(share: float, seen_share: float = 0.0) -> set[Episode]:
        return set(episodes(classes=["gpu_step"], share=share, seeds="all", part="all", seen_share=seen_share))

    assert drawn(0.2, 0.05) == drawn(0.2) - drawn(0.05)
    assert len(drawn(0.2, 0.05)) == 90


def test_what_is_held_out_exists() -> None:
    lists = held_out()
    assert set(lists["classes"]) < set(CLASSES)
    assert set(lists["layouts"]) < set(LAYOUTS)
    assert len(lists["series"]) == 4


def test_an_episode_is_the_same_every_time() -> None:
    one, other = (Episode("compound_two", 6).draw() for _ in range(2))
    assert one[1] == other[1]
    assert Episode("compound_two", 8).draw()[1] != one[1]


def test_every_fault_has_an_answer_for_every_setting_of_the_sensors() -> None:
    settings = set(SETTINGS) - {"losses", "agent_missing"}
    kinds = {fault.kind for name in FAULTS for seed in range(3) for fault in Episode(name, seed).draw()[1].faults}
    assert kinds <= set(table())
    for kind in kinds:
        assert set(table()[kind]) == settings


@pytest.mark.parametrize("class_name", ONE_FAULT)
def test_the_table_of_answers_agrees_with_the_simulator(class_name: str) -> None:
    n_compared = 0
    for seed in range(0, 40, 2):
        episode = Episode(class_name, seed)
        if n_compared == COMPARED or LAYOUTS[episode.begun().layout_name].shape.world_size > 16:
            continue
        draw, scenario = episode.draw()
        if draw.setting in {"losses", "agent_missing"}:
            continue
        (ours,) = answers(scenario, draw.setting, clock(scenario))
        (theirs,) = expected(scenario)
        is_near_a_limit = min(abs(ours.ratio - limit) for limit in (1.05, 1.10)) < 0.02
        if is_near_a_limit or theirs.severity is Severity.INFO:
            continue
        assert (ours.asked == "incident") == theirs.visible
        assert ours.accepted[0].kind is theirs.kind
        assert ours.accepted[0].candidates == theirs.candidates
        n_compared += 1
    assert n_compared == COMPARED


def test_a_fault_costs_what_was_drawn() -> None:
    draw, scenario = Episode("gpu_step", 4).draw()
    placed = calibrated(scenario, scenario.faults[0], 1.5)
    assert placed.factor > 1.5
    assert 0.005 * 0.9 < clock(scenario).sigma < 0.11 * 1.3
    assert draw.noise_cv == scenario.jitter.iteration_cv


def test_the_answer_of_a_card_is_asked_again_after_a_restart() -> None:
    for seed in range(0, 30, 2):
        draw, scenario = Episode("gpu_restart", seed).draw()
        if draw.setting == "inspector" and scenario.layout.world_size <= 16:
            before, after = answers(scenario, draw.setting, clock(scenario))
            assert (before.has_past, after.has_past) == (True, False)
            assert before.accepted == after.accepted
            assert before.end == after.onset
            return
    pytest.fail("no such episode among the first seeds")


def test_wilson_and_bootstrap_bounds_hold_what_was_seen() -> None:
    assert wilson(300, 300)[0] == pytest.approx(0.98735, abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = bootstrap_rate([0] * 50 + [1] * 5, [100] * 55)
    assert low < 5 / 5500 < high
    assert bootstrap_rate([0, 0], [100, 200]) == (0.0, 0.01)
    assert np.isnan(bootstrap_rate([], [])[0])


def test_every_series_that_is_held_out_is_named_in_the_file() -> None:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "quality" / "held_out.toml"
    assert tomllib.loads(path.read_text())["seeds"] == "odd"
