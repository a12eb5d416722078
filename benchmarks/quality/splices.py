"""Series of iteration times with a shift of known size, made of the residuals of real healthy jobs.

Source: B. Efron, Bootstrap methods: another look at the jackknife, Annals of Statistics 7 (1979), 1-26: values drawn
with replacement from what was observed, so that skewness and tails are those of real jobs.

The residuals of a series are the logs of its times less their running median. Those within five spreads are its noise:
drawn independently and scaled to the coefficient of variation asked for. The rest are its spikes (checkpoints, stalls):
events and no noise, they come as often as they did and keep their own size. Scaling them too would make a tenth of
noise out of a steady job with a few pauses, on which any shift is plain, or spikes of a thousand times the iteration.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from detectors.robust import wide_scale
from schemas.table import FloatArray

_SETTLING = 20  # iterations after a start that are no noise
_RUNNING = 101  # values of the running median: longer than any shift within the noise, shorter than a run's drift
_SPIKE_SPREADS = 5.0
_FOLDER = "healthy-iteration-times"


class _File(msgspec.Struct):
    iteration_time: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """What one real series is made of, in log units: noise (m,) of unit spread, spikes (k,) as they are."""

    name: str
    noise: FloatArray
    spikes: FloatArray

    def draw(self, random: np.random.Generator, n: int, cv: float) -> FloatArray:
        """Return n iteration times around 1 s with the coefficient of variation `cv`, and spikes as often as seen."""
        sigma = float(np.sqrt(np.log1p(cv**2)))
        logs = sigma * random.choice(self.noise, n)
        is_spike = random.random(n) < len(self.spikes) / (len(self.noise) + len(self.spikes))
        if len(self.spikes):
            logs = np.where(is_spike, random.choice(self.spikes, n), logs)
        return np.exp(logs)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Splice:
    """Iteration times (n,), seconds, `shift` times as long from the iteration `onset` on."""

    duration_s: FloatArray
    onset: int


def series_names(folder: Path, *, held_out: bool) -> list[str]:
    """Return the series that nobody tunes on, or the others (held_out.toml)."""
    lists = tomllib.loads((Path(__file__).parent / "held_out.toml").read_text(encoding="utf-8"))
    names = sorted(path.stem for path in (folder / _FOLDER).glob("*.json"))
    unknown = set(lists["series"]) - set(names)
    if unknown:
        raise FileNotFoundError(f"{folder / _FOLDER} lacks {', '.join(sorted(unknown))}: name the folder of recordings")
    return [name for name in names if (name in lists["series"]) is held_out]


def read_noise(folder: Path, name: str) -> Noise:
    """Return the noise and the spikes of a series."""
    path = folder / _FOLDER / f"{name}.json"
    times_s = np.array(msgspec.json.decode(path.read_bytes(), type=_File).iteration_time)[_SETTLING:]
    residuals = residuals_of(np.log(times_s))
    is_noise = np.abs(residuals) <= _SPIKE_SPREADS * float(wide_scale(residuals))
    noise = residuals[is_noise]
    return Noise(name, noise / float(noise.std()), residuals[~is_noise])


def residuals_of(logs: FloatArray) -> FloatArray:
    """Return logs (n,) less the median of the values around each; at the ends, of the nearest complete window."""
    width = min(_RUNNING, len(logs) - (len(logs) + 1) % 2)
    middle = np.median(np.lib.stride_tricks.sliding_window_view(logs, width), axis=1)
    return logs - np.pad(middle, width // 2, mode="edge")[: len(logs)]


def splices(
    noises: list[Noise], n: int, *, seed: int, cv: float, shift: float, before: int, after: int
) -> Iterator[Splice]:
    """Yield n splices, each of the noise of one series in turn; the same seed gives the same ones."""
    for index in range(n):
        random = np.random.default_rng([seed, index])
        duration_s = noises[index % len(noises)].draw(random, before + after, cv)
        duration_s[before:] *= shift
        yield Splice(duration_s=duration_s, onset=before)
