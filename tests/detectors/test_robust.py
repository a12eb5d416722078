"""Location and scale on values whose answer is known."""

import numpy as np
import pytest

from detectors.robust import MEDIAN_ERROR, MIDMEAN_ERROR, mad_scale, midmean, wide_scale


def test_the_midmean_leaves_out_a_quarter_at_each_end() -> None:
    assert midmean(np.array([-900.0, 3.0, 1.0, 2.0, 4.0, 900.0, 800.0, 0.0])) == pytest.approx(2.5)


@pytest.mark.parametrize("scale", [mad_scale, wide_scale])
def test_a_scale_is_the_standard_deviation_of_gaussian_values(scale: object) -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, (3, 200_003))
    np.testing.assert_allclose(scale(values), 2.0, rtol=0.02)  # type: ignore[operator]


def test_spikes_in_one_value_of_twenty_hardly_move_a_scale() -> None:
    values = np.random.default_rng(2).normal(0.0, 1.0, 997)
    values[::20] = 50.0
    assert mad_scale(values) < 1.15
    assert wide_scale(values) < 1.3


def test_the_wide_scale_sees_two_speeds_where_the_mad_sees_one() -> None:
    values = np.array([0.0] * 7 + [0.1] * 3)
    assert mad_scale(values) == 0.0
    assert wide_scale(values) == pytest.approx(0.1 / 2.563)


def test_the_standard_errors_are_those_of_gaussian_values() -> None:
    values = np.random.default_rng(3).normal(0.0, 1.0, (4001, 101))
    assert np.median(values, axis=1).std() * np.sqrt(101) == pytest.approx(MEDIAN_ERROR, rel=0.04)
    assert midmean(values).std() * np.sqrt(101) == pytest.approx(MIDMEAN_ERROR, rel=0.04)
