"""Location and scale of a few values, some of which may be spikes.

Source: F. R. Hampel, The influence curve and its role in robust estimation, Journal of the American Statistical
Association 69 (1974), 383-393; P. J. Huber, Robust Statistics (1981), 3.3 for the trimmed mean.

median; midmean, the mean of the middle half; their standard errors, in sigma / sqrt(m), are 1.253 and 1.093 for many
Gaussian values. MAD scale = 1.4826 median(|x - median(x)|); decile scale = (90 % - 10 % quantile) / 2.563; both are the
standard deviation for Gaussian values. The MAD outvotes spikes up to nearly half of the values, the deciles up to a
tenth; but of a series that alternates between two speeds the MAD may see but one and call it steady, hence the wide
scale, the larger of the two.

Blind to: half of the values (median, MAD), a quarter at each end (midmean), a tenth at each end (deciles).
"""

import numpy as np

from detectors.detector import FloatArray

_MAD_TO_SIGMA = 1.4826  # 1 / Phi^-1(3/4)
_DECILES_TO_SIGMA = 2.563  # distance of the 10 % and 90 % quantiles of a Gaussian, in standard deviations
MEDIAN_ERROR, MIDMEAN_ERROR = 1.253, 1.093  # standard errors of many values, in sigma / sqrt(m)


def midmean(values: FloatArray) -> FloatArray:
    """Return the mean of the middle half of values (..., m) along their last axis."""
    m = values.shape[-1]
    middle: FloatArray = np.sort(values, axis=-1)[..., m // 4 : m - m // 4].mean(axis=-1)
    return middle


def mad_scale(values: FloatArray) -> FloatArray:
    """Return the standard deviation by the median absolute deviation of values (..., m) along their last axis."""
    median = np.median(values, axis=-1)
    scale: FloatArray = _MAD_TO_SIGMA * np.median(np.abs(values - median[..., None]), axis=-1)
    return scale


def wide_scale(values: FloatArray) -> FloatArray:
    """Return the larger of MAD and decile scale of values (..., m) along their last axis."""
    low, high = np.quantile(values, (0.1, 0.9), axis=-1)
    scale: FloatArray = np.maximum(mad_scale(values), (high - low) / _DECILES_TO_SIGMA)
    return scale
