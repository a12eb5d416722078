"""Ranks beside their peers: what a slow one stands out of."""

import numpy as np
import pytest

from pipeline.excess import Excess, beyond_others, beyond_peers, rank_excess, with_wander
from pipeline.groups import Groups
from schemas.table import FloatArray

RANKS, FRAMES, BLOCK = 16, 72, 12
GROUPS = Groups(np.zeros(RANKS, np.int64))


def dealt_out(seed: int, spread: float) -> FloatArray:
    """Return computation (n, ranks), seconds, of work dealt out anew every 12 frames and steady in between."""
    random = np.random.default_rng(seed)
    dealt = 1 + spread * random.standard_normal((FRAMES // BLOCK, RANKS))
    seconds: FloatArray = np.repeat(dealt, BLOCK, axis=0) * (1 + 0.003 * random.standard_normal((FRAMES, RANKS)))
    return seconds


def excess_at_the_end(values: FloatArray) -> tuple[Excess, Excess]:
    """Return the excess in the last eight frames by the noise of frames alone, and beside the wander of ranks."""
    found = rank_excess(values[-8:], np.empty((0, RANKS)), GROUPS)
    return found, with_wander(found, beyond_others(values[:-8], GROUPS), beyond_others(values[-8:], GROUPS))


def test_ranks_that_are_slow_in_turns_are_no_slow_ranks() -> None:
    for seed in range(11):
        alone, beside = excess_at_the_end(dealt_out(seed, 0.08))
        assert np.any(alone.z >= 5.0)
        assert not np.any(beside.z >= 5.0)


def test_a_rank_that_is_slow_beyond_all_that_wander_stands_out() -> None:
    values = dealt_out(3, 0.03)
    values[-8:, 5] += 0.4
    _, beside = excess_at_the_end(values)
    assert np.flatnonzero(beside.z >= 5.0).tolist() == [5]


def test_steady_ranks_are_compared_as_before() -> None:
    values = dealt_out(4, 0.0)
    values[-8:, 5] *= 1.05
    alone, beside = excess_at_the_end(values)
    assert np.flatnonzero(beside.z >= 5.0).tolist() == [5]
    assert beside.z[5] > 0.7 * alone.z[5]


def test_the_ranks_of_a_slow_host_are_not_taken_for_wander() -> None:
    values = dealt_out(5, 0.0)
    values[-40:, :4] *= 1.2
    _, beside = excess_at_the_end(values)
    assert np.flatnonzero(beside.z >= 5.0).tolist() == [0, 1, 2, 3]


def test_too_few_values_tell_nothing_about_wander() -> None:
    found = rank_excess(np.ones((3, RANKS)), np.empty((0, RANKS)), GROUPS)
    few = Excess(found.seconds[:4], found.error[:4], found.usual[:4], found.by_peers[:4], found.level[:4])
    with_it = with_wander(few, np.empty((0, 4)), np.zeros((3, 4)))
    np.testing.assert_array_equal(with_it.error, few.error)
    assert not with_it.wanders


def test_in_a_scale_of_few_values_one_has_to_lie_farther_out() -> None:
    """Sixteen values tell a scale as six degrees of freedom do; what lies twice as far out counts in any case."""
    random = np.random.default_rng(8)
    offsets = 0.05 * random.standard_normal(RANKS)
    values = 1 + offsets + 0.001 * random.standard_normal((FRAMES, RANKS))
    found = rank_excess(values[-8:], np.empty((0, RANKS)), GROUPS)
    now = beyond_others(values[-8:], GROUPS)
    few, many = (with_wander(found, beyond_others(values[n:-8], GROUPS), now) for n in (-8, 0))
    scale = float(1.4826 * np.median(np.abs(found.seconds - np.median(found.seconds))))
    np.testing.assert_allclose(few.error, 2.0 * scale)
    assert 1.0 < np.max(many.error) / scale < 1.5
    assert not many.wanders  # ranks that always differ


@pytest.mark.parametrize(("spread", "wanders"), [(0.08, True), (0.0, False)])
def test_ranks_wander_where_one_frame_is_like_the_next(spread: float, *, wanders: bool) -> None:
    for seed in range(5):
        values = dealt_out(seed, spread)
        assert excess_at_the_end(values)[1].wanders == wanders
        values[-40:, :4] *= 1.2  # which is a host's, and no wandering
        assert excess_at_the_end(values)[1].wanders == wanders


def test_the_frames_looked_at_tell_of_wandering_too() -> None:
    values = dealt_out(9, 0.08)
    found = rank_excess(values[-8:], np.empty((0, RANKS)), GROUPS)
    before, now = beyond_others(values[-15:-8], GROUPS), beyond_others(values[-8:], GROUPS)
    assert with_wander(found, before, now).wanders
    assert not with_wander(found, before[4:], now).wanders  # eleven frames: too few


def test_the_others_lower_median_is_that_of_the_group_without_the_rank() -> None:
    random, groups = np.random.default_rng(6), Groups(np.array([0, 1, 0, 1, 0, -1, 0, 1, 2, 1]))
    values = random.standard_normal((7, 10))
    values[2, 4] = values[3, 0] = values[3, 2] = np.nan
    found = groups.lower_median_of_others(values)
    for frame, rank in np.ndindex(values.shape):
        peers = (groups.of_rank == groups.of_rank[rank]) & np.isfinite(values[frame]) & (np.arange(10) != rank)
        others = np.sort(values[frame, peers])
        is_known = len(others) > 0 and groups.of_rank[rank] >= 0 and np.isfinite(values[frame, rank])
        expected = others[(len(others) - 1) // 2] if is_known else np.nan
        np.testing.assert_equal(found[frame, rank], expected)


def test_in_small_groups_the_error_is_what_medians_scatter_by() -> None:
    random, groups = np.random.default_rng(7), Groups(np.repeat(np.arange(4), 4))
    errors, seconds, by_peers = [], [], []
    for _ in range(400):
        values = 1 + 0.1 * random.standard_normal((8, RANKS))
        found = rank_excess(values, np.empty((0, RANKS)), groups)
        errors.append(np.median(found.error))
        seconds.append(found.seconds)
        by_peers.append(beyond_peers(values, groups))
    scatter = float(np.std(np.concatenate(seconds)))
    assert np.median(errors) > scatter
    assert np.median(errors) < 2 * scatter
    assert np.mean(np.concatenate(by_peers) == 0.0) == 0.25  # a rank that is the median itself lies nowhere beyond it
