"""How to see whether a suspect is still slow: the excess seconds it adds to each frame."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.groups import quiet_median
from pipeline.history import History
from schemas.table import FloatArray, IntArray

_FEWEST_PEERS = 3  # among fewer, nobody can say which one is slow


class Watch(Protocol):
    """Follows one suspect through the frames."""

    def excess(self, history: History, start: int, stop: int) -> FloatArray:
        """Return (n,) seconds per frame that the suspect adds; NaN where it was not seen."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RankWatch:
    """Ranks against the lower median of their peers, less what was usual between them before.

    ranks (n,), peers (n, largest) with -1 for no one, usual (n,) seconds; peers of width 0 compare with `usual` alone.
    """

    ranks: IntArray
    peers: IntArray
    usual: FloatArray
    of_host: bool
    by_worst: bool = False  # of ranks that take turns at being the last

    def excess(self, history: History, start: int, stop: int) -> FloatArray:
        """Return the median over the ranks, or the worst of them."""
        values = (history.host if self.of_host else history.compute)(start, stop)
        own = values[:, self.ranks] - self.usual
        if self.peers.shape[1]:
            others = np.sort(np.where(self.peers >= 0, values[:, self.peers], np.nan), axis=-1)
            known = np.count_nonzero(np.isfinite(others), axis=-1)
            middle = np.maximum(known - 1, 0) // 2
            usual = np.take_along_axis(others, middle[..., None], axis=-1)[..., 0]
            own = np.where(known >= _FEWEST_PEERS, own - usual, np.nan)
        if self.by_worst:
            seen = np.isfinite(own)
            return np.where(seen.any(axis=1), np.where(seen, own, -np.inf).max(axis=1), np.nan)
        return quiet_median(own.T)


@dataclass(frozen=True, slots=True, eq=False)
class LinkWatch:
    """Transfer series of the rank that loses most against their reference.

    series (n,), reference_s (n,) seconds of one call, calls (n,) in an iteration.
    """

    series: IntArray
    reference_s: FloatArray
    calls: FloatArray

    def excess(self, history: History, start: int, stop: int) -> FloatArray:
        """Return the seconds spent beyond the reference; transfers not seen are taken to be as slow as the others."""
        values = history.transfers(start, stop, int(self.series.max()) + 1)[:, self.series]
        usual = self.reference_s * self.calls
        beyond = (values - self.reference_s) * self.calls
        seen = np.isfinite(beyond)
        part = np.where(seen, usual, 0.0).sum(axis=1) / usual.sum()
        return np.where(part > 0, np.nansum(beyond, axis=1) / np.where(part > 0, part, 1.0), np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class JobWatch:
    """The whole job against its own healthy iteration time."""

    reference_s: float
    most_s: float = float("inf")  # a suspect of one slowdown does not answer for the next

    def excess(self, history: History, start: int, stop: int) -> FloatArray:
        """Return the iteration time beyond the reference."""
        return np.minimum(history.durations(start, stop) - self.reference_s, self.most_s)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWatch:
    """A watch whose excess is only in part felt by the job: a host has slack before it holds up its GPU."""

    watch: Watch
    factor: float

    def excess(self, history: History, start: int, stop: int) -> FloatArray:
        """Return the part that is felt."""
        return self.factor * self.watch.excess(history, start, stop)


@dataclass(frozen=True, slots=True, eq=False)
class ClockWatch:
    """GPUs whose clocks lag those of the job's other GPUs: what a healthy iteration would lack of the present one.

    ranks (n,); share is what of a healthy iteration is computation at the clock's pace.
    """

    ranks: IntArray
    share: float

    def excess(self, history: History, start: int, stop: int) -> FloatArray:
        """Return the part of the iteration that the slowest of the clocks adds; NaN where no clock was seen."""
        clock = history.clock(start, stop)
        own = np.where(np.isfinite(clock[:, self.ranks]), clock[:, self.ranks], np.inf).min(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            slower = self.share * np.maximum(quiet_median(clock.T) / own - 1, 0.0)
        added = history.durations(start, stop) * slower / (1 + slower)
        return np.where(np.isfinite(own), added, np.nan)
