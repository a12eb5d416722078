"""Evidence for a shift: that it is there, how soon, and that spikes and correlation are none."""

from math import log

import numpy as np

from detectors.detector import FloatArray
from detectors.evidence import strongest_split

THRESHOLD = 8.0


def noise(seed: int, n: int, cv: float) -> FloatArray:
    """Logs of iteration times with Gaussian jitter."""
    return cv * np.random.default_rng(seed).standard_normal(n)


def score(logs: FloatArray, least_log_ratio: float = log(1.05)) -> float:
    found = strongest_split(logs, least_log_ratio=least_log_ratio)
    return 0.0 if found is None else found.score


def delay(logs: FloatArray, onset: int) -> float:
    """Return after how many values the evidence is there, infinity if it never is."""
    found = [n for n in range(onset + 1, len(logs) + 1) if score(logs[:n]) >= THRESHOLD]
    return found[0] - onset if found else np.inf


def test_a_shift_of_one_standard_deviation_is_found_nearly_as_soon_as_it_can_be() -> None:
    bound = 2 * log(10_000)  # iterations, with one false alarm in 10,000 and Gaussian noise
    found = []
    for seed in range(31):
        logs = noise(seed, 307, 0.1)
        logs[203:] += 0.1
        found.append(delay(logs, 203))
    assert np.median(found) <= 1.5 * bound
    assert np.mean(np.isfinite(found)) >= 0.9


def test_noise_alone_is_no_evidence() -> None:
    scores = [score(noise(seed, n, 0.1)) for seed in range(23) for n in range(37, 409, 31)]
    assert max(scores) < THRESHOLD


def test_the_split_is_where_the_level_moves_and_tells_by_how_much() -> None:
    logs = noise(3, 211, 0.02)
    logs[179:] += log(1.13)
    found = strongest_split(logs, least_log_ratio=log(1.05))
    assert found is not None
    assert abs(found.length - 32) <= 1
    assert 0.09 <= found.log_ratio <= log(1.13), "of clipped values: at least that much"


def test_a_fall_is_found_like_a_rise() -> None:
    logs = noise(4, 211, 0.05)
    logs[179:] -= log(1.2)
    found = strongest_split(logs, least_log_ratio=log(1.05))
    assert found is not None
    assert found.log_ratio < -0.1
    assert found.score >= THRESHOLD


def test_two_spikes_in_a_row_are_not_enough_and_a_change_below_the_least_ratio_is_none() -> None:
    logs = noise(5, 211, 0.02)
    logs[-2:] += 2.0
    assert 0 < score(logs) < THRESHOLD
    small = noise(6, 211, 0.005)
    small[170:] += log(1.03)
    assert strongest_split(small, least_log_ratio=log(1.05)) is None
    assert score(small, least_log_ratio=0.0) >= THRESHOLD


def test_correlated_noise_needs_more_evidence_than_independent_noise() -> None:
    rng, rho = np.random.default_rng(7), 0.8
    scores: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(41):
        steps = rng.standard_normal(307)
        walk = np.zeros(307)
        for i in range(1, 307):
            walk[i] = rho * walk[i - 1] + np.sqrt(1 - rho**2) * steps[i]
        for is_told, ordered in ((True, walk), (False, rng.permutation(walk[:-31]))):
            logs = 0.1 * (ordered if is_told else np.concatenate([ordered, walk[-31:]]))
            scores[is_told].append(score(logs))
    assert np.mean(np.array(scores[True]) >= THRESHOLD) < 0.1
    assert np.mean(np.array(scores[False]) >= THRESHOLD) > np.mean(np.array(scores[True]) >= THRESHOLD)


def test_too_few_values_say_nothing() -> None:
    assert strongest_split(noise(8, 11, 0.01)) is None
    assert strongest_split(np.zeros(53)) is None


def test_a_slow_ramp_adds_up() -> None:
    logs = noise(9, 163, 0.01)
    logs[103:] += np.linspace(0, log(1.15), 60)
    assert delay(logs, 103) <= 40
