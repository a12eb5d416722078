"""Wire formats of one node's batch, side by side in one run: encode, decode to numpy columns, size.

Every candidate carries the same content from and to the same numpy columns. protobuf and Avro take part where they
can be imported; the command in docs/decisions/0003-batch-format.md brings them without installing them.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from schemas.codec import decode_events, encode_events
from schemas.events import (
    Calls,
    CallSource,
    EventBatch,
    GpuSamples,
    HostSamples,
    Markers,
    Op,
    RankInfo,
    Sensor,
    Syncs,
)
from schemas.table import Table, column_specs

N_RANKS = 8
N_MICRO_BATCHES = 8
REPEATS = 11
MEASURE_S = 0.2

Columns = dict[str, dict[str, npt.NDArray[Any]]]  # by table and column


@dataclass(frozen=True)
class Candidate:
    """One format: how to encode the batch, and how to get its columns back."""

    name: str
    encode: Callable[[], bytes]
    decode: Callable[[bytes], Any]
    columns: Callable[[Any], Columns] = lambda decoded: decoded


def node_batch(seed: int = 23) -> EventBatch:
    """Return a second of a node: one iteration of eight ranks, calls seen by the host and by the GPU, and samples."""
    random = np.random.default_rng(seed)
    n_calls = 2 * (4 * N_MICRO_BATCHES + 2 * N_MICRO_BATCHES + 3)  # transfers, collapsed all-reduces, the end
    n_rows = N_RANKS * n_calls
    start_ns = 1_764_489_600 * 10**9 + np.sort(random.integers(0, 10**9, (N_RANKS, n_calls)), axis=1).ravel()
    duration_ns = random.lognormal(13, 1.5, n_rows).astype(np.int64)
    ranks = np.arange(N_RANKS)
    now_ns = int(start_ns.max())
    return EventBatch(
        job_id="pretrain-70b",
        incarnation="0",
        node="gpu-a-0017",
        agent_version="0.1.0",
        seq=4711,
        agent_start_ns=now_ns - 10**13,
        flush_ns=now_ns,
        flush_interval_ns=10**9,
        world_size=1024,
        sensors=Sensor(0x3F),
        ranks=tuple(
            RankInfo(rank=r, local_rank=r, pid=4000 + r, process_start_ns=now_ns, gpu=r, gpu_uuid=f"GPU-{r:032x}")
            for r in range(N_RANKS)
        ),
        calls=Calls.build(
            n_rows,
            rank=np.repeat(ranks, n_calls),
            comm=random.choice(random.integers(0, 2**63, 4, dtype=np.uint64), n_rows),
            op=random.choice([Op.SEND, Op.RECV, Op.ALL_REDUCE], n_rows),
            source=np.tile([CallSource.HOST_CALL, CallSource.GPU], n_rows // 2),
            bytes=random.choice([4, 1 << 20, 1 << 26], n_rows),
            count=random.choice([1, 1, 64], n_rows),
            first_seq=np.tile(np.arange(n_calls) + 10**6, N_RANKS),
            seq_known=1,
            start_ns=start_ns,
            end_ns=start_ns + duration_ns,
            duration_ns=duration_ns,
            duration_min_ns=duration_ns,
        ),
        syncs=Syncs.build(N_RANKS, rank=ranks, start_ns=now_ns - 10**8, duration_ns=random.integers(0, 10**8, N_RANKS)),
        gpu_samples=GpuSamples.build(
            N_RANKS, gpu=ranks, time_ns=now_ns, sm_clock_hz=random.normal(1.9e9, 1e7, N_RANKS), throttle_known=1
        ),
        host_samples=HostSamples.build(N_RANKS, rank=ranks, time_ns=now_ns, run_queue_ratio=random.random(N_RANKS)),
        markers=Markers.build(N_RANKS, rank=ranks, kind=0, iteration=4711, time_ns=now_ns),
    )


TABLES: dict[str, type[Table]] = {
    "calls": Calls,
    "syncs": Syncs,
    "gpu_samples": GpuSamples,
    "host_samples": HostSamples,
    "markers": Markers,
}


def columns_of(batch: EventBatch) -> Columns:
    """Return the columns of the batch's filled tables."""
    return {
        table: {name: getattr(getattr(batch, table), name) for name in column_specs(kind)}
        for table, kind in TABLES.items()
    }


