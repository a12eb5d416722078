"""Batches for the tests of the window stage: by hand, to the nanosecond, and simulated."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agents.simulated import Cluster, Scenario, load_scenario
from pipeline.observer import Counting
from pipeline.record import Record
from pipeline.window import Window
from pipeline.window_params import DEFAULTS, WindowParams
from schemas.codec import decode_iterations, encode_events, encode_iterations
from schemas.events import (
    Calls,
    CallSource,
    Communicators,
    EventBatch,
    GpuSamples,
    HostSamples,
    MarkerKind,
    Markers,
    Op,
    RankInfo,
    Sensor,
    Spans,
    Syncs,
)
from schemas.iterations import CommunicationRows, IterationBatch, IterationRows
from schemas.table import FloatArray
from schemas.topics import EVENTS

MS = 1_000_000
T0 = 1_796_000_000 * 10**9
WORLD, DATA, PIPE = 11, 22, 33  # communicators
SIZE = {WORLD: 4, DATA: 2, PIPE: 2}

ALL_SENSORS = Sensor.HOST_CALL | Sensor.GPU | Sensor.SYNC


def batch(seq: int, **changes: Any) -> EventBatch:
    """An empty batch of rank 0 on one node; batches are a second apart."""
    values: dict[str, Any] = {
        "job_id": "job",
        "incarnation": "first",
        "node": "node0",
        "agent_version": "test",
        "seq": seq,
        "agent_start_ns": T0,
        "flush_ns": T0 + (seq + 1) * 1000 * MS,
        "flush_interval_ns": 1000 * MS,
        "world_size": 4,
        "sensors": ALL_SENSORS,
        "ranks": (RankInfo(rank=0, local_rank=0, pid=7, process_start_ns=T0, gpu=0, gpu_uuid="GPU-0"),),
        "communicators": Communicators.build(len(SIZE), rank=0, comm=list(SIZE), comm_rank=0, size=list(SIZE.values())),
    }
    return EventBatch(**values | changes)


def record(events: EventBatch, time_ns: int = 0) -> Record:
    """The record of a batch."""
    return Record(EVENTS, 0, 0, time_ns, f"{events.job_id}/{events.node}".encode(), encode_events(events))


@dataclass(frozen=True)
class Answers:
    """What a window said, and counted."""

    batches: tuple[IterationBatch, ...]
    counts: dict[str, int]

    @property
    def rows(self) -> IterationRows:
        return IterationRows.concatenate([answer.rows for answer in self.batches])

    @property
    def communication(self) -> CommunicationRows:
        """All communication, `row` counting through all batches."""
        tables, n_before = [], 0
        for answer in self.batches:
            tables.append(answer.communication.replace(row=answer.communication.row + n_before))
            n_before += len(answer.rows)
        return CommunicationRows.concatenate(tables)


def answers(batches: Iterable[EventBatch], window: Window | None = None, params: WindowParams = DEFAULTS) -> Answers:
    """Give batches to a window; what it says goes over the wire and back."""
    counting = Counting()
    window = window or Window(counting, params)
    said = [answer for events in batches for answer in window.handle(record(events))]
    return Answers(tuple(decode_iterations(encode_iterations(answer)) for answer in said), counting.counts)


@dataclass
class Trainer:
    """A rank that trains by hand: each iteration RECV, two all-reduces, REDUCE_SCATTER, world ALL_REDUCE, ALL_GATHER.

    The host calls within the first 10 ms of an iteration of `iteration_ms` and then waits for its GPU to the end.
    """

    rank: int = 0
    iteration_ms: int = 100
    known: bool = True
    now_ns: int = T0
    seq: dict[tuple[int, int], int] = field(default_factory=dict)
    calls: list[dict[str, int]] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)
    markers: list[tuple[int, int, int, int]] = field(default_factory=list)
    n_done: int = 0
    gpu_first: dict[tuple[int, int], int] = field(default_factory=dict)

    PLAN = (
        (PIPE, Op.RECV, 1, 5000, 1),
        (DATA, Op.ALL_REDUCE, 0, 7000, 3),
        (DATA, Op.REDUCE_SCATTER, 0, 90_000, 1),
        (WORLD, Op.ALL_REDUCE, 0, 4, 1),
        (DATA, Op.ALL_GATHER, 0, 90_000, 1),
    )

    def iterate(self, plan: tuple[tuple[int, Op, int, int, int], ...] = PLAN, *, syncs: bool = True) -> None:
        """Do one iteration; GPU calls take 4 ms each, runs included, 8 ms apart."""
        start = self.now_ns
        for place, (comm, op, peer, size, count) in enumerate(plan):
            seq = self.seq.get((comm, op), 0)
            self.seq[comm, op] = seq + count
            host = start + (1 + place) * MS
            gpu = start + (12 + 8 * place) * MS
            common = {"comm": comm, "op": int(op), "peer": peer, "bytes": size, "count": count}
            self.calls.append(
                common
                | {"source": int(CallSource.HOST_CALL), "first_seq": seq, "seq_known": self.known, "start_ns": host}
                | {"end_ns": host + 5000, "duration_ns": 5000, "duration_min_ns": 1000}
            )
            offset = self.gpu_first.get((comm, int(op)), 0)
            self.calls.append(
                common
                | {"source": int(CallSource.GPU), "first_seq": seq + offset, "seq_known": True, "start_ns": gpu}
                | {"end_ns": gpu + 4 * MS, "duration_ns": 4 * MS, "duration_min_ns": MS}
            )
        self.now_ns = start + self.iteration_ms * MS
        if syncs:
            wait = self.now_ns - start - 10 * MS
            self.syncs.append((start + 10 * MS, wait))
        self.n_done += 1

    def mark(self, kind: MarkerKind = MarkerKind.ITERATION_END, duration_ns: int = 0) -> None:
        """Say that an iteration has ended now, or a pause."""
        self.markers.append((int(kind), self.n_done - 1, self.now_ns, duration_ns))

    def tables(self, *, gpu: bool = True, host: bool = True) -> dict[str, Any]:
        """Return, and forget, what has happened as tables."""
        wanted = {int(CallSource.HOST_CALL)} if host else set()
        wanted |= {int(CallSource.GPU)} if gpu else set()
        rows = sorted((c for c in self.calls if c["source"] in wanted), key=lambda c: c["start_ns"])
        self.calls = [c for c in self.calls if c["source"] not in wanted]
        columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
        syncs, self.syncs = self.syncs, []
        markers, self.markers = self.markers, []
        return {
            "calls": Calls.build(len(rows), rank=self.rank, **columns) if rows else Calls.empty(),
            "syncs": Syncs.build(
                len(syncs), rank=self.rank, start_ns=[s for s, _ in syncs], duration_ns=[d for _, d in syncs]
            ),
            "markers": Markers.build(
                len(markers),
                rank=self.rank,
                kind=[m[0] for m in markers],
                iteration=[m[1] for m in markers],
                time_ns=[m[2] for m in markers],
                duration_ns=[m[3] for m in markers],
            ),
        }

    def batches(self, n: int, per_batch: int = 5, **changes: Any) -> list[EventBatch]:
        """Return n batches of so many iterations each."""
        made = []
        for seq in range(n):
            for _ in range(per_batch):
                self.iterate()
            made.append(batch(seq, flush_ns=self.now_ns + 1, **self.tables(), **changes))
        return made


def gpu_samples(*samples: tuple[int, float, int]) -> GpuSamples:
    """Samples of GPU 0: time, SM clock over its maximum, throttle reasons."""
    return GpuSamples.build(
        len(samples),
        gpu=0,
        time_ns=[s[0] for s in samples],
        sm_clock_hz=[s[1] * 2e9 for s in samples],
        sm_clock_max_hz=2e9,
        throttle_reasons=[s[2] for s in samples],
        throttle_known=1,
        temperature_c=61.0,
    )


def host_samples(*samples: tuple[int, float]) -> HostSamples:
    """Samples of rank 0: time and run-queue ratio."""
    return HostSamples.build(
        len(samples), rank=0, time_ns=[s[0] for s in samples], run_queue_ratio=[s[1] for s in samples]
    )


def spans(rank: int, rows: list[tuple[int, int, int]]) -> Spans:
    """Spans of a rank: kind, start and duration."""
    return Spans.build(
        len(rows),
        rank=rank,
        kind=[r[0] for r in rows],
        micro_batch=0,
        start_ns=[r[1] for r in rows],
        duration_ns=[r[2] for r in rows],
    )


SIMULATED = """
title = "a job for the window"
seed = {seed}
iterations = {iterations}
micro_batches = {micro_batches}
[layout]
tp = {tp}
pp = {pp}
dp = {dp}
gpus_per_node = {gpus_per_node}
[agents]
flush_interval_s = {flush_s}
sensors = [{sensors}]
{more}
"""


def simulated(sensors: str = "host_call gpu sync", *, more: str = "", **changes: float) -> Scenario:
    """A scenario; without markers unless `sensors` names them."""
    values: dict[str, float] = {
        "seed": 5,
        "iterations": 61,
        "micro_batches": 3,
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "gpus_per_node": 4,
        "flush_s": 0.37,
    }
    named = ", ".join(f'"{name}"' for name in sensors.split())
    return load_scenario(SIMULATED.format(**values | changes, sensors=named, more=more))


def duration_error(rows: IterationRows, scenario: Scenario) -> FloatArray:
    """Return, for each row but the first iteration's, the relative error of its duration."""
    end_s = Cluster(scenario).truth().end_s
    later = rows.iteration > 0
    iteration = rows.iteration[later]
    true_s = end_s[iteration] - end_s[iteration - 1]
    error: FloatArray = np.abs(rows.duration_s[later] / true_s - 1)
    return error
