"""Refuses batches that contradict themselves, before any state has changed; what passes cannot make the window fail."""

import numpy as np

from schemas.codec import InvalidRecord
from schemas.events import EventBatch
from schemas.table import AnyArray

_LATEST_NS = 1 << 61  # the year 2043: the difference of any two times fits into 64 bits
_LONGEST_NS = 1 << 53
_MOST_BYTES = 1 << 48
_HIGHEST_NUMBER = 1 << 43


def check(batch: EventBatch) -> None:
    """Raise InvalidRecord, naming the column, where a value is outside of what can be meant."""
    calls, spans, syncs, markers = batch.calls, batch.spans, batch.syncs, batch.markers
    for name, times in (
        ("flush_ns", np.array([batch.flush_ns])),
        ("agent_start_ns", np.array([batch.agent_start_ns])),
        ("flush_interval_ns", np.array([batch.flush_interval_ns])),
        ("calls.start_ns", calls.start_ns),
        ("calls.end_ns", calls.end_ns),
        ("spans.start_ns", spans.start_ns),
        ("syncs.start_ns", syncs.start_ns),
        ("markers.time_ns", markers.time_ns),
        ("gpu_samples.time_ns", batch.gpu_samples.time_ns),
        ("host_samples.time_ns", batch.host_samples.time_ns),
        ("peer_samples.time_ns", batch.peer_samples.time_ns),
        ("port_samples.time_ns", batch.port_samples.time_ns),
    ):
        _within(name, times, -_LATEST_NS, _LATEST_NS)
    for name, durations in (
        ("calls.duration_ns", calls.duration_ns),
        ("calls.duration_min_ns", calls.duration_min_ns),
        ("calls.end_ns - start_ns", calls.end_ns - calls.start_ns),
        ("spans.duration_ns", spans.duration_ns),
        ("syncs.duration_ns", syncs.duration_ns),
        ("markers.duration_ns", markers.duration_ns),
    ):
        _within(name, durations, 0, _LONGEST_NS)
    _within("calls.bytes", calls.bytes, 0, _MOST_BYTES)
    _within("calls.count", calls.count, 1, 1 << 32)
    _within("calls.first_seq", calls.first_seq, 0, _HIGHEST_NUMBER)
    _within("markers.iteration", markers.iteration, 0, _HIGHEST_NUMBER)
    if (calls.duration_min_ns > calls.duration_ns).any():
        raise InvalidRecord("calls.duration_min_ns is longer than duration_ns, the total of its run")


def _within(name: str, values: AnyArray, least: int, most: int) -> None:
    if len(values) and not (least <= values.min() and values.max() <= most):
        raise InvalidRecord(f"{name} must be in {least}..{most}, it reaches from {values.min()} to {values.max()}")
