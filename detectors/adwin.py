"""Has the mean of this series changed? River's adaptive window: cut where the two parts differ too much for chance.

Source: A. Bifet and R. Gavalda, Learning from time-changing data with adaptive windowing, SIAM International Conference
on Data Mining (2007), 443-448; implemented by River.

A window W is cut into W0, W1 where |mean(W0) - mean(W1)| >= sqrt(2 v d' / m) + 2 d' / (3 m), with
1/m = 1/|W0| + 1/|W1|, d' = ln(2 ln|W| / delta), v the variance of W; W1 is kept. Run length = |W1|.

Blind to: small shifts in short windows: the second term of the bound, made for values between 0 and 1, is large against
log times. Its run length is rounded up to River's buckets. Answers yes or no; slow for large jobs (see `per_series`).
"""

from typing import Any

from river import drift

from detectors.per_series import PerSeries


class Adwin(PerSeries):
    """River's ADWIN, one per series.

    delta: significance of a cut; smaller is more cautious.
    clock: values between two looks for a cut.
    warmup_frames: values before the first look.
    """

    def __init__(self, n_series: int, *, delta: float = 0.002, clock: int = 1, warmup_frames: int = 10) -> None:
        super().__init__("adwin", n_series, lambda: drift.ADWIN(delta=delta, clock=clock, grace_period=warmup_frames))

    def _run_length(self, detector: Any) -> int:
        return max(int(detector.width), 1)
