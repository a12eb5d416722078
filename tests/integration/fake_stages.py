"""Stages that are simple enough to be predicted: what the drivers are tested with.

Run as a module it is a worker process with these stages instead of the real ones.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.observer import Observer
from pipeline.record import Record
from pipeline.worker import main
from schemas.alerts import (
    ALERT_SCHEMA_VERSION,
    Alert,
    AlertState,
    Component,
    ComponentName,
    ComponentType,
    Kind,
    Resolution,
    Severity,
    fingerprint,
)
from schemas.codec import InvalidRecord, decode_events, decode_iterations, encode_events
from schemas.events import EventBatch, Sensor
from schemas.iterations import IterationBatch
from schemas.topics import EVENTS, ITERATIONS

T0_NS = 1_796_000_000 * 10**9
SECOND_NS = 10**9
EXPLOSIVE = "explosive"  # a node name that ends the window stage
ONSET, END = 11, 37
UPDATE_EVERY = 7


def batch(job_id: str, seq: int, *, node: str = "n0", is_last: bool = False, flush_ns: int | None = None) -> EventBatch:
    """An EventBatch without events, one of a series a second apart."""
    return EventBatch(
        job_id=job_id,
        incarnation="i0",
        node=node,
        agent_version="0",
        seq=seq,
        agent_start_ns=T0_NS,
        flush_ns=T0_NS + seq * SECOND_NS if flush_ns is None else flush_ns,
        flush_interval_ns=SECOND_NS,
        world_size=1,
        sensors=Sensor(0),
        is_last=is_last,
    )


class FakeWindow:
    """One IterationBatch for each EventBatch."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def handle(self, record: Record) -> Iterator[IterationBatch]:
        """Pass the header on; a batch of the node EXPLOSIVE is a bug in the stage."""
        events = decode_events(record.value)
        if events.node == EXPLOSIVE:
            raise RuntimeError("a bug in the stage")
        yield IterationBatch(
            job_id=events.job_id,
            incarnation=events.incarnation,
            node=events.node,
            seq=events.seq,
            agent_start_ns=events.agent_start_ns,
            flush_ns=events.flush_ns,
            flush_interval_ns=events.flush_interval_ns,
            world_size=events.world_size,
            sensors=events.sensors,
            is_last=events.is_last,
        )


@dataclass
class FakeJudge:
    """Each job has one incident, from its batch ONSET to its batch END, with an update now and then."""

    observer: Observer
    seen: dict[str, int] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def handle(self, record: Record) -> Iterator[Alert]:
        """Count the batches of the job; duplicates change nothing, and a gap is a lost record.

        The count is in the alerts, so that a judge that has not seen the job from its beginning says something else.
        """
        rows = decode_iterations(record.value)
        expected = self.seen.get(rows.job_id, -1) + 1
        if rows.seq < expected:
            return
        if rows.seq > expected and expected:
            raise InvalidRecord(f"batch {rows.seq} of {rows.job_id} came where {expected} was due")
        self.seen[rows.job_id] = rows.seq
        self.count[rows.job_id] = self.count.get(rows.job_id, 0) + 1
        if ONSET <= rows.seq <= END and (rows.seq in {ONSET, END} or (rows.seq - ONSET) % UPDATE_EVERY == 0):
            stop_at_barrier(rows.seq)
            yield alert(rows.job_id, rows.seq, self.count[rows.job_id])


def stop_at_barrier(seq: int) -> None:
    """Where the test asks for it, say that an alert is about to be made and wait until the test lets it be."""
    folder = Path(os.environ.get("BARRIER", os.devnull))
    if (folder / f"wait-{seq}").exists():
        (folder / f"reached-{seq}").touch()
        while (folder / f"wait-{seq}").exists():
            time.sleep(0.01)


def alert(job_id: str, seq: int, count: int) -> Alert:
    """What FakeJudge says of a job at its batch `seq`, having seen `count` of them."""
    name = ComponentName(type=ComponentType.HOST, node="n0")
    component = Component(type=ComponentType.HOST, name=name, candidates=(name,))
    is_over = seq == END
    return Alert(
        schema_version=ALERT_SCHEMA_VERSION,
        fingerprint=fingerprint(job_id, Kind.SLOW_HOST, component),
        revision=2 + (END - 1 - ONSET) // UPDATE_EVERY if is_over else 1 + (seq - ONSET) // UPDATE_EVERY,
        state=AlertState.RESOLVED if is_over else AlertState.FIRING,
        severity=Severity.WARNING,
        job_id=job_id,
        incarnation="i0",
        kind=Kind.SLOW_HOST,
        component=component,
        onset_iteration=ONSET - 2,
        detected_iteration=ONSET,
        as_of_iteration=seq,
        resolved_iteration=END if is_over else None,
        resolution=Resolution.RECOVERED if is_over else None,
        onset_time_ns=T0_NS + (ONSET - 2) * SECOND_NS,
        as_of_time_ns=T0_NS + seq * SECOND_NS,
        slowdown_ratio=1.5,
        lost_gpu_s=float(count),
        confidence=0.9,
        sources=("host_call",),
        evidence=(),
        causes=(),
        advice="ignore",
    )


def expected(job_id: str, n_batches: int) -> list[Alert]:
    """The alerts of a job of so many batches."""
    judge = FakeJudge(Observer())
    window = FakeWindow(Observer())
    alerts: list[Alert] = []
    for seq in range(n_batches):
        record = Record(EVENTS, 0, seq, 0, b"", encode_events(batch(job_id, seq)))
        for rows in window.handle(record):
            alerts += judge.handle(iterations_record(rows, seq))
    return alerts


def iterations_record(rows: IterationBatch, offset: int, time_ns: int = 0) -> Record:
    """A record of the iterations topic."""
    from schemas.codec import encode_iterations

    return Record(ITERATIONS, 0, offset, time_ns, rows.job_id.encode(), encode_iterations(rows))


STAGES = {EVENTS: FakeWindow, ITERATIONS: FakeJudge}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], STAGES))
