"""Methods for a bare series of iteration times, each over the settings of what decides in it, its default among them.

What is swept: for failslow the evidence that a change within the noise has to have, everything else at its defaults;
for its parts alone their own hazard or threshold; ADWIN's delta at River's clock and at every value, and apart from
these on standardised values, which are not what its bound is made for; for bocd the expected length of a run, by its
own rule and by the mass of short runs, as released and with its update corrected; for others their one threshold.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace

from benchmarks.quality.baselines.baseline import (
    Baseline,
    Detection,
    Input,
    Observed,
    has_risen,
    known,
)
from benchmarks.quality.baselines.bocd_package import BocdPackage
from benchmarks.quality.baselines.rbeast_falcon import RbeastFalcon
from benchmarks.quality.baselines.river_drift import adwin, kswin, page_hinkley
from benchmarks.quality.baselines.ruptures_offline import RupturesOffline
from benchmarks.quality.chain import Chain
from detectors.bocpd import Bocpd
from detectors.cusum import Cusum
from detectors.detector import Detector
from pipeline.judge_params import DEFAULTS


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a method; exactly one of a method's settings is its default."""

    label: str
    make: Callable[[], Baseline]
    is_default: bool = False


class Part:
    """One detector of failslow alone, its proposals believed as they are, made anew after each."""

    needs = frozenset({Input.DURATION})
    is_online = True

    def __init__(self, name: str, make: Callable[[], Detector]) -> None:
        self.name = name
        self._make = make

    def judges(self, observed: Observed) -> list[Detection]:
        """Return where the score reaches the threshold."""
        positions, times = known(observed.duration_s)
        logs = np.log(times)
        detector, found = self._make(), []
        for index, value in enumerate(logs.tolist()):
            verdict = detector.update(np.array([value]))
            if verdict.alarm[0]:
                change = max(index + 1 - int(verdict.run_length[0]), 0)
                is_slower = has_risen(logs, index, change)
                found.append(Detection(at=int(positions[index]), onset=int(positions[change]), is_slower=is_slower))
                detector = self._make()
        return found


def _failslow() -> Iterator[Setting]:
    yield Setting("defaults", Chain, is_default=True)
    for evidence in (4.0, 6.0, 10.0, 14.0):
        yield Setting(f"evidence {evidence:g}", partial(Chain, replace(DEFAULTS, evidence=evidence)))


def _bocpd() -> Iterator[Setting]:
    for hazard in (1e-2, 1 / 250, 1e-3, 1e-5, 1e-8, 1e-12):
        make = partial(Part, "bocpd", partial(Bocpd, 1, hazard=hazard))
        yield Setting(f"hazard {hazard:.2g}", make, is_default=hazard == 1 / 250)


def _cusum() -> Iterator[Setting]:
    for threshold in (5.0, 8.0, 10.0, 12.0, 16.0, 20.0, 26.0):
        make = partial(Part, "cusum", partial(Cusum, 1, threshold=threshold))
        yield Setting(f"threshold {threshold:g}", make, is_default=threshold == 8.0)


def _adwin(*, is_standardised: bool) -> Iterator[Setting]:
    for clock in (1,) if is_standardised else (32, 1):
        for delta in (1e-8, 1e-6, 1e-4, 0.002, 0.02, 0.1, 0.3, 0.6, 0.9):
            is_default = delta == 0.002 and (is_standardised or clock == 32)
            make = partial(adwin, delta, clock=clock, is_standardised=is_standardised)
            yield Setting(f"delta {delta}, clock {clock}", make, is_default)


def _bocd(*, is_corrected: bool) -> Iterator[Setting]:
    for length in (10.0, 300.0, 1e4, 1e7, 1e11, 1e16):
        for short in (None, 20):
            rule = "" if short is None else f", P(r <= {short})"
            make = partial(BocdPackage, length, short_iterations=short, is_corrected=is_corrected)
            yield Setting(f"hazard 1/{length:g}{rule}", make, is_default=length == 300.0 and short is None)


def _page_hinkley() -> Iterator[Setting]:
    for threshold in (0.5, 0.8, 1.2, 2.0, 3.0, 5.0, 50.0):
        yield Setting(f"threshold {threshold}", partial(page_hinkley, threshold), threshold == 50.0)


def _kswin() -> Iterator[Setting]:
    for alpha in (1e-8, 1e-6, 1e-5, 1e-4, 0.005, 0.02):
        yield Setting(f"alpha {alpha}", partial(kswin, alpha), alpha == 0.005)


def _pelt() -> Iterator[Setting]:
    for penalty in (0.5, 1.0, 2.0, 4.0, 6.0):
        yield Setting(f"penalty {penalty}", partial(RupturesOffline, "Pelt", penalty=penalty), penalty == 1.0)


def _falcon() -> Iterator[Setting]:
    yield Setting("defaults", RbeastFalcon, is_default=True)


METHODS: dict[str, Callable[[], Iterator[Setting]]] = {
    "failslow": _failslow,
    "its bocpd alone": _bocpd,
    "its cusum alone": _cusum,
    "bocd": partial(_bocd, is_corrected=False),
    "bocd, corrected": partial(_bocd, is_corrected=True),
    "River ADWIN": partial(_adwin, is_standardised=False),
    "River ADWIN, standardised": partial(_adwin, is_standardised=True),
    "River PageHinkley": _page_hinkley,
    "River KSWIN": _kswin,
    "ruptures PELT (offline)": _pelt,
    "FALCON (Rbeast)": _falcon,
}
