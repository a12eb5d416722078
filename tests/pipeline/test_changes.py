"""Changes of one job's iteration time: what is found how soon, what is not, and which level counts afterwards."""

import numpy as np
import pytest

from pipeline.changes import Change, ChangeSearch
from pipeline.history import History
from pipeline.judge_params import DEFAULTS
from schemas.table import FloatArray

ONSET = 101


def changes(times_s: FloatArray) -> list[tuple[int, Change]]:
    """Return the changes with the frame in which each was told."""
    history, search, found = History(1), ChangeSearch(DEFAULTS), []
    for frame, duration_s in enumerate(times_s.tolist()):
        slot = frame % history.capacity
        history.n_frames += 1
        history.iterations[slot], history.duration_s[slot] = frame, duration_s
        if (change := search.update(history)) is not None:
            found.append((frame, change))
    return found


def noise(seed: int, n: int, cv: float) -> FloatArray:
    times_s: FloatArray = np.exp(cv * np.random.default_rng(seed).standard_normal(n))
    return times_s


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_plain_change_is_known_with_its_second_iteration(seed: int) -> None:
    times_s = noise(seed, 131, 0.01)
    times_s[ONSET:] *= 1.3
    ((frame, change),) = changes(times_s)
    assert (frame, change.onset, change.n_after) == (ONSET + 1, ONSET, 2)
    assert change.ratio == pytest.approx(1.3, rel=0.03)
    assert change.before_s == pytest.approx(1.0, rel=0.01)


def test_shifts_of_one_standard_deviation_are_found() -> None:
    delays = []
    for seed in range(11):
        times_s = noise(seed, 293, 0.1)
        times_s[193:] *= 1.11
        delays.append(next((frame - 193 for frame, change in changes(times_s) if change.ratio > 1), 100))
    assert np.median(delays) <= 30
    assert np.count_nonzero(np.array(delays) < 100) >= 10


def test_noise_alone_changes_nothing() -> None:
    assert not [change for seed in range(7) for change in changes(noise(seed, 401, 0.08))]


def test_a_slow_ramp_is_dated_where_it_begins_to_show() -> None:
    times_s = noise(4, 181, 0.01)
    times_s[ONSET:] *= np.minimum(1 + 0.15 * np.arange(1, 81) / 80, 1.15)
    frame, change = changes(times_s)[0]
    assert frame - ONSET <= 40
    assert ONSET <= change.onset <= frame - 8
    assert change.before_s == pytest.approx(1.0, rel=0.01)


def test_stairs_of_four_percent_are_found_with_their_second_step() -> None:
    times_s = noise(5, 181, 0.005)
    for number in range(4):
        times_s[ONSET + 17 * number :] *= 1.04
    frame, change = changes(times_s)[0]
    assert ONSET + 17 <= frame <= ONSET + 22
    assert 1.04 < change.ratio < 1.1


def test_a_change_of_less_than_five_percent_is_none() -> None:
    times_s = noise(6, 201, 0.005)
    times_s[ONSET:] *= 1.03
    assert changes(times_s) == []


def test_spikes_are_no_change_however_often_they_come() -> None:
    random = np.random.default_rng(7)
    times_s = noise(7, 503, 0.01)
    times_s[random.uniform(size=503) < 0.07] *= 2.0
    assert changes(times_s) == []


def test_a_job_that_is_back_is_compared_with_all_that_was_known_of_its_level() -> None:
    """After a spell, seven healthy iterations are too few to tell a tenth more from noise; a hundred before are not."""
    times_s = noise(8, 171, 0.03)
    times_s[ONSET : ONSET + 13] *= 1.5
    again = ONSET + 13 + 7
    times_s[again:] *= 1.12
    told = changes(times_s)
    assert [change.ratio > 1 for _, change in told] == [True, False, True]
    frame, change = told[-1]
    assert frame - again <= 8
    assert change.before_s == pytest.approx(1.0, rel=0.02)


def test_a_change_that_was_none_leaves_the_level_as_it_was() -> None:
    """Three long iterations pass for a change; the level is known again as soon as they are seen to be over."""
    times_s = noise(9, 161, 0.02)
    times_s[ONSET : ONSET + 3] *= 1.6
    times_s[ONSET + 27 :] *= 1.12
    told = changes(times_s)
    frame, change = told[-1]
    assert change.ratio == pytest.approx(1.12, rel=0.03)
    assert frame - (ONSET + 27) <= 8, "the spell has shown that three long iterations in a row happen"
