"""Stretches of time: synchronisations, spans, pauses and gaps, and questions about what lies within an iteration."""

from dataclasses import dataclass

import numpy as np

from schemas.table import AnyArray, BoolArray, FloatArray, IntArray

NEVER_NS = np.iinfo(np.int64).max // 2

Gap = tuple[int, int]  # nanoseconds between which events were lost


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """Stretches sorted by their end; kind means what its owner says."""

    start_ns: IntArray
    end_ns: IntArray
    kind: IntArray

    @classmethod
    def empty(cls) -> "Timed":
        """Return no stretches."""
        return _EMPTY

    @classmethod
    def sorted(cls, start_ns: AnyArray, duration_ns: AnyArray, kind: AnyArray | int = 0) -> "Timed":
        """Return stretches in the order of their end."""
        start = start_ns.astype(np.int64)
        end = start + duration_ns
        kinds = np.broadcast_to(np.asarray(kind, np.int64), end.shape)
        if (end[1:] >= end[:-1]).all():
            return cls(start, end, kinds)
        order = np.argsort(end, kind="stable")
        return cls(start[order], end[order], kinds[order])

    def __len__(self) -> int:
        return len(self.end_ns)

    def take(self, chosen: IntArray | BoolArray | slice) -> "Timed":
        """Return some of the stretches."""
        return Timed(self.start_ns[chosen], self.end_ns[chosen], self.kind[chosen])

    def of(self, kinds: tuple[int, ...] | None) -> "Timed":
        """Return the stretches of some kinds, or of all."""
        return self if kinds is None else self.take(np.isin(self.kind, kinds))

    def after(self, time_ns: int) -> "Timed":
        """Return the stretches that end later."""
        return self.take(slice(int(self.end_ns.searchsorted(time_ns, "right")), None)) if len(self) else self

    def with_more(self, more: "Timed", limit: int) -> "Timed":
        """Return the latest `limit` stretches of both."""
        if not len(more):
            return self
        start = np.concatenate((self.start_ns, more.start_ns))
        end = np.concatenate((self.end_ns, more.end_ns))
        kinds = np.concatenate((self.kind, more.kind))
        both = Timed(start, end, kinds)
        if (end[1:] < end[:-1]).any():
            both = both.take(np.argsort(end, kind="stable"))
        return both.take(slice(-limit, None)) if len(both) > limit else both

    def any_overlapping(self, start_ns: IntArray, end_ns: IntArray) -> BoolArray:
        """Return (n,): whether a stretch, or an instant within, lies in each of (start_ns, end_ns]."""
        found = np.zeros(len(start_ns), bool)
        for start, end in zip(self.start_ns.tolist(), self.end_ns.tolist(), strict=True):
            found |= (start < end_ns) & (end > start_ns)
        return found


_EMPTY = Timed(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


def sums_between(times: Timed, start_ns: IntArray, end_ns: IntArray) -> FloatArray:
    """Return (n,): seconds of the stretches that end in each of (start_ns, end_ns]."""
    total = np.concatenate(([0], np.cumsum(times.end_ns - times.start_ns)))
    first = times.end_ns.searchsorted(start_ns, "right")
    last = times.end_ns.searchsorted(end_ns, "right")
    seconds: FloatArray = (total[np.maximum(last, first)] - total[first]) / 1e9
    return seconds


def overlaps(gaps: tuple[Gap, ...], start_ns: IntArray, end_ns: IntArray) -> BoolArray:
    """Return (n,): whether a gap overlaps each of (start_ns, end_ns]."""
    found = np.zeros(len(start_ns), bool)
    for low, high in gaps:
        found |= (start_ns < high) & (end_ns > low)
    return found
