"""Location and scale of a few values, some of which may be spikes.

Source: F. R. Hampel, The influence curve and its role in robust estimation, Journal of the American Statistical
Association 69 (1974), 383-393.

location = median(x); scale = 1.4826 median(|x - median(x)|), which is the standard deviation for Gaussian values.

Blind to: up to half of the values. A distribution of two values of which one holds the majority has a scale of zero.
"""

import numpy as np

from detectors.detector import FloatArray

MAD_TO_SIGMA = 1.4826  # 1 / Phi^-1(3/4)


def location_and_scale(values: FloatArray, floor: float) -> tuple[FloatArray, FloatArray]:
    """Return median and scale, each (n,), of values (n, m) along their last axis; no scale is below `floor`."""
    location = np.median(values, axis=-1)
    scale = MAD_TO_SIGMA * np.median(np.abs(values - location[..., None]), axis=-1)
    return location, np.maximum(scale, floor)