def header_of(batch: EventBatch) -> dict[str, Any]:
    """Return all that is not in a table, as plain values."""
    names = ("job_id", "incarnation", "node", "agent_version", "seq", "agent_start_ns", "flush_ns", "flush_interval_ns")
    more = ("world_size", "lost_events", "clock_error_ns", "is_last")
    header = {name: getattr(batch, name) for name in names + more}
    return {**header, "sensors": int(batch.sensors), "ranks": msgspec.to_builtins(batch.ranks)}


def from_lists(decoded: dict[str, Any]) -> Columns:
    """Return lists of numbers as columns of their types; null is NaN."""
    return {
        table: {
            name: np.array(decoded[table][name], spec.dtype if spec.dtype.kind != "f" else "f8").astype(spec.dtype)
            for name, spec in column_specs(kind).items()
        }
        for table, kind in TABLES.items()
    }


def msgspec_candidates(batch: EventBatch) -> list[Candidate]:
    """Return our format, and what msgspec makes of lists."""
    columns, header = columns_of(batch), header_of(batch)

    def lists() -> dict[str, Any]:
        return header | {t: {n: c.tolist() for n, c in named.items()} for t, named in columns.items()}

    def raw() -> bytes:
        tables = {t: {n: c.tobytes() for n, c in named.items()} for t, named in columns.items()}
        return msgspec.msgpack.encode(header | tables)

    def from_raw(content: bytes) -> Columns:
        decoded = raw_decoder.decode(content)
        return {
            table: {name: np.frombuffer(decoded[table][name], spec.dtype) for name, spec in column_specs(kind).items()}
            for table, kind in TABLES.items()
        }

    raw_decoder = msgspec.msgpack.Decoder()
    return [
        Candidate("msgpack map, raw columns", raw, from_raw),
        Candidate("the same, checked: schemas.codec", lambda: encode_events(batch), decode_events, columns_of),
        Candidate(
            "msgpack map, lists",
            lambda: msgspec.msgpack.encode(lists()),
            lambda content: from_lists(msgspec.msgpack.decode(content)),
        ),
        Candidate(
            "JSON columns",
            lambda: msgspec.json.encode(lists()),
            lambda content: from_lists(msgspec.json.decode(content)),
        ),
    ]


def arrow_candidate(batch: EventBatch) -> Candidate:
    """Return Arrow IPC: one record batch a table, without schemas, which both sides know."""
    columns, header = columns_of(batch), header_of(batch)
    schemas = {t: pa.RecordBatch.from_pydict(named).schema for t, named in columns.items()}

    def encode() -> bytes:
        tables = {
            t: pa.RecordBatch.from_arrays([pa.array(c) for c in named.values()], schema=schemas[t])
            .serialize()
            .to_pybytes()
            for t, named in columns.items()
        }
        return msgspec.msgpack.encode(header | tables)

    def decode(content: bytes) -> Columns:
        decoded = msgspec.msgpack.decode(content)
        return {
            t: dict(
                zip(
                    schema.names,
                    (c.to_numpy() for c in pa.ipc.read_record_batch(pa.py_buffer(decoded[t]), schema).columns),
                    strict=True,
                )
            )
            for t, schema in schemas.items()
        }

    return Candidate("Arrow IPC record batches", encode, decode)


