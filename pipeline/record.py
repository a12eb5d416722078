"""One message as the broker held it: the unit that is consumed, recorded and replayed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """An undecoded message; replaying records therefore exercises the decoder too.

    time_ns is the broker's timestamp of the message, in nanoseconds since the epoch.
    """

    topic: str
    partition: int
    offset: int
    time_ns: int
    key: bytes
    value: bytes
