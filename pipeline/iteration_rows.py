"""Finished iterations of one rank to rows: where the time went, what was communicated, what the telemetry showed."""

from dataclasses import dataclass

import numpy as np

from pipeline.rank_stream import Segments
from schemas.events import Calls, CallSource, GpuSamples, HostSamples, Op, Sensor, SpanKind
from schemas.iterations import CommunicationRows, IterationRows, Quality
from schemas.table import AnyArray, FloatArray, IntArray

_FRESH_NS = 2_500_000_000
_COMPUTING = (int(SpanKind.FORWARD), int(SpanKind.BACKWARD), int(SpanKind.OPTIMIZER))
_POINT_TO_POINT = (int(Op.SEND), int(Op.RECV))


@dataclass(frozen=True, slots=True, eq=False)
class Telemetry:
    """One rank's samples, in the order of time; gpu is None where its GPU is not known."""

    gpu: GpuSamples | None
    host: HostSamples
    flush_interval_ns: int


def iteration_rows(rank: int, segments: Segments, telemetry: Telemetry, sensors: Sensor) -> IterationRows:
    """Return one row per finished iteration."""
    n = len(segments.end_ns)
    communication_s = _communication_s(segments) if sensors & Sensor.GPU else np.full(n, np.nan)
    quality = segments.quality.copy()
    if sensors & Sensor.GPU:
        quality[np.isnan(communication_s)] |= int(Quality.NO_GPU_TIMES)
    compute_s = np.maximum(segments.duration_s - communication_s, 0.0)
    forward_s, backward_s, spans_s = _spans_s(segments)
    if sensors & Sensor.SPAN:
        compute_s = spans_s
    freshness = np.maximum(np.nan_to_num(segments.duration_s) * 1e9, max(2 * telemetry.flush_interval_ns, _FRESH_NS))
    columns: dict[str, AnyArray] = {}
    if telemetry.gpu is not None and len(telemetry.gpu):
        columns |= _gpu_columns(segments, telemetry.gpu, freshness)
    if len(telemetry.host):
        columns |= _host_columns(segments, telemetry.host, freshness)
    waits = np.where(segments.host_wait_ns >= 0, segments.host_wait_ns / 1e9, np.nan)
    blocks = (segments.quality & int(Quality.BLOCK_MEAN)) != 0
    return IterationRows.build(
        n,
        rank=rank,
        iteration=segments.number,
        numbering=segments.numbering,
        segment=segments.origin_ns,
        end_ns=segments.end_ns,
        duration_s=segments.duration_s,
        compute_s=compute_s,
        forward_s=forward_s,
        backward_s=backward_s,
        host_wait_s=np.where(blocks, np.nan, waits) if sensors & Sensor.SYNC else np.full(n, np.nan),
        communication_s=communication_s,
        quality=quality,
        **columns,
    )


def _communication_s(segments: Segments) -> FloatArray:
    """Return (n,) seconds the GPU spent in calls: their union, since sends and receives overlap; NaN without any.

    Of a collapsed run only the total counts: computation lies between its calls.
    """
    n = len(segments.end_ns)
    on_gpu = segments.calls.source == int(CallSource.GPU)
    calls, segment = segments.calls.take(on_gpu), segments.segment[on_gpu]
    single = calls.count == 1
    total = np.bincount(segment[~single], calls.duration_ns[~single], minlength=n).astype(np.float64)
    order = np.argsort(calls.start_ns[single], kind="stable")
    start, end = calls.start_ns[single][order], calls.end_ns[single][order]
    if len(start):
        reached = np.maximum.accumulate(end)
        covered_until = np.concatenate([[start[0]], reached[:-1]])
        gained = np.maximum(end - np.maximum(start, covered_until), 0)
        total += np.bincount(segment[single][order], gained, minlength=n)
    seen = np.bincount(segment, minlength=n) > 0
    return np.where(seen & _is_whole(segments, on_gpu), total / 1e9, np.nan)


