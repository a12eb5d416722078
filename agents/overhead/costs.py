"""What one hit of a probe costs, with how well that is known, and what many hits add up to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

N_DRAWS = 2000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_percent(self) -> str:
        """Say it as a share."""
        return f"{self.value:.3%} ({100 * self.low:.3f} to {100 * self.high:.3f})"

    def as_ns(self) -> str:
        """Say it as nanoseconds."""
        return f"{self.value:,.0f} ({self.low:,.0f} to {self.high:,.0f})"


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """Nanoseconds for each hit: what blocks of hits showed, (n,), and medians of them drawn anew, (N_DRAWS,)."""

    samples_ns: Floats
    draws_ns: Floats

    @property
    def ns(self) -> Interval:
        """The median."""
        return interval(float(np.median(self.samples_ns)), self.draws_ns)


def cost(samples_ns: Sequence[float], seed: int = 0) -> Cost:
    """Return what these blocks say."""
    samples = np.asarray(samples_ns, np.float64)
    return Cost(samples, resampled_medians(samples, seed))


def resampled_medians(samples: Floats, seed: int = 0) -> Floats:
    """Return medians of as many samples drawn with replacement, (N_DRAWS,)."""
    random = np.random.default_rng([seed, len(samples)])
    medians: Floats = np.median(samples[random.integers(0, len(samples), (N_DRAWS, len(samples)))], axis=1)
    return medians


def interval(value: float, draws: Floats) -> Interval:
    """Return a value with the middle 95 % of the draws."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def share(costs: Mapping[str, Cost], hits_per_s: Mapping[str, float]) -> Interval:
    """Return the share of a thread's time that hits take.

    Hits that nobody could measure the cost of are left out. The costs were measured apart from each other, so their
    errors add up as independent ones do.
    """
    known = {name: rate for name, rate in hits_per_s.items() if name in costs}
    value = sum(rate * costs[name].ns.value for name, rate in known.items()) / 1e9
    random = np.random.default_rng(7)
    draws = np.zeros(N_DRAWS)
    for name, rate in known.items():
        draws += rate * random.permutation(costs[name].draws_ns) / 1e9
    return interval(value, draws)
