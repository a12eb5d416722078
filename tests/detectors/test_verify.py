"""Verification: what its bounds promise, what confirms how soon, and what must never confirm."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student  # type: ignore[import-untyped]

from detectors.detector import FloatArray
from detectors.verify import Decision, Outcome, Reason, Shift, confirm, shift, student_quantile


def times(rng: np.random.Generator, n: int, cv: float, ratio: float = 1.0) -> FloatArray:
    """Iteration times of 1.3 s with log-normal jitter."""
    jitter: FloatArray = np.exp(rng.normal(0.0, np.sqrt(np.log1p(cv**2)), n))
    return 1.3 * ratio * jitter


def scan(before: FloatArray, after: FloatArray, least_ratio: float = 1.05) -> tuple[Decision, int]:
    """Look after each iteration until it is decided; return the decision and the number of iterations it took."""
    for n_after in range(1, len(after) + 1):
        decision = confirm(shift(before, after[:n_after]), least_ratio)
        if decision.outcome is not Outcome.UNDECIDED:
            return decision, n_after
    return decision, len(after)


def delays(cv: float, ratio: float, n_before: int, tries: int = 53, seed: int = 1) -> tuple[float, float]:
    """Return the share of true shifts that confirm, and the median number of iterations that it takes."""
    rng = np.random.default_rng(seed)
    took = []
    for _ in range(tries):
        decision, n_after = scan(times(rng, n_before, cv), times(rng, 30, cv, ratio))
        if decision.outcome is Outcome.CONFIRMED:
            took.append(n_after)
    return len(took) / tries, float(np.median(took))


def test_the_ratio_of_two_steady_stretches_is_exact() -> None:
    found = shift(np.full(11, 0.8), np.full(5, 1.0))
    assert found.ratio == pytest.approx(1.25)
    assert (found.n_before, found.n_after) == (11, 5)
    assert found.lower < log(1.25) < found.upper
    assert exp(found.lower) == pytest.approx(1.25, rel=0.01)


@pytest.mark.parametrize("n_after", [3, 5, 8, 13, 29])
def test_the_bounds_hold_the_true_ratio_as_often_as_they_promise(n_after: int) -> None:
    rng = np.random.default_rng(2)
    found = [shift(times(rng, 41, 0.05), times(rng, n_after, 0.05, 1.2), confidence=0.95) for _ in range(1009)]
    assert np.mean([one.lower <= log(1.2) for one in found]) >= 0.93
    assert np.mean([one.upper >= log(1.2) for one in found]) >= 0.93
    assert np.mean([one.ratio for one in found]) == pytest.approx(1.2, rel=0.01)


def test_thirty_percent_at_half_a_percent_of_jitter_confirms_with_the_second_iteration() -> None:
    assert delays(cv=0.005, ratio=1.3, n_before=30) == (1.0, 2.0)
    assert delays(cv=0.005, ratio=1.3, n_before=10) == (1.0, 2.0)


def test_fifteen_percent_at_seven_percent_of_jitter_takes_about_ten_iterations() -> None:
    found, median = delays(cv=0.07, ratio=1.15, n_before=100)
    assert found >= 0.95
    assert 7 <= median <= 12


def test_eleven_percent_at_two_percent_of_jitter_takes_three_iterations() -> None:
    found, median = delays(cv=0.023, ratio=1.11, n_before=100)
    assert found >= 0.99
    assert median <= 4


@pytest.mark.parametrize("cv", [0.005, 0.023, 0.07, 0.11])
@pytest.mark.parametrize("n_before", [10, 30, 100])
def test_noise_looked_at_after_each_of_thirty_iterations_does_not_confirm(cv: float, n_before: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(23):
        decision, _ = scan(times(rng, n_before, cv), times(rng, 30, cv))
        assert decision.outcome is not Outcome.CONFIRMED


def test_a_single_spike_never_confirms() -> None:
    rng = np.random.default_rng(4)
    for position in range(7):
        after = times(rng, 30, 0.005)
        after[position] *= 4.0
        decision, _ = scan(times(rng, 31, 0.005), after)
        assert decision.outcome is Outcome.REFUTED


def test_two_spikes_in_a_row_do_not_confirm_where_spikes_are_frequent() -> None:
    rng = np.random.default_rng(5)
    before = times(rng, 101, 0.005)
    before[::20] *= 2.0
    after = times(rng, 30, 0.005)
    after[:2] *= 2.0
    decision, _ = scan(before, after)
    assert decision.outcome is Outcome.REFUTED


def test_a_lasting_slowdown_is_found_among_frequent_spikes_too() -> None:
    rng = np.random.default_rng(6)
    before = times(rng, 101, 0.005)
    before[::20] *= 2.0
    decision, n_after = scan(before, times(rng, 30, 0.005, 1.3))
    assert decision.outcome is Outcome.CONFIRMED
    assert n_after <= 3


def test_what_has_happened_before_for_as_long_proves_nothing() -> None:
    rng = np.random.default_rng(7)
    before = times(rng, 101, 0.005)
    before[40:46] *= 1.5
    assert scan(before, np.concatenate([times(rng, 4, 0.005, 1.5), times(rng, 26, 0.005)]))[0].outcome is not (
        Outcome.CONFIRMED
    )


def test_a_job_that_alternates_between_two_speeds_has_not_become_slower() -> None:
    rng = np.random.default_rng(8)
    for _ in range(97):
        job = 1.3 * np.where(rng.random(131) < 0.3, 1.09, 1.0)
        job *= times(rng, 131, 0.002)
        assert scan(job[:101], job[101:])[0].outcome is not Outcome.CONFIRMED


def test_correlated_jitter_widens_the_bounds() -> None:
    rng = np.random.default_rng(9)
    white = rng.normal(0.0, 0.02, 401)
    correlated = np.convolve(white, 0.8 ** np.arange(40))[:401] * np.sqrt(1 - 0.8**2)
    after = np.full(9, np.exp(0.3))
    plain, careful = (shift(np.exp(jitter - np.median(jitter)), after) for jitter in (white, correlated))
    assert 0.3 - careful.lower > 2 * (0.3 - plain.lower)


def test_a_recovery_is_confirmed_with_a_ratio_below_one() -> None:
    rng = np.random.default_rng(10)
    slow, well = times(rng, 31, 0.01, 1.4), times(rng, 30, 0.01)
    decision, n_after = scan(slow, well, least_ratio=1 / 1.05)
    assert decision == Decision(Outcome.CONFIRMED, Reason.LOWER_BOUND_CLEAR)
    assert n_after <= 3
    assert scan(slow, slow[:30], least_ratio=1 / 1.05)[0].outcome is Outcome.REFUTED
    assert scan(well, times(rng, 30, 0.01, 1.4), least_ratio=1 / 1.05)[0].outcome is Outcome.REFUTED


@given(
    st.lists(st.floats(0.1, 10.0), min_size=3, max_size=41),
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=31),
)
def test_a_speed_is_judged_like_a_time_turned_round(before: list[float], after: list[float]) -> None:
    times, speeds = shift(np.array(before), np.array(after)), shift(1 / np.array(before), 1 / np.array(after))
    assert speeds.log_ratio == pytest.approx(-times.log_ratio, abs=1e-9)
    assert speeds.lower == pytest.approx(-times.upper, abs=1e-9)
    assert speeds.upper == pytest.approx(-times.lower, abs=1e-9)


def test_what_proves_no_slowdown_proves_no_recovery_when_turned_round() -> None:
    rng = np.random.default_rng(15)
    quiet, spiky, once_slow = times(rng, 101, 0.005), times(rng, 101, 0.005), times(rng, 101, 0.005)
    spiky[::20] *= 2.0
    once_slow[40:46] *= 1.5
    over = 1.3 * np.array([1.5, 1.5, 1.5, 1.0])
    for before, after in ((quiet, over), (spiky, np.full(2, 2.6)), (once_slow, np.full(4, 1.9))):
        assert confirm(shift(before, after)).outcome is Outcome.UNDECIDED
        assert confirm(shift(1 / before, 1 / after), 1 / 1.05).outcome is Outcome.UNDECIDED


def test_the_bounds_are_those_of_the_formula() -> None:
    jitter = 0.01 * np.ravel(np.column_stack([np.arange(-1, -9, -1), np.arange(1, 9)]))  # no correlation to allow for
    found = shift(np.exp(jitter), np.full(9, 2.0))
    scale = max(1.4826 * 0.045, 0.01 * (6.5 + 6.5) / 2.563)
    error = 1.093 * scale * np.sqrt(1 / 16 + 1 / 9)
    margin = student.ppf(0.999, 15) * error
    assert found.lower == pytest.approx(log(2) - margin, rel=0.01)
    assert found.upper == pytest.approx(log(2) + margin, rel=0.01)


def test_a_slow_spell_that_is_over_confirms_nothing() -> None:
    before = times(np.random.default_rng(13), 31, 0.005)
    spell = 1.3 * np.array([1.5, 1.5, 1.5, 1.0])
    assert confirm(shift(before, spell[:3])).outcome is Outcome.CONFIRMED
    assert confirm(shift(before, spell)).outcome is Outcome.UNDECIDED


def test_half_of_an_even_number_of_values_is_no_slowdown() -> None:
    before = times(np.random.default_rng(14), 101, 0.005)
    assert confirm(shift(before, 1.3 * np.array([1.5, 1.0, 1.0, 1.5]))).outcome is Outcome.UNDECIDED
    assert confirm(shift(before, 1.3 * np.array([1.5, 1.0, 1.5, 1.5]))).outcome is Outcome.CONFIRMED


def shift_of(lower: float, upper: float, n_before: int = 30, n_after: int = 7) -> Shift:
    return Shift((lower + upper) / 2, lower, upper, n_before, n_after)


@pytest.mark.parametrize(
    ("found", "outcome", "reason"),
    [
        (shift_of(0.06, 0.2), Outcome.CONFIRMED, Reason.LOWER_BOUND_CLEAR),
        (shift_of(0.04, 0.2), Outcome.UNDECIDED, Reason.STILL_OPEN),
        (shift_of(-0.2, 0.04), Outcome.REFUTED, Reason.UPPER_BOUND_BELOW),
        (shift_of(0.04, 0.2, n_after=30), Outcome.REFUTED, Reason.NEVER_CLEAR),
        (shift_of(0.06, 0.2, n_before=9), Outcome.UNDECIDED, Reason.REFERENCE_SHORT),
        (shift_of(0.06, 0.2, n_after=1), Outcome.UNDECIDED, Reason.AFTER_SHORT),
    ],
)
def test_every_decision_says_why(found: Shift, outcome: Outcome, reason: Reason) -> None:
    assert confirm(found) == Decision(outcome, reason)


def test_a_caller_may_want_more_iterations_before_anything_is_decided() -> None:
    found = shift_of(0.06, 0.2, n_after=3)
    assert confirm(found, least_after=4).reason is Reason.AFTER_SHORT
    assert confirm(found, least_after=3).outcome is Outcome.CONFIRMED
    assert confirm(shift_of(0.06, 0.2, n_after=1), least_after=1).reason is Reason.AFTER_SHORT


def test_missing_times_are_left_out() -> None:
    rng = np.random.default_rng(11)
    before, after = times(rng, 31, 0.02), times(rng, 7, 0.02, 1.2)
    holed_before = np.insert(before, [0, 5, 31], np.nan)
    holed_after = np.insert(after, [3], np.nan)
    assert shift(before, after) == shift(holed_before, holed_after)


def test_nothing_is_known_without_values() -> None:
    for before, after in (([], [1.0]), ([1.0, 1.0], [1.0]), ([1.0] * 11, []), ([1.0] * 11, [np.nan])):
        found = shift(np.array(before), np.array(after))
        assert np.isnan(found.log_ratio)
        assert (found.lower, found.upper) == (-np.inf, np.inf)
        assert confirm(found).outcome is Outcome.UNDECIDED


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.inf])
def test_a_time_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="after: times must be finite and above 0"):
        shift(np.full(11, 1.0), np.array([1.0, wrong]))
    with pytest.raises(ValueError, match="before: times must be finite and above 0"):
        shift(np.array([1.0, wrong]), np.full(11, 1.0))


@pytest.mark.parametrize("wrong", [0.0, 1.0, -2.0])
def test_a_least_ratio_without_sense_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="least_ratio"):
        confirm(shift_of(0.0, 0.1), wrong)


@given(
    st.lists(st.floats(0.1, 10.0), min_size=3, max_size=41),
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=31),
    st.floats(0.001, 1000.0),
)
def test_the_unit_of_time_does_not_matter(before: list[float], after: list[float], unit: float) -> None:
    one = shift(np.array(before), np.array(after))
    other = shift(unit * np.array(before), unit * np.array(after))
    assert one.lower <= one.log_ratio <= one.upper
    assert other.log_ratio == pytest.approx(one.log_ratio, abs=1e-6)


@pytest.mark.parametrize("degrees", [9, 11, 17, 29, 101])
@pytest.mark.parametrize("probability", [0.95, 0.99, 0.999])
def test_the_expansion_of_students_quantile_is_good_to_one_percent(degrees: int, probability: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(student.ppf(probability, degrees), rel=0.01)


def test_more_after_than_before_is_compared_as_well() -> None:
    rng = np.random.default_rng(12)
    found = shift(times(rng, 13, 0.01), times(rng, 997, 0.01, 1.3))
    assert confirm(found).outcome is Outcome.CONFIRMED
