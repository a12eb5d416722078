"""Bayesian online change point detection by the `bocd` package, release 0.1.2 (y-bar, 2019), as its notebook uses it.

Source: R. P. Adams and D. J. C. MacKay, arXiv:0710.3742 (2007), in that package's implementation.

Its own use: ConstantHazard(300), StudentT(mu=0, kappa=1, alpha=1, beta=1), and a change wherever the likeliest run
length falls. The prior is meant for values of about unit spread, so log times are given standardised by the median and
the wide scale of their first REFERENCE values. The release updates beta from kappa instead of from beta, so that it
believes in a spread of about sqrt(2) whatever the data say; `is_corrected` puts the published update in its place,
which makes a stronger baseline.

The other rule, by the mass of short run lengths, is that of this project's `bocpd`; it is not the package's, and is
here so that a better reading of the same posterior is not left out.

Cannot see: jobs slow from the start; who is slow; single spikes from changes (each begins a run, and so does its end).
Slows down with the length of the series, which it never forgets: about 0.15 ms per value after 300.
"""

from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.quality.baselines.baseline import REFERENCE, Detection, Input, Observed, has_risen, known, standardised
from benchmarks.quality.baselines.packages import load
from schemas.table import FloatArray

_SHORT = 20


class BocdPackage:
    """The job's iteration time, one value after the other.

    hazard_iterations: expected length of a run; short_iterations: None for the package's own rule, else a change is
    where the run lengths up to this have more than half of the mass; is_corrected: with the published update of beta.
    """

    needs = frozenset({Input.DURATION})
    is_online = True

    def __init__(
        self,
        hazard_iterations: float = 300.0,
        *,
        short_iterations: int | None = None,
        is_corrected: bool = False,
    ) -> None:
        self.hazard_iterations = hazard_iterations
        self.short_iterations = short_iterations
        self.is_corrected = is_corrected
        self.name = "bocd" + (", beta corrected" if is_corrected else "")
        if short_iterations is not None:
            self.name += f", P(r <= {short_iterations})"

    def judges(self, observed: Observed) -> list[Detection]:
        """Return where the rule says that a run has begun."""
        positions, times = known(observed.duration_s)
        values = standardised(np.log(times))
        found: list[Detection] = []
        run_length, is_said = 0, False
        trace = _trace(values.tobytes(), self.hazard_iterations, self.short_iterations or _SHORT, self.is_corrected)
        for index, (likeliest, short) in enumerate(trace):
            if self.short_iterations is None:
                is_change = likeliest < run_length
            else:
                is_change, is_said = short > 0.5 and not is_said, short > 0.5
            run_length = likeliest
            if is_change and index >= REFERENCE:
                onset = max(index + 1 - max(likeliest, 1), 0)
                found.append(
                    Detection(
                        at=int(positions[index]),
                        onset=int(positions[onset]),
                        is_slower=has_risen(values, index, onset),
                    )
                )
        return found


@lru_cache(maxsize=1024)  # both rules read the same posterior of the same series
def _trace(
    values: bytes,
    hazard_iterations: float,
    short_iterations: int,
    is_corrected: bool,  # noqa: FBT001
) -> tuple[tuple[int, float], ...]:
    """Return, after each value, the likeliest run length and the mass of run lengths up to `short_iterations`."""
    package = load("bocd")
    student = _corrected(package) if is_corrected else package.StudentT
    detector = package.BayesianOnlineChangePointDetection(
        package.ConstantHazard(hazard_iterations), student(mu=0, kappa=1, alpha=1, beta=1)
    )
    found = []
    for index, value in enumerate(np.frombuffer(values).tolist()):
        detector.update(value)
        # The first run began with the series, and is no change as long as it is short for that reason.
        short = float(detector.belief[: min(short_iterations, index - 1) + 1].sum())
        found.append((int(detector.rt[0]), short))
    return tuple(found)


def _corrected(package: ModuleType) -> type[Any]:
    """Return the package's Student t with beta updated from beta (Murphy 2007, equation 89)."""
    base: Any = package.StudentT

    class Corrected(base):  # type: ignore[misc]
        betaT: FloatArray  # noqa: N815  the package's name

        def update_params(self, x: float) -> None:
            grown = self.betaT + self.kappaT * (x - self.muT) ** 2 / (2 * (self.kappaT + 1))
            super().update_params(x)
            self.betaT = np.concatenate([self.beta0, grown])

    return Corrected
