"""One rank's op stream, cut into iterations.

An explicit marker ends an iteration where there is one. Otherwise the calls themselves do: the period of the sequence
of large calls (runs of equal calls collapsed) is learnt with detectors.period, and the call on the largest communicator
that occurs once per iteration is its anchor. Where the host's waits for its GPU are seen, an iteration ends with the
wait that follows its anchor, and several iterations between two waits are known by their mean alone.
"""

from dataclasses import dataclass, field

import numpy as np

from pipeline.cuts import Cuts, cuts_of_anchor, cuts_of_markers
from pipeline.iteration_pattern import AnchorCall, learn_anchor, token_hashes
from pipeline.observer import Observer
from schemas.events import Calls, CallSource, MarkerKind, Markers, Sensor, Spans, Syncs
from schemas.iterations import Numbering, Quality
from schemas.table import IntArray, Table

_MOST_ROWS = 60_000
_MOST_OPEN = 512
_PATIENCE_BATCHES = 3  # for GPU times, which come later than the calls
_RELEARN_AFTER = 3
_LEARN_FROM = 24  # rows


class RankPart(dict[str, Table]):
    """What one batch says of one rank: tables by name, where there are any."""

    def of(self, name: str, kind: type[Table]) -> Table:
        """Return a table, empty where the batch has none."""
        return self.get(name) or kind.empty()


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Finished iterations of one rank, (n,), and everything that lies in them.

    segment (n_calls,), span_segment (n_spans,): to which iteration each row belongs.
    """

    start_ns: IntArray
    end_ns: IntArray
    number: IntArray
    numbering: IntArray
    quality: IntArray
    duration_s: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"
    origin_ns: int
    host_wait_ns: IntArray
    calls: Calls
    segment: IntArray
    spans: Spans
    span_segment: IntArray


@dataclass(slots=True)
class RankStream:
    """State of one rank process."""

    rank: int
    observer: Observer
    _calls: Calls = field(default_factory=Calls.empty)
    _syncs: Syncs = field(default_factory=Syncs.empty)
    _spans: Spans = field(default_factory=Spans.empty)
    _markers: Markers = field(default_factory=Markers.empty)
    _pauses: Markers = field(default_factory=Markers.empty)
    _anchor: AnchorCall | None = None
    _open: list[Cuts] = field(default_factory=list)
    _cut_ns: int | None = None  # where the last iteration ended
    _cut_number: int | None = None
    _origin_ns: int | None = None
    _n_local: int = 0
    _losses: list[tuple[int, int]] = field(default_factory=list)
    _learnt: int | None = None  # signature of an ordinary iteration
    _other: list[int] = field(default_factory=list)
    _is_marked: bool = False  # markers have been seen: calls no longer decide
    _tried_rows: int = 0
    _misses: int = 0

    def taint(self, start_ns: int, end_ns: int) -> None:
        """Mark that something was lost in between; at most 64 such stretches are kept apart."""
        self._losses.append((start_ns, end_ns))
        if len(self._losses) > 64:
            self._losses = [(self._losses[0][0], self._losses[1][1]), *self._losses[2:]]

    def advance(self, part: RankPart, sensors: Sensor, sizes: dict[int, int], *, is_last: bool) -> Segments:
        """Take in a batch's share and return the iterations that are complete, in order."""
        self._append(part)
        if self._origin_ns is None:
            self._origin_ns = self._first_time()
        for cuts in self._new_cuts(sensors, sizes):
            self._open.append(cuts)
        ready = self._take_ready(sensors, is_last=is_last)
        return self._segments(ready, sensors)

    def _append(self, part: RankPart) -> None:
        self._calls = _joined(self._calls, part.get("calls"))
        self._syncs = _joined(self._syncs, part.get("syncs"))
        self._spans = _joined(self._spans, part.get("spans"))
        markers = part.get("markers")
        if isinstance(markers, Markers):
            ends = markers.kind == int(MarkerKind.ITERATION_END)
            self._markers = _joined(self._markers, markers.take(ends))
            self._pauses = _joined(self._pauses, markers.take(~ends))
        if len(self._calls) > _MOST_ROWS:
            self.observer.counted("calls_dropped", len(self._calls) - _MOST_ROWS)
            self.taint(int(self._calls.start_ns.min()), int(self._calls.start_ns[-_MOST_ROWS]))
            self._calls = self._calls.take(np.arange(len(self._calls) - _MOST_ROWS, len(self._calls)))

    def _first_time(self) -> int | None:
        starts = [int(t.start_ns.min()) for t in (self._calls, self._spans) if len(t)]
        return min(starts, default=None)

    def _new_cuts(self, sensors: Sensor, sizes: dict[int, int]) -> list[Cuts]:
        syncs = self._syncs if sensors & Sensor.SYNC else None
        if len(self._markers) or self._is_marked:
            self._is_marked = True
            found, n_used = cuts_of_markers(self._markers, syncs)
            self._markers = self._markers.take(np.arange(n_used, len(self._markers)))
            return [found] if len(found.end_ns) else []
        stream = self._stream(sensors)
        if self._anchor is None and not self._learn(stream, sizes):
            return []
        assert self._anchor is not None
        since = self._open[-1].last_ns if self._open else self._cut_ns
        found = cuts_of_anchor(self._anchor.rows(stream), stream, syncs, since, self._n_local)
        self._n_local += len(found.end_ns)
        self._misses = 0 if len(found.end_ns) else self._misses + 1
        if self._misses > 8 and len(stream) > 4 * self._tried_rows + 64:
            self._anchor, self._misses, self._tried_rows = None, 0, len(stream)
        return [found] if len(found.end_ns) else []

    def _stream(self, sensors: Sensor) -> Calls:
        source = CallSource.HOST_CALL if sensors & Sensor.HOST_CALL else CallSource.GPU
        mine = self._calls.take(self._calls.source == int(source))
        return mine if source is CallSource.HOST_CALL else mine.take(np.argsort(mine.start_ns, kind="stable"))

    def _learn(self, stream: Calls, sizes: dict[int, int]) -> bool:
        """Try again once a quarter more has been seen."""
        if len(stream) < max(_LEARN_FROM, 1.25 * self._tried_rows):
            return False
        self._tried_rows = len(stream)
        self._anchor = learn_anchor(stream, sizes)
        return self._anchor is not None

    def _take_ready(self, sensors: Sensor, *, is_last: bool) -> list[Cuts]:
        """Return the cuts whose GPU times have come, or for which we have waited long enough."""
        ready: list[Cuts] = []
        start = self._cut_ns
        for cuts in self._open:
            cuts.batches_waited += 1
        while self._open:
            cuts = self._open[0]
            if sensors & Sensor.GPU and not is_last and cuts.batches_waited <= _PATIENCE_BATCHES:
                n_complete = self._n_complete(cuts, start, sensors)
                if n_complete < len(cuts.end_ns):
                    if n_complete:
                        head, tail = cuts.split(n_complete)
                        ready.append(head)
                        self._open[0] = tail
                    break
            ready.append(cuts)
            self._open.pop(0)
            start = cuts.last_ns
        if len(self._open) > _MOST_OPEN:
            ready += self._open
            self._open = []
        return ready

    def _n_complete(self, cuts: Cuts, start: int | None, sensors: Sensor) -> int:
        """Return how many of the cuts in front have as many GPU times as host calls."""
        n = len(cuts.end_ns)
        of = _segment_of(self._calls.start_ns, cuts.end_ns)
        inside = (of < n) & (self._calls.start_ns > (start if start is not None else -(1 << 62)))
        is_gpu = self._calls.source == int(CallSource.GPU)
        on_gpu = np.bincount(of[inside & is_gpu], self._calls.count[inside & is_gpu], minlength=n)
        if sensors & Sensor.HOST_CALL:
            wanted = np.bincount(of[inside & ~is_gpu], self._calls.count[inside & ~is_gpu], minlength=n)
        else:
            later = self._calls.start_ns[is_gpu].max(initial=-(1 << 62)) > cuts.end_ns
            return int(np.argmin(np.append(later & (cuts.batches_waited > 1), False)))
        return int(np.argmin(np.append((on_gpu >= wanted) & (on_gpu > 0), False)))

    def _segments(self, ready: list[Cuts], sensors: Sensor) -> Segments:
        cuts = Cuts.joined(ready)
        n = len(cuts.end_ns)
        if n == 0:
            return _NOTHING
        first_start, first_known = self._first_start(cuts)
        start_ns = np.concatenate([[first_start], cuts.end_ns[:-1]])
        last = cuts.last_ns
        calls, segment = self._take_calls(cuts.end_ns, last)
        spans, span_segment = self._take_spans(cuts.end_ns, last)
        number, numbering = self._numbers(cuts, calls, segment)
        quality, duration_s = self._judge(cuts, start_ns, number, first_known=first_known)
        quality = quality | self._work(calls, segment, spans, span_segment, n, sensors)
        host_wait_ns = self._waits(cuts.end_ns, last)
        self._cut_ns, self._cut_number = last, int(number[-1])
        self._losses = [loss for loss in self._losses if loss[1] > last]
        return Segments(
            start_ns,
            cuts.end_ns,
            number,
            numbering,
            quality,
            duration_s,
            self._origin_ns or 0,
            host_wait_ns,
            calls,
            segment,
            spans,
            span_segment,
        )

    def _first_start(self, cuts: Cuts) -> tuple[int, bool]:
        """Return where the first of the cuts began, and whether that is known: the last cut, or the job's start."""
        if self._cut_ns is not None:
            return self._cut_ns, True
        if self._origin_ns is None:
            return int(cuts.end_ns[0]) - 1, False
        known = (self._calls.seq_known != 0) & (self._calls.first_seq == 0) & (self._calls.start_ns == self._origin_ns)
        return self._origin_ns - 1, bool(known.any()) or len(self._calls) == 0

    def _take_calls(self, ends: IntArray, last: int) -> tuple[Calls, IntArray]:
        inside = self._calls.start_ns <= last
        taken, self._calls = self._calls.take(inside), self._calls.take(~inside)
        late = taken.start_ns <= self._cut_ns if self._cut_ns is not None else np.zeros(len(taken), bool)
        if late.any():
            self.observer.counted("calls_late", int(np.count_nonzero(late)))
            taken = taken.take(~late)
        return taken, _segment_of(taken.start_ns, ends)

    def _take_spans(self, ends: IntArray, last: int) -> tuple[Spans, IntArray]:
        if not len(self._spans):
            return Spans.empty(), np.empty(0, np.int64)
        inside = self._spans.start_ns <= last
        taken, self._spans = self._spans.take(inside), self._spans.take(~inside)
        return taken, _segment_of(taken.start_ns, ends)

    def _waits(self, ends: IntArray, last: int) -> IntArray:
        if not len(self._syncs):
            return np.full(len(ends), -1, np.int64)
        sync_end = self._syncs.start_ns + self._syncs.duration_ns
        inside = sync_end <= last
        waits = np.bincount(
            _segment_of(sync_end[inside], ends), self._syncs.duration_ns[inside], minlength=len(ends)
        ).astype(np.int64)
        self._syncs = self._syncs.take(~inside)
        return waits

    def _numbers(self, cuts: Cuts, calls: Calls, segment: IntArray) -> tuple[IntArray, IntArray]:
        """Replace local numbers by sequence numbers, where NCCL's own came with the GPU times of the anchor."""
        number, numbering = cuts.number.copy(), np.full(len(cuts.number), int(cuts.numbering), np.int64)
        if cuts.numbering != Numbering.LOCAL or self._anchor is None:
            return number, numbering
        known = self._anchor.rows_on_gpu(calls) & (calls.seq_known != 0)
        number[segment[known]] = calls.first_seq[known]
        numbering[segment[known]] = int(Numbering.SEQUENCE)
        return number, numbering

    def _judge(
        self, cuts: Cuts, start_ns: IntArray, number: IntArray, *, first_known: bool
    ) -> "tuple[IntArray, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]":
        """Return quality flags and durations in seconds; the first one's is unknown where its start is."""
        quality = np.where(cuts.block > 1, int(Quality.BLOCK_MEAN), 0)
        duration_s = (cuts.end_ns - start_ns) / 1e9
        if not first_known:
            quality[0] |= int(Quality.INCOMPLETE)
            duration_s[0] = np.nan
        before = np.concatenate([[number[0] - 1 if self._cut_number is None else self._cut_number], number[:-1]])
        jumped = number != before + 1
        quality[jumped] |= int(Quality.INCOMPLETE)
        duration_s[jumped] = np.nan
        for lost_start, lost_end in self._losses:
            quality[(cuts.end_ns > lost_start) & (start_ns < lost_end)] |= int(Quality.INCOMPLETE)
        if len(self._pauses):
            pause_end = self._pauses.time_ns
            for first, last in zip((pause_end - self._pauses.duration_ns).tolist(), pause_end.tolist(), strict=True):
                quality[(cuts.end_ns > first) & (start_ns < last)] |= int(Quality.PAUSED)
            self._pauses = self._pauses.take(pause_end > cuts.last_ns)
        return quality, duration_s

    def _work(
        self, calls: Calls, segment: IntArray, spans: Spans, span_segment: IntArray, n: int, sensors: Sensor
    ) -> IntArray:
        """Flag iterations whose calls (or spans, where there are no calls) are not those of the learnt iteration."""
        source = CallSource.HOST_CALL if sensors & Sensor.HOST_CALL else CallSource.GPU
        mine = calls.source == int(source)
        signatures = np.zeros(n, np.uint64)
        with np.errstate(over="ignore"):
            np.add.at(signatures, segment[mine], token_hashes(calls.take(mine)) * calls.count[mine].astype(np.uint64))
            np.add.at(signatures, span_segment, spans.kind.astype(np.uint64) + np.uint64(1))
        flags = np.zeros(n, np.int64)
        for i, signature in enumerate(signatures.tolist()):
            if self._learnt is None or signature == self._learnt:
                self._learnt, self._other = signature, []
                continue
            flags[i] = int(Quality.OTHER_WORK)
            self._other = [*self._other, signature] if signature in self._other[-1:] else [signature]
            if len(self._other) >= _RELEARN_AFTER:
                self._learnt, self._other = signature, []
        return flags


def _joined(kept: "Table", more: "Table | None") -> "Table":  # type: ignore[type-var]
    return kept if more is None else more if not len(kept) else type(kept).concatenate([kept, more])


def _segment_of(times: IntArray, ends: IntArray) -> IntArray:
    """Return which of the stretches that end at `ends` each time lies in; len(ends) for later ones."""
    return np.searchsorted(ends, times, side="left").astype(np.int64)


_NONE = np.empty(0, np.int64)
_NOTHING = Segments(
    _NONE, _NONE, _NONE, _NONE, _NONE, np.empty(0), 0, _NONE, Calls.empty(), _NONE, Spans.empty(), _NONE
)
