"""River's drift detectors, release 0.26 (https://riverml.xyz), with River's own defaults, on the job's iteration time.

Source: ADWIN, A. Bifet and R. Gavalda, SIAM International Conference on Data Mining (2007), 443-448; Page-Hinkley,
E. S. Page, Biometrika 41 (1954), 100-115; KSWIN, C. Raab, M. Heusinger and F.-M. Schleif, Neurocomputing 416 (2020),
340-351.

Values are ratios to the first iterations, since ADWIN's bound is made for values between 0 and 1 and Page-Hinkley's
threshold has the unit of the values. Defaults: ADWIN delta=0.002, clock=32, grace_period=10; PageHinkley
min_instances=30, delta=0.005, threshold=50, alpha=0.9999, both directions; KSWIN alpha=0.005, window_size=100,
stat_size=30, here with seed 1, since it samples its window at random.

Cannot see: jobs slow from the start; who is slow. Page-Hinkley at its default threshold would need 500 iterations at
twice the time less 10 %. KSWIN sees any change of distribution, noise growing included.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from river import drift

from benchmarks.quality.baselines.baseline import Detection, Input, Observed, has_risen, known, relative, standardised
from schemas.table import FloatArray


class _Drift(Protocol):
    @property
    def drift_detected(self) -> bool: ...

    def update(self, x: float) -> None: ...


class RiverDrift:
    """One of River's detectors, made anew for each job."""

    needs = frozenset({Input.DURATION})
    is_online = True

    def __init__(self, name: str, make: Callable[[], _Drift], scale: Callable[[FloatArray], FloatArray]) -> None:
        self.name = name
        self._make = make
        self._scale = scale

    def judges(self, observed: Observed) -> list[Detection]:
        """Return the iterations in which drift was detected."""
        positions, times = known(observed.duration_s)
        values = self._scale(times)
        detector = self._make()
        found = []
        for index, value in enumerate(values.tolist()):
            detector.update(value)
            if detector.drift_detected:
                width = getattr(detector, "width", None)  # ADWIN keeps what came after the cut
                change = None if width is None else index + 1 - max(int(width), 1)
                found.append(
                    Detection(
                        at=int(positions[index]),
                        onset=None if change is None else int(positions[max(change, 0)]),
                        is_slower=has_risen(values, index, change),
                    )
                )
        return found


def adwin(delta: float = 0.002, *, clock: int = 32, is_standardised: bool = False) -> RiverDrift:
    """Return ADWIN; `clock` is how many values apart it looks.

    Standardised values have unit spread: larger than ADWIN's bound is made for, so that it promises nothing any more,
    but its constant term no longer outweighs the noise.
    """
    name = "River ADWIN" + ("" if clock == 32 else f", clock {clock}") + (", standardised" if is_standardised else "")
    scale = (lambda times: standardised(np.log(times))) if is_standardised else relative
    return RiverDrift(name, lambda: drift.ADWIN(delta=delta, clock=clock), scale)


def page_hinkley(threshold: float = 50.0) -> RiverDrift:
    """Return Page-Hinkley; the threshold is a sum of ratios."""
    return RiverDrift("River PageHinkley", lambda: drift.PageHinkley(threshold=threshold), relative)


def kswin(alpha: float = 0.005) -> RiverDrift:
    """Return KSWIN; alpha is the level of its Kolmogorov-Smirnov test."""
    return RiverDrift("River KSWIN", lambda: drift.KSWIN(alpha=alpha, seed=1), relative)
