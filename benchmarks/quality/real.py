"""Real healthy series and real traces: what is said of them.

Held-out series are told apart from the others; a person who tunes looks at the others only.
"""

from pathlib import Path

import msgspec
import numpy as np

from benchmarks.quality.baselines.baseline import Observed
from benchmarks.quality.chain import Chain
from benchmarks.quality.splices import series_names
from pipeline.engine import Engine
from pipeline.importers.straggler_analysis import read_trace
from pipeline.record import Record
from schemas.alerts import AlertState, ComponentName, ComponentType, Kind, Severity
from schemas.codec import encode_events
from schemas.table import FloatArray
from schemas.topics import EVENTS, events_key


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A real trace with an answer known: whether just that was said, and whatever else was."""

    name: str
    is_right: bool
    others: tuple[str, ...]


class Spell(msgspec.Struct, frozen=True, kw_only=True):
    """One incident in a healthy series."""

    series: str
    onset: int
    detected: int
    is_information: bool


class Healthy(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of the healthy series."""

    iterations: int
    false_incidents: int
    spells: tuple[Spell, ...]


# The right answer, as the people who published the traces found it; of the last two, information about the workload.
TRACES = {
    "AR": (Kind.SLOW_RANK, ComponentName(type=ComponentType.RANK, node="rank-0", rank=0)),
    "ST": (Kind.STAGE_IMBALANCE, ComponentName(type=ComponentType.STAGE, stage=3)),
    "SE": (Kind.DATA_IMBALANCE, ComponentName(type=ComponentType.JOB)),
}


def traces(folder: Path) -> list[Trace]:
    """Judge the three traces of straggler-analysis."""
    return [trace(folder / "straggler-analysis" / f"trace-{name}.parquet", name) for name in TRACES]


def trace(path: Path, name: str) -> Trace:
    """Judge one trace, and compare with its answer in TRACES."""
    engine, said = Engine(), set()
    for offset, batch in enumerate(read_trace(path).batches()):
        key = events_key(batch.job_id, batch.node)
        for alert in engine.handle(Record(EVENTS, 0, offset, batch.flush_ns, key, encode_events(batch))):
            if alert.state is AlertState.FIRING:
                said.add((alert.kind, alert.component.candidates, alert.severity is Severity.INFO))
    kind, component = TRACES[name]
    right = (kind, (component,), kind is not Kind.SLOW_RANK)
    others = tuple(sorted(f"{one[0].value} {one[1]}" for one in said if one != right))
    return Trace(name=name, is_right=right in said, others=others)


def read_times(folder: Path, name: str) -> FloatArray:
    """Return a healthy series of iteration times (n,), seconds."""
    content = (folder / "healthy-iteration-times" / f"{name}.json").read_bytes()
    return np.array(msgspec.json.decode(content, type=_Series).iteration_time)


class _Series(msgspec.Struct):
    iteration_time: list[float]


def healthy(folder: Path, *, held_out: bool) -> Healthy:
    """Judge each series as a job of one rank that reports nothing but its iteration times."""
    spells: list[Spell] = []
    iterations = 0
    for name in series_names(folder, held_out=held_out):
        times_s = read_times(folder, name)
        iterations += len(times_s)
        spells += [
            Spell(series=name, onset=said.onset or 0, detected=said.at, is_information=said.is_information)
            for said in Chain().judges(Observed(duration_s=times_s))
        ]
    accusing = sum(not spell.is_information for spell in spells)
    return Healthy(iterations=iterations, false_incidents=accusing, spells=tuple(spells))
