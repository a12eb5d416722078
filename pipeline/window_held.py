"""Iterations that wait for their GPU times, which come later than the host's calls, and what these times add up to.

A call on the GPU belongs to the iteration whose host calls have its sequence number. Where the host's count began late
(the agent attached late), the two counts differ by a constant: it is found in iterations between two synchronisations,
since all that the host launched there has run there, and believed when two in a row agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pipeline.window_calls import (
    BYTES,
    COUNT,
    COUNTER,
    END,
    KEY,
    KNOWN,
    LEAST,
    NO_CALLS,
    SEQ,
    START,
    TIMED,
    TOTAL,
    Keys,
    in_order,
)
from schemas.iterations import Numbering
from schemas.table import AnyArray, BoolArray, FloatArray, IntArray

Columns = dict[str, AnyArray]

_SEQ_BITS = 44
_AGREEING = 2
_NO_COUNTER = -1


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Iterations and what they communicated, columns by name, plus the lines that tell which belong together.

    iteration: of each entry of `communication`, its place among the iterations. n_seen: calls seen on the GPU.
    """

    rows: Columns
    communication: Columns
    iteration: IntArray
    n_seen: IntArray
    age: IntArray  # batches that each iteration has waited

    def take(self, chosen: BoolArray) -> "Rows":
        """Return some of the iterations."""
        place = np.cumsum(chosen) - 1
        own = chosen[self.iteration]
        return Rows(
            {name: column[chosen] for name, column in self.rows.items()},
            {name: column[own] for name, column in self.communication.items()},
            place[self.iteration[own]],
            self.n_seen[own],
            self.age[chosen],
        )

    def with_more(self, more: "Rows") -> "Rows":
        """Return both, in this order."""
        return Rows(
            {name: np.concatenate((column, more.rows[name])) for name, column in self.rows.items()},
            {name: np.concatenate((column, more.communication[name])) for name, column in self.communication.items()},
            np.concatenate((self.iteration, more.iteration + len(self.age))),
            np.concatenate((self.n_seen, more.n_seen)),
            np.concatenate((self.age, more.age)),
        )


def communication(content: IntArray, iteration: IntArray, keys: Keys) -> tuple[Columns, IntArray]:
    """Return one entry per iteration and key, in the order of iterations and first calls, and its iteration.

    content: the calls of all iterations, in order; iteration: of each of them.
    """
    pair = iteration * max(1, len(keys.rank)) + content[KEY]
    order = np.argsort(pair, kind="stable")
    pair, sorted_ = pair[order], content[:, order]
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])) if len(pair) else np.empty(0, np.int64)
    own = iteration[order[first]]
    begins = iteration.searchsorted(own)
    seq, count = sorted_[SEQ], sorted_[COUNT]

    def over(function: np.ufunc, values: IntArray) -> IntArray:
        return np.asarray(function.reduceat(values, first)) if len(first) else values[:0]

    columns: Columns = {
        "key": sorted_[KEY, first],
        "counter": sorted_[COUNTER, first],
        "order": np.minimum(order[first] - begins, np.iinfo(np.uint16).max),
        "first_seq": over(np.minimum, seq),
        "last_seq": over(np.maximum, seq + count - 1),
        "seq_known": over(np.minimum, sorted_[KNOWN]),
        "calls": over(np.add, count),
        "bytes": over(np.add, count * sorted_[BYTES]),
        "start_ns": over(np.minimum, sorted_[START]),
    }
    by_first_call = np.lexsort((columns["order"], own))
    return {name: column[by_first_call] for name, column in columns.items()}, own[by_first_call]


