"""Rows of many ranks, in any interleaving, to frames of one iteration of one job, in order.

A frame closes when every expected rank has reported, or when it is late: `late_iterations` newer iterations have
begun and `late_flushes` flush intervals of event time have passed, on the nodes' own clocks and on average. Ranks
missing from a late frame are no longer waited for until they report again: a dead node delays one frame and not all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from pipeline.alignment import Aligner, StreamRows
from pipeline.observer import Observer
from pipeline.topology import POINT_TO_POINT, Topology
from schemas.iterations import CommunicationRows, IterationBatch, IterationRows, Quality
from schemas.table import AnyArray, FloatArray, IntArray

_NO_COMMUNICATION = int(Quality.INCOMPLETE | Quality.OTHER_WORK | Quality.NO_GPU_TIMES)


_SPARSE_SHARE = 0.25
_LATE_RUN_PER_RANK = 16
_LONGEST_STEP_FLUSHES = 8  # a node that comes back after a long silence does not make the others late


class Signal(IntEnum):
    """The rows of Frame.values. Seconds, but for the ratios of the telemetry."""

    DURATION = 0
    COMPUTE = 1
    HOST_WAIT = 2
    COMMUNICATION = 3
    FORWARD = 4
    BACKWARD = 5
    SM_CLOCK = 6
    RUN_QUEUE = 7
    BLOCKED = 8
    TEMPERATURE = 9
    STOPPED = 10
    THROTTLED = 11


_COLUMNS = (
    "duration_s",
    "compute_s",
    "host_wait_s",
    "communication_s",
    "forward_s",
    "backward_s",
    "sm_clock_ratio",
    "run_queue_ratio",
    "blocked_ratio",
    "temperature_c",
    "stopped_ratio",
    "throttled_ratio",
)


@dataclass(slots=True, eq=False)
class Frame:
    """One iteration of one job across its ranks; NaN where a rank did not say.

    values: (n_signals, world_size). transfers: (n_series,) shortest call over all members, seconds, NaN unless all of
    them reported: with one member missing the shortest call may contain a wait for it.
    """

    iteration: int
    values: FloatArray
    present: npt.NDArray[np.bool_]
    quality: IntArray
    throttle: npt.NDArray[np.uint64]
    throttle_known: npt.NDArray[np.bool_]
    rank_end_ns: IntArray
    least: FloatArray
    reports: IntArray
    first_seen_ns: int = 0
    missing: int = 0

    @classmethod
    def empty(cls, iteration: int, world_size: int, seen_ns: int) -> "Frame":
        """Return a frame in which nobody has reported."""
        return cls(
            iteration=iteration,
            values=np.full((len(Signal), world_size), np.nan),
            present=np.zeros(world_size, bool),
            quality=np.zeros(world_size, np.int64),
            throttle=np.zeros(world_size, np.uint64),
            throttle_known=np.zeros(world_size, bool),
            rank_end_ns=np.zeros(world_size, np.int64),
            least=np.empty(0),
            reports=np.zeros(0, np.int64),
            first_seen_ns=seen_ns,
        )

    def signal(self, signal: Signal) -> FloatArray:
        """Return one signal, (world_size,)."""
        row: FloatArray = self.values[signal]
        return row

    @property
    def end_ns(self) -> int:
        """The median over ranks of the end of the iteration."""
        ends = np.sort(self.rank_end_ns[self.present])
        return int(ends[len(ends) // 2]) if len(ends) else 0

    def transfers(self, expected: IntArray) -> FloatArray:
        """Return (n_series,) transfer times, of series reported by all their members."""
        known = np.full(len(expected), np.nan)
        n = len(self.least)
        whole = self.reports >= expected[:n]
        known[:n] = np.where(whole & np.isfinite(self.least), self.least, np.nan)
        return known

    def grow(self, n_series: int) -> None:
        """Make room for series that appeared since."""
        more = n_series - len(self.least)
        if more > 0:
            self.least = np.concatenate([self.least, np.full(more, np.inf)])
            self.reports = np.concatenate([self.reports, np.zeros(more, np.int64)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How long a frame is held open for stragglers among the batches; both bounds have to be passed."""

    late_iterations: int = 4
    late_flushes: int = 8


