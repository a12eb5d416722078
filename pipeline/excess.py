"""By how much ranks outlast their peers, or their own past where they have too few peers."""

from dataclasses import dataclass, replace

import numpy as np

from detectors.robust import MEDIAN_ERROR
from pipeline.groups import Groups, quiet_median, robust_scale
from pipeline.suspect import FEWEST_REFERENCE
from schemas.table import BoolArray, FloatArray

_FEWEST_PEERS = 3
_FEWEST_VALUES = 8  # that a spread between ranks is believed from
_MAD_EFFICIENCY = 0.37  # of a MAD, beside the standard deviation of as many values
_FAR = 5.0  # standard errors, at which tails are compared: where ranks begin to be accused
_MOST_OF_FEW = 2.0  # more would hide who is slow from the start
_FEWEST_FRAMES = 12  # from which it is told whether one is like the next
_ALIKE = 0.3  # correlation of successive frames: 0 where each is another chance, 0.7 where experts' work has a memory


@dataclass(frozen=True, slots=True, eq=False)
class Excess:
    """Per rank, (world_size,): seconds beyond the peers, their standard error, and what was usual before."""

    seconds: FloatArray
    error: FloatArray
    usual: FloatArray
    by_peers: BoolArray
    level: FloatArray
    wanders: bool = False  # whether ranks are slow for a while, one after another, by themselves

    @property
    def z(self) -> FloatArray:
        """Signal over noise."""
        return self.seconds / np.maximum(self.error, 1e-9)


def beyond_peers(values: FloatArray, groups: Groups) -> FloatArray:
    """Return values (n, world_size) less the lower median of the peers; NaN in frames with fewer than three of them."""
    enough = groups.known(values) >= _FEWEST_PEERS
    return np.where(enough, values - groups.to_ranks(groups.lower_median(values)), np.nan)


def beyond_others(values: FloatArray, groups: Groups) -> FloatArray:
    """Return values (n, world_size) less the lower median of the other peers, with two of them at least."""
    enough = groups.known(values) >= _FEWEST_PEERS
    return np.where(enough, values - groups.lower_median_of_others(values), np.nan)


def rank_excess(values: FloatArray, reference: FloatArray, groups: Groups) -> Excess:
    """Compare values (n, world_size) with the peers in each frame, and with reference (b, world_size), b may be 0.

    Ranks with fewer than three peers, themselves included, are compared with their past and the job's common change.
    """
    n, b = len(values), len(reference)
    beyond = beyond_peers(values, groups)
    level = quiet_median(values)
    by_peers = groups.known(level) >= _FEWEST_PEERS
    unknown = np.full(values.shape[1], np.nan)
    noise = robust_scale(beyond_others(values, groups)) if n >= FEWEST_REFERENCE else unknown
    usual = np.zeros(values.shape[1])
    if b >= FEWEST_REFERENCE:
        before = beyond_peers(reference, groups)
        usual = np.nan_to_num(quiet_median(before))
        noise = np.fmax(noise, robust_scale(beyond_others(reference, groups)))
        own = quiet_median(reference)
        change = level / own
        common = np.nanmedian(change) if np.isfinite(change).any() else 1.0
        alone = (change - common) * own
        usual = np.where(by_peers, usual, own)
        own_noise = robust_scale(reference)
        noise = np.where(by_peers, noise, np.fmax(own_noise, 0.0))
    else:
        alone = unknown
    pooled = np.nanmedian(noise) if np.isfinite(noise).any() else np.nan
    seen = np.maximum(np.count_nonzero(np.isfinite(np.where(by_peers, beyond, values)), axis=0), 1)
    error = MEDIAN_ERROR * np.fmax(noise, pooled) * np.sqrt(1 / seen + (1 / b if b else 0.0))
    seconds = np.where(by_peers, quiet_median(beyond) - np.where(by_peers, usual, 0.0), alone)
    return Excess(seconds, error, usual, by_peers, level)


def with_wander(excess: Excess, before: FloatArray, now: FloatArray) -> Excess:
    """Return an excess in the frames of now with no less error than ranks wander among their peers by themselves.

    before and now (n, world_size) are frames less the peers'. Work that is dealt out anew now and then, as to
    experts, leaves ranks slow for a while, one after the other: how far the median of as many frames lies from the
    peers' for all ranks, by its robust scale, is what chance brings, however steady each rank is from one frame to the
    next. A slow rank, or the ranks of a slow host, are too few to be taken for it. A scale that comes from a few values
    may be too small by chance, for which the error makes up.
    """
    wanders, n_frames = _wanders(np.concatenate([before, now])), len(now)
    n_blocks = len(before) // max(n_frames, 1)
    blocks = before[len(before) - n_blocks * n_frames :].reshape(n_blocks, n_frames, before.shape[1])
    medians = [quiet_median(block) - excess.usual for block in blocks]
    # Half of a group of peers may be a slow host's: of the others' median these make the others seem quick.
    values = np.concatenate([np.where(excess.by_peers, excess.seconds, np.nan), *medians])
    values = values[np.isfinite(values)]
    if len(values) < _FEWEST_VALUES:
        return replace(excess, wanders=wanders)
    scale = float(robust_scale(values[:, None])[0])
    return replace(excess, error=np.fmax(excess.error, scale * _of_few(len(values))), wanders=wanders)


def _wanders(beyond: FloatArray) -> bool:
    """Whether most ranks are where they were a frame ago, beyond or behind their peers (n, world_size)."""
    if len(beyond) < _FEWEST_FRAMES:
        return False
    off = np.nan_to_num(beyond - quiet_median(beyond))
    energy = np.sum(off**2, axis=0)
    seen = energy > 0
    if np.count_nonzero(seen) < _FEWEST_PEERS:
        return False
    correlation = np.sum(off[1:] * off[:-1], axis=0)[seen] / energy[seen]
    return bool(np.median(correlation) > _ALIKE)


def _of_few(n_values: int) -> float:
    """Return how many times farther out is as unlikely, in a scale known from so few values, as in one that is known.

    Equal log likelihood ratios of Student's and of the normal distribution: dof log(1 + t^2 / dof) is about z^2.
    """
    dof = _MAD_EFFICIENCY * n_values
    return min(float(np.sqrt(dof * np.expm1(_FAR**2 / (dof + 1)))) / _FAR, _MOST_OF_FEW)
