"""What a recording shows to a baseline: the iteration batches of a job, put together into arrays.

Frames are assembled by the pipeline's own stage, since numbering and lateness are no part of any baseline. The time of
an iteration is the median over the ranks that reported it, unknown where most of them lost events. Checkpoints,
evaluations and other work are not taken out: a baseline that is to ignore them has to do so itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.quality.baselines.baseline import Observed
from pipeline.frames import Frame, FrameAssembler, Lateness, Signal
from pipeline.observer import Observer
from pipeline.record import Record
from pipeline.topology import Topology
from schemas.codec import decode_iterations
from schemas.iterations import IterationBatch, Quality
from schemas.table import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Series:
    """One incarnation of one job: iteration (n,) numbers as incidents name them, end_ns (n,), and what was observed.

    known_ns (n,): time of the record with which the iteration was complete, or no longer waited for.
    """

    iteration: IntArray
    end_ns: IntArray
    known_ns: IntArray
    observed: Observed


@dataclass(slots=True)
class _Assembly:
    topology: Topology
    assembler: FrameAssembler = field(init=False)
    frames: list[Frame] = field(default_factory=list)
    known_ns: list[int] = field(default_factory=list)
    newest_ns: int = 0

    def __post_init__(self) -> None:
        self.assembler = FrameAssembler(self.topology, Observer(), Lateness())

    def add(self, batch: IterationBatch, time_ns: int) -> None:
        self.newest_ns = time_ns
        self.topology.learn(batch.node, batch.ranks, batch.communicators, batch.rows.rank)
        self.assembler.add(batch)
        self._close(ending=False)

    def _close(self, *, ending: bool) -> None:
        self.frames += self.assembler.ready(ending=ending)
        self.known_ns += [self.newest_ns] * (len(self.frames) - len(self.known_ns))

    def series(self) -> Series:
        self._close(ending=True)
        names = sorted(set(self.topology.node_by_rank))
        compute_s, communication_s = (self._values(s) for s in (Signal.COMPUTE, Signal.COMMUNICATION))
        return Series(
            iteration=np.array([frame.iteration for frame in self.frames], np.int64),
            end_ns=np.array([frame.end_ns for frame in self.frames], np.int64),
            known_ns=np.array(self.known_ns, np.int64),
            observed=Observed(
                duration_s=np.array([_duration_s(frame) for frame in self.frames]),
                compute_s=compute_s if np.isfinite(compute_s).any() else None,
                communication_s=communication_s if np.isfinite(communication_s).any() else None,
                node=np.array([names.index(name) for name in self.topology.node_by_rank], np.int64),
            ),
        )

    def _values(self, signal: Signal) -> FloatArray:
        lossy = int(Quality.INCOMPLETE)
        rows = [np.where(frame.quality & lossy, np.nan, frame.signal(signal)) for frame in self.frames]
        return np.array(rows).reshape(len(rows), self.topology.world_size)


class Feed:
    """Takes in records of the iterations topic of one job, one after the other."""

    def __init__(self) -> None:
        self._assemblies: dict[str, _Assembly] = {}

    def take(self, record: Record) -> None:
        """Take in one record."""
        batch = decode_iterations(record.value)
        assembly = self._assemblies.setdefault(batch.incarnation, _Assembly(Topology(batch.world_size)))
        assembly.add(batch, record.time_ns)

    def series(self) -> dict[str, Series]:
        """Return what was shown, by incarnation, in the order of appearance; nothing more can be taken in then."""
        return {incarnation: assembly.series() for incarnation, assembly in self._assemblies.items()}


def series_by_incarnation(records: Iterable[Record]) -> dict[str, Series]:
    """Return what records of the iterations topic show of one job, by incarnation, in the order of appearance."""
    feed = Feed()
    for record in records:
        feed.take(record)
    return feed.series()


def _duration_s(frame: Frame) -> float:
    usable = frame.present & ((frame.quality & int(Quality.INCOMPLETE)) == 0)
    if 2 * np.count_nonzero(usable) < np.count_nonzero(frame.present):
        return float("nan")
    values = frame.signal(Signal.DURATION)[usable]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else float("nan")
