"""What the window remembers of one node of one job: batches in order in, the iterations that they complete out."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pipeline.iteration_rows import communication_rows, iteration_rows, opened
from pipeline.rank_stream import BatchFacts, RankNews, RankStream
from pipeline.window_blocks import Closed
from pipeline.window_calls import KEY, NO_CALLS, SOURCE, Keys, by_rank
from pipeline.window_gate import Gate
from pipeline.window_held import Held, Rows
from pipeline.window_params import WindowParams
from pipeline.window_telemetry import Telemetry
from pipeline.window_times import NEVER_NS, Gap, Timed
from schemas.events import Calls, CallSource, EventBatch, MarkerKind, Sensor
from schemas.iterations import IterationBatch
from schemas.table import BoolArray, IntArray

_MOST_GAPS = 64
_PAUSES = (int(MarkerKind.CHECKPOINT), int(MarkerKind.EVALUATION), int(MarkerKind.PROFILING))


@dataclass(slots=True, eq=False)
class NodeState:
    """State of one (job, incarnation, node); `count` takes note of what its bounds drop."""

    params: WindowParams
    count: Callable[[str, int], None]
    _keys: Keys = field(init=False)
    _held: Held = field(init=False)
    _gate: Gate = field(init=False)
    _telemetry: Telemetry = field(default_factory=Telemetry)
    _streams: dict[int, RankStream] = field(default_factory=dict)
    _size: dict[int, int] = field(default_factory=dict)  # of a communicator
    _top_size: dict[int, int] = field(default_factory=dict)  # of a rank's largest communicator
    _memberships: bytes = b""
    _gaps: list[Gap] = field(default_factory=list)
    _rank_gaps: dict[int, list[Gap]] = field(default_factory=dict)
    _piece: int = 0
    _flushes: deque[int] = field(init=False)  # times of the last batches
    _agent_start_ns: int | None = None
    _source: CallSource | None = None

    def __post_init__(self) -> None:
        self._keys = Keys(self.params.keys)
        self._held = Held(self.params.buffer_rows, self.count)
        self._gate = Gate(self.params.gpu_wait_batches)
        self._flushes = deque(maxlen=max(1, self.params.gpu_wait_batches))

    def answer(self, batch: EventBatch, lost_batches: int) -> IterationBatch:
        """Take in the next batch, before which so many are missing, and return what has become known with it."""
        self._begin(batch, lost_batches)
        self._learn_memberships(batch)
        self._admit_ranks(batch)
        self._telemetry.learn(batch, self._streams)
        closed, gpu_calls = self._advance(batch)
        self._held.limit_rows = self.params.buffer_rows * max(1, len(self._streams))
        self._held.add(opened(closed, self._keys, self._telemetry), gpu_calls, len(self._keys.counter_rank))
        done = self._held.take(lambda held, is_seen: self._ready(held, is_seen, batch))
        if batch.lost_events:
            self._piece += 1  # nor is what remains of it whole
        self._flushes.append(batch.flush_ns)
        return IterationBatch(
            job_id=batch.job_id,
            incarnation=batch.incarnation,
            node=batch.node,
            seq=batch.seq,
            agent_start_ns=batch.agent_start_ns,
            flush_ns=batch.flush_ns,
            flush_interval_ns=batch.flush_interval_ns,
            world_size=batch.world_size,
            sensors=batch.sensors,
            lost_events=batch.lost_events + lost_batches,
            clock_error_ns=batch.clock_error_ns,
            is_last=batch.is_last,
            ranks=batch.ranks,
            communicators=batch.communicators,
            rows=iteration_rows(done, batch.sensors),
            communication=communication_rows(done, self._keys),
        )

    def _begin(self, batch: EventBatch, lost_batches: int) -> None:
        """Note what is missing before this batch, and who saw it."""
        source = CallSource.HOST_CALL if batch.sensors & Sensor.HOST_CALL else CallSource.GPU
        is_new_agent = self._agent_start_ns not in {None, batch.agent_start_ns}
        if is_new_agent:
            self._held.forget_offsets()
        if is_new_agent or self._source not in {None, source}:
            self._gate.cut()
            for stream in self._streams.values():
                stream.cut()
        self._agent_start_ns, self._source = batch.agent_start_ns, source
        since_ns = self._flushes[-1] if self._flushes else batch.flush_ns - batch.flush_interval_ns
        if batch.lost_events:
            self._gaps.append((since_ns, batch.flush_ns))
        elif lost_batches or is_new_agent:
            self._gaps.append((since_ns, max(since_ns + 1, batch.flush_ns - batch.flush_interval_ns)))
        if batch.lost_events or lost_batches:
            self._piece += 1
        del self._gaps[:-_MOST_GAPS]

    def _learn_memberships(self, batch: EventBatch) -> None:
        table = batch.communicators
        said = table.rank.tobytes() + table.comm.tobytes() + table.size.tobytes()
        if said in {self._memberships, b""}:
            return
        self._memberships = said
        if len(self._size) > self.params.keys:
            self._size.clear()
        self._size.update(zip(table.comm.tolist(), table.size.tolist(), strict=True))
        for rank, rows in by_rank(table.rank):
            self._top_size[rank] = max(self._top_size.get(rank, 0), int(table.size[rows].max()))

    def _admit_ranks(self, batch: EventBatch) -> None:
        seen = {info.rank: None for info in batch.ranks}
        for table in (batch.calls, batch.markers):
            seen |= dict.fromkeys(np.unique(table.rank).tolist())
        new = [rank for rank in seen if rank not in self._streams]
        room = self.params.ranks - len(self._streams)
        for rank in new[:room]:
            self._streams[rank] = RankStream(rank, self._keys, self.params)
        if len(new) > room:
            self.count("ranks_dropped", len(new) - room)
        for rank in set(self._top_size) - set(self._streams):
            del self._top_size[rank]

    def _advance(self, batch: EventBatch) -> tuple[list[Closed], IntArray]:
        """Hand each rank its share; return what they close, and the GPU's calls."""
        calls, gpu_calls = self._calls(batch)
        size = np.array([self._size.get(comm, 0) for comm in self._keys.comm.tolist()], np.int64)
        by_name = {
            "calls": dict(by_rank(self._keys.rank[calls[KEY]])),
            "syncs": dict(by_rank(batch.syncs.rank)),
            "spans": dict(by_rank(batch.spans.rank)),
            "markers": dict(by_rank(batch.markers.rank)),
        }
        closed: list[Closed] = []
        for rank, stream in self._streams.items():
            parts = {name: places.get(rank, _NO_ROWS) for name, places in by_name.items()}
            facts = BatchFacts(
                has_sync=bool(batch.sensors & Sensor.SYNC),
                has_span=bool(batch.sensors & Sensor.SPAN),
                are_gpu_calls=self._source is CallSource.GPU and bool(batch.sensors & Sensor.GPU),
                is_last=batch.is_last,
                overdue_ns=self._flushes[0] if len(self._flushes) == self._flushes.maxlen else -NEVER_NS,
                gaps=(*self._gaps, *self._rank_gaps.get(rank, ())),
                size=size,
                top_size=self._top_size.get(rank, 0),
            )
            closed += stream.advance(_news(batch, calls, parts), facts)
            if stream.dropped_rows:
                self.count("calls_dropped", stream.dropped_rows)
                stream.dropped_rows = 0
        return closed, gpu_calls

    def _calls(self, batch: EventBatch) -> tuple[IntArray, IntArray]:
        """Return the calls that iterations are found in, in the order of time but for late ones, and all of the GPU."""
        table: Calls = batch.calls
        if not len(table):
            lines = NO_CALLS
        else:
            is_known = table.source <= int(CallSource.GPU)
            if len(self._streams) >= self.params.ranks:
                is_known &= np.isin(table.rank, list(self._streams))
            if not is_known.all():
                self.count("calls_dropped", int(np.count_nonzero(~is_known)))
                table = table.take(is_known)
            lines, n_dropped = self._keys.lines(table, self._piece)
            if n_dropped:
                self.count("calls_without_key", n_dropped)
        is_gpu = lines[SOURCE] == int(CallSource.GPU)
        gpu_calls = lines[:, is_gpu]
        if self._source is CallSource.HOST_CALL:
            return lines[:, ~is_gpu], gpu_calls
        passed = self._gate.pass_through(gpu_calls, self._keys.counter_rank, is_last=batch.is_last)
        if passed.n_late:
            self.count("gpu_calls_late", passed.n_late)
        for rank, gap in passed.lost.items():
            self._rank_gaps.setdefault(rank, []).append(gap)
            del self._rank_gaps[rank][:-_MOST_GAPS]
        return passed.calls, passed.calls

    def _ready(self, held: Rows, is_seen: BoolArray, batch: EventBatch) -> BoolArray:
        """Return (n,) which iterations go now; those of one rank go in their order."""
        if batch.is_last or not batch.sensors & Sensor.GPU:
            return np.ones(len(is_seen), bool)
        ready = is_seen | (held.age >= self.params.gpu_wait_batches)
        ready[: max(0, len(ready) - self.params.held_iterations)] = True
        ranks, place = np.unique(held.rows["rank"], return_inverse=True)
        first = np.full(len(ranks), len(ready))
        np.minimum.at(first, place[~ready], np.flatnonzero(~ready))
        return np.arange(len(ready)) < first[place]


