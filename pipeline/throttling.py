"""Throttle reasons that say something: those that slow a GPU down and that few of a job's GPUs show."""

import numpy as np

from schemas.events import ThrottleReason
from schemas.table import BoolArray, IntArray

_SLOWING = (
    ThrottleReason.SW_POWER_CAP,
    ThrottleReason.HW_SLOWDOWN,
    ThrottleReason.SW_THERMAL_SLOWDOWN,
    ThrottleReason.HW_THERMAL_SLOWDOWN,
    ThrottleReason.HW_POWER_BRAKE_SLOWDOWN,
)
_RARE_SHARE = 0.25  # a reason that more of the GPUs show is how this fleet runs: a power cap often is


def rarely_throttled(reasons: IntArray) -> BoolArray:
    """Return (world_size,) who shows a slowing reason that few others show; reasons are NVML's bits per rank."""
    slowed = np.zeros(len(reasons), bool)
    for reason in _SLOWING:
        has = (reasons & int(reason)) != 0
        if 0 < np.count_nonzero(has) <= max(1, _RARE_SHARE * len(reasons)):
            slowed |= has
    return slowed
