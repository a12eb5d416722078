"""Messages one after another in a pipe or a file: each is preceded by its length, a 32-bit little-endian number."""

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
MESSAGE_BYTES_MAX = 1 << 28


class InvalidFrame(ValueError):
    """A length that no message can have: what is read is something else, or damaged."""


def frame(message: bytes) -> bytes:
    """Return the message with its length in front."""
    return _LENGTH.pack(len(message)) + message


class Deframer:
    """Cuts bytes that arrive in pieces of any size into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def pending_bytes(self) -> int:
        """How much of a message that is not complete yet has arrived."""
        return len(self._pending)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the messages that `piece` completes. Raises InvalidFrame."""
        self._pending += piece
        start = 0
        try:
            while len(self._pending) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._pending, start)
                if length > MESSAGE_BYTES_MAX:
                    raise InvalidFrame(f"a message of {length} bytes is longer than {MESSAGE_BYTES_MAX}")
                end = start + _LENGTH.size + length
                if end > len(self._pending):
                    return
                message = bytes(memoryview(self._pending)[start + _LENGTH.size : end])
                start = end
                yield message
        finally:
            del self._pending[:start]
