"""Shifts of known size in the noise of real series, and what the product says of real traces."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import pool, real, real_curves
from benchmarks.quality.baselines.baseline import Observed
from benchmarks.quality.chain import Chain
from benchmarks.quality.real_curves import SHAPES, Curve, Found, Piece, Shape
from benchmarks.quality.splices import series_names
from schemas.table import FloatArray

ONSET = 120


def pieces(data: Path, noise: str) -> list[FloatArray]:
    return [real_curves.healthy_piece(data, noise, number, held_out=False)[0] for number in range(8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shift_grows_from_its_onset_on(shape: Shape) -> None:
    strength = real_curves.strength(shape)
    assert (strength[:ONSET] == 0).all()
    assert strength[ONSET] > 0
    assert (np.diff(strength[ONSET:]) >= 0).all()
    assert strength[-1] == 1.0
    assert len(np.unique(np.round(strength[ONSET:], 9))) == {"step": 1, "ramp": 60, "staircase": 5}[shape]


def test_noise_drawn_anew_has_the_spread_asked_for(data: Path) -> None:
    logs = np.concatenate([np.log(one) for one in pieces(data, "10 %")])
    middle = logs[np.abs(logs) < 0.35]  # without the spikes, which keep their own size
    assert 0.085 < middle.std() < 0.115


def test_a_piece_as_it_is_is_part_of_a_series(data: Path) -> None:
    whole = [real.read_times(data, name) for name in series_names(data, held_out=False)]
    for one in pieces(data, "own"):
        assert any(one.tobytes() in series.tobytes() for series in whole)


def test_held_out_series_are_none_of_those_to_develop_on(data: Path) -> None:
    both = [set(series_names(data, held_out=held_out)) for held_out in (True, False)]
    assert [len(names) for names in both] == [4, 4]
    assert not both[0] & both[1]


def test_series_that_are_alike_at_first_are_judged_as_one_by_one() -> None:
    random = np.random.default_rng(4)
    healthy_s = np.exp(0.02 * random.standard_normal(190))
    healthy_s[[7, 90]] = np.nan  # not reported
    healthy_s[50:75] *= 1.5  # one incident before they part
    series = [healthy_s * np.where(np.arange(190) < ONSET, 1.0, ratio) for ratio in (1.0, 1.3, 0.8, 2.0)]
    alone = [Chain().judges(Observed(duration_s=one)) for one in series]
    assert all(said[0].at < ONSET for said in alone)
    assert alone[0] != alone[1]
    assert list(Chain().judges_alike(series, until=ONSET)) == alone


def test_series_that_are_not_alike_are_refused() -> None:
    series = [np.ones(20), np.ones(20)]
    series[1][5] = 2.0
    with pytest.raises(ValueError, match="differ before iteration 6"):
        list(Chain().judges_alike(series, until=6))


def test_a_plain_shift_is_found_and_the_bound_told_beside_it(data: Path) -> None:
    plain = Piece("3 %", 1, (("step", 6.0), ("step", 0.0)))
    found = real_curves.found(data, plain, held_out=False)
    assert found.delays[0] is not None
    assert found.delays[0] <= 8
    assert found.delays[1] is None
    assert 0.02 < found.sigma < 0.04


def test_curves_are_of_all_pieces_and_go_on_where_they_were_broken_off(data: Path, tmp_path: Path) -> None:
    judged: list[Piece] = []

    def found(_: Path, piece: Piece, *, held_out: bool) -> Found:
        """Find what is 1.5 sigma or more in every second piece, after as many iterations as its number."""
        judged.append(piece)
        delays = tuple(float(piece.number) if size >= 1.5 and piece.number % 2 else None for _, size in piece.points)
        return Found(piece=piece, sigma=0.02 if held_out else 0.04, delays=delays, extra=(1,) * len(piece.points))

    def curves(n: int) -> list[Curve]:
        return real_curves.curves(
            data, held_out=False, n=n, n_processes=1, folder=tmp_path, noises=("5 %",), shapes=("step",)
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(real_curves, "found", found)
        patched.setattr(pool, "ProcessPoolExecutor", ThreadPoolExecutor)
        curves(3)
        assert [piece.number for piece in judged] == [0, 1, 2]
        made = curves(8)
    assert [piece.number for piece in judged] == list(range(8))
    assert [curve.recall for curve in made] == [0.0, 0.0, *[0.5] * 6]
    assert [curve.delay for curve in made[2:]] == [4.0] * 6
    assert [curve.shift_sigmas for curve in made] == pytest.approx(real_curves.SHIFTS)
    assert made[-1].bound == pytest.approx(2 * np.log(10_000) / 36)
    assert made[-1].ratio == pytest.approx(np.exp(0.24))
    assert made[0].extra_per_10000 == pytest.approx(1e4 / 220)


def test_the_trace_with_one_slow_worker_gives_that_answer_and_no_other(data: Path) -> None:
    trace = real.trace(data / "straggler-analysis" / "trace-AR.parquet", "AR")
    assert trace.is_right
    assert trace.others == ()
