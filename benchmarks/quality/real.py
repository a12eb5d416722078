"""Real series and traces: what is said of them, and how shifts of known size in their noise are found.

Held-out series are told apart from the others; a person who tunes looks at the others only.

Source of the bound: T. L. Lai, Information bounds and quick detection of parameter changes in stochastic systems, IEEE
Transactions on Information Theory 44 (1998), 2917-2929: with one false alarm in 10,000 iterations a change can be
known after about ln(10,000) / KL iterations on average, KL = shift^2 / 2 for Gaussian noise of unit spread.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import log
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from rich.progress import track

from benchmarks.quality.baselines.baseline import Detection, Observed
from benchmarks.quality.chain import Chain
from benchmarks.quality.intervals import Interval, bootstrap, wilson
from benchmarks.quality.splices import Noise, read_noise, residuals_of, series_names
from detectors.robust import wide_scale
from pipeline.engine import Engine
from pipeline.importers.straggler_analysis import read_trace
from pipeline.record import Record
from schemas.alerts import AlertState, ComponentName, ComponentType, Kind, Severity
from schemas.codec import encode_events
from schemas.table import FloatArray
from schemas.topics import EVENTS, events_key

Shape = Literal["step", "ramp", "staircase"]
SHAPES: tuple[Shape, ...] = ("step", "ramp", "staircase")
NOISES = ("own", "3 %", "5 %", "10 %")
SHIFTS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.3, 4.5, 6.0)  # in standard deviations of noise drawn anew
RATIOS = (1.03, 1.05, 1.075, 1.10, 1.15, 1.20, 1.30, 1.50)  # of time after over time before, in a series as it is
FALSE_EVERY = 10_000  # iterations between false alarms, of the bound
_CV = {"3 %": 0.03, "5 %": 0.05, "10 %": 0.10}
_BEFORE, _AFTER = 120, 100
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


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A real trace with an answer known: whether just that was said, and whatever else was."""

    name: str
    is_right: bool
    others: tuple[str, ...]


class Spell(msgspec.Struct, frozen=True, kw_only=True):
    """One incident in a healthy series."""

    series: str
    onset: int
    detected: int
    is_information: bool


