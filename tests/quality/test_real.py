"""Shifts of known size in the noise of real series, and what the product says of real traces."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import real
from benchmarks.quality.real import SHAPES, Shape
from benchmarks.quality.splices import series_names
from schemas.table import FloatArray

ONSET = 120


def spliced(data: Path, shape: Shape, size: float, noise: str = "5 %") -> list[FloatArray]:
    made = real.splices(data, held_out=False, n=8, shape=shape, noise=noise, size=size)
    return [duration_s for duration_s, _, _ in made]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noise", real.NOISES)
def test_a_splice_is_the_same_noise_before_its_onset_and_longer_after(data: Path, shape: Shape, noise: str) -> None:
    none, some = (1.0, 1.2) if noise == "own" else (0.0, 4.0)
    for plain, shifted in zip(spliced(data, shape, none, noise), spliced(data, shape, some, noise), strict=True):
        ratio = shifted / plain
        np.testing.assert_allclose(ratio[:ONSET], 1.0)
        assert (np.diff(ratio[ONSET:]) >= -1e-12).all()
        assert ratio[-1] > 1.0
    rising = len(np.unique(np.round(ratio[ONSET:], 9)))
    assert rising == {"step": 1, "ramp": 60, "staircase": 5}[shape]


def test_noise_drawn_anew_has_the_spread_asked_for(data: Path) -> None:
    logs = np.concatenate([np.log(one) for one in spliced(data, "step", 0.0, "10 %")])
    middle = logs[np.abs(logs) < 0.35]  # without the spikes, which keep their own size
    assert 0.085 < middle.std() < 0.115


def test_held_out_series_are_none_of_those_to_develop_on(data: Path) -> None:
    both = [set(series_names(data, held_out=held_out)) for held_out in (True, False)]
    assert [len(names) for names in both] == [4, 4]
    assert not both[0] & both[1]


def test_a_plain_shift_is_found_and_the_bound_told_beside_it(data: Path) -> None:
    curve = real.curve(data, held_out=False, n=4, shape="step", noise="3 %", size=6.0)
    assert curve.recall == 1.0
    assert curve.delay <= 8
    assert curve.bound == pytest.approx(2 * np.log(10_000) / 36)
    assert curve.ratio > 1.15


def test_the_trace_with_one_slow_worker_gives_that_answer_and_no_other(data: Path) -> None:
    trace = real.trace(data / "straggler-analysis" / "trace-AR.parquet", "AR")
    assert trace.is_right
    assert trace.others == ()
