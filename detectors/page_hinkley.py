"""Has the mean of this series risen? River's Page-Hinkley test, a cumulative sum against the running mean.

Source: E. S. Page, Continuous inspection schemes, Biometrika 41 (1954), 100-115; D. V. Hinkley, Inference about the
change-point from cumulative sum tests, Biometrika 58 (1971), 509-523; implemented by River.

m' = alpha m + (x - mean of all x - delta), alarm where m - min(m) > threshold, then begun anew.

Blind to: how noisy a series is, since delta and threshold are in log units and not in its own scale; when the change
was (its run length is always 1). Answers yes or no; slow for large jobs (see `per_series`).
"""

from river import drift

from detectors.per_series import PerSeries


class PageHinkley(PerSeries):
    """River's PageHinkley in its upward form, one per series.

    delta: excess that is forgiven in every frame, in log units.
    threshold: sum that is an alarm, in log units.
    warmup_frames: values before the first alarm.
    """

    def __init__(self, n_series: int, *, delta: float = 0.02, threshold: float = 0.5, warmup_frames: int = 30) -> None:
        super().__init__(
            "page_hinkley",
            n_series,
            lambda: drift.PageHinkley(min_instances=warmup_frames, delta=delta, threshold=threshold, mode="up"),
        )
