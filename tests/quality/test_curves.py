"""Splices are what they say, and curves and paired intervals answer cases that can be worked out by hand."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality.baselines.baseline import Detection
from benchmarks.quality.compare_series import bound_iterations
from benchmarks.quality.curves import Curve, Outcomes, Scored, interval, resampled, score
from benchmarks.quality.splices import Noise, Splice, read_noise, residuals_of, series_names, splices

N = 101
NOISE = Noise("made up", np.random.default_rng(1).normal(0.0, 1.0, 4001), np.full(40, 1.5))


def outcomes(setting: str, extra: list[int], found: list[bool]) -> Outcomes:
    scored = [
        Scored(before=e, after=0, delay=3.0 if f else float("nan"), iterations=1000)
        for e, f in zip(extra, found, strict=True)
    ]
    return Outcomes.of(setting, scored)


def at(*positions: int, is_slower: bool = True) -> list[Detection]:
    return [Detection(at=position, is_slower=is_slower) for position in positions]


def test_the_first_alarm_after_the_onset_finds_the_shift_and_all_others_are_extra() -> None:
    splice = Splice(duration_s=np.ones(97), onset=53)
    assert score(at(13, 52, 53, 60, 61), splice) == Scored(before=2, after=2, delay=1.0, iterations=97)
    told = [Detection(at=60, is_information=True), Detection(at=70)]
    assert score(told, splice).is_information
    missed = score(at(60, is_slower=False), splice)
    assert (missed.before, missed.after, np.isnan(missed.delay)) == (0, 0, True)


def test_hindsight_may_date_a_change_a_little_too_early_and_an_online_alarm_may_not() -> None:
    splice = Splice(duration_s=np.ones(97), onset=53)
    assert score(at(50), splice, is_online=False).before == 0
    assert score(at(40), splice, is_online=False).before == 1
    assert score(at(50), splice).before == 1


def test_a_curve_is_the_best_recall_at_a_rate_and_straight_between_settings() -> None:
    half, full, worse = [i % 2 == 0 for i in range(N - 1)], [True] * (N - 1), [False] * (N - 1)
    settings = [
        outcomes("half", [0] * (N - 1), half),
        outcomes("worse", [1] * (N - 1), worse),
        outcomes("full", [2] * (N - 1), full),
    ]
    curve = Curve.of(settings, resampled(N - 1, 1)[:1])
    assert curve.recall_at(0.0)[0] == pytest.approx(0.5)
    assert curve.recall_at(15.0)[0] == pytest.approx(0.75)
    assert curve.recall_at(99.0)[0] == pytest.approx(1.0)
    assert curve.extra_at(0.5)[0] == pytest.approx(0.0)
    assert curve.extra_at(1.0)[0] == pytest.approx(20.0)
    assert np.isinf(Curve.of(settings[:1], resampled(N - 1, 1)[:1]).extra_at(0.9)[0])


def test_an_interval_of_a_paired_difference_holds_what_splices_have_in_common() -> None:
    random = np.random.default_rng(7)
    easy = random.random(N) < 0.6
    better = easy | (random.random(N) < 0.2)
    weights = resampled(N, 3)
    one, other = (Curve.of([outcomes("", [0] * N, f.tolist())], weights).recall_at(1.0) for f in (better, easy))
    middle, low, high = interval(one - other)
    assert middle == pytest.approx(better.mean() - easy.mean())
    assert 0 <= low < middle < high
    alone = interval(one)
    assert high - low < alone[2] - alone[1]


def test_resamples_hold_as_many_splices_as_there_are_and_the_first_is_what_was_observed() -> None:
    weights = resampled(N, 5)
    assert (weights.sum(axis=1) == N).all()
    assert (weights[0] == 1).all()


def test_noise_has_the_spread_asked_for_and_spikes_come_at_their_own_rate_and_size() -> None:
    logs = np.log(NOISE.draw(np.random.default_rng(2), 40_009, 0.1))
    spikes = logs == 1.5
    assert spikes.mean() == pytest.approx(40 / 4041, rel=0.2)
    assert np.exp(logs[~spikes]).std() == pytest.approx(0.1, rel=0.03)


def test_splices_are_those_of_the_seed_and_shift_where_they_say() -> None:
    given = list(splices([NOISE], 3, seed=5, cv=0.02, shift=1.5, before=401, after=307))
    again = list(splices([NOISE], 3, seed=5, cv=0.02, shift=1.5, before=401, after=307))
    other = list(splices([NOISE], 3, seed=6, cv=0.02, shift=1.5, before=401, after=307))
    for one, same, another in zip(given, again, other, strict=True):
        np.testing.assert_array_equal(one.duration_s, same.duration_s)
        assert (one.duration_s != another.duration_s).any()
        assert one.onset == 401
        ratio = np.median(one.duration_s[401:]) / np.median(one.duration_s[:401])
        assert ratio == pytest.approx(1.5, rel=0.01)


def test_residuals_know_no_drift_and_keep_spikes() -> None:
    logs = np.linspace(0.0, 0.5, 607)
    logs[311] += 2.0
    residuals = residuals_of(logs)
    assert residuals[311] == pytest.approx(2.0, abs=0.01)
    assert np.abs(np.delete(residuals, 311))[60:-60].max() < 0.01


def test_series_of_few_values_have_residuals_too() -> None:
    assert len(residuals_of(np.zeros(48))) == 48
    assert len(residuals_of(np.zeros(53))) == 53


def test_the_recordings_are_shared_out_as_listed(data: Path, repository: Path) -> None:
    listed = tomllib.loads((repository / "benchmarks" / "quality" / "held_out.toml").read_text())["series"]
    assert series_names(data, held_out=True) == sorted(listed)
    development = series_names(data, held_out=False)
    assert len(development) == 4
    assert not set(development) & set(listed)
    noise = read_noise(data, development[0])
    assert noise.noise.std() == pytest.approx(1.0)


def test_the_information_bound_is_ln_10000_over_the_divergence() -> None:
    assert bound_iterations(0.1, 1.1) == pytest.approx(9.2103 / (0.09531**2 / (2 * 0.00995)), rel=1e-3)