@dataclass(slots=True, eq=False)
class Held:
    """Iterations of one node and the GPU calls that no iteration has taken yet."""

    limit_rows: int  # of GPU calls
    count: Callable[[str, int], None]
    held: Rows | None = None
    _waiting: IntArray = field(default_factory=lambda: NO_CALLS)
    _taken: IntArray = field(default_factory=lambda: NO_CALLS)
    _entry: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # of held.communication, by taken call
    _done: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # by counter: first number not yet let go
    _offset: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # by counter, to be added to host numbers
    _has_offset: BoolArray = field(default_factory=lambda: np.empty(0, bool))
    _guess: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # by counter: offset, how often, till when

    def forget_offsets(self) -> None:
        """Take it that the host counts anew; what is held keeps its numbers."""
        self._has_offset[:] = False
        self._guess.clear()
        if self.held is not None:
            self.held.communication["is_open"] &= False
            self.held.rows["counter"][:] = _NO_COUNTER

    def add(self, more: Rows | None, gpu_calls: IntArray, n_counters: int) -> None:
        """Take in the iterations that a batch has closed and the GPU calls that it has brought."""
        n_new = n_counters - len(self._done)
        if n_new:
            self._done = np.concatenate((self._done, np.zeros(n_new, np.int64)))
            self._offset = np.concatenate((self._offset, np.zeros(n_new, np.int64)))
            self._has_offset = np.concatenate((self._has_offset, np.zeros(n_new, bool)))
        if self.held is not None:
            self.held.age[:] += 1
        if more is not None:
            self.held = more if self.held is None else self.held.with_more(more)
        if gpu_calls.shape[1]:
            is_late = gpu_calls[SEQ] < self._done[gpu_calls[COUNTER]]
            if is_late.any():
                self.count("gpu_calls_late", int(np.count_nonzero(is_late)))
                gpu_calls = gpu_calls[:, ~is_late]
            self._waiting = np.concatenate((self._waiting, gpu_calls), axis=1)
        too_many = self._waiting.shape[1] - self.limit_rows
        if too_many > 0:
            self.count("gpu_calls_dropped", too_many)
            self._waiting = self._waiting[:, too_many:]
        if self.held is not None:
            if self.held.communication["is_open"].any():
                self._find_offsets(self.held)
                self._apply_offsets(self.held)
            self._match(self.held)

    def take(self, is_ready: Callable[[Rows, BoolArray], BoolArray]) -> Rows | None:
        """Return, and let go of, the iterations that are ready; the GPU's columns are filled in where it was seen.

        is_ready is asked with what is held and whether all GPU times are there, (n,).
        """
        held = self.held
        if held is None:
            return None
        is_seen = held.n_seen == held.communication["calls"]
        lacks = np.zeros(len(held.age), bool)
        lacks[held.iteration[~is_seen]] = True
        ready = is_ready(held, ~lacks)
        busy_s, least_s = self._entry_times(len(is_seen))
        held.communication["busy_s"] = np.where(is_seen, busy_s, np.nan)
        held.communication["least_s"] = np.where(is_seen, least_s, np.nan)
        held.rows["communication_s"] = np.where(held.rows["has_calls"] & ~lacks, self._union_s(held), np.nan)
        taken = held.take(ready)
        self._let_go(held, ready)
        return taken

    def _let_go(self, held: Rows, ready: BoolArray) -> None:
        goes = ready[held.iteration]
        known = goes & (held.communication["seq_known"] != 0)
        np.maximum.at(self._done, held.communication["counter"][known], held.communication["last_seq"][known] + 1)
        place = np.cumsum(~goes) - 1
        stays = ~goes[self._entry]
        self._taken, self._entry = self._taken[:, stays], place[self._entry[stays]]
        self.held = None if ready.all() else held.take(~ready)
        if self._waiting.shape[1] and known.any():
            is_late = self._waiting[SEQ] < self._done[self._waiting[COUNTER]]
            if is_late.any():
                self.count("gpu_calls_late", int(np.count_nonzero(is_late)))
                self._waiting = self._waiting[:, ~is_late]

    def _match(self, held: Rows) -> None:
        """Give each waiting GPU call to the iteration whose numbers include its own."""
        entries = np.flatnonzero(held.communication["seq_known"] != 0)
        if not self._waiting.shape[1] or not len(entries):
            return
        # One name for (counter, number): all entries of an iteration and counter share a range of numbers.
        low = (held.communication["counter"] << _SEQ_BITS) + held.communication["first_seq"]
        order = entries[np.argsort(low[entries], kind="stable")]
        wanted = (self._waiting[COUNTER] << _SEQ_BITS) + self._waiting[SEQ]
        place = low[order].searchsorted(wanted, "right") - 1
        near = order[np.maximum(place, 0)]
        iteration = held.iteration[near]
        # Of the entries of that iteration, the one with the call's own key.
        n_keys = int(max(held.communication["key"].max(), self._waiting[KEY].max())) + 1
        names = held.iteration * n_keys + held.communication["key"]
        sorter = np.argsort(names, kind="stable")
        own = iteration * n_keys + self._waiting[KEY]
        found = np.minimum(names[sorter].searchsorted(own), len(names) - 1)
        entry = sorter[found]
        fits = (place >= 0) & (names[entry] == own)
        fits &= (held.communication["first_seq"][entry] <= self._waiting[SEQ]) & (
            self._waiting[SEQ] <= held.communication["last_seq"][entry]
        )
        np.add.at(held.n_seen, entry[fits], self._waiting[COUNT, fits])
        self._taken = np.concatenate((self._taken, self._waiting[:, fits]), axis=1)
        self._entry = np.concatenate((self._entry, entry[fits]))
        self._waiting = self._waiting[:, ~fits]

    def _entry_times(self, n: int) -> tuple[FloatArray, FloatArray]:
        busy_s = np.bincount(self._entry, self._taken[TOTAL], minlength=n) / 1e9
        least = np.full(n, np.inf)
        np.minimum.at(least, self._entry, self._taken[LEAST] / 1e9)
        return busy_s, least

    def _union_s(self, held: Rows) -> FloatArray:
        """Return (n,) seconds of each iteration in which its rank communicated.

        Of a run of calls the total counts alone, since computation lies between them; other calls may overlap. Calls
        of which it is not known when they ran are taken to have run one after the other, as most do: where they are
        put is when the host made them, all at once.
        """
        n = len(held.age)
        iteration = held.iteration[self._entry]
        is_run = (self._taken[COUNT] > 1) | (self._taken[TIMED] == 0)
        total = np.bincount(iteration[is_run], self._taken[TOTAL, is_run], minlength=n)
        single, own = self._taken[:, ~is_run], iteration[~is_run]
        if not len(own):
            return total / 1e9
        # Iterations are laid one after another, so far apart that the running maximum never reaches over.
        spread = (1 << 60) // (n + 1)
        shift = held.rows["end_ns"][own]
        lift = 2 * spread * own
        start = np.minimum(np.maximum(single[START] - shift, -spread), spread - 1) + lift
        end = np.minimum(np.maximum(single[END] - shift, -spread), spread - 1) + lift
        order = np.lexsort((start, own))
        start, end, own = start[order], end[order], own[order]
        before = np.append(start[0], np.maximum.accumulate(end)[:-1])
        gained = np.maximum(end - np.maximum(start, before), 0)
        seconds: FloatArray = (total + np.bincount(own, gained, minlength=n)) / 1e9
        return seconds

    def _find_offsets(self, held: Rows) -> None:
        asked = held.communication["is_open"] & held.rows["is_drained"][held.iteration]
        for counter in np.unique(held.communication["counter"][asked]).tolist():
            if self._has_offset[counter]:
                continue
            calls = in_order(self._waiting[:, self._waiting[COUNTER] == counter], END)
            own = np.flatnonzero(asked & (held.communication["counter"] == counter))
            iterations, place = np.unique(held.iteration[own], return_inverse=True)
            for number, iteration in enumerate(iterations.tolist()):
                self._learn_offset(held, counter, calls, iteration, own[place == number])

    def _learn_offset(self, held: Rows, counter: int, calls: IntArray, iteration: int, entries: IntArray) -> None:
        """Compare the GPU calls that ended within an iteration with the host's calls of one counter."""
        end_ns = int(held.rows["end_ns"][iteration])
        guess, n_agreeing, latest_ns = self._guess.get(counter, (0, 0, -1))
        bounds = [held.rows["start_ns"][iteration], end_ns]
        inside = calls[:, slice(*calls[END].searchsorted(bounds, "right").tolist())]
        if end_ns <= latest_ns or inside[COUNT].sum() != held.communication["calls"][entries].sum():
            return
        if inside[END, 0] < held.communication["start_ns"][entries].min():
            return  # it ran before the host called
        offset = int(inside[SEQ].min() - held.communication["first_seq"][entries].min())
        n_agreeing = n_agreeing + 1 if guess == offset else 1
        self._guess[counter] = offset, n_agreeing, end_ns
        self._offset[counter] = offset
        self._has_offset[counter] = n_agreeing >= _AGREEING

    def _apply_offsets(self, held: Rows) -> None:
        columns = held.communication
        known = columns["is_open"] & self._has_offset[columns["counter"]]
        if not known.any():
            return
        shift = np.where(known, self._offset[columns["counter"]], 0)
        columns["first_seq"] += shift
        columns["last_seq"] += shift
        columns["seq_known"][known] = 1
        columns["is_open"][known] = False
        counter = held.rows["counter"]
        rows = (counter != _NO_COUNTER) & self._has_offset[np.maximum(counter, 0)]
        held.rows["mark"][rows] += self._offset[counter[rows]]
        held.rows["numbering"][rows] = int(Numbering.SEQUENCE)
        held.rows["counter"][rows] = _NO_COUNTER
