"""One node's window: splits batches by rank, lets each rank's stream find its iterations, and joins the answers."""

from dataclasses import dataclass, field

import numpy as np

from pipeline.iteration_rows import Telemetry, communication_rows, iteration_rows
from pipeline.observer import Observer
from pipeline.rank_stream import RankPart, RankStream, Segments
from schemas.events import EventBatch, GpuSamples, HostSamples, Sensor
from schemas.iterations import CommunicationRows, IterationBatch, IterationRows
from schemas.table import AnyArray, IntArray, TableT

_SAMPLES_KEPT_NS = 120 * 10**9


@dataclass(slots=True)
class NodeWindow:
    """State of one (job, incarnation, node)."""

    observer: Observer
    _streams: dict[int, RankStream] = field(default_factory=dict)
    _gpu_samples: GpuSamples = field(default_factory=GpuSamples.empty)
    _host_samples: HostSamples = field(default_factory=HostSamples.empty)
    _flush_ns: int | None = None

    def answer(self, batch: EventBatch, lost_batches: int) -> IterationBatch:
        """Return the iterations that became complete with this batch."""
        if (batch.lost_events or lost_batches) and self._flush_ns is not None:
            for stream in self._streams.values():
                stream.taint(self._flush_ns, batch.flush_ns)
        self._flush_ns = batch.flush_ns
        self._remember_samples(batch)
        tables = []
        comms = []
        n_rows = 0
        parts = _by_rank(batch)
        for info in batch.ranks:
            stream = self._streams.get(info.rank)
            if stream is None:
                stream = self._streams[info.rank] = RankStream(info.rank, self.observer)
            part = parts.get(info.rank) or RankPart()
            segments = stream.advance(part, batch.sensors, _sizes(batch, info.rank), is_last=batch.is_last)
            if len(segments.end_ns) == 0:
                continue
            gpu = None if info.gpu is None else self._gpu_samples.take(self._gpu_samples.gpu == info.gpu)
            host = self._host_samples.take(self._host_samples.rank == info.rank)
            telemetry = Telemetry(gpu, host, batch.flush_interval_ns)
            tables.append(iteration_rows(info.rank, segments, telemetry, batch.sensors))
            communication = communication_rows(segments, batch.sensors)
            comms.append(communication.replace(row=communication.row + n_rows))
            n_rows += len(segments.end_ns)
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
            rows=IterationRows.concatenate(tables),
            communication=CommunicationRows.concatenate(comms),
        )

    def _remember_samples(self, batch: EventBatch) -> None:
        """Keep samples as long as an iteration that they belong to may still be open."""
        oldest_ns = batch.flush_ns - _SAMPLES_KEPT_NS
        if len(batch.gpu_samples):
            kept = self._gpu_samples.take(self._gpu_samples.time_ns >= oldest_ns)
            self._gpu_samples = GpuSamples.concatenate([kept, batch.gpu_samples])
        if len(batch.host_samples):
            kept_host = self._host_samples.take(self._host_samples.time_ns >= oldest_ns)
            self._host_samples = HostSamples.concatenate([kept_host, batch.host_samples])


def _sizes(batch: EventBatch, rank: int) -> dict[int, int]:
    """Return the sizes of the communicators of a rank."""
    mine = batch.communicators.rank == rank
    return dict(zip(batch.communicators.comm[mine].tolist(), batch.communicators.size[mine].tolist(), strict=True))


def _by_rank(batch: EventBatch) -> dict[int, RankPart]:
    """Return each rank's share of the batch, in the order of its rows."""
    parts: dict[int, RankPart] = {}
    for name in ("calls", "syncs", "spans", "markers"):
        for rank, rows in _split(getattr(batch, name)):
            parts.setdefault(rank, RankPart())[name] = rows
    return parts


def _split(table: TableT) -> "list[tuple[int, TableT]]":
    if len(table) == 0:
        return []
    ranks: AnyArray = table.rank  # type: ignore[attr-defined]
    order: IntArray = np.argsort(ranks, kind="stable")
    names, starts = np.unique(ranks[order], return_index=True)
    bounds = [*starts.tolist(), len(order)]
    return [(int(name), table.take(order[bounds[i] : bounds[i + 1]])) for i, name in enumerate(names)]


__all__ = ["NodeWindow", "Segments", "Sensor"]
