"""Peer comparison: medians of others by brute force, who alarms when, and healthy unevenness that must not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.detector import BoolArray, FloatArray
from detectors.peer import Peer, _binomial_tail, _Groups

VALUES = st.one_of(st.floats(-3.0, 3.0), st.just(float("nan")))


@given(st.lists(st.tuples(st.integers(0, 4), VALUES), min_size=1, max_size=37))
def test_the_median_of_the_others_is_what_it_says(members: list[tuple[int, float]]) -> None:
    groups = np.array([group for group, _ in members])
    values = np.array([value for _, value in members])
    found = _Groups(groups).median_of_others(values)
    median = _Groups(groups).median(values)
    for i in range(len(values)):
        known = [j for j in range(len(values)) if groups[j] == groups[i] and not np.isnan(values[j])]
        others = [values[j] for j in known if j != i]
        if np.isnan(values[i]) or len(known) < 3:
            assert np.isnan(found[i])
        else:
            assert found[i] == pytest.approx(np.median(others))
        assert median[i] == pytest.approx(np.median(values[known]) if known else np.nan, nan_ok=True)


def test_the_binomial_tail_is_that_of_the_formula() -> None:
    tail = _binomial_tail(np.array([0, 5, 8, 3]), np.array([8, 8, 8, 5]), np.array([0.3, 0.5, 0.25, 0.1]))
    expected = [1.0, (56 + 28 + 8 + 1) / 256, 0.25**8, 10 * 0.1**3 * 0.9**2 + 5 * 0.1**4 * 0.9 + 0.1**5]
    np.testing.assert_allclose(tail, expected)


def jitter(seed: int, n_frames: int, n_series: int, cv: float) -> FloatArray:
    return np.random.default_rng(seed).normal(-1.0, np.sqrt(np.log1p(cv**2)), (n_frames, n_series))


def alarms(detector: Peer, frames: FloatArray) -> BoolArray:
    return np.array([detector.update(frame).alarm for frame in frames])


@pytest.mark.parametrize(("size", "frames_needed"), [(3, 6), (4, 5), (5, 5), (8, 5), (32, 5)])
def test_one_rank_at_twice_the_time_of_its_peers_alarms_after_five_or_six_frames(size: int, frames_needed: int) -> None:
    n_groups = 13
    groups = np.repeat(np.arange(n_groups), size)
    frames = jitter(1, 29, len(groups), 0.02)
    frames[:, ::size] += np.log(2.0)
    found = alarms(Peer(groups), frames)
    assert not found[: frames_needed - 1].any()
    assert found[frames_needed - 1 :, ::size].all()
    assert np.count_nonzero(found) == (29 - frames_needed + 1) * n_groups


def test_a_rank_that_falls_ill_later_alarms_after_five_frames_and_is_dated_to_the_first() -> None:
    groups = np.repeat(np.arange(13), 4)
    frames = jitter(2, 61, 52, 0.02)
    frames[41:, ::4] += np.log(2.0)
    detector = Peer(groups)
    verdicts = [detector.update(frame) for frame in frames]
    assert not any(verdict.alarm.any() for verdict in verdicts[:45])
    assert verdicts[45].alarm[::4].all()
    assert (verdicts[45].run_length[::4] == 5).mean() > 0.9
    assert (verdicts[60].run_length[::4] == 20).mean() > 0.9


def test_its_alarm_ends_with_its_reason_and_a_relapse_has_a_new_date() -> None:
    groups = np.zeros(7, np.int64)
    frames = jitter(3, 131, 7, 0.01)
    frames[11:51, 0] += np.log(1.5)
    frames[101:, 0] += np.log(1.5)
    detector = Peer(groups)
    verdicts = [detector.update(frame) for frame in frames]
    assert verdicts[50].alarm[0]
    assert not any(verdict.alarm.any() for verdict in verdicts[55:105])
    assert verdicts[106].run_length[0] == 6


@pytest.mark.parametrize("ratio", [1.02, 1.05, 1.09])
def test_a_rank_below_the_ratio_floor_is_never_an_alarm(ratio: float) -> None:
    frames = jitter(4, 101, 7, 0.005)
    frames[:, 0] += np.log(ratio)
    assert not alarms(Peer(np.zeros(7, np.int64)), frames).any()


def test_a_fast_rank_is_no_alarm_for_anybody() -> None:
    frames = jitter(5, 53, 7, 0.01)
    frames[:, 0] -= np.log(3.0)
    assert not alarms(Peer(np.zeros(7, np.int64)), frames).any()


@pytest.mark.parametrize("size", [1, 2])
def test_without_two_peers_there_is_no_opinion(size: int) -> None:
    groups = np.repeat(np.arange(5), size)
    detector = Peer(groups)
    for frame in jitter(6, 23, len(groups), 0.01):
        assert np.isnan(detector.update(frame).score).all()
    assert np.isnan(detector.excess()).all()


def test_a_group_that_shrinks_below_three_loses_its_opinion_and_gets_it_back() -> None:
    frames = jitter(7, 41, 3, 0.01)
    frames[17:23, 1] = np.nan
    detector = Peer(np.zeros(3, np.int64))
    has_opinion = [~np.isnan(detector.update(frame).score).any() for frame in frames]
    assert has_opinion == [False] * 4 + [True] * 13 + [False] * 6 + [True] * 18


@pytest.mark.parametrize(("cv", "size"), [(0.07, 4), (0.11, 8), (0.2, 3), (0.2, 4), (0.2, 32)])
def test_independent_jitter_alarms_less_than_once_in_a_hundred_thousand_frames(cv: float, size: int) -> None:
    groups = np.arange(4800) // size
    found = alarms(Peer(groups), jitter(8, 67, 4800, cv))
    assert np.count_nonzero(found[1:] & ~found[:-1]) <= 4800 * 67 / 100_000


@pytest.mark.parametrize(("size", "per_frames"), [(3, 2000), (4, 2000), (8, 4000), (32, 50_000)])
@pytest.mark.parametrize("ratio", [1.3, 2.0])
def test_ranks_that_take_turns_in_being_slow_are_hardly_ever_accused(size: int, per_frames: int, ratio: float) -> None:
    rng = np.random.default_rng(9)
    groups = np.arange(960) // size
    frames = jitter(9, 83, 960, 0.01)
    for frame in frames:
        frame[np.arange(0, 960, size) + rng.integers(0, size, 960 // size)] += np.log(ratio)
    found = alarms(Peer(groups), frames)
    assert np.count_nonzero(found[1:] & ~found[:-1]) <= 960 * 83 / per_frames


def test_peers_that_differ_lastingly_hide_one_who_differs_no_more() -> None:
    levels = np.log(np.array([0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 0.7]))
    assert not alarms(Peer(np.zeros(7, np.int64)), jitter(10, 53, 7, 0.005) + levels).any()


def test_a_slow_member_of_three_does_not_hide_behind_the_shift_that_it_causes() -> None:
    frames = jitter(11, 29, 3, 0.01)
    frames[:, 2] += np.log(1.5)
    found = alarms(Peer(np.zeros(3, np.int64)), frames)
    assert found[7:, 2].all()
    assert not found[:, :2].any()


def test_stages_of_different_length_are_not_compared_with_each_other() -> None:
    groups = np.repeat([0, 1], 8)
    frames = jitter(12, 53, 16, 0.02)
    frames[:, 8:] += np.log(2.09)
    assert not alarms(Peer(groups), frames).any()


def test_the_excess_is_the_log_ratio_to_the_others() -> None:
    frames = np.zeros((11, 5))
    frames[:, 3] = np.log(1.4)
    detector = Peer(np.zeros(5, np.int64))
    alarms(detector, frames)
    np.testing.assert_allclose(detector.excess(), [0, 0, 0, np.log(1.4), 0])


@pytest.mark.parametrize("groups", [np.zeros((3, 2), np.int64), np.array([0.0, 1.0])])
def test_groups_that_are_no_list_of_integers_are_refused(groups: FloatArray) -> None:
    with pytest.raises(ValueError, match="groups must be one integer per series"):
        Peer(groups)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"least_ratio": 1.0}, {"sustain_frames": 9}, {"sustain_frames": 0}, {"sigmas": 0.0}, {"chance": 1.0}]
)
def test_parameters_without_sense_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Peer(np.zeros(3, np.int64), **wrong)  # type: ignore[arg-type]