class Healthy(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of the healthy series."""

    iterations: int
    false_incidents: int
    spells: tuple[Spell, ...]


# The right answer, as the people who published the traces found it; of the last two, information about the workload.
TRACES = {
    "AR": (Kind.SLOW_RANK, ComponentName(type=ComponentType.RANK, node="rank-0", rank=0)),
    "ST": (Kind.STAGE_IMBALANCE, ComponentName(type=ComponentType.STAGE, stage=3)),
    "SE": (Kind.DATA_IMBALANCE, ComponentName(type=ComponentType.JOB)),
}


def traces(folder: Path) -> list[Trace]:
    """Judge the three traces of straggler-analysis."""
    return [trace(folder / "straggler-analysis" / f"trace-{name}.parquet", name) for name in TRACES]


def trace(path: Path, name: str) -> Trace:
    """Judge one trace, and compare with its answer in TRACES."""
    engine, said = Engine(), set()
    for offset, batch in enumerate(read_trace(path).batches()):
        key = events_key(batch.job_id, batch.node)
        for alert in engine.handle(Record(EVENTS, 0, offset, batch.flush_ns, key, encode_events(batch))):
            if alert.state is AlertState.FIRING:
                said.add((alert.kind, alert.component.candidates, alert.severity is Severity.INFO))
    kind, component = TRACES[name]
    right = (kind, (component,), kind is not Kind.SLOW_RANK)
    others = tuple(sorted(f"{one[0].value} {one[1]}" for one in said if one != right))
    return Trace(name=name, is_right=right in said, others=others)


def read_times(folder: Path, name: str) -> FloatArray:
    """Return a healthy series of iteration times (n,), seconds."""
    content = (folder / "healthy-iteration-times" / f"{name}.json").read_bytes()
    return np.array(msgspec.json.decode(content, type=_Series).iteration_time)


class _Series(msgspec.Struct):
    iteration_time: list[float]


def healthy(folder: Path, *, held_out: bool) -> Healthy:
    """Judge each series as a job of one rank that reports nothing but its iteration times."""
    spells: list[Spell] = []
    iterations = 0
    for name in series_names(folder, held_out=held_out):
        times_s = read_times(folder, name)
        iterations += len(times_s)
        spells += [
            Spell(series=name, onset=said.onset or 0, detected=said.at, is_information=said.is_information)
            for said in Chain().judges(Observed(duration_s=times_s))
        ]
    accusing = sum(not spell.is_information for spell in spells)
    return Healthy(iterations=iterations, false_incidents=accusing, spells=tuple(spells))


def curves(folder: Path, *, held_out: bool, n: int, n_processes: int) -> list[Curve]:
    """Return all curves, each point of `n` splices of the series in turn."""
    points = [(s, noise, size) for s in SHAPES for noise in NOISES for size in (RATIOS if noise == "own" else SHIFTS)]
    with ProcessPoolExecutor(n_processes) as pool:
        found = pool.map(_curve, [(folder, held_out, n, *point) for point in points])
        return list(track(found, "splices", total=len(points)))


def _curve(given: tuple[Path, bool, int, Shape, str, float]) -> Curve:
    folder, held_out, n, shape, noise, size = given
    return curve(folder, held_out=held_out, n=n, shape=shape, noise=noise, size=size)


def curve(folder: Path, *, held_out: bool, n: int, shape: Shape, noise: str, size: float) -> Curve:
    """Return one point, of n splices; `size` is one of SHIFTS, or of RATIOS in a series' own noise."""
    delays, sigmas, ratios, extra = [], [], [], 0
    for duration_s, ratio, shift_sigmas in splices(folder, held_out=held_out, n=n, shape=shape, noise=noise, size=size):
        said = Chain().judges(Observed(duration_s=duration_s))
        after = [one for one in said if one.at >= _BEFORE]
        delays.append(_delay(after))
        sigmas.append(shift_sigmas)
        ratios.append(ratio)
        extra += len(said) - min(len(after), 1)
    typical = float(np.median(sigmas))
    found = [delay for delay in delays if np.isfinite(delay)]
    return Curve(
        shape=shape,
        noise=noise,
        shift_sigmas=typical,
        ratio=float(np.median(ratios)),
        n=n,
        recall=len(found) / n,
        recall_interval=wilson(len(found), n),
        delay=float(np.median(found)) if found else float("nan"),
        delay_interval=bootstrap(found, lambda values: float(np.median(values))),
        bound=2 * log(FALSE_EVERY) / typical**2,
        extra_per_10000=1e4 * extra / (n * (_BEFORE + _AFTER)),
    )


def _delay(said: Sequence[Detection]) -> float:
    return said[0].at - _BEFORE + 1.0 if said else float("nan")


def splices(
    folder: Path, *, held_out: bool, n: int, shape: Shape, noise: str, size: float
) -> Iterator[tuple[FloatArray, float, float]]:
    """Yield n series of seconds with a shift from iteration 120 on, and its size as a ratio and in sigmas of noise."""
    names = series_names(folder, held_out=held_out)
    noises = [read_noise(folder, name) for name in names]
    series = [read_times(folder, name) for name in names]
    long_enough = [i for i, times_s in enumerate(series) if len(times_s) >= _BEFORE + _AFTER + 20]
    for number in range(n):
        # The same noise for all shapes and shifts: differences between points are the shift's.
        random = np.random.default_rng([_SEED, NOISES.index(noise), number])
        place = long_enough[number % len(long_enough)]
        healthy_s = _own(series[place], random) if noise == "own" else _drawn(noises[place], random, _CV[noise])
        sigma = float(wide_scale(residuals_of(np.log(healthy_s[:_BEFORE]))))
        log_ratio = log(size) if noise == "own" else size * sigma
        yield healthy_s * np.exp(log_ratio * _strength(shape)), float(np.exp(log_ratio)), log_ratio / sigma


def _own(times_s: FloatArray, random: np.random.Generator) -> FloatArray:
    start = int(random.integers(20, len(times_s) - _BEFORE - _AFTER + 1))
    return times_s[start : start + _BEFORE + _AFTER]


def _drawn(noise: Noise, random: np.random.Generator, cv: float) -> FloatArray:
    return noise.draw(random, _BEFORE + _AFTER, cv)


def _strength(shape: Shape) -> FloatArray:
    """Return (n,) shares of the full shift: 0 before the onset, 1 once it is there in full."""
    since = np.arange(_BEFORE + _AFTER) - _BEFORE
    growing = {
        "step": np.ones(len(since)),
        "ramp": (since + 1) / _RAMP,
        "staircase": (since * _STEPS // _RAMP + 1) / _STEPS,
    }[shape]
    return np.where(since < 0, 0.0, np.minimum(growing, 1.0))
