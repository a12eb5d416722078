"""What could not be read, set aside with where it was and why, so that somebody can look at it."""

from enum import StrEnum

import msgspec

from pipeline.record import Record
from schemas.codec import InvalidRecord

SCHEMA_VERSION = 1
VALUE_BYTES_MAX = 1 << 20  # kept of a value: enough to see what it is, and never too large to be published


class Cause(StrEnum):
    """The two ways of being set aside; also the label of the metric."""

    UNREADABLE = "unreadable"
    POISON = "poison"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One record that was set aside; key and value are base64 in JSON."""

    schema_version: int
    cause: Cause
    reason: str
    topic: str
    partition: int
    offset: int
    time_ns: int
    key: bytes
    value: bytes
    value_bytes: int  # of the whole value, of which VALUE_BYTES_MAX at most are kept


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(DeadLetter)


def letter(record: Record, cause: Cause, reason: str) -> DeadLetter:
    """Set a record aside."""
    return DeadLetter(
        schema_version=SCHEMA_VERSION,
        cause=cause,
        reason=reason,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        time_ns=record.time_ns,
        key=record.key,
        value=record.value[:VALUE_BYTES_MAX],
        value_bytes=len(record.value),
    )


def encode(dead: DeadLetter) -> bytes:
    """Return a dead letter as JSON."""
    return _encoder.encode(dead)


def decode(content: bytes) -> DeadLetter:
    """Read a dead letter. Raises InvalidRecord."""
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRecord(f"not a dead letter: {error}") from error
