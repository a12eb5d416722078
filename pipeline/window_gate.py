"""Puts the GPU's calls in order where there is no host sensor: their times arrive late, and not one after the other.

NCCL counts without gaps, so a gap in the count is a call that is still on its way, and all calls that may come after it
wait. One that does not come within some batches is taken for lost.
"""

from dataclasses import dataclass, field

import numpy as np

from pipeline.window_calls import COUNT, COUNTER, NO_CALLS, SEQ, START
from pipeline.window_times import NEVER_NS
from schemas.table import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """What comes out of the gate: calls by rank, not sorted; ranks that lost some, with the times between which."""

    calls: IntArray
    lost: dict[int, tuple[int, int]]
    n_late: int


@dataclass(slots=True, eq=False)
class Gate:
    """Calls of one node that wait for others; `wait_batches` is for how many batches at most."""

    wait_batches: int
    _waiting: IntArray = field(default_factory=lambda: NO_CALLS)
    _age: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    _next: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # by counter

    _begun: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # the last call that went, by counter

    def cut(self) -> None:
        """Let go of everything, since it cannot be continued."""
        self._waiting, self._age = NO_CALLS, self._age[:0]
        self._next, self._begun = self._next[:0], self._begun[:0]

    def pass_through(self, calls: IntArray, counter_rank: IntArray, *, is_last: bool) -> Passed:
        """Take in the calls of one batch and return all that are in order."""
        missing = len(counter_rank) - len(self._next)
        self._next = np.concatenate((self._next, np.zeros(missing, np.int64)))
        self._begun = np.concatenate((self._begun, np.full(missing, -NEVER_NS)))
        lines = np.concatenate((self._waiting, calls), axis=1)
        age = np.concatenate((self._age + 1, np.zeros(calls.shape[1], np.int64)))
        is_late = lines[SEQ] < self._next[lines[COUNTER]]
        n_late = int(np.count_nonzero(is_late))
        order = np.lexsort((lines[SEQ], lines[COUNTER]))
        order = order[~is_late[order]]
        lines, age = lines[:, order], age[order]
        if not lines.shape[1]:
            self._waiting, self._age = lines, age
            return Passed(lines, {}, n_late)
        until, lost = self._until(lines, age, counter_rank, is_last=is_last)
        goes = lines[START] <= until[counter_rank[lines[COUNTER]]]
        gone = lines[:, goes]
        np.maximum.at(self._next, gone[COUNTER], gone[SEQ] + gone[COUNT])
        np.maximum.at(self._begun, gone[COUNTER], gone[START])
        self._waiting, self._age = lines[:, ~goes], age[~goes]
        return Passed(gone, lost, n_late)

    def _until(
        self, lines: IntArray, age: IntArray, counter_rank: IntArray, *, is_last: bool
    ) -> tuple[IntArray, dict[int, tuple[int, int]]]:
        """Return the time up to which each rank's calls are complete, or have waited for long enough."""
        counter, start = lines[COUNTER], lines[START]
        is_first = np.append(True, counter[1:] != counter[:-1])
        due = np.where(is_first, self._next[counter], np.roll(lines[SEQ] + lines[COUNT], 1))
        has_hole = lines[SEQ] > due
        # The missing call began after the one that is before it in the count.
        before = np.where(is_first, self._begun[counter], np.roll(start, 1))
        until = np.full(int(counter_rank.max()) + 1, NEVER_NS)
        np.minimum.at(until, counter_rank[counter[has_hole]], before[has_hole])
        # Where nothing of a counter has gone yet, the count may have begun before anybody looked.
        is_lost = has_hole & (before > -NEVER_NS)
        since = np.full(len(until), NEVER_NS)
        np.minimum.at(since, counter_rank[counter[is_lost]], before[is_lost])
        lost: dict[int, tuple[int, int]] = {}
        is_tired = age >= (0 if is_last else self.wait_batches)
        is_tired &= start > until[counter_rank[counter]]
        for rank in np.unique(counter_rank[counter[is_tired]]).tolist():
            own = counter_rank[counter] == rank
            latest = int(start[is_tired & own].max())
            # The missing calls began before those that follow them in the count.
            after = start[is_lost & own & (start <= latest)]
            if len(after):
                lost[rank] = int(since[rank]), int(after.max())
            until[rank] = NEVER_NS if is_last else latest
        return until, lost
