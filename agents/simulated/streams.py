"""What one node's agent sends: it collects rows as they become known and cuts them into batches at its flush times."""

from dataclasses import dataclass, field

import numpy as np

from agents.simulated.benign import GcPauses
from agents.simulated.layout import Placement, gpu_uuid, node_name
from agents.simulated.rows import END, READY, START, CallRows, NodeTemplate, calls, cut, nanoseconds
from agents.simulated.samples import NodeSampler
from agents.simulated.spans import SPAN_START, span_lines
from agents.simulated.timeline import Passed, Paused
from schemas.events import (
    Calls,
    CallSource,
    Communicators,
    EventBatch,
    GpuSamples,
    HostSamples,
    MarkerKind,
    Markers,
    RankInfo,
    Sensor,
    Spans,
    Syncs,
)
from schemas.table import AnyArray, IntArray, TableT

AGENT_VERSION = "simulated"
_STREAM = 4  # purpose of random numbers
_AGENT_LEAD_S = 30.0  # agents run before the job


class _Pending:
    """Rows that wait for their flush: integer matrices (lines, rows) whose first line is when a row is ready."""

    def __init__(self, n_lines: int) -> None:
        self._parts: list[IntArray] = []
        self._empty = np.empty((n_lines, 0), np.int64)

    def add(self, lines: IntArray) -> None:
        self._parts.append(lines)

    def take(self, until_ns: int) -> IntArray:
        """Return and forget the rows that are ready."""
        if not self._parts:
            return self._empty
        rows = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts, axis=1)
        is_ready = rows[READY] <= until_ns
        if is_ready.all():
            self._parts = []
            return rows
        self._parts = [rows[:, ~is_ready]]
        return rows[:, is_ready]


