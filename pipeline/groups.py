"""Statistics within groups of peers, for all ranks at once."""

from dataclasses import dataclass, field

import numpy as np

from detectors.robust import MEDIAN_ERROR
from schemas.table import FloatArray, IntArray


@dataclass(slots=True)
class Groups:
    """Groups as a padded index: members (n_groups, largest) with -1 for no one. Group number -1 is nobody's peer."""

    of_rank: IntArray
    members: IntArray = field(init=False)

    def __post_init__(self) -> None:
        numbered = np.flatnonzero(self.of_rank >= 0)
        order = numbered[np.argsort(self.of_rank[numbered], kind="stable")]
        group = self.of_rank[order]
        n_groups = int(group.max()) + 1 if len(group) else 0
        size = np.bincount(group, minlength=n_groups)
        place = np.arange(len(order)) - np.repeat(np.cumsum(size) - size, size)
        self.members = np.full((n_groups, int(size.max()) if n_groups else 0), -1, np.int64)
        self.members[group, place] = order

    def spread(self, values: FloatArray) -> FloatArray:
        """Return values (..., world_size) as (..., n_groups, largest), NaN where there is no member."""
        if self.members.size == 0:
            return np.full((*values.shape[:-1], *self.members.shape), np.nan)
        picked: FloatArray = np.where(self.members >= 0, values[..., self.members], np.nan)
        return picked

    def lower_median(self, values: FloatArray) -> FloatArray:
        """Return (..., n_groups) medians, the lower one of two, so that half a group may be slow and not move it."""
        spread = np.sort(self.spread(values), axis=-1)
        known = np.count_nonzero(np.isfinite(spread), axis=-1)
        if spread.shape[-1] == 0:
            return np.full(spread.shape[:-1], np.nan)
        middle = np.maximum(known - 1, 0) // 2
        median: FloatArray = np.take_along_axis(spread, middle[..., None], axis=-1)[..., 0]
        return median

    def lower_median_of_others(self, values: FloatArray) -> FloatArray:
        """Return (..., world_size) each rank's lower median of its group without itself; NaN where there is no other.

        A rank that is its group's median itself lies nowhere beyond it: spreads are measured from the others.
        """
        spread = self.spread(values)
        if spread.shape[-1] < 2:
            return np.full(values.shape, np.nan)
        order = np.argsort(spread, axis=-1)
        ordered = np.take_along_axis(spread, order, axis=-1)
        known = np.count_nonzero(np.isfinite(spread), axis=-1)[..., None]
        middle = np.maximum(known - 2, 0) // 2
        place = np.arange(spread.shape[-1])
        above = np.take_along_axis(ordered, np.minimum(middle + 1, spread.shape[-1] - 1), axis=-1)
        of_place = np.where(place <= middle, above, np.take_along_axis(ordered, middle, axis=-1))
        others = np.empty_like(spread)
        np.put_along_axis(others, order, np.where((known >= 2) & (place < known), of_place, np.nan), axis=-1)
        by_rank = np.full(values.shape, np.nan)
        is_member = self.members >= 0
        by_rank[..., self.members[is_member]] = others[..., is_member]
        return by_rank

    def to_ranks(self, by_group: FloatArray) -> FloatArray:
        """Return by_group (..., n_groups) as (..., world_size), NaN for ranks in no group."""
        if by_group.shape[-1] == 0:
            return np.full((*by_group.shape[:-1], len(self.of_rank)), np.nan)
        ranks: FloatArray = np.where(self.of_rank >= 0, by_group[..., self.of_rank], np.nan)
        return ranks

    def known(self, values: FloatArray) -> IntArray:
        """Return (world_size,): how many of each rank's group, itself included, have a value."""
        count = np.count_nonzero(np.isfinite(self.spread(values)), axis=-1).astype(np.float64)
        return np.nan_to_num(self.to_ranks(count)).astype(np.int64)


def robust_scale(values: FloatArray) -> FloatArray:
    """Return the normal-consistent median absolute deviation of values (n, m) along the first axis, (m,)."""
    center = quiet_median(values)
    return 1.4826 * quiet_median(np.abs(values - center))


def median_error(values: FloatArray) -> float:
    """Return the standard error of the median of values (n,), all known."""
    return MEDIAN_ERROR * float(robust_scale(values[:, None])[0]) / float(np.sqrt(len(values)))


def quiet_median(values: FloatArray) -> FloatArray:
    """Return the median of values (n, m) along the first axis without NaNs, (m,), NaN where there is none."""
    if values.shape[0] == 0:
        return np.full(values.shape[1:], np.nan)
    ordered = np.sort(values, axis=0)
    known = np.count_nonzero(np.isfinite(ordered), axis=0)
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, len(ordered) - 1)
    picked = np.take_along_axis(ordered, np.stack([low, high]), axis=0)
    median: FloatArray = np.where(known > 0, picked.mean(axis=0), np.nan)
    return median
