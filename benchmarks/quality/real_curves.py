"""How shifts of known size in the noise of real series are found: recall and delay over the size, beside the bound.

A piece of noise is shifted in every shape by every size, and judged once up to the onset, where it is the same for all.

Source of the bound: T. L. Lai, Information bounds and quick detection of parameter changes in stochastic systems, IEEE
Transactions on Information Theory 44 (1998), 2917-2929: with one false alarm in 10,000 iterations a change can be
known after about ln(10,000) / KL iterations on average, KL = shift^2 / 2 for Gaussian noise of unit spread.
"""

from collections.abc import Sequence
from functools import cache, partial
from math import log
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from benchmarks.quality.chain import Chain
from benchmarks.quality.intervals import Interval, bootstrap, wilson
from benchmarks.quality.pool import code_digest, kept
from benchmarks.quality.real import read_times
from benchmarks.quality.splices import Noise, read_noise, residuals_of, series_names
from detectors.robust import wide_scale
from schemas.table import FloatArray

Shape = Literal["step", "ramp", "staircase"]
SHAPES: tuple[Shape, ...] = ("step", "ramp", "staircase")
NOISES = ("own", "3 %", "5 %", "10 %")
SHIFTS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.3, 4.5, 6.0)  # in standard deviations of noise drawn anew
RATIOS = (1.03, 1.05, 1.075, 1.10, 1.15, 1.20, 1.30, 1.50)  # of time after over time before, in a series as it is
FALSE_EVERY = 10_000  # iterations between false alarms, of the bound
BEFORE, AFTER = 120, 100
_CV = {"3 %": 0.03, "5 %": 0.05, "10 %": 0.10}
_RAMP = 60  # iterations over which ramps and staircases grow
_STEPS = 5
_SEED = 20241101


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One shape in one noise at one shift: a point of each curve."""

    shape: Shape
    noise: str
    shift_sigmas: float  # median
    ratio: float  # median, of time after over time before
    n: int
    recall: float
    recall_interval: Interval
    delay: float  # median iterations, the first shifted one counts as 1, of those found
    delay_interval: Interval
    bound: float
    extra_per_10000: float  # incidents before the onset, and further ones after


class Piece(msgspec.Struct, frozen=True):
    """Names a piece of noise, and what is done to it: a size is one of SHIFTS, or of RATIOS in a series' own noise."""

    noise: str
    number: int
    points: tuple[tuple[Shape, float], ...]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of a piece, point by point: a delay is None where the shift was missed."""

    piece: Piece
    sigma: float  # of the logarithms of its times before the onset
    delays: tuple[float | None, ...]
    extra: tuple[int, ...]


class _Series(NamedTuple):
    times_s: tuple[FloatArray, ...]  # of the series that are long enough
    noises: tuple[Noise, ...]  # of the same


def curves(
    data: Path,
    *,
    held_out: bool,
    n: int,
    n_processes: int,
    folder: Path,
    noises: Sequence[str] = NOISES,
    shapes: Sequence[Shape] = SHAPES,
) -> list[Curve]:
    """Return all curves, each point of `n` pieces of the series in turn; what `folder` holds is not judged again."""
    wanted = [_piece(noise, number, shapes) for number in range(n) for noise in noises]
    of_code = code_digest("chain.py", "real.py", "real_curves.py", "splices.py")
    path = folder / f"curves-{of_code}-{'held_out' if held_out else 'development'}.jsonl"
    run = partial(found, data, held_out=held_out)
    done = kept(wanted, path, run, Found, lambda one: one.piece, n_processes, "pieces of noise")
    points = [(shape, noise, size) for shape in shapes for noise in noises for size in _sizes(noise)]
    return [_curve([one for one in done if one.piece.noise == noise], shape, size) for shape, noise, size in points]


def found(data: Path, piece: Piece, *, held_out: bool) -> Found:
    """Judge a piece at each of its points."""
    healthy_s, sigma = healthy_piece(data, piece.noise, piece.number, held_out=held_out)
    shifted = [
        healthy_s * np.exp(_log_ratio(piece.noise, size, sigma) * strength(shape)) for shape, size in piece.points
    ]
    delays, extra = list[float | None](), []
    for said in Chain().judges_alike(shifted, until=BEFORE):
        after = [one for one in said if one.at >= BEFORE]
        delays.append(after[0].at - BEFORE + 1.0 if after else None)
        extra.append(len(said) - min(len(after), 1))
    return Found(piece=piece, sigma=sigma, delays=tuple(delays), extra=tuple(extra))


def healthy_piece(data: Path, noise: str, number: int, *, held_out: bool) -> tuple[FloatArray, float]:
    """Return the iteration times (n,) of a piece, seconds, and the spread of their logarithms before the onset."""
    series = _read(data, held_out)
    # The same noise for all shapes and shifts: differences between points are the shift's.
    random = np.random.default_rng([_SEED, NOISES.index(noise), number])
    place = number % len(series.times_s)
    if noise == "own":
        times_s = series.times_s[place]
        start = int(random.integers(20, len(times_s) - BEFORE - AFTER + 1))
        healthy_s = times_s[start : start + BEFORE + AFTER]
    else:
        healthy_s = series.noises[place].draw(random, BEFORE + AFTER, _CV[noise])
    return healthy_s, float(wide_scale(residuals_of(np.log(healthy_s[:BEFORE]))))


def strength(shape: Shape) -> FloatArray:
    """Return (n,) shares of the full shift: 0 before the onset, 1 once it is there in full."""
    since = np.arange(BEFORE + AFTER) - BEFORE
    growing = {
        "step": np.ones(len(since)),
        "ramp": (since + 1) / _RAMP,
        "staircase": (since * _STEPS // _RAMP + 1) / _STEPS,
    }[shape]
    return np.where(since < 0, 0.0, np.minimum(growing, 1.0))


def _sizes(noise: str) -> tuple[float, ...]:
    return RATIOS if noise == "own" else SHIFTS


def _piece(noise: str, number: int, shapes: Sequence[Shape]) -> Piece:
    return Piece(noise, number, tuple((shape, size) for shape in shapes for size in _sizes(noise)))


def _log_ratio(noise: str, size: float, sigma: float) -> float:
    return log(size) if noise == "own" else size * sigma


@cache
def _read(data: Path, held_out: bool) -> _Series:  # noqa: FBT001 - cached by it
    times = {name: read_times(data, name) for name in series_names(data, held_out=held_out)}
    long_enough = [name for name in times if len(times[name]) >= BEFORE + AFTER + 20]
    return _Series(tuple(times[n] for n in long_enough), tuple(read_noise(data, n) for n in long_enough))


def _curve(done: Sequence[Found], shape: Shape, size: float) -> Curve:
    noise, place = done[0].piece.noise, done[0].piece.points.index((shape, size))
    log_ratios = np.array([_log_ratio(noise, size, one.sigma) for one in done])
    typical = float(np.median(log_ratios / np.array([one.sigma for one in done])))
    delays = [delay for one in done if (delay := one.delays[place]) is not None]
    n = len(done)
    return Curve(
        shape=shape,
        noise=noise,
        shift_sigmas=typical,
        ratio=float(np.median(np.exp(log_ratios))),
        n=n,
        recall=len(delays) / n,
        recall_interval=wilson(len(delays), n),
        delay=float(np.median(delays)) if delays else float("nan"),
        delay_interval=bootstrap(delays, lambda values: float(np.median(values))),
        bound=2 * log(FALSE_EVERY) / typical**2,
        extra_per_10000=1e4 * sum(one.extra[place] for one in done) / (n * (BEFORE + AFTER)),
    )
