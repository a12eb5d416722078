"""The calls, synchronisations and markers of one rank, batch by batch, to the iterations that they close.

An iteration ends where a marker says so. Without markers it ends with the anchor call that window_pattern.py finds, or
with the synchronisation that follows it; where that is missing (the host runs ahead), a block of iterations from one
synchronisation to the next is shared out evenly. Nothing is closed before the next iteration has begun, since only
then is it known what came last.
"""

from dataclasses import dataclass, field

import numpy as np

from pipeline.window_blocks import Blocks, Bounds, Closed
from pipeline.window_calls import COUNT, END, KNOWN, NO_CALLS, PIECE, SEQ, START, TOKEN, Keys, in_order
from pipeline.window_params import WindowParams
from pipeline.window_pattern import Members, Pattern, anchors, learn, signatures
from pipeline.window_times import NEVER_NS, Gap, Timed, overlaps, sums_between
from schemas.events import SpanKind
from schemas.iterations import Numbering, Quality
from schemas.table import BoolArray, FloatArray, IntArray

_SPANS = {
    "forward_s": (int(SpanKind.FORWARD),),
    "backward_s": (int(SpanKind.BACKWARD),),
    "span_compute_s": (int(SpanKind.FORWARD), int(SpanKind.BACKWARD), int(SpanKind.OPTIMIZER)),
}
_RELEARN = 20  # iterations' worth of calls without an end of an iteration
_ADOPT = 3  # equal iterations in a row that differ from the learnt one
_MOST_IN_BLOCK = 256  # marked iterations without a synchronisation among them
_GROWTH = 1.3  # of the calls after a vain attempt to learn, until the next


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankNews:
    """What a batch says of one rank; calls is a matrix, the others are sorted by their end."""

    calls: IntArray
    syncs: Timed
    spans: Timed
    pauses: Timed
    ends: Timed  # markers of ends of iterations; `kind` is the iteration's number


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What holds for all ranks of a batch."""

    has_sync: bool
    has_span: bool
    are_gpu_calls: bool  # the stream's calls are those of the GPU, since there is no host sensor
    is_last: bool
    overdue_ns: int  # what began before has come, or will not
    gaps: tuple[Gap, ...]
    size: IntArray  # of the communicator, by key
    top_size: int  # of the rank's largest communicator, 0 if unknown


@dataclass(slots=True, eq=False)
class RankStream:
    """What is remembered of one rank; bounded by params.buffer_rows."""

    rank: int
    keys: Keys
    params: WindowParams
    rows: IntArray = field(default_factory=lambda: NO_CALLS)
    syncs: Timed = field(default_factory=Timed.empty)
    spans: Timed = field(default_factory=Timed.empty)
    pauses: Timed = field(default_factory=Timed.empty)
    ends: Timed = field(default_factory=Timed.empty)
    pattern: Pattern | None = None
    dropped_rows: int = 0
    _is_marked: bool = False
    _counter: int | None = None  # of the first anchor: others count from elsewhere
    _least_size: int = 0  # of its communicator: evaluations may make no use of it
    _previous_end_ns: int | None = None
    _previous_mark: int | None = None
    _previous_known: bool = False
    _segment_ns: int | None = None
    _has_begun: bool = False
    _rows_at_attempt: int = 0
    _signature: int | None = None
    _other: list[int] = field(default_factory=list)
    _is_unsynchronised: bool = False  # no wait for the GPU has been seen for long

    def cut(self) -> None:
        """Begin anew after a break across which nothing can be counted on; what has been learnt remains."""
        self.rows = NO_CALLS
        self.syncs = self.spans = self.ends = Timed.empty()
        self._previous_end_ns = self._previous_mark = self._segment_ns = None
        self._has_begun = True
        self._rows_at_attempt = 0

    def advance(self, news: RankNews, facts: BatchFacts) -> list[Closed]:
        """Take in one batch and return the iterations that it closes."""
        self._append(news)
        if len(self.ends) and not self._is_marked:
            self._switch_to_markers()
        if self._is_marked:
            bounds = self._marker_bounds(facts)
            self._is_unsynchronised |= len(bounds.row) >= _MOST_IN_BLOCK
            marked = self._close(bounds, facts)
            return [] if marked is None else [marked]
        if self.pattern is None and not self._learn(facts):
            return []
        closed = self._close_pieces(facts)
        pattern = self.pattern
        if pattern and self.rows.shape[1] > min(
            _RELEARN * pattern.rows * max(1, pattern.block), self.params.buffer_rows // 2
        ):
            self.pattern = None
            self._rows_at_attempt = 0
        return closed

    def _append(self, news: RankNews) -> None:
        if news.calls.shape[1]:
            self.rows = in_order(np.concatenate((self.rows, news.calls), axis=1), START)
        limit = self.params.buffer_rows
        too_many = self.rows.shape[1] - limit
        if too_many > 0:
            self.rows = self.rows[:, too_many:]
            self.dropped_rows += too_many
            self._previous_end_ns = self._previous_mark = None
        if self.rows.shape[1] and not self._has_begun:
            # Only who saw the first call of a communicator knows when the first iteration began.
            self._has_begun = True
            if self.rows[KNOWN, 0] and not self.rows[SEQ, 0]:
                self._previous_end_ns = int(self.rows[START, 0])
        if self.rows.shape[1] and self._segment_ns is None:
            self._segment_ns = int(self.rows[START, 0])
        self.syncs = self.syncs.with_more(news.syncs, limit)
        self._is_unsynchronised &= not len(self.syncs)
        self.spans = self.spans.with_more(news.spans, limit)
        self.pauses = self.pauses.with_more(news.pauses, limit)
        self.ends = self.ends.with_more(news.ends, limit)

    def _switch_to_markers(self) -> None:
        self._is_marked = True
        if self.pattern is not None:
            self._previous_mark = None
            self.pattern = None

    def _learn(self, facts: BatchFacts) -> bool:
        n_rows = self.rows.shape[1]
        if n_rows < _GROWTH * self._rows_at_attempt and not facts.is_last:
            return False
        self._rows_at_attempt = n_rows
        members = Members(size=facts.size, top=facts.top_size, least=self._least_size)
        syncs = self.syncs.end_ns if facts.has_sync else None
        self.pattern = learn(self.rows, self.keys, members, syncs, self.params.buffer_rows // 10)
        if self.pattern is None:
            return False
        if self._counter is None:
            self._counter = self.pattern.counter
            self._least_size = int(facts.size[self.keys.counter == self._counter].max())
        elif self._counter != self.pattern.counter:
            self._previous_mark = None
            self._segment_ns = int(self.rows[START, 0])
        self._signature = self.pattern.signature
        self._other.clear()
        return True

    def _close_pieces(self, facts: BatchFacts) -> list[Closed]:
        """Close what can be closed, never across a gap: a call after it does not belong to an anchor before it."""
        pieces = self.rows[PIECE]
        cuts = np.flatnonzero(np.diff(pieces)) + 1
        parts = np.split(self.rows, cuts, axis=1) if len(cuts) else [self.rows]
        closed = []
        for place, part in enumerate(parts):
            self.rows = part
            if part.shape[1] and (done := self._close(self._anchor_bounds(facts), facts)):
                closed.append(done)
            if place < len(parts) - 1:
                self.rows = NO_CALLS
        return closed

    def _anchor_bounds(self, facts: BatchFacts) -> Bounds:
        assert self.pattern is not None
        rows, pattern = self.rows, self.pattern
        n_rows = rows.shape[1]
        places = anchors(rows, pattern.line, pattern.anchor)
        last = places
        if pattern.tail:
            calls = np.cumsum(rows[COUNT])
            last = calls.searchsorted(calls[places] + pattern.tail)
            last[:-1] = np.minimum(last[:-1], places[1:] - 1)
        if facts.is_last:
            last = np.minimum(last, n_rows - 1)
        is_over = last + 1 < n_rows + facts.is_last
        places, last = places[is_over], last[is_over]
        mark = rows[SEQ, places] + rows[COUNT, places] - 1
        known = rows[KNOWN, places] != 0
        self._follow_count(known, mark, int(rows[START, 0]))
        if pattern.tail is None:
            time_ns = rows[END if facts.are_gpu_calls else START, places]
            return Bounds(last + 1, time_ns, np.ones(len(last), bool), mark)
        # The last synchronisation after the anchor and before the call that follows the tail; the tail may be shorter.
        begun = np.append(rows[START], NEVER_NS)
        sync = self.syncs.end_ns.searchsorted(begun[last + 1], "right") - 1
        end_ns = self.syncs.end_ns[sync] if len(self.syncs) else np.zeros(len(last), np.int64)
        has_time = (sync >= 0) & (end_ns > begun[places])
        row = np.where(has_time, rows[START].searchsorted(end_ns, "left"), last + 1)
        return Bounds(row, end_ns, has_time, mark)

    def _follow_count(self, known: BoolArray, mark: IntArray, first_ns: int) -> None:
        """Begin a new segment where the count does not go on as before."""
        if not len(known):
            return
        if self._previous_mark is not None and (self._previous_known != known[0] or mark[0] <= self._previous_mark):
            self._previous_mark = None
            self._segment_ns = first_ns
        self._previous_known = bool(known[-1])

    def _marker_bounds(self, facts: BatchFacts) -> Bounds:
        time_ns, number = self.ends.end_ns, self.ends.kind
        if facts.are_gpu_calls and not facts.is_last:
            # Times of the GPU come late: an iteration is whole once calls of the next one are there.
            newest_ns = int(self.rows[START, -1]) if self.rows.shape[1] else -NEVER_NS
            n_over = int(time_ns.searchsorted(max(newest_ns - 1, facts.overdue_ns), "right"))
            time_ns, number = time_ns[:n_over], number[:n_over]
        has_time = np.ones(len(time_ns), bool)
        if facts.has_sync and len(time_ns) < _MOST_IN_BLOCK:
            # Without a wait for the GPU the host says "done" as early as it likes.
            n_before = self.syncs.end_ns.searchsorted(time_ns, "right")
            has_time = np.diff(n_before, prepend=0) > 0
        row = self.rows[START].searchsorted(time_ns, "left")
        return Bounds(row, time_ns, has_time | self._is_unsynchronised, number)

    def _close(self, bounds: Bounds, facts: BatchFacts) -> Closed | None:
        if not bounds.has_time.any():
            return None
        step = self.pattern.step if self.pattern else 1
        n_seen = len(bounds.mark)
        if facts.gaps:
            before = int(bounds.mark[0]) - step if self._previous_mark is None else self._previous_mark
            since_ns = -NEVER_NS if self._previous_end_ns is None else self._previous_end_ns
            is_lossy = overlaps(facts.gaps, *bounds.intervals(since_ns))
            bounds = bounds.with_lost(before, step, is_lossy, self.params.fill_iterations)
        blocks = Blocks.of(bounds)
        start_ns, has_start = self._starts(blocks, is_filled=len(bounds.mark) > n_seen)
        length_ns = np.where(has_start, blocks.stop_ns - start_ns, 0)
        has_start &= length_ns > 0
        start_ns = np.where(has_start, start_ns, blocks.stop_ns)
        own = blocks.of_iteration
        is_canonical = self.pattern is not None and self.pattern.counter == self._counter
        numbering = self._numbering(is_canonical=is_canonical)
        closed = Closed(
            rank=self.rank,
            mark=blocks.mark,
            step=step,
            numbering=numbering,
            counter=self.pattern.counter if self.pattern and is_canonical else -1,
            segment_ns=(self._segment_ns or 0) if numbering is Numbering.LOCAL else 0,
            start_ns=start_ns[own],
            end_ns=blocks.ends_ns(length_ns),
            duration_s=np.where(has_start, length_ns / blocks.size / 1e9, np.nan)[own],
            quality=self._quality(blocks, start_ns, has_start, facts),
            is_drained=(has_start & (blocks.size == 1) & self._is_drained(blocks))[own],
            content=self.rows[:, : blocks.end[-1]],
            begin=blocks.begin,
            end=blocks.end,
            **self._seconds(blocks, start_ns, has_start, facts),
        )
        self._forget(int(blocks.stop_ns[-1]), int(blocks.end[-1]), int(blocks.mark[-1]))
        return closed

    def _numbering(self, *, is_canonical: bool) -> Numbering:
        if self._is_marked:
            return Numbering.MARKER
        return Numbering.SEQUENCE if self._previous_known and is_canonical else Numbering.LOCAL

    def _starts(self, blocks: Blocks, *, is_filled: bool) -> tuple[IntArray, BoolArray]:
        """Return when each block began, and whether that is known."""
        start_ns = np.concatenate(([self._previous_end_ns or 0], blocks.stop_ns[:-1]))
        has_start = np.ones(len(start_ns), bool)
        has_start[0] = self._previous_end_ns is not None
        if not self._is_marked or is_filled:
            return start_ns, has_start
        # Where markers do not count on, or this is the first, an iteration began with its first event.
        first = blocks.first
        before = np.concatenate(([self._previous_mark if self._previous_mark is not None else -2], blocks.mark))[first]
        for block in np.flatnonzero(has_start & (blocks.mark[first] != before + 1)).tolist():
            after_ns = int(start_ns[block]) if self._previous_mark is not None or block else -NEVER_NS
            first_ns = self._first_event(int(blocks.begin[first[block]]), after_ns)
            has_start[block] = first_ns is not None
            start_ns[block] = first_ns or 0
        return start_ns, has_start

    def _quality(self, blocks: Blocks, start_ns: IntArray, has_start: BoolArray, facts: BatchFacts) -> IntArray:
        quality = np.where(blocks.size > 1, int(Quality.BLOCK_MEAN), 0)
        is_incomplete = ~has_start | overlaps(facts.gaps, start_ns, blocks.stop_ns)
        quality[is_incomplete] |= int(Quality.INCOMPLETE)
        quality[self.pauses.any_overlapping(start_ns, blocks.stop_ns)] |= int(Quality.PAUSED)
        quality = quality[blocks.of_iteration]
        self._judge_work(blocks, quality)
        return quality

    def _seconds(
        self, blocks: Blocks, start_ns: IntArray, has_start: BoolArray, facts: BatchFacts
    ) -> dict[str, FloatArray]:
        """Return what the host waited and the spans took, (n,) each by name; means over blocks."""
        unknown = np.full(len(blocks.mark), np.nan)

        def mean(times: Timed) -> FloatArray:
            total = sums_between(times, start_ns, blocks.stop_ns) / blocks.size
            return np.where(has_start, total, np.nan)[blocks.of_iteration]

        seconds = {"host_wait_s": mean(self.syncs) if facts.has_sync else unknown}
        return seconds | {
            name: mean(self.spans.of(kinds)) if facts.has_span else unknown for name, kinds in _SPANS.items()
        }

    def _first_event(self, row: int, after_ns: int) -> int | None:
        firsts = [int(self.rows[START, row])] if row < self.rows.shape[1] else []
        spans = self.spans.start_ns[self.spans.end_ns > after_ns]
        firsts += [int(spans.min())] if len(spans) else []
        return min(firsts, default=None)

    def _is_drained(self, blocks: Blocks) -> BoolArray:
        """Return whether a synchronisation came after the last call of each block, and before its end."""
        if not len(self.syncs):
            return np.zeros(len(blocks.last), bool)
        begun = np.concatenate(([-NEVER_NS], self.rows[START]))[blocks.end[blocks.last]]
        sync = self.syncs.end_ns.searchsorted(blocks.stop_ns, "right") - 1
        return np.asarray((sync >= 0) & (self.syncs.end_ns[sync] >= begun))

    def _judge_work(self, blocks: Blocks, quality: IntArray) -> None:
        """Flag iterations whose calls are not the learnt ones, and learn anew when that lasts."""
        line = self.pattern.line if self.pattern else TOKEN
        bounds = np.append(blocks.begin, blocks.end[-1])
        signature = signatures(self.rows, line, bounds)
        whole = (quality & int(Quality.INCOMPLETE)) == 0
        if self._signature is not None and (signature[whole] == self._signature).all():
            if whole.any():
                self._other.clear()
            return
        for place in np.flatnonzero(whole).tolist():
            seen = int(signature[place])
            if seen == self._signature:
                self._other.clear()
                continue
            self._other = [*self._other, seen] if self._other[-1:] == [seen] else [seen]
            if len(self._other) >= (_ADOPT if self._signature is not None else 2):
                self._signature = seen
                self._other.clear()
            elif self._signature is not None:
                quality[place] |= int(Quality.OTHER_WORK)

    def _forget(self, time_ns: int, row: int, mark: int) -> None:
        self._previous_end_ns, self._previous_mark = time_ns, mark
        self.rows = self.rows[:, row:]
        self.syncs = self.syncs.after(time_ns)
        self.spans = self.spans.after(time_ns)
        self.ends = self.ends.after(time_ns)
        self.pauses = self.pauses.after(time_ns)
