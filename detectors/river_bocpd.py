"""Bayesian online change point detection as River users know drift detectors: one series, one value at a time.

Source: R. P. Adams and D. J. C. MacKay, Bayesian Online Changepoint Detection, arXiv:0710.3742 (2007), 1-7.

The formula, and the code, are those of `bocpd`.

Blind to: what `bocpd` is blind to. One numpy call per value costs tens of microseconds; for many series of equal
length in time, use `bocpd.Bocpd`, which takes them all at once.
"""

import numpy as np
from river import base

from detectors.bocpd import Bocpd


class BOCPD(base.DriftDetector, base.Estimator):  # type: ignore[misc]  # River is not typed here
    """Bayesian Online Change Point Detection.

    Keeps a posterior over the time since the last change of a Gaussian series of unknown mean and variance, and reports
    a drift in the first update at which a recent change has more than the threshold's probability. It goes on from
    there by itself and need not be reset. Values enter as they are: pass logarithms where a change by a factor is
    meant.

    Parameters
    ----------
    hazard
        Prior probability of a change per value.
    short
        Run lengths of up to so many values are a recent change.
    threshold
        Posterior probability of a recent change that is a drift.
    run_lengths
        Number of hypotheses that are kept, those of most probability; more than `short`.
    warmup
        Values from which level and scale are learnt before the first drift can be reported.
    scale_floor
        Least standard deviation that the series is believed to have, in its own units.
    spike_sigmas
        A value further out than this many predictive standard deviations is held back until the next one shows whether
        it was alone. Infinity lets every value in at once.

    Examples
    --------
    >>> import random
    >>> from detectors.river_bocpd import BOCPD

    >>> rng = random.Random(7)
    >>> bocpd = BOCPD()
    >>> for i in range(200):
    ...     bocpd.update(rng.gauss(0.0 if i < 101 else 3.0, 1.0))
    ...     if bocpd.drift_detected:
    ...         print(f"change found at index {i}, {bocpd.run_length} values after it happened")
    change found at index 102, 2 values after it happened

    References
    ----------
    [^1]: Adams, R. P., & MacKay, D. J. C. (2007). Bayesian Online Changepoint Detection. arXiv:0710.3742.

    """

    def __init__(
        self,
        hazard: float = 1 / 250,
        short: int = 20,
        threshold: float = 0.9,
        run_lengths: int = 32,
        warmup: int = 10,
        scale_floor: float = 1e-6,
        spike_sigmas: float = 3.5,
    ) -> None:
        super().__init__()
        self.hazard = hazard
        self.short = short
        self.threshold = threshold
        self.run_lengths = run_lengths
        self.warmup = warmup
        self.scale_floor = scale_floor
        self.spike_sigmas = spike_sigmas
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self._was_recent = False
        self._run_length = 0
        self._bocpd = Bocpd(
            1,
            hazard=self.hazard,
            short=self.short,
            threshold=self.threshold,
            run_lengths=self.run_lengths,
            warmup_frames=self.warmup,
            scale_floor=self.scale_floor,
            spike_sigmas=self.spike_sigmas,
        )

    @property
    def run_length(self) -> int:
        """Values since the estimated change point, the latest included; 0 if there was no recent change."""
        return self._run_length

    def update(self, x: float) -> None:
        """Update the detector with a single data point; NaN changes nothing.

        Parameters
        ----------
        x
            Input value.

        """
        verdict = self._bocpd.update(np.array([x], dtype=np.float64))
        if np.isnan(verdict.score[0]):
            self._drift_detected = False
            return
        is_recent = bool(verdict.alarm[0])
        self._drift_detected = is_recent and not self._was_recent
        self._was_recent = is_recent
        self._run_length = int(verdict.run_length[0])
