"""BOCPD against a slow reference that keeps every run length, and what it does with spikes, gaps and long runs."""

import numpy as np
import pytest
from scipy.stats import t as student  # type: ignore[import-untyped]

from detectors.bocpd import Bocpd
from detectors.detector import FloatArray, IntArray

HAZARD = 1 / 250
MEAN_WEIGHT = 0.01


def reference_mass(values: FloatArray, warmup: int) -> FloatArray:
    """Return mass (n, n + 1) of run length r after value t, by the textbook recursion and scipy's density.

    The run that was going on at the beginning is the one of length t + 1.
    """
    history = values[:warmup]
    location = float(np.median(history))
    scale = 1.4826 * float(np.median(np.abs(history - location)))
    runs = [(1.0, location, MEAN_WEIGHT, 1.0, scale**2)]
    mass = np.zeros((len(values), len(values) + 1))
    for now, x in enumerate(values):
        grown = []
        total = 0.0
        for probability, mu, kappa, alpha, beta in runs:
            width = np.sqrt(beta * (kappa + 1) / (alpha * kappa))
            joint = probability * student.pdf(x, df=2 * alpha, loc=mu, scale=width)
            total += joint
            moved = mu + (x - mu) / (kappa + 1)
            spread = beta + kappa * (x - mu) ** 2 / (2 * (kappa + 1))
            grown.append((joint * (1 - HAZARD), moved, kappa + 1, alpha + 0.5, spread))
        runs = [(HAZARD * total, location, MEAN_WEIGHT, 1.0, scale**2), *grown]
        runs = [(p / total, mu, kappa, alpha, beta) for p, mu, kappa, alpha, beta in runs]
        mass[now, : len(runs)] = [run[0] for run in runs]
    return mass


def reference_verdicts(values: FloatArray, warmup: int, short: int) -> tuple[FloatArray, IntArray]:
    mass = reference_mass(values, warmup)
    score = np.full(len(values), np.nan)
    run_length = np.zeros(len(values), np.int64)
    for now in range(warmup, len(values)):
        recent = mass[now, 1 : min(short, now) + 1]
        score[now] = recent.sum() / 0.9
        run_length[now] = recent.argmax() + 1 if score[now] >= 1 else 0
    return score, run_length


