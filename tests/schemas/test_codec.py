"""Batches come back from the wire as they were; what cannot be read is refused with a reason."""

import contextlib
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import (
    MAX_WORLD_SIZE,
    InvalidRecord,
    decode_alert,
    decode_events,
    decode_iterations,
    encode_events,
    encode_iterations,
)
from schemas.events import (
    Calls,
    Communicators,
    EventBatch,
    GpuSamples,
    HostSamples,
    Markers,
    RankInfo,
    Sensor,
    Spans,
    Syncs,
)
from schemas.iterations import CommunicationRows, IterationBatch, IterationRows
from schemas.table import Table, column_specs

WORLD_SIZE = 23


def filled(table: type[Table], n_rows: int, seed: int) -> Any:
    """A table of plausible values: ranks below the world size, and now and then a missing number."""
    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    for name, spec in column_specs(table).items():
        if spec.dtype.kind == "f":
            columns[name] = np.where(random.random(n_rows) < 0.2, np.nan, random.normal(size=n_rows))
        elif name == "rank":
            columns[name] = random.integers(0, WORLD_SIZE, n_rows)
        else:
            columns[name] = random.integers(0, np.iinfo(spec.dtype).max, n_rows, dtype=spec.dtype.newbyteorder("="))
    return table.build(n_rows, **columns)


def event_batch(n_rows: int = 7, seed: int = 5) -> EventBatch:
    return EventBatch(
        job_id="job",
        incarnation="2",
        node="node-3",
        agent_version="0.1",
        seq=11,
        agent_start_ns=13,
        flush_ns=10**18,
        flush_interval_ns=10**9,
        world_size=WORLD_SIZE,
        sensors=Sensor.GPU | Sensor.SYNC,
        lost_events=17,
        clock_error_ns=19,
        is_last=True,
        ranks=(RankInfo(rank=5, local_rank=1, pid=99, process_start_ns=3, gpu=None, gpu_uuid="GPU-5"),),
        communicators=filled(Communicators, n_rows, seed),
        calls=filled(Calls, n_rows + 1, seed + 1),
        spans=filled(Spans, n_rows + 2, seed + 2),
        syncs=filled(Syncs, n_rows + 3, seed + 3),
        gpu_samples=filled(GpuSamples, n_rows + 4, seed + 4),
        host_samples=filled(HostSamples, n_rows + 5, seed + 5),
        markers=filled(Markers, n_rows + 6, seed + 6),
    )


def iteration_batch(n_rows: int = 7, seed: int = 5) -> IterationBatch:
    return IterationBatch(
        job_id="job",
        incarnation="2",
        node="node-3",
        seq=11,
        agent_start_ns=13,
        flush_ns=10**18,
        flush_interval_ns=10**9,
        world_size=WORLD_SIZE,
        sensors=Sensor.SPAN,
        communicators=filled(Communicators, n_rows, seed),
        rows=filled(IterationRows, n_rows, seed + 1),
        communication=filled(CommunicationRows, n_rows, seed + 2).replace(row=np.arange(n_rows)),
    )


def wire(**changes: object) -> bytes:
    """The wire form of a batch with fields of its outer map replaced."""
    content = msgspec.msgpack.decode(encode_events(event_batch()))
    return msgspec.msgpack.encode({**content, **changes})


@given(n_rows=st.integers(0, 23), seed=st.integers(0, 1 << 16))
def test_an_event_batch_comes_back_as_it_was(n_rows: int, seed: int) -> None:
    batch = event_batch(n_rows, seed)
    assert decode_events(encode_events(batch)) == batch


@given(n_rows=st.integers(0, 23), seed=st.integers(0, 1 << 16))
def test_an_iteration_batch_comes_back_as_it_was(n_rows: int, seed: int) -> None:
    batch = iteration_batch(n_rows, seed)
    assert decode_iterations(encode_iterations(batch)) == batch


def test_a_pulse_without_rows_is_small_and_comes_back() -> None:
    pulse = EventBatch(
        job_id="job",
        incarnation="2",
        node="node-3",
        agent_version="0.1",
        seq=11,
        agent_start_ns=13,
        flush_ns=10**18,
        flush_interval_ns=10**9,
        world_size=WORLD_SIZE,
        sensors=Sensor.GPU,
    )
    content = encode_events(pulse)
    assert len(content) < 300
    assert decode_events(content) == pulse


def test_equal_batches_have_equal_bytes() -> None:
    assert encode_events(event_batch()) == encode_events(event_batch())


