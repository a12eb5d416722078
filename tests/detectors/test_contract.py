"""The laws that every detector keeps, each stated once and checked on all of them."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from detectors.adwin import Adwin
from detectors.bocpd import Bocpd
from detectors.cusum import Cusum
from detectors.detector import Detector, FloatArray, IntArray, Verdict
from detectors.null import Null
from detectors.page_hinkley import PageHinkley
from detectors.peer import Peer

N_SERIES = 23
N_FRAMES = 97
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5])
SLOW = 8
ONSET = 47


@dataclass(frozen=True)
class Member:
    """A detector of the contract; make(groups) builds it for series with these peers.

    is_free_of_scale: its thresholds are in the scale of the series, not in ratios or log units.
    """

    make: Callable[[IntArray], Detector]
    compares_series: bool = False
    is_free_of_scale: bool = False


MEMBERS = {
    "bocpd": Member(lambda groups: Bocpd(len(groups), scale_floor=1e-9), is_free_of_scale=True),
    "cusum": Member(lambda groups: Cusum(len(groups), scale_floor=1e-9), is_free_of_scale=True),
    "peer": Member(Peer, compares_series=True),
    "adwin": Member(lambda groups: Adwin(len(groups))),
    "page_hinkley": Member(lambda groups: PageHinkley(len(groups))),
    "null": Member(lambda groups: Null(len(groups)), is_free_of_scale=True),
}


@pytest.fixture(params=MEMBERS)
def member(request: pytest.FixtureRequest) -> Member:
    return MEMBERS[request.param]


def noise(seed: int, n_frames: int = N_FRAMES) -> FloatArray:
    """Log times of which one series slows down to twice its time, with spikes and missing values here and there."""
    rng = np.random.default_rng(seed)
    frames = rng.normal(-1.0, 0.03, (n_frames, N_SERIES))
    frames[ONSET:, SLOW] += np.log(2.0)
    frames[rng.random(frames.shape) < 0.02] += np.log(3.0)
    frames[rng.random(frames.shape) < 0.03] = np.nan
    return frames


def judged(detector: Detector, frames: FloatArray) -> Iterator[Verdict]:
    for frame in frames:
        yield detector.update(frame)


def assert_equal(one: Verdict, other: Verdict) -> None:
    np.testing.assert_array_equal(one.score, other.score)
    np.testing.assert_array_equal(one.run_length, other.run_length)


def test_its_name_is_the_one_it_is_known_by() -> None:
    assert [member.make(GROUPS).name for member in MEMBERS.values()] == list(MEMBERS)


def test_it_leaves_the_frame_as_it_was(member: Member) -> None:
    frames = noise(seed=1)
    before = frames.copy()
    frames.flags.writeable = False
    list(judged(member.make(GROUPS), frames))
    np.testing.assert_array_equal(frames, before)


def test_equal_frames_give_equal_verdicts(member: Member) -> None:
    frames = noise(seed=2)
    for one, other in zip(judged(member.make(GROUPS), frames), judged(member.make(GROUPS), frames), strict=True):
        assert_equal(one, other)


def through_pickle(detector: Detector) -> Detector:
    revived: Detector = pickle.loads(pickle.dumps(detector))  # noqa: S301  written a moment ago
    return revived


@pytest.mark.parametrize("revive", [copy.deepcopy, through_pickle])
def test_a_copy_goes_on_where_its_original_stood(member: Member, revive: Callable[[Detector], Detector]) -> None:
    frames = noise(seed=3)
    for cut in (5, 31, ONSET + 3):
        detector = member.make(GROUPS)
        list(judged(detector, frames[:cut]))
        revived = revive(detector)
        rest = [(verdict.score, verdict.run_length) for verdict in judged(detector, frames[cut:])]
        for (score, run_length), verdict in zip(rest, judged(revived, frames[cut:]), strict=True):
            assert_equal(Verdict(score, run_length), verdict)


def test_permuting_the_series_permutes_the_verdict(member: Member) -> None:
    frames = noise(seed=4)
    order = np.random.default_rng(4).permutation(N_SERIES)
    plain = judged(member.make(GROUPS), frames)
    permuted = judged(member.make(GROUPS[order]), frames[:, order])
    for one, other in zip(plain, permuted, strict=True):
        assert_equal(Verdict(one.score[order], one.run_length[order]), other)


def test_a_missing_value_leaves_the_other_series_alone(member: Member) -> None:
    frames = noise(seed=5)
    holed = frames.copy()
    holed[::3, 9] = np.nan
    others = GROUPS[9] != GROUPS if member.compares_series else np.arange(N_SERIES) != 9
    for one, other in zip(judged(member.make(GROUPS), frames), judged(member.make(GROUPS), holed), strict=True):
        assert_equal(
            Verdict(one.score[others], one.run_length[others]), Verdict(other.score[others], other.run_length[others])
        )


def test_a_frame_without_any_value_changes_nothing_and_gets_no_opinion(member: Member) -> None:
    frames = noise(seed=6)
    plain, interrupted = member.make(GROUPS), member.make(GROUPS)
    for frame in frames:
        silence = interrupted.update(np.full(N_SERIES, np.nan))
        assert np.isnan(silence.score).all()
        assert not silence.run_length.any()
        assert_equal(plain.update(frame), interrupted.update(frame))


def test_a_series_without_a_value_gets_no_opinion(member: Member) -> None:
    frames = noise(seed=7)
    for frame, verdict in zip(frames, judged(member.make(GROUPS), frames), strict=True):
        assert np.isnan(verdict.score[np.isnan(frame)]).all()


def test_scores_are_finite_or_missing_and_run_lengths_go_with_alarms_alone(member: Member) -> None:
    for seen, verdict in enumerate(judged(member.make(GROUPS), noise(seed=8)), start=1):
        assert verdict.score.shape == (N_SERIES,)
        assert verdict.run_length.shape == (N_SERIES,)
        assert verdict.score.dtype == np.float64
        assert verdict.run_length.dtype == np.int64
        assert not np.isinf(verdict.score).any()
        assert (verdict.run_length[~verdict.alarm] == 0).all()
        assert (verdict.run_length[verdict.alarm] >= 1).all()
        assert (verdict.run_length <= seen).all()


def test_a_verdict_is_not_part_of_the_detectors_state(member: Member) -> None:
    frames = noise(seed=9)
    careful, careless = member.make(GROUPS), member.make(GROUPS)
    for frame in frames:
        kept, scribbled = careful.update(frame), careless.update(frame)
        assert_equal(kept, scribbled)
        scribbled.score[:] = 7.0
        scribbled.run_length[:] = 7


def test_another_unit_of_time_changes_nothing(member: Member) -> None:
    frames = noise(seed=10)
    milliseconds = frames + np.log(1000.0)
    for one, other in zip(judged(member.make(GROUPS), frames), judged(member.make(GROUPS), milliseconds), strict=True):
        np.testing.assert_allclose(one.score, other.score, rtol=1e-6, atol=1e-9)
        np.testing.assert_array_equal(one.run_length, other.run_length)


@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if member.is_free_of_scale])
def test_a_detector_that_learns_the_scale_does_not_mind_another_one(name: str) -> None:
    member = MEMBERS[name]
    frames = noise(seed=11)
    for one, other in zip(judged(member.make(GROUPS), frames), judged(member.make(GROUPS), 4 * frames), strict=True):
        np.testing.assert_allclose(one.score, other.score, rtol=1e-6, atol=1e-9)
        np.testing.assert_array_equal(one.run_length, other.run_length)


def test_its_memory_does_not_grow_with_the_number_of_frames(member: Member) -> None:
    detector = member.make(GROUPS)
    frames = noise(seed=12, n_frames=1499)
    list(judged(detector, frames[:499]))
    early = stored_bytes(detector)
    list(judged(detector, frames[499:]))
    assert stored_bytes(detector) <= 1.25 * early


def stored_bytes(detector: Detector) -> int:
    """Size of everything that a detector holds, River's objects included."""
    return len(pickle.dumps(vars(detector)))