def verdicts(detector: Bocpd, series: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return scores and run lengths (n_frames, n_series) for values (n_frames, n_series)."""
    given = [detector.update(frame) for frame in series]
    return np.array([v.score for v in given]), np.array([v.run_length for v in given])


def shifted(seed: int, n_frames: int, onset: int, shift: float, n_series: int) -> FloatArray:
    """Gaussian noise of unit variance that moves by `shift`."""
    series = np.random.default_rng(seed).normal(0.0, 1.0, (n_frames, n_series))
    series[onset:] += shift
    return series


@pytest.mark.parametrize("shift", [0.0, 2.0, 5.0, -40.0])
def test_with_room_for_all_run_lengths_it_is_the_textbook_recursion(shift: float) -> None:
    series = shifted(1, 97, 53, shift, 3)
    detector = Bocpd(3, run_lengths=101, short=13, spike_sigmas=np.inf)
    scores, run_lengths = verdicts(detector, series)
    for column in range(3):
        expected, length = reference_verdicts(series[:, column], 10, 13)
        np.testing.assert_allclose(scores[:, column], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(run_lengths[:, column], length)


def test_thirty_two_run_lengths_are_as_good_as_all() -> None:
    series = shifted(2, 197, 149, 2.5, 101)
    few, _ = verdicts(Bocpd(101, spike_sigmas=np.inf), series)
    all_of_them, _ = verdicts(Bocpd(101, run_lengths=200, spike_sigmas=np.inf), series)
    difference = np.abs(few - all_of_them)[10:]
    assert np.quantile(difference, 0.999) < 0.05
    assert ((few >= 1) == (all_of_them >= 1))[10:].mean() > 0.999


def test_the_mass_of_run_length_nought_is_the_hazard_whatever_happens() -> None:
    mass = reference_mass(shifted(3, 61, 31, 9.0, 1)[:, 0], 10)
    np.testing.assert_allclose(mass[:, 0], HAZARD)


def test_a_large_shift_is_found_with_its_second_value_and_dated_to_its_first() -> None:
    detector = Bocpd(11)
    scores, run_lengths = verdicts(detector, shifted(4, 67, 59, 30.0, 11))
    assert (scores[59] < 1).all()
    assert (scores[60:] >= 1).all()
    np.testing.assert_array_equal(run_lengths[60:], np.arange(2, 9)[:, None].repeat(11, axis=1))


def test_a_recovery_is_found_like_a_slowdown() -> None:
    series = shifted(5, 131, 59, 8.0, 11)
    series[101:] -= 8.0
    _, run_lengths = verdicts(Bocpd(11), series)
    assert (run_lengths[104] == 4).all()


def test_it_can_speak_with_the_first_value_after_the_warm_up() -> None:
    scores, _ = verdicts(Bocpd(5), shifted(6, 13, 11, 30.0, 5))
    assert np.isnan(scores[:10]).all()
    assert (scores[10] < 0.5).all()
    assert (scores[12] >= 1).all()


@pytest.mark.parametrize("size", [5.0, 50.0, -50.0])
def test_a_single_spike_alarms_nobody(size: float) -> None:
    series = shifted(7, 83, 0, 0.0, 101)
    series[61] += size
    scores, _ = verdicts(Bocpd(101), series)
    assert (scores[61:71] < 1).all()


def test_spikes_on_alternating_sides_are_single_spikes() -> None:
    series = shifted(8, 83, 0, 0.0, 11)
    series[61], series[62], series[63] = 50.0, -50.0, 50.0
    scores, _ = verdicts(Bocpd(11), series)
    assert (scores[61:64] < 1).all()


def test_a_spike_does_not_move_the_date_of_a_change() -> None:
    series = shifted(9, 73, 59, 8.0, 11)
    series[63] += 60.0
    _, run_lengths = verdicts(Bocpd(11), series)
    assert (run_lengths[63] == 5).all()
    assert (run_lengths[67] == 9).mean() > 0.85


def test_spikes_during_the_warm_up_do_not_blind_it() -> None:
    series = shifted(10, 41, 31, 6.0, 11)
    series[0], series[4] = 700.0, 30.0
    scores, run_lengths = verdicts(Bocpd(11), series)
    assert (scores[34] >= 1).all()
    assert (run_lengths[34] == 4).mean() > 0.8


def test_gaps_change_nothing_but_the_count_of_frames() -> None:
    rng = np.random.default_rng(11)
    values = shifted(11, 101, 71, 4.0, 1)[:, 0]
    values[[23, 83]] += 40.0
    expected_score, expected_length = verdicts(Bocpd(1), values[:, None])
    holed = np.full((307, 1), np.nan)
    places = np.sort(rng.choice(307, 101, replace=False))
    holed[places, 0] = values
    score, length = verdicts(Bocpd(1), holed)
    np.testing.assert_array_equal(score[places], expected_score)
    np.testing.assert_array_equal(length[places], expected_length)
    assert np.isnan(np.delete(score, places, axis=0)).all()


@pytest.mark.parametrize("missing", [0.1, 0.9])
def test_series_that_start_and_pause_on_their_own_are_judged_as_if_alone(missing: float) -> None:
    rng = np.random.default_rng(12)
    series = shifted(12, 149, 97, 5.0, 331)
    series[rng.random(series.shape) < missing] = np.nan
    together, _ = verdicts(Bocpd(331), series)
    for column in (0, 255, 256, 330):
        alone, _ = verdicts(Bocpd(1), series[:, [column]])
        np.testing.assert_array_equal(together[:, column], alone[:, 0])


def test_noise_alone_alarms_less_than_once_in_two_thousand_frames() -> None:
    scores, _ = verdicts(Bocpd(499), shifted(13, 211, 0, 0.0, 499))
    alarm = scores >= 1
    episodes = np.count_nonzero(alarm[1:] & ~alarm[:-1])
    assert episodes <= 499 * 201 / 2000


@pytest.mark.parametrize(("shift", "median_delay", "found"), [(2.0, 7, 0.95), (3.3, 3, 0.999), (6.0, 2, 0.999)])
def test_shifts_are_found_after_so_many_frames(shift: float, median_delay: int, found: float) -> None:
    scores, run_lengths = verdicts(Bocpd(499), shifted(14, 109, 83, shift, 499))
    alarm = scores[83:] >= 1
    assert alarm.any(axis=0).mean() >= found
    delay = alarm.argmax(axis=0)[alarm.any(axis=0)] + 1
    assert np.median(delay) <= median_delay
    onset = delay - run_lengths[83:][alarm.argmax(axis=0), np.arange(499)][alarm.any(axis=0)]
    assert np.abs(np.median(onset)) < 1
    assert np.quantile(np.abs(onset), 0.9) <= 4


def test_a_run_of_many_thousand_values_keeps_the_scale_of_its_values() -> None:
    rng = np.random.default_rng(15)
    detector = Bocpd(7, spike_sigmas=np.inf)
    alarms = sum(int(detector.update(rng.normal(0.0, 1.0, 7)).alarm.sum()) for _ in range(6007))
    np.testing.assert_allclose(detector.prediction[1], 1.0, rtol=0.06)
    _, run_lengths = verdicts(detector, rng.normal(4.0, 1.0, (5, 7)))
    assert (run_lengths[-1] == 5).mean() > 0.8
    assert alarms < 7 * 6007 / 500


def test_a_series_without_any_jitter_is_judged_too() -> None:
    series = np.zeros((41, 3))
    series[23:] = 0.05
    scores, run_lengths = verdicts(Bocpd(3), series)
    assert not (scores[:24] >= 1).any()
    assert (run_lengths[24] == 2).all()


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("hazard", 0.0), ("hazard", 1.0), ("short", 0), ("short", 32), ("threshold", 0.0), ("threshold", 1.0),
        ("warmup_frames", 2), ("scale_floor", 0.0), ("spike_sigmas", 0.0), ("mean_weight", 0.0),
    ],
)  # fmt: skip
def test_a_parameter_without_sense_is_refused_by_name(parameter: str, value: float) -> None:
    with pytest.raises(ValueError, match=parameter):
        Bocpd(3, **{parameter: value})  # type: ignore[arg-type]
