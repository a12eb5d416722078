"""Bytes and batches: the only module that knows the wire.

Batches are a small msgpack map whose tables are maps of raw little-endian columns; alerts are JSON. Anything that
cannot be read raises InvalidRecord with a reason for the dead-letter topic.
"""

from typing import Any, TypeVar

import msgspec

from schemas.alerts import Alert
from schemas.events import (
    SCHEMA_VERSION,
    Calls,
    Communicators,
    EventBatch,
    GpuSamples,
    HostSamples,
    Markers,
    PeerSamples,
    PortSamples,
    RankInfo,
    Sensor,
    Spans,
    Syncs,
)
from schemas.iterations import CommunicationRows, IterationBatch, IterationRows
from schemas.table import InvalidTable, Table

MAX_WORLD_SIZE = 1 << 20
_KNOWN_SENSORS = int(~Sensor(0))


class InvalidRecord(ValueError):
    """A record that cannot be read; the message says why."""


class _Columns(msgspec.Struct, array_like=True):
    n: int
    columns: dict[str, memoryview]


class _Wire(msgspec.Struct, kw_only=True):
    version: int
    job_id: str
    incarnation: str
    node: str
    seq: int
    agent_start_ns: int
    flush_ns: int
    flush_interval_ns: int
    world_size: int
    sensors: int
    lost_events: int = 0
    clock_error_ns: int | None = None
    is_last: bool = False
    agent_version: str = ""
    ranks: tuple[RankInfo, ...] = ()
    ports: tuple[str, ...] = ()
    tables: dict[str, _Columns] = {}


_EVENT_TABLES: dict[str, type[Table]] = {
    "communicators": Communicators,
    "calls": Calls,
    "spans": Spans,
    "syncs": Syncs,
    "gpu_samples": GpuSamples,
    "host_samples": HostSamples,
    "markers": Markers,
    "peer_samples": PeerSamples,
    "port_samples": PortSamples,
}
_ITERATION_TABLES: dict[str, type[Table]] = {
    "communicators": Communicators,
    "rows": IterationRows,
    "communication": CommunicationRows,
}
_PER_RANK = ("communicators", "calls", "spans", "syncs", "host_samples", "markers", "peer_samples", "rows")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Wire)
_alert_encoder = msgspec.json.Encoder()
_alert_decoder = msgspec.json.Decoder(Alert)

_Batch = TypeVar("_Batch", EventBatch, IterationBatch)


def encode_events(batch: EventBatch) -> bytes:
    """Return the wire form of an EventBatch."""
    return _encode(batch, _EVENT_TABLES, agent_version=batch.agent_version, ports=batch.ports)


def decode_events(content: bytes) -> EventBatch:
    """Read an EventBatch; its arrays are views of `content`. Raises InvalidRecord."""
    wire = _read(content)
    tables = _tables(wire, _EVENT_TABLES)
    if len(tables["port_samples"]) and tables["port_samples"].port.max() >= len(wire.ports):
        raise InvalidRecord("port_samples.port points past the last of ports")
    return EventBatch(agent_version=wire.agent_version, ports=wire.ports, **_common(wire), **tables)


def encode_iterations(batch: IterationBatch) -> bytes:
    """Return the wire form of an IterationBatch."""
    return _encode(batch, _ITERATION_TABLES)


def decode_iterations(content: bytes) -> IterationBatch:
    """Read an IterationBatch; its arrays are views of `content`. Raises InvalidRecord."""
    wire = _read(content)
    tables = _tables(wire, _ITERATION_TABLES)
    if len(tables["communication"]) and tables["communication"].row.max() >= len(tables["rows"]):
        raise InvalidRecord("communication.row points past the last iteration row")
    return IterationBatch(**_common(wire), **tables)


def encode_alert(alert: Alert) -> bytes:
    """Return an alert as JSON, byte for byte the same for equal alerts."""
    return _alert_encoder.encode(alert)


def decode_alert(content: bytes) -> Alert:
    """Read an alert. Raises InvalidRecord."""
    try:
        return _alert_decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRecord(f"not an alert: {error}") from error


def _encode(batch: _Batch, tables: dict[str, type[Table]], **more: Any) -> bytes:
    wire = _Wire(
        version=SCHEMA_VERSION,
        job_id=batch.job_id,
        incarnation=batch.incarnation,
        node=batch.node,
        seq=batch.seq,
        agent_start_ns=batch.agent_start_ns,
        flush_ns=batch.flush_ns,
        flush_interval_ns=batch.flush_interval_ns,
        world_size=batch.world_size,
        sensors=int(batch.sensors),
        lost_events=batch.lost_events,
        clock_error_ns=batch.clock_error_ns,
        is_last=batch.is_last,
        ranks=batch.ranks,
        tables={name: _Columns(len(table), table.to_wire()) for name in tables if len(table := getattr(batch, name))},
        **more,
    )
    return _encoder.encode(wire)


def _read(content: bytes) -> _Wire:
    try:
        wire = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRecord(f"not a batch: {error}") from error
    if wire.version != SCHEMA_VERSION:
        raise InvalidRecord(f"schema version {wire.version} is not known to this reader ({SCHEMA_VERSION})")
    if not (wire.job_id and wire.node):
        raise InvalidRecord("job_id and node must not be empty")
    if not 0 < wire.world_size <= MAX_WORLD_SIZE:
        raise InvalidRecord(f"world_size {wire.world_size} is outside 1..{MAX_WORLD_SIZE}")
    if wire.seq < 0 or wire.lost_events < 0 or wire.flush_interval_ns <= 0:
        raise InvalidRecord("seq and lost_events must not be negative, flush_interval_ns must be positive")
    if any(not 0 <= info.rank < wire.world_size for info in wire.ranks):
        raise InvalidRecord(f"a rank is outside 0..{wire.world_size - 1}")
    return wire


def _common(wire: _Wire) -> dict[str, Any]:
    return {
        "job_id": wire.job_id,
        "incarnation": wire.incarnation,
        "node": wire.node,
        "seq": wire.seq,
        "agent_start_ns": wire.agent_start_ns,
        "flush_ns": wire.flush_ns,
        "flush_interval_ns": wire.flush_interval_ns,
        "world_size": wire.world_size,
        "sensors": Sensor(wire.sensors & _KNOWN_SENSORS),
        "lost_events": wire.lost_events,
        "clock_error_ns": wire.clock_error_ns,
        "is_last": wire.is_last,
        "ranks": wire.ranks,
    }


def _tables(wire: _Wire, tables: dict[str, type[Table]]) -> dict[str, Any]:
    try:
        read = {
            name: table.from_wire(content.n, content.columns) if (content := wire.tables.get(name)) else table.empty()
            for name, table in tables.items()
        }
    except InvalidTable as error:
        raise InvalidRecord(str(error)) from error
    for name in _PER_RANK:
        table: Any = read.get(name)
        if table is not None and len(table) and table.rank.max() >= wire.world_size:
            raise InvalidRecord(f"{name}.rank is outside 0..{wire.world_size - 1}")
    return read
