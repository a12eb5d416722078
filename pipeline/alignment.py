"""Gives every rank's iterations the job's numbers (design decision 6).

Numbers from markers and from NCCL's sequence numbers are alike on all ranks. A window that attached late counts by
itself; its numbers get one integer offset per segment, found from a shared communicator's (communicator, op, sequence
number), else from the wall clock where its error is below half an iteration. Without either the rank stays unaligned:
its rows are counted and judged by nobody.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeline.observer import Observer
from schemas.iterations import CommunicationRows, IterationBatch, IterationRows, Numbering
from schemas.table import BoolArray, IntArray

_REMEMBERED = 128
_HELD_BATCHES = 32  # per node
_MISSES_PER_NODE = 8
_MOST_OFFSETS_PER_RANK = 64


@dataclass(frozen=True, slots=True, eq=False)
class StreamRows:
    """Rows whose job-wide iteration numbers are known: iterations is (n_rows,)."""

    rows: IterationRows
    communication: CommunicationRows
    iterations: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """What is remembered of aligned rows: arrays of one batch, and the clock error they were stamped with."""

    rows: IterationRows
    communication: CommunicationRows
    iterations: IntArray
    clock_error_ns: int | None


@dataclass(slots=True)
class Aligner:
    """Offsets per (rank, numbering, segment) of one job's incarnation."""

    canonical: Numbering | None = None
    offsets: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _recent: deque[_Reference] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _misses: int = 0  # batches in succession of which nothing could be placed
    _held: dict[str, deque[IterationBatch]] = field(default_factory=dict)

    def align(self, batch: IterationBatch, observer: Observer) -> Iterator[StreamRows]:
        """Yield what can be placed now: this batch's rows, and held ones that it has placed."""
        if not len(batch.rows):
            return
        placed = list(self._place(batch, observer))
        yield from placed
        self._misses = 0 if placed else self._misses + 1
        if self._misses > _MISSES_PER_NODE * (len(self._held) + 1):
            self._begin_anew(batch)
            placed = [*placed, *self._place(batch, observer)]
        if placed and self.offsets:
            for waiting in self._held.pop(batch.node, ()):
                yield from self._place(waiting, observer)

    def _place(self, batch: IterationBatch, observer: Observer) -> Iterator[StreamRows]:
        rows = batch.rows
        if self.canonical is None:
            self._choose(rows)
        direct = rows.numbering == self.canonical
        if direct.all() and self.canonical != Numbering.LOCAL:
            yield self._remember(batch, rows.iteration)
            return
        offset, known = self._offsets(batch, direct)
        if known.all():
            yield self._remember(batch, rows.iteration + offset)
        elif known.any():
            yield self._remember(_subset(batch, known), (rows.iteration + offset)[known])
        if not known.all():
            self._hold(_subset(batch, ~known), observer)

    def _begin_anew(self, batch: IterationBatch) -> None:
        """Go on from one stream, where none fits what came before: all windows have begun to count anew at once."""
        rows = batch.rows
        first = int(np.flatnonzero(rows.rank == rows.rank.min())[0])
        newest = max((int(r.iterations.max()) for r in self._recent), default=-1)
        key = (int(rows.rank[first]), int(rows.numbering[first]), int(rows.segment[first]))
        self.offsets[key] = newest + 1 - int(rows.iteration[first])
        self._misses = 0

    def _choose(self, rows: IterationRows) -> None:
        """Adopt the best numbering of the first rows as the job's own; local numbers, where there is no better."""
        self.canonical = Numbering(int(rows.numbering.min()))
        if self.canonical == Numbering.LOCAL:
            first = np.flatnonzero(rows.rank == rows.rank.min())[0]
            self.offsets[int(rows.rank[first]), int(Numbering.LOCAL), int(rows.segment[first])] = 0

    def _offsets(self, batch: IterationBatch, direct: BoolArray) -> tuple[IntArray, BoolArray]:
        rows = batch.rows
        offset = np.zeros(len(rows), np.int64)
        known = direct & (rows.numbering != Numbering.LOCAL)
        streams = {
            key: None
            for key, done in zip(
                zip(rows.rank.tolist(), rows.numbering.tolist(), rows.segment.tolist(), strict=True),
                known.tolist(),
                strict=True,
            )
            if not done
        }
        for rank, numbering, segment in streams:
            mine = (rows.rank == rank) & (rows.numbering == numbering) & (rows.segment == segment)
            found = self.offsets.get((rank, numbering, segment))
            if found is None:
                found = self._find(batch, mine)
            if found is not None:
                if len(self.offsets) > _MOST_OFFSETS_PER_RANK * batch.world_size:
                    self.offsets.clear()
                self.offsets[rank, numbering, segment] = found
                offset[mine] = found
                known |= mine
        return offset, known

    def _find(self, batch: IterationBatch, mine: BoolArray) -> int | None:
        by_sequence = self._by_sequence(batch, mine)
        return self._by_clock(batch, mine) if by_sequence is None else by_sequence

    def _by_sequence(self, batch: IterationBatch, mine: BoolArray) -> int | None:
        own = batch.communication
        chosen = mine[own.row] & (own.seq_known != 0)
        wanted = {
            (comm, op, last): int(batch.rows.iteration[row])
            for comm, op, last, row in zip(
                own.comm[chosen].tolist(),
                own.op[chosen].tolist(),
                own.last_seq[chosen].tolist(),
                own.row[chosen].tolist(),
                strict=True,
            )
        }
        if not wanted:
            return None
        comms = np.unique(own.comm[chosen])
        for reference in reversed(self._recent):
            other = reference.communication
            for i in np.flatnonzero(np.isin(other.comm, comms) & (other.seq_known != 0)).tolist():
                local = wanted.get((int(other.comm[i]), int(other.op[i]), int(other.last_seq[i])))
                if local is not None:
                    return int(reference.iterations[other.row[i]]) - local
        return None

    def _by_clock(self, batch: IterationBatch, mine: BoolArray) -> int | None:
        if batch.clock_error_ns is None:
            return None
        row = int(np.flatnonzero(mine)[0])
        end_ns = int(batch.rows.end_ns[row])
        half_ns = 0.5e9 * float(np.nanmedian(batch.rows.duration_s[mine])) if mine.any() else float("nan")
        for reference in self._recent:
            if reference.clock_error_ns is None:
                continue
            error_ns = batch.clock_error_ns + reference.clock_error_ns
            distance = np.abs(reference.rows.end_ns - end_ns)
            nearest = int(distance.argmin())
            if error_ns < half_ns and distance[nearest] + error_ns < half_ns:
                return int(reference.iterations[nearest]) - int(batch.rows.iteration[row])
        return None

    def _remember(self, batch: IterationBatch, iterations: IntArray) -> StreamRows:
        self._recent.append(_Reference(batch.rows, batch.communication, iterations, batch.clock_error_ns))
        return StreamRows(batch.rows, batch.communication, iterations)

    def _hold(self, batch: IterationBatch, observer: Observer) -> None:
        held = self._held.setdefault(batch.node, deque())
        held.append(batch)
        if len(held) > _HELD_BATCHES:
            observer.counted("rows_unaligned", len(held.popleft().rows))


def _subset(batch: IterationBatch, mask: BoolArray) -> IterationBatch:
    """Return the batch with only some of its rows, and their communication."""
    number = np.cumsum(mask) - 1
    kept = mask[batch.communication.row]
    communication = batch.communication.take(kept)
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
        clock_error_ns=batch.clock_error_ns,
        rows=batch.rows.take(mask),
        communication=communication.replace(row=number[communication.row]),
    )