_NO_ROWS: IntArray = np.empty(0, np.int64)


def _news(batch: EventBatch, calls: IntArray, rows: dict[str, IntArray]) -> RankNews:
    syncs, spans, markers = batch.syncs, batch.spans, batch.markers
    own = rows["syncs"]
    synced = Timed.sorted(syncs.start_ns[own], syncs.duration_ns[own]) if len(own) else Timed.empty()
    own = rows["spans"]
    spanned = Timed.sorted(spans.start_ns[own], spans.duration_ns[own], spans.kind[own]) if len(own) else Timed.empty()
    pauses = ends = Timed.empty()
    own = rows["markers"]
    if len(own):
        kind, end_ns, duration_ns = markers.kind[own], markers.time_ns[own], markers.duration_ns[own]
        is_end, is_pause = kind == int(MarkerKind.ITERATION_END), np.isin(kind, _PAUSES)
        pauses = Timed.sorted((end_ns - duration_ns)[is_pause], duration_ns[is_pause])
        instants = np.zeros(np.count_nonzero(is_end), np.int64)
        ends = Timed.sorted(end_ns[is_end], instants, markers.iteration[own][is_end])
    return RankNews(calls=calls[:, rows["calls"]], syncs=synced, spans=spanned, pauses=pauses, ends=ends)
