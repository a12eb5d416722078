"""Ends of iterations to blocks: the iterations from one moment that is known to the next one, shared out evenly.

Most blocks are single iterations. Longer ones come from hosts that run ahead of their GPU, and from losses.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.window_times import NEVER_NS
from schemas.iterations import Numbering
from schemas.table import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Ends of iterations: the row after the last call, the time where it is known, and the mark."""

    row: IntArray
    time_ns: IntArray
    has_time: BoolArray
    mark: IntArray

    def intervals(self, previous_ns: int) -> tuple[IntArray, IntArray]:
        """Return (n,) twice: between which known times each end lies, the last ones being left open."""
        known = np.concatenate(([previous_ns], self.time_ns[self.has_time], [NEVER_NS]))
        place: IntArray = np.cumsum(self.has_time) - self.has_time
        return known[place], known[place + 1]

    def with_lost(self, previous_mark: int, step: int, is_lossy: BoolArray, limit: int) -> "Bounds":
        """Return also the ends that nobody saw though the count goes past them, where something is known to be lost.

        is_lossy: (n,), of each end. Nothing is added before an end of which the count tells of more than `limit`.
        """
        n_lost = np.diff(self.mark, prepend=previous_mark) // step - 1
        n_lost = np.where(is_lossy & (n_lost > 0) & (n_lost <= limit), n_lost, 0)
        if not n_lost.any():
            return self
        place = np.arange(len(n_lost)) + np.cumsum(n_lost)  # of what was seen
        total = int(place[-1]) + 1
        to_come = np.repeat(place, n_lost + 1) - np.arange(total)
        row, time_ns = np.zeros((2, total), np.int64)
        has_time = np.zeros(total, bool)
        row[place], time_ns[place], has_time[place] = self.row, self.time_ns, self.has_time
        return Bounds(np.maximum.accumulate(row), time_ns, has_time, np.repeat(self.mark, n_lost + 1) - step * to_come)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Iterations up to the last known time: mark, begin and end (rows) by iteration; last (iteration) by block."""

    mark: IntArray
    begin: IntArray
    end: IntArray
    last: IntArray
    stop_ns: IntArray

    @classmethod
    def of(cls, bounds: Bounds) -> "Blocks":
        """Return the blocks of bounds of which at least one has a time."""
        last = np.flatnonzero(bounds.has_time)
        end = np.maximum.accumulate(bounds.row[: last[-1] + 1])
        begin = np.concatenate(([0], end[:-1]))
        return cls(bounds.mark[: last[-1] + 1], begin, end, last, bounds.time_ns[last])

    @cached_property
    def size(self) -> IntArray:
        """Return the number of iterations of each block."""
        return np.diff(self.last, prepend=-1)

    @property
    def first(self) -> IntArray:
        """Return the first iteration of each block."""
        return self.last - self.size + 1

    @cached_property
    def of_iteration(self) -> IntArray:
        """Return the block of each iteration."""
        return np.repeat(np.arange(len(self.last)), self.size)

    def ends_ns(self, length_ns: IntArray) -> IntArray:
        """Return when each iteration ended, blocks of some lengths being shared out evenly."""
        if len(self.last) == len(self.mark):
            return self.stop_ns
        to_come = self.last[self.of_iteration] - np.arange(len(self.mark))
        each_ns = (length_ns / self.size)[self.of_iteration]
        ends: IntArray = self.stop_ns[self.of_iteration] - np.rint(each_ns * to_come).astype(np.int64)
        return ends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Closed:
    """Iterations of one rank in order; arrays are (n,), NaN is unknown.

    mark: what numbers are made of, iteration = mark // step (without markers, once sequence numbers are known).
    content[:, begin[i]:end[i]] are the calls of iteration i.
    """

    rank: int
    mark: IntArray
    step: int
    numbering: Numbering
    counter: int  # whose sequence numbers the marks are; -1 where they cannot become job-wide numbers
    segment_ns: int
    start_ns: IntArray
    end_ns: IntArray
    duration_s: FloatArray
    host_wait_s: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    span_compute_s: FloatArray
    quality: IntArray
    is_drained: BoolArray  # the GPU had nothing left to do at its start and at its end
    content: IntArray
    begin: IntArray
    end: IntArray
