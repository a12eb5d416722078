"""The cumulative sum, by arithmetic that can be done by hand, and by its false alarms on noise."""

from math import ceil, sqrt

import numpy as np
import pytest

from detectors.cusum import Cusum
from detectors.detector import FloatArray

WARMUP = 31
# Equally spaced from -1 to 1: midmean 0, MAD scale 1.4826 / 2, decile scale 1.6 / 2.563.
RAMP = np.linspace(-1.0, 1.0, WARMUP)
SCALE = 1.4826 * 0.5333333333
ALLOWANCE = 0.5 + 0.6 / sqrt(WARMUP)


def learnt() -> Cusum:
    """A CUSUM of one series with reference 0 and scale SCALE."""
    detector = Cusum(1, warmup_frames=WARMUP)
    for value in RAMP:
        assert np.isnan(detector.update(np.array([value])).score[0])
    return detector


def frames_to_alarm(detector: Cusum, values: FloatArray) -> int | None:
    for frame, value in enumerate(values, start=1):
        verdict = detector.update(np.array([value]))
        if verdict.alarm[0]:
            assert verdict.run_length[0] == frame
            return frame
    return None


def test_the_reference_is_the_middle_of_the_warm_up() -> None:
    detector = Cusum(1, warmup_frames=WARMUP)
    assert np.isnan(detector.reference[0])
    assert learnt().reference[0] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("shift", [1.0, 1.5, 2.0, 2.5])
def test_a_shift_alarms_as_soon_as_its_excess_adds_up_to_the_threshold(shift: float) -> None:
    needed = ceil(8.0 / (shift - ALLOWANCE) - 1e-9)
    assert frames_to_alarm(learnt(), np.full(47, shift * SCALE)) == needed


def test_no_frame_weighs_more_than_the_clip() -> None:
    assert frames_to_alarm(learnt(), np.full(47, 1e6)) == ceil(8.0 / (3.0 - ALLOWANCE))


def test_three_spikes_in_a_row_do_not_alarm_and_four_do() -> None:
    assert frames_to_alarm(learnt(), np.array([1e6] * 3 + [0.0] * 41)) is None
    assert frames_to_alarm(learnt(), np.array([1e6] * 4)) == 4


def test_a_shift_within_the_slack_is_never_an_alarm() -> None:
    assert frames_to_alarm(learnt(), np.full(2003, 0.5 * SCALE)) is None


def test_a_staircase_of_steps_too_small_to_notice_is_found() -> None:
    stairs = np.repeat([0.4, 0.8, 1.2, 1.6], 10) * SCALE
    found = learnt()
    alarm = next(i for i, value in enumerate(stairs) if found.update(np.array([value])).alarm[0])
    assert 30 <= alarm < 40


def test_the_run_length_counts_from_the_last_zero_of_the_sum() -> None:
    detector = learnt()
    for value in [2 * SCALE, -SCALE, -SCALE, 0.0, *[2 * SCALE] * 6]:
        verdict = detector.update(np.array([value]))
    assert verdict.alarm[0]
    assert verdict.run_length[0] == 6


def test_the_alarm_ends_within_twenty_frames_of_its_reason() -> None:
    detector = learnt()
    for _ in range(997):
        assert detector.update(np.array([3 * SCALE])).score[0] <= 2.0
    verdicts = [detector.update(np.array([0.0])) for _ in range(20)]
    assert verdicts[0].alarm[0]
    assert not verdicts[-1].alarm[0]


def test_the_reference_is_learnt_again_from_twice_and_four_times_as_many_values() -> None:
    detector = learnt()
    mixed = np.random.default_rng(2).permutation(RAMP)
    for value in mixed + 0.1:
        detector.update(np.array([value]))
    assert detector.reference[0] == pytest.approx(0.05, abs=0.01)
    for value in np.tile(mixed + 0.05, 2):
        detector.update(np.array([value]))
    assert detector.reference[0] == pytest.approx(0.05, abs=0.01)
    for value in np.tile(mixed + 0.3, 9):
        detector.update(np.array([value]))
    assert detector.reference[0] == pytest.approx(0.05, abs=0.01)


def test_the_reference_is_not_learnt_from_what_is_already_suspect() -> None:
    detector = learnt()
    for _ in range(7 * WARMUP):
        detector.update(np.array([1.2 * SCALE]))
    assert detector.reference[0] == pytest.approx(0.0, abs=1e-12)


def test_a_tenth_of_spikes_in_the_warm_up_hardly_moves_the_reference() -> None:
    detector = Cusum(1, warmup_frames=WARMUP)
    for frame, value in enumerate(RAMP):
        detector.update(np.array([9.0 if frame in {0, 13, 29} else value]))
    assert abs(detector.reference[0]) < 0.15


def test_noise_alone_alarms_less_than_once_in_a_thousand_frames() -> None:
    rng = np.random.default_rng(3)
    detector = Cusum(499)
    alarm = np.array([detector.update(frame).alarm for frame in rng.normal(-1.0, 0.05, (331, 499))])
    episodes = np.count_nonzero(alarm[1:] & ~alarm[:-1])
    assert episodes <= 499 * 301 / 1000


def test_jitter_below_the_floor_is_measured_in_the_floor() -> None:
    rng = np.random.default_rng(4)
    detector = Cusum(11, scale_floor=0.01)
    for frame in rng.normal(0.0, 1e-4, (151, 11)):
        detector.update(frame)
    quiet = [detector.update(np.full(11, 0.005)) for _ in range(499)]
    assert not any(verdict.alarm.any() for verdict in quiet)


@pytest.mark.parametrize(
    "wrong", [{"warmup_frames": 2}, {"slack": -0.1}, {"clip": 0.5}, {"threshold": 3.0}, {"scale_floor": 0.0}]
)
def test_parameters_without_sense_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Cusum(3, **wrong)  # type: ignore[arg-type]