def test_decoded_columns_are_views_of_the_message() -> None:
    calls = decode_events(encode_events(event_batch())).calls
    assert not calls.start_ns.flags.owndata
    assert not calls.start_ns.flags.writeable


def test_fields_tables_and_columns_of_a_later_version_are_tolerated() -> None:
    content = msgspec.msgpack.decode(encode_events(event_batch()))
    content["mood"] = "cheerful"
    content["tables"]["moods"] = [1, {"mood": b"\x05"}]
    content["tables"]["calls"][1]["mood"] = b"\x05" * 8
    content["tables"]["calls"].append("more")
    assert decode_events(msgspec.msgpack.encode(content)) == event_batch()


def test_a_column_that_an_older_version_did_not_send_is_missing_not_zero() -> None:
    content = msgspec.msgpack.decode(encode_events(event_batch()))
    del content["tables"]["gpu_samples"][1]["power_w"]
    assert np.isnan(decode_events(msgspec.msgpack.encode(content)).gpu_samples.power_w).all()


def test_a_sensor_of_a_later_version_is_left_out() -> None:
    assert decode_events(wire(sensors=int(Sensor.GPU) | 1 << 20)).sensors == Sensor.GPU


@pytest.mark.parametrize("n_bytes", [0, 1, 7, 100, 1000, -1])
def test_a_batch_cut_anywhere_is_refused(n_bytes: int) -> None:
    with pytest.raises(InvalidRecord, match="not a batch"):
        decode_events(encode_events(event_batch())[:n_bytes])


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 97, b"{}", b"\x80", b"\x91\x05", "Kaffee ☕".encode()])
def test_garbage_is_refused(content: bytes) -> None:
    for decode in (decode_events, decode_iterations, decode_alert):
        with pytest.raises(InvalidRecord, match=r"not a batch|not an alert"):
            decode(content)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_invalid_record(content: bytes) -> None:
    for decode in (decode_events, decode_iterations, decode_alert):
        with pytest.raises(InvalidRecord):
            decode(content)


@given(place=st.integers(0, 5000), flip=st.integers(1, 255))
def test_a_damaged_batch_is_read_or_refused_and_never_anything_else(place: int, flip: int) -> None:
    content = bytearray(encode_events(event_batch()))
    content[place % len(content)] ^= flip
    with contextlib.suppress(InvalidRecord):
        decode_events(bytes(content))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "schema version 2 is not known to this reader"),
        ({"job_id": ""}, "job_id and node must not be empty"),
        ({"node": ""}, "job_id and node must not be empty"),
        ({"world_size": 0}, "world_size 0 is outside"),
        ({"world_size": MAX_WORLD_SIZE + 1}, "world_size 1048577 is outside"),
        ({"seq": -1}, "must not be negative"),
        ({"lost_events": -1}, "must not be negative"),
        ({"flush_interval_ns": 0}, "flush_interval_ns must be positive"),
        ({"world_size": 5}, "a rank is outside 0..4"),
        ({"world_size": 6}, "rank is outside 0..5"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidRecord, match=reason):
        decode_events(wire(**changes))


def test_columns_of_unequal_length_are_refused_by_name() -> None:
    content = msgspec.msgpack.decode(encode_events(event_batch()))
    content["tables"]["calls"][1]["start_ns"] = b"\x00" * 9
    with pytest.raises(InvalidRecord, match=r"Calls.start_ns has 9 bytes, expected 8 rows of 8"):
        decode_events(msgspec.msgpack.encode(content))


def test_a_missing_required_column_is_refused_by_name() -> None:
    content = msgspec.msgpack.decode(encode_events(event_batch()))
    del content["tables"]["calls"][1]["start_ns"]
    with pytest.raises(InvalidRecord, match="Calls lacks the required column 'start_ns'"):
        decode_events(msgspec.msgpack.encode(content))


def test_more_rows_than_any_message_holds_cost_no_memory() -> None:
    content = msgspec.msgpack.decode(encode_events(event_batch()))
    content["tables"]["gpu_samples"] = [1 << 40, {}]
    with pytest.raises(InvalidRecord):
        decode_events(msgspec.msgpack.encode(content))


def test_communication_of_no_iteration_is_refused() -> None:
    batch = iteration_batch()
    wrong = dataclasses.replace(batch, communication=batch.communication.replace(row=len(batch.rows)))
    with pytest.raises(InvalidRecord, match="points past the last iteration row"):
        decode_iterations(encode_iterations(wrong))