def protobuf_candidate(batch: EventBatch) -> Candidate | None:
    """Return protobuf with packed columns; None without the library."""
    try:
        descriptor_pb2, descriptor_pool, message_factory = (
            importlib.import_module(f"google.protobuf.{name}")
            for name in ("descriptor_pb2", "descriptor_pool", "message_factory")
        )
    except ImportError:
        return None
    kinds = {"u": 4, "i": 3}  # uint64 and int64 are varints; floats keep their width
    columns, header = columns_of(batch), msgspec.msgpack.encode(header_of(batch))
    file = descriptor_pb2.FileDescriptorProto(name="batch.proto", package="bench", syntax="proto3")
    outer = file.message_type.add(name="Batch")
    outer.field.add(name="header", number=1, type=12, label=1)
    for number, (table, named) in enumerate(columns.items(), start=2):
        inner = file.message_type.add(name=table)
        for place, (name, values) in enumerate(named.items(), start=1):
            is_float = values.dtype.kind == "f"
            kind = (1 if values.dtype.itemsize == 8 else 2) if is_float else kinds[values.dtype.kind]
            inner.field.add(name=name, number=place, type=kind, label=3)
        outer.field.add(name=table, number=number, type=11, type_name=f".bench.{table}", label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message_type = message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Batch"))

    def encode() -> bytes:
        message = message_type(header=header)
        for table, named in columns.items():
            inner = getattr(message, table)
            for name, values in named.items():
                getattr(inner, name).extend(values.tolist())
        return bytes(message.SerializeToString())

    def decode(content: bytes) -> Columns:
        message = message_type.FromString(content)
        msgspec.msgpack.decode(message.header)
        return {
            table: {
                name: np.array(getattr(getattr(message, table), name), spec.dtype)
                for name, spec in column_specs(kind).items()
            }
            for table, kind in TABLES.items()
        }

    return Candidate("protobuf, packed columns", encode, decode)


def avro_candidate(batch: EventBatch) -> Candidate | None:
    """Return Avro with arrays; None without the library."""
    try:
        fastavro = importlib.import_module("fastavro")
    except ImportError:
        return None
    columns, header = columns_of(batch), msgspec.msgpack.encode(header_of(batch))

    def avro_type(values: npt.NDArray[Any]) -> str:
        return ("double" if values.dtype.itemsize == 8 else "float") if values.dtype.kind == "f" else "long"

    def array_field(name: str, values: npt.NDArray[Any]) -> dict[str, Any]:
        return {"name": name, "type": {"type": "array", "items": avro_type(values)}}

    fields: list[dict[str, Any]] = [{"name": "header", "type": "bytes"}]
    for table, named in columns.items():
        record = {"type": "record", "name": table, "fields": [array_field(n, v) for n, v in named.items()]}
        fields.append({"name": table, "type": record})
    schema = fastavro.parse_schema({"type": "record", "name": "Batch", "fields": fields})

    def encode() -> bytes:
        out = BytesIO()
        lists = {t: {n: c.tolist() for n, c in named.items()} for t, named in columns.items()}
        fastavro.schemaless_writer(out, schema, {"header": header, **lists})
        return out.getvalue()

    def decode(content: bytes) -> Columns:
        decoded = fastavro.schemaless_reader(BytesIO(content), schema, None)
        msgspec.msgpack.decode(decoded["header"])
        return from_lists(decoded)

    return Candidate("Avro, arrays", encode, decode)


def check(candidate: Candidate, batch: EventBatch) -> None:
    """Refuse a candidate that does not give back what it was given."""
    got = candidate.columns(candidate.decode(candidate.encode()))
    for table, named in columns_of(batch).items():
        for name, values in named.items():
            np.testing.assert_array_equal(got[table][name], values, err_msg=f"{candidate.name}: {table}.{name}")


def per_call_s(function: Callable[[], object]) -> float:
    """Return the least of REPEATS mean times of a call: what else runs on the machine only ever adds."""
    function()
    times = []
    for _ in range(REPEATS):
        n_calls, started_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < MEASURE_S / REPEATS or not n_calls:
            function()
            n_calls += 1
        times.append(elapsed_s / n_calls)
    return min(times)


def main() -> None:
    """Measure all candidates and print the table of the decision."""
    batch = node_batch()
    compressor = zstandard.ZstdCompressor(level=1)
    optional = [protobuf_candidate(batch), avro_candidate(batch)]
    candidates = [*msgspec_candidates(batch), arrow_candidate(batch), *(c for c in optional if c is not None)]
    raw_bytes = sum(values.nbytes for named in columns_of(batch).values() for values in named.values())
    print(f"{len(batch.calls)} calls of {N_RANKS} ranks, {raw_bytes} bytes of columns\n")
    print("| format | encode µs | decode µs | bytes | zstd-1 bytes | encode, relative | decode, relative |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    first: tuple[float, float] | None = None
    for candidate in candidates:
        check(candidate, batch)
        content = candidate.encode()
        encode_s = per_call_s(candidate.encode)
        decode_s = per_call_s(partial(candidate.decode, content))
        first = first or (encode_s, decode_s)
        print(
            f"| {candidate.name} | {encode_s * 1e6:.1f} | {decode_s * 1e6:.1f} | {len(content)} | "
            f"{len(compressor.compress(content))} | {encode_s / first[0]:.1f} | {decode_s / first[1]:.1f} |"
        )


if __name__ == "__main__":
    main()