@dataclass(eq=False)
class NodeStream:
    """One node's agent during one incarnation. Times come in true seconds and leave on the node's clock."""

    placement: Placement
    node: int
    rows: CallRows
    clock_offset_ns: int  # to be added to true nanoseconds since the scenario's epoch
    attach_s: float
    is_late: bool
    sampler: NodeSampler
    process_start_s: float
    next_flush_s: float = field(init=False)
    _seq: int = 0

    def __post_init__(self) -> None:
        scenario = self.placement.scenario
        self._settings = scenario.agents
        self._sensors = scenario.agents.sensor_flags
        self._random = np.random.default_rng([scenario.seed, _STREAM, self.placement.incarnation, self.node])
        self._agent_start_s = self.attach_s if self.is_late else -_AGENT_LEAD_S
        self._template: NodeTemplate = self.rows.template(self.node)
        self._calls = _Pending(7)
        self._syncs = _Pending(4)
        self._markers = _Pending(6)
        self._spans = _Pending(6)
        self._first_seen: dict[tuple[int, int, int], int] = {}
        self.next_flush_s = self.attach_s + self._settings.flush_interval_s * float(self._random.uniform(0.05, 1))
        self._next_sample_s = self.attach_s + self._settings.sample_interval_s * float(self._random.uniform(0.05, 1))
        self._ranks = self._rank_infos()
        self._communicators = self._memberships()

    def add_pass(self, passed: Passed, matrices: list[IntArray]) -> None:
        """Take in the node's share of a pass; `matrices` are those of CallRows."""
        ranks, times = self._template.ranks, passed.times
        lines = cut(self._template, passed.program, matrices)
        lines[: END + 1] += self.clock_offset_ns  # ready, start and end
        delay_s = self._settings.gpu_delay_flushes * self._settings.flush_interval_s * float(self._random.uniform())
        is_gpu = self._template.columns["source"][lines[-1]] == CallSource.GPU
        lines[READY, is_gpu] += int(delay_s * 1e9)
        self._calls.add(self._attached(lines, lines[START]))
        wait_start = self._clock(times.wait_start.ravel()[ranks])
        wait_end = self._clock(times.wait_end.ravel()[ranks])
        if Sensor.SYNC & self._sensors and times.is_synchronised:
            self._syncs.add(self._attached(np.stack([wait_end, ranks, wait_start, wait_end - wait_start]), wait_start))
        if Sensor.MARKER & self._sensors and not passed.is_evaluation:
            self._add_markers(MarkerKind.ITERATION_END, passed.iteration, wait_end, wait_end)
        if Sensor.SPAN & self._sensors:
            self._add_spans(passed)

    def add_pause(self, paused: Paused) -> None:
        """Take in a pause, if the training process speaks of it."""
        if Sensor.MARKER & self._sensors and paused.has_marker:
            start = self._clock(paused.start_s.ravel()[self._template.ranks])
            end = self._clock(paused.end_s.ravel()[self._template.ranks])
            self._add_markers(paused.kind, paused.iteration, start, end)

    def flush(self, *, is_last: bool) -> EventBatch:
        """Return what has become known until the next flush time, or all that is left, and set the next."""
        flush_s = self.next_flush_s
        flush_ns = int(self._clock(np.array(flush_s)))
        until_ns = np.iinfo(np.int64).max if is_last else flush_ns
        gpu_samples, host_samples = self._sample(flush_s)
        batch = EventBatch(
            job_id=self.placement.scenario.job,
            incarnation=self.placement.name,
            node=node_name(self.placement.scenario, self.node),
            agent_version=AGENT_VERSION,
            seq=self._seq,
            agent_start_ns=int(self._clock(np.array(self._agent_start_s))),
            flush_ns=flush_ns,
            flush_interval_ns=round(self._settings.flush_interval_s * 1e9),
            world_size=self.placement.shape.world_size,
            sensors=self._sensors,
            clock_error_ns=self._clock_error_ns(),
            is_last=is_last,
            ranks=self._ranks,
            communicators=self._communicators,
            calls=self._take_calls(until_ns),
            spans=_table(Spans, self._spans.take(until_ns), "rank", "kind", "micro_batch", "start_ns", "duration_ns"),
            syncs=_table(Syncs, self._syncs.take(until_ns), "rank", "start_ns", "duration_ns"),
            gpu_samples=gpu_samples,
            host_samples=host_samples,
            markers=_table(
                Markers, self._markers.take(until_ns), "rank", "kind", "iteration", "time_ns", "duration_ns"
            ),
        )
        self._seq += 1
        self.next_flush_s += self._settings.flush_interval_s
        return batch

    def _clock(self, seconds: AnyArray) -> IntArray:
        return nanoseconds(seconds) + self.clock_offset_ns

    def _clock_error_ns(self) -> int | None:
        clocks = self.placement.scenario.clocks
        return round(clocks.error_s * 1e9) if clocks.is_error_known else None

    def _attached(self, lines: IntArray, start_ns: IntArray) -> IntArray:
        """Return the rows that began under the agent's eyes."""
        if not self.is_late:
            return lines
        return lines[:, start_ns >= self._clock(np.array(self.attach_s))]

    def _add_markers(self, kind: MarkerKind, iteration: int, start: IntArray, end: IntArray) -> None:
        ranks = self._template.ranks
        lines = np.stack([end, ranks, np.full_like(end, kind), np.full_like(end, iteration), end, end - start])
        self._markers.add(self._attached(lines, start))

    def _add_spans(self, passed: Passed) -> None:
        lines = span_lines(self._template, passed, self.placement.scenario.find(GcPauses))
        lines[0] += self.clock_offset_ns
        lines[SPAN_START] += self.clock_offset_ns
        self._spans.add(self._attached(lines, lines[SPAN_START]))

    def _take_calls(self, until_ns: int) -> Calls:
        table = calls(self._template, self._calls.take(until_ns))
        return self._recounted(table) if self.is_late else table

    def _recounted(self, table: Calls) -> Calls:
        """Count host calls from the agent's attachment: it cannot know how many there were before."""
        first_seq = table.first_seq.copy()
        is_host = table.source == CallSource.HOST_CALL
        keys = zip(table.rank.tolist(), table.comm.tolist(), table.op.tolist(), strict=True)
        for row, key in enumerate(keys):
            if is_host[row]:
                first_seq[row] -= self._first_seen.setdefault(key, int(first_seq[row]))
        return table.replace(first_seq=first_seq, seq_known=(~is_host).astype("<u1"))

    def _sample(self, until_s: float) -> tuple[GpuSamples, HostSamples]:
        gpus, ranks = [], []
        while self._next_sample_s <= until_s:
            time_ns = int(self._clock(np.array(self._next_sample_s)))
            if Sensor.NVML & self._sensors:
                gpus.append(self.sampler.gpus(self._next_sample_s, time_ns))
            if Sensor.HOST & self._sensors:
                ranks.append(self.sampler.ranks(self._next_sample_s, time_ns, self._template.ranks))
            self._next_sample_s += self._settings.sample_interval_s
        return GpuSamples.concatenate(gpus), HostSamples.concatenate(ranks)

    def _rank_infos(self) -> tuple[RankInfo, ...]:
        scenario = self.placement.scenario
        return tuple(
            RankInfo(
                rank=rank,
                local_rank=local_rank,
                pid=10_000 + 1_000 * self.placement.incarnation + local_rank,
                process_start_ns=int(self._clock(np.array(self.process_start_s))),
                gpu=local_rank,
                gpu_uuid=gpu_uuid(scenario, self.node, local_rank),
            )
            for local_rank, rank in enumerate(self._template.ranks.tolist())
        )

    def _memberships(self) -> Communicators:
        ranks, placement = self._template.ranks, self.placement
        return Communicators.concatenate(
            [
                Communicators.build(
                    len(ranks),
                    rank=ranks,
                    comm=comm.ravel()[ranks],
                    comm_rank=placement.comm_rank[axis].ravel()[ranks],
                    size=placement.size(axis),
                )
                for axis, comm in placement.comm.items()
            ]
        )


def _table(kind: type[TableT], lines: IntArray, *names: str) -> TableT:
    """Return the lines after the first as columns."""
    return kind.build(lines.shape[1], **dict(zip(names, lines[1:], strict=True)))