@pytest.mark.parametrize("shape", [(N_SERIES + 1,), (1, N_SERIES), ()])
def test_a_frame_of_another_shape_is_refused_by_name(member: Member, shape: tuple[int, ...]) -> None:
    detector = member.make(GROUPS)
    with pytest.raises(ValueError, match=rf"{detector.name}: the frame has shape .* expected \({N_SERIES},\)"):
        detector.update(np.zeros(shape))


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_value_is_refused_before_it_changes_anything(member: Member, value: float) -> None:
    frames = noise(seed=13)
    plain, offended = member.make(GROUPS), member.make(GROUPS)
    bad = frames[0].copy()
    bad[2] = value
    for frame in frames[:41]:
        with pytest.raises(ValueError, match="infinite value"):
            offended.update(bad)
        assert_equal(plain.update(frame), offended.update(frame))


@pytest.mark.parametrize(
    ("name", "delay"), [("bocpd", 1), ("cusum", 3), ("peer", 4), ("adwin", 30), ("page_hinkley", 0), ("null", None)]
)
def test_a_lasting_slowdown_to_twice_the_time_is_found_after_so_many_frames(name: str, delay: int | None) -> None:
    rng = np.random.default_rng(14)
    frames = rng.normal(-1.0, 0.03, (N_FRAMES, N_SERIES))
    frames[ONSET:, SLOW] += np.log(2.0)
    alarms = np.array([verdict.alarm for verdict in judged(MEMBERS[name].make(GROUPS), frames)])
    assert not alarms[:ONSET].any()
    assert not np.delete(alarms, SLOW, axis=1).any()
    found = np.flatnonzero(alarms[:, SLOW])
    assert (found[0] - ONSET if len(found) else None) == delay
