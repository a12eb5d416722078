"""Periods of token sequences: exact words, parallel layouts, corruption, super-periods, and nothing where none is."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from detectors.detector import IntArray
from detectors.period import Anchor, Period, anchor, period


def primitive_length(word: list[int]) -> int:
    """Return the length of the shortest word whose repetition is `word`."""
    n = len(word)
    return next(p for p in range(1, n + 1) if n % p == 0 and word == word[:p] * (n // p))


@given(st.lists(st.integers(-3, 5), min_size=1, max_size=40), st.integers(0, 39), st.integers(4, 9))
def test_the_period_of_a_repeated_word_is_its_shortest_repeating_part(word: list[int], cut: int, times: int) -> None:
    tokens = np.array(word * times)[cut % len(word) :]
    assume(len(tokens) >= 3 * len(word))
    assert period(tokens) == Period(primitive_length(word), 0, 1.0)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=23), st.permutations(list(range(6))))
def test_the_numbers_of_the_tokens_mean_nothing(word: list[int], names: list[int]) -> None:
    tokens = np.array(word * 5)
    assert period(tokens) == period(10**12 * np.array(names)[tokens] - 7)


def one_layer(kind: int) -> list[int]:
    """Calls of a transformer layer under tensor parallelism: gather and scatter around two blocks."""
    return [kind, kind + 1] * 2


LAYOUTS = {
    "dp": [1] * 25 + [2],
    "dp sharded": [3] * 12 + [4, 3] * 12 + [4] * 12,
    "tp": one_layer(5) * 24 + [7],
    "tp dp": one_layer(5) * 24 + [1] * 3 + [7],
    "pp": [8, 9] * 8 + [7],
    "pp dp": [8, 9, 9, 8] * 8 + [3, 4, 7],
    "tp pp": ([8] + one_layer(5) * 6 + [9] + one_layer(5) * 6) * 8 + [7],
    "tp pp dp": ([8] + one_layer(5) * 6 + [9] + one_layer(5) * 6) * 4 + [3, 4, 7, 7],
    "tp dp deep": one_layer(5) * 96 + [3, 4, 7, 7],
    "ep": [10, 10, *one_layer(5)] * 16 + [3, 4, 7],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_iteration_of_each_parallel_layout_is_found(layout: str) -> None:
    iteration = LAYOUTS[layout]
    tokens = np.array(iteration * 5)[3:]
    found = period(tokens)
    assert found is not None
    assert found.length == len(iteration)
    once = {token for token in iteration if iteration.count(token) == 1}
    if once:
        mark = anchor(tokens, found, candidates=once)
        assert mark is not None
        assert mark.iterations == 1
        assert mark.token in once


def test_a_start_up_phase_before_the_first_iteration_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    tokens = np.concatenate([rng.integers(20, 40, 61), np.tile(LAYOUTS["tp pp dp"], 7)])
    found = period(tokens)
    assert found is not None
    assert found.length == len(LAYOUTS["tp pp dp"])
    assert found.offset == 61


@pytest.mark.parametrize("seed", range(5))
def test_a_corrupted_stretch_does_not_hide_the_period(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.tile([1, 2, 1, 2, 3, 4, 4, 5, 1, 6, 7], 30)
    at = int(rng.integers(40, 250))
    noisy = tokens.copy()
    noisy[at : at + 29] = rng.integers(0, 9, 29)
    assert_period(noisy, 11)
    assert_period(np.delete(tokens, np.arange(at, at + 17)), 11)
    assert_period(np.insert(tokens, at, rng.integers(0, 9, 23)), 11)


def assert_period(tokens: IntArray, length: int) -> None:
    found = period(tokens)
    assert found is not None
    assert found.length == length
    o = found.offset
    np.testing.assert_array_equal(tokens[o : o + length], tokens[o + length : o + 2 * length])


def super_period(n_calls: int, extra: list[int], every: int, times: int) -> IntArray:
    """Iterations of n_calls calls that begin with token 0, of which every n-th makes further calls."""
    plain = [0, *([1, 2] * (n_calls // 2))[: n_calls - 1]]
    return np.array((plain * every + extra) * times)


@pytest.mark.parametrize(("n_calls", "extra", "every"), [(9, [7, 7, 8], 5), (17, [9], 10), (23, [9, 9, 9, 9], 4)])
def test_iterations_of_which_every_nth_does_more_are_counted_by_their_anchor(
    n_calls: int, extra: list[int], every: int
) -> None:
    tokens = super_period(n_calls, extra, every, times=7)
    found = period(tokens)
    assert found is not None
    assert found.length == n_calls * every + len(extra)
    assert anchor(tokens, found) == Anchor(0, every)


def test_a_micro_batch_inside_an_iteration_is_told_by_what_can_only_occur_once() -> None:
    tokens = np.tile([*([1, 2, 3, 4, 5, 6] * 8), 7, 8], 9)
    found = period(tokens)
    assert found is not None
    assert anchor(tokens, found, candidates={7, 8}) == Anchor(7, 1)
    assert anchor(tokens, found, candidates=set()) is None


def test_alternating_calls_inside_an_iteration_are_no_iterations() -> None:
    tokens = np.array(([1, 2] * 200 + [3, 4, 5, 6]) * 5)
    found = period(tokens)
    assert found is not None
    assert found.length == 404
    assert anchor(tokens, found) == Anchor(3, 1)


def test_without_a_regular_call_there_is_no_anchor() -> None:
    tokens = np.tile([1, 1, 1, 1, 2, 2, 2, 2], 7)
    found = period(tokens)
    assert found is not None
    assert found.length == 8
    assert anchor(tokens, found) is None


@pytest.mark.parametrize("n_tokens", [2, 3, 5, 9, 40])
@pytest.mark.parametrize("n", [31, 101, 1009, 4001])
def test_chance_has_no_period(n_tokens: int, n: int) -> None:
    tokens = np.random.default_rng(n * n_tokens).integers(0, n_tokens, n)
    assert period(tokens) is None


@pytest.mark.parametrize("n", [0, 1, 2])
def test_so_few_tokens_have_no_period(n: int) -> None:
    assert period(np.full(n, 4)) is None


def test_one_call_among_which_others_are_strewn_has_no_period() -> None:
    rng = np.random.default_rng(3)
    tokens = np.where(rng.random(2003) < 0.98, 1, rng.integers(2, 9, 2003))
    assert period(tokens) is None


def test_iterations_of_ever_different_length_have_no_period() -> None:
    rng = np.random.default_rng(2)
    tokens = np.concatenate([[1, 2] * rng.integers(2, 9) + [3] for _ in range(307)])
    assert period(tokens) is None


def test_long_runs_of_one_call_are_no_iterations() -> None:
    tokens = np.array(([1] * 300 + [2] * 300) * 5)
    assert period(tokens) == Period(600, 0, 1.0)


def test_iterations_that_never_repeat_exactly_have_no_period() -> None:
    tokens = np.tile(np.arange(50), 9)
    tokens[::50] = 1000 + np.arange(9)
    assert period(tokens) is None


def test_a_call_at_ever_different_distances_marks_no_iteration() -> None:
    tokens = np.tile([0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1], 7)
    found = period(tokens)
    assert found == Period(14, 0, 1.0)
    assert anchor(tokens, found) is None


def test_fewer_than_three_repeats_are_not_enough() -> None:
    word = list(range(13))
    assert period(np.array(word * 3)[:-1]) is None
    assert period(np.array(word * 3)) == Period(13, 0, 1.0)


def test_a_single_token_has_the_period_one() -> None:
    assert period(np.full(97, 4)) == Period(1, 0, 1.0)


@pytest.mark.parametrize("tokens", [np.zeros((3, 3), np.int64), np.zeros(9)])
def test_what_is_no_list_of_integers_is_refused(tokens: IntArray) -> None:
    with pytest.raises(ValueError, match="tokens must be a list of integers"):
        period(tokens)