@dataclass(slots=True)
class FrameAssembler:
    """Collects the rows of one job's incarnation."""

    topology: Topology
    observer: Observer
    lateness: Lateness
    aligner: Aligner = field(default_factory=Aligner)
    pending: dict[int, Frame] = field(default_factory=dict)
    closed_through: int | None = None
    expected: npt.NDArray[np.bool_] = field(init=False)
    newest: int | None = None
    event_time_ns: int = 0
    elapsed_ns: float = 0.0
    flush_interval_ns: int = 0
    _flushed: dict[str, int] = field(default_factory=dict)
    _n_late_run: int = 0
    _patterns: dict[bytes, IntArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.expected = np.ones(self.topology.world_size, bool)

    def add(self, batch: IterationBatch) -> None:
        """Take in one node's batch."""
        self._advance(batch)
        for aligned in self.aligner.align(batch, self.observer):
            self._add_rows(aligned, int(self.elapsed_ns))

    def _advance(self, batch: IterationBatch) -> None:
        """Let event time pass: by what the nodes' own clocks have advanced, on average, so that no skew matters."""
        self.event_time_ns = max(self.event_time_ns, batch.flush_ns)
        self.flush_interval_ns = max(self.flush_interval_ns, batch.flush_interval_ns)
        last_ns = self._flushed.get(batch.node)
        self._flushed[batch.node] = batch.flush_ns
        if last_ns is not None:
            most_ns = _LONGEST_STEP_FLUSHES * batch.flush_interval_ns
            self.elapsed_ns += min(max(batch.flush_ns - last_ns, 0), most_ns) / len(self._flushed)

    def ready(self, *, ending: bool = False) -> Iterator[Frame]:
        """Yield the frames that close, in the order of iterations; all of them where the job is ending."""
        while self.pending:
            frame = self.pending[iteration := min(self.pending)]
            missing = int(np.count_nonzero(self.expected & ~frame.present))
            if missing and not (ending or self._is_late(frame)):
                return
            del self.pending[iteration]
            if missing and self._is_sparse(frame):
                self.observer.counted("frames_sparse", 1)
                continue
            self.closed_through = iteration
            frame.missing = int(np.count_nonzero(~frame.present))
            if missing and not ending:
                self.expected &= frame.present
            yield frame

    def _is_sparse(self, frame: Frame) -> bool:
        """Whether so few have reported an iteration that its number is likelier wrong than the others late."""
        n_known = sum(1 for node in self.topology.node_by_rank if node)
        return bool(np.count_nonzero(frame.present) < _SPARSE_SHARE * n_known)

    def _is_late(self, frame: Frame) -> bool:
        newer = sum(1 for i in self.pending if i > frame.iteration)
        waited_ns = self.elapsed_ns - frame.first_seen_ns
        return (
            newer >= self.lateness.late_iterations and waited_ns >= self.lateness.late_flushes * self.flush_interval_ns
        )

    def _add_rows(self, aligned: StreamRows, seen_ns: int) -> None:
        rows, iterations = aligned.rows, aligned.iterations
        if len(iterations) == 0:
            return
        for iteration in np.unique(iterations).tolist():
            if self.closed_through is not None and iteration <= self.closed_through:
                self._take_note_of_late(rows.rank[iterations == iteration], self.closed_through - iteration)
                continue
            self._n_late_run = 0
            frame = self.pending.get(iteration)
            if frame is None:
                frame = self.pending[iteration] = Frame.empty(iteration, self.topology.world_size, seen_ns)
            chosen = np.flatnonzero(iterations == iteration)
            fresh = chosen[~frame.present[rows.rank[chosen]]]
            if len(fresh) < len(chosen):
                self.observer.counted("rows_duplicate", len(chosen) - len(fresh))
            if len(fresh):
                self._fill(frame, rows, fresh)
                self._fill_transfers(frame, rows, aligned.communication, fresh)

    def _take_note_of_late(self, ranks: AnyArray, behind: int) -> None:
        """Count rows of a closed frame; ranks that are only a little behind are waited for again.

        Where nothing but late rows comes for long, the job has begun to count anew (per epoch, say), and so do we.
        """
        self.observer.counted("rows_late", len(ranks))
        if behind <= self.lateness.late_iterations:
            self.expected[ranks] = True
        self._n_late_run += len(ranks)
        if self._n_late_run > _LATE_RUN_PER_RANK * self.topology.world_size:
            self.observer.counted("numbers_restarted", 1)
            self.pending.clear()
            self.closed_through, self._n_late_run = None, 0

    def _fill(self, frame: Frame, rows: IterationRows, chosen: IntArray) -> None:
        ranks = rows.rank[chosen]
        for signal, name in enumerate(_COLUMNS):
            frame.values[signal, ranks] = getattr(rows, name)[chosen]
        frame.present[ranks] = True
        frame.quality[ranks] = rows.quality[chosen]
        frame.throttle[ranks] = rows.throttle_reasons[chosen]
        frame.throttle_known[ranks] = rows.throttle_known[chosen] != 0
        frame.rank_end_ns[ranks] = rows.end_ns[chosen]
        self.expected[ranks] = True

    def _fill_transfers(
        self, frame: Frame, rows: IterationRows, communication: CommunicationRows, chosen: IntArray
    ) -> None:
        usable = chosen[(rows.quality[chosen] & _NO_COMMUNICATION) == 0]
        wanted = np.zeros(len(rows), bool)
        wanted[usable] = True
        picked = np.flatnonzero(wanted[communication.row])
        if len(picked) == 0:
            return
        series = self._series_of(rows, communication, picked)
        frame.grow(len(self.topology.series))
        known = series >= 0
        series, least = series[known], communication.least_s[picked[known]]
        np.minimum.at(frame.least, series, np.where(np.isnan(least), np.inf, least))
        np.add.at(frame.reports, series, (~np.isnan(least)).astype(np.int64))

    def _series_of(self, rows: IterationRows, communication: CommunicationRows, picked: IntArray) -> IntArray:
        """Return the series index of each picked row; the pattern repeats in every iteration, so it is remembered."""
        ranks = rows.rank[communication.row[picked]]
        columns: list[AnyArray] = [
            ranks,
            communication.comm[picked],
            communication.op[picked],
            communication.peer[picked],
        ]
        key = b"".join(c.tobytes() for c in columns)
        found = self._patterns.get(key)
        if found is None:
            if len(self._patterns) >= 4 * self.topology.world_size + 64:
                self._patterns.clear()
            found = np.array(
                [
                    self.topology.series_index(
                        rank, comm, op, peer if op in POINT_TO_POINT else 0, calls, total // max(calls, 1)
                    )
                    for rank, comm, op, peer, calls, total in zip(
                        *(c.tolist() for c in columns),
                        communication.calls[picked].tolist(),
                        communication.bytes[picked].tolist(),
                        strict=True,
                    )
                ],
                np.int64,
            )
            if (found >= 0).all():
                self._patterns[key] = found
        return found
