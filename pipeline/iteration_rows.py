"""Closed iterations to the rows of the judge: where the time went, what was communicated, what samples showed."""

from collections.abc import Sequence

import numpy as np

from pipeline.window_blocks import Closed
from pipeline.window_calls import Keys
from pipeline.window_held import Columns, Rows, communication
from pipeline.window_telemetry import Telemetry
from schemas.events import Sensor
from schemas.iterations import CommunicationRows, IterationRows, Numbering, Quality
from schemas.table import FloatArray

_BY_ITERATION = (
    "mark",
    "start_ns",
    "end_ns",
    "duration_s",
    "host_wait_s",
    "forward_s",
    "backward_s",
    "span_compute_s",
    "quality",
    "is_drained",
)


def opened(closed: Sequence[Closed], keys: Keys, telemetry: Telemetry) -> Rows | None:
    """Return the iterations of all ranks, rank by rank, as they are before their GPU times are known."""
    if not closed:
        return None
    parts = [_columns(part) for part in closed]
    rows: Columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows |= telemetry.describe(rows["rank"], rows["start_ns"], rows["end_ns"], rows["duration_s"])
    content = np.concatenate([part.content for part in closed], axis=1)
    sizes = np.concatenate([part.end - part.begin for part in closed])
    iteration = np.repeat(np.arange(len(sizes)), sizes)
    entries, own = communication(content, iteration, keys)
    entries |= {"is_open": entries["seq_known"] == 0}
    entries |= {name: np.full(len(own), np.nan) for name in ("busy_s", "least_s")}
    rows |= {"communication_s": np.full(len(sizes), np.nan), "has_calls": sizes > 0}
    return Rows(rows, entries, own, np.zeros(len(own), np.int64), np.zeros(len(sizes), np.int64))


def _columns(closed: Closed) -> Columns:
    n = len(closed.mark)
    columns: Columns = {name: getattr(closed, name) for name in _BY_ITERATION}
    columns["rank"] = np.full(n, closed.rank)
    columns["step"] = np.full(n, closed.step)
    columns["numbering"] = np.full(n, int(closed.numbering))
    columns["segment"] = np.full(n, closed.segment_ns)
    columns["counter"] = np.full(n, closed.counter if closed.numbering is Numbering.LOCAL else -1)
    return columns


def iteration_rows(done: Rows | None, sensors: Sensor) -> IterationRows:
    """Return the rows of iterations that wait for nothing more."""
    if done is None:
        return IterationRows.empty()
    rows = done.rows
    quality = rows["quality"].copy()
    if sensors & Sensor.GPU:
        quality[rows["has_calls"] & np.isnan(rows["communication_s"])] |= int(Quality.NO_GPU_TIMES)
    spans_s = _known(rows["span_compute_s"])
    compute_s = np.where(np.isnan(spans_s), np.maximum(rows["duration_s"] - rows["communication_s"], 0.0), spans_s)
    return IterationRows.build(
        len(quality),
        rank=rows["rank"],
        iteration=rows["mark"] // rows["step"],
        numbering=rows["numbering"],
        segment=np.where(rows["numbering"] == int(Numbering.LOCAL), rows["segment"], 0),
        end_ns=rows["end_ns"],
        duration_s=rows["duration_s"],
        compute_s=compute_s,
        forward_s=_known(rows["forward_s"]),
        backward_s=_known(rows["backward_s"]),
        host_wait_s=rows["host_wait_s"],
        communication_s=rows["communication_s"],
        quality=quality,
        **{name: rows[name] for name in Telemetry.COLUMNS},
    )


def communication_rows(done: Rows | None, keys: Keys) -> CommunicationRows:
    """Return what the iterations communicated."""
    if done is None:
        return CommunicationRows.empty()
    entries = done.communication
    key = entries["key"]
    return CommunicationRows.build(
        len(key),
        row=done.iteration,
        comm=keys.comm[key],
        op=keys.op[key],
        peer=keys.peer[key],
        **{name: entries[name] for name in ("order", "first_seq", "last_seq", "seq_known", "calls", "bytes")},
        busy_s=entries["busy_s"],
        least_s=entries["least_s"],
    )


def _known(seconds: FloatArray) -> FloatArray:
    """Return NaN where no span of a kind was seen."""
    return np.where(seconds > 0, seconds, np.nan)