def _is_whole(segments: Segments, on_gpu: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> AnyArray:
    """Return (n,) whether there are as many GPU times as host calls, where the latter are seen."""
    n = len(segments.end_ns)
    counts = segments.calls.count
    host = np.bincount(segments.segment[~on_gpu], counts[~on_gpu], minlength=n)
    gpu = np.bincount(segments.segment[on_gpu], counts[on_gpu], minlength=n)
    return (host == 0) | (gpu >= 0.9 * host)


def _spans_s(segments: Segments) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return forward, backward and all computation of the spans, (n,) seconds, NaN without spans."""
    n, spans, segment = len(segments.end_ns), segments.spans, segments.span_segment

    def total(mask: AnyArray) -> FloatArray:
        seconds = np.bincount(segment[mask], spans.duration_ns[mask], minlength=n) / 1e9
        return np.where(np.bincount(segment[mask], minlength=n) > 0, seconds, np.nan)

    if not len(spans):
        unknown = np.full(n, np.nan)
        return unknown, unknown, unknown
    return (
        total(spans.kind == int(SpanKind.FORWARD)),
        total(spans.kind == int(SpanKind.BACKWARD)),
        total(np.isin(spans.kind, _COMPUTING)),
    )


def _latest(segments: Segments, time_ns: IntArray, freshness: FloatArray) -> tuple[IntArray, AnyArray]:
    """Return (n,) the last sample at each iteration's end, and whether it is fresh enough to speak of it."""
    last = np.searchsorted(time_ns, segments.end_ns, side="right") - 1
    fresh = (last >= 0) & (segments.end_ns - time_ns[np.maximum(last, 0)] <= freshness)
    return np.maximum(last, 0), fresh


def _gpu_columns(segments: Segments, samples: GpuSamples, freshness: FloatArray) -> dict[str, AnyArray]:
    last, fresh = _latest(segments, samples.time_ns, freshness)
    ratio = samples.sm_clock_hz / samples.sm_clock_max_hz
    known = fresh & (samples.throttle_known[last] != 0)
    reasons = samples.throttle_reasons[last]
    return {
        "sm_clock_ratio": np.where(fresh, ratio[last], np.nan),
        "temperature_c": np.where(fresh, samples.temperature_c[last], np.nan),
        "throttle_reasons": np.where(known, reasons, 0),
        "throttle_known": known,
    }


def _host_columns(segments: Segments, samples: HostSamples, freshness: FloatArray) -> dict[str, AnyArray]:
    last, fresh = _latest(segments, samples.time_ns, freshness)
    return {
        "run_queue_ratio": np.where(fresh, samples.run_queue_ratio[last], np.nan),
        "blocked_ratio": np.where(fresh, samples.blocked_ratio[last], np.nan),
    }


def communication_rows(segments: Segments, sensors: Sensor) -> CommunicationRows:
    """Return one row per iteration, communicator, op and peer, in the order of iterations.

    Counts and sequence numbers are those of the host's calls where these are seen, else of the GPU's; times are the
    GPU's alone.
    """
    source = CallSource.HOST_CALL if sensors & Sensor.HOST_CALL else CallSource.GPU
    counted = segments.calls.source == int(source)
    calls, segment = segments.calls.take(counted), segments.segment[counted]
    if not len(calls):
        return CommunicationRows.empty()
    keys = _keys(calls, segment)
    names, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    n = len(names)
    start_of = np.searchsorted(segment, segment[first]) if (np.diff(segment) >= 0).all() else np.zeros(n, np.int64)
    last_seq = np.zeros(n, np.int64)
    np.maximum.at(last_seq, inverse, calls.first_seq + calls.count - 1)
    first_seq = np.full(n, np.iinfo(np.int64).max)
    np.minimum.at(first_seq, inverse, calls.first_seq)
    busy_s, least_s = _gpu_times(segments, names)
    return CommunicationRows.build(
        n,
        row=segment[first],
        comm=calls.comm[first],
        op=calls.op[first],
        peer=np.where(np.isin(calls.op[first], _POINT_TO_POINT), calls.peer[first], 0),
        order=np.minimum(np.maximum(first - start_of, 0), 65535),
        first_seq=first_seq,
        last_seq=last_seq,
        seq_known=calls.seq_known[first],
        calls=np.bincount(inverse, calls.count, minlength=n),
        bytes=np.bincount(inverse, calls.count * calls.bytes, minlength=n).astype(np.int64),
        busy_s=busy_s,
        least_s=least_s,
    )


def _keys(calls: Calls, segment: IntArray) -> AnyArray:
    """Return (n_calls,) records that are equal for calls of one row, and order by iteration first."""
    keys = np.zeros(len(calls), [("row", "u4"), ("comm", "u8"), ("op", "u1"), ("peer", "u4")])
    keys["row"], keys["comm"], keys["op"] = segment, calls.comm, calls.op
    keys["peer"] = np.where(np.isin(calls.op, _POINT_TO_POINT), calls.peer, 0)
    return keys


def _gpu_times(segments: Segments, names: AnyArray) -> tuple[FloatArray, FloatArray]:
    """Return the total and the shortest GPU time of each row, NaN where there is none."""
    n = len(names)
    on_gpu = segments.calls.source == int(CallSource.GPU)
    calls = segments.calls.take(on_gpu)
    if not len(calls):
        return np.full(n, np.nan), np.full(n, np.nan)
    keys = _keys(calls, segments.segment[on_gpu])
    place = np.minimum(np.searchsorted(names, keys), n - 1)
    known = names[place] == keys
    busy = np.bincount(place[known], calls.duration_ns[known], minlength=n) / 1e9
    least = np.full(n, np.inf)
    np.minimum.at(least, place[known], calls.duration_min_ns[known] / 1e9)
    seen = np.isfinite(least)
    return np.where(seen, busy, np.nan), np.where(seen, least, np.nan)
