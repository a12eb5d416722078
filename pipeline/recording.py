"""Recordings: what the topics held, in one self-describing file (docs/decisions/0005-recordings.md).

The file is a sequence of zstd frames, which `zstd -d` reads as one stream of messages, each preceded by its length:
a header, then records in arrival order, then an end that counts them. Every frame is complete in itself and carries a
checksum, so a file that was cut or damaged is readable up to there, and says so.
"""

import os
from collections.abc import Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec
import zstandard

from pipeline.record import Record
from schemas.framing import MESSAGE_BYTES_MAX, Deframer, InvalidFrame, frame

FORMAT = "failslow recording"
FORMAT_VERSION = 1
BLOCK_BYTES = 1 << 20
MAX_BYTES_LEAST = 1 << 16

_END_BYTES_MAX = 128  # what the compressed end may take, kept free under a size bound
_PIECE_BYTES = 1 << 12  # small, so that no damaged or hostile piece can unfold to much more than a block
_FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + BLOCK_BYTES


class RecordingError(ValueError):
    """A file that cannot be read or written as a recording; the message says why and what to do."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of. `configuration` holds the settings that its alerts were made with."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    failslow_version: str = ""
    source: str = ""  # the broker, scenario or imported file that it was made from
    created_ns: int | None = None
    topics: tuple[str, ...] = ()
    configuration: dict[str, Any] = {}


class _Record(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    topic: str
    partition: int
    offset: int
    time_ns: int
    key: bytes
    value: bytes


class _End(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    n_records: int
    n_dropped: int


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_message_decoder = msgspec.msgpack.Decoder(_Record | _End)


class RecordingWriter:
    """Writes records in place, block by block: what has been flushed survives a crash. Use it in a `with` statement.

    Past `max_bytes` whole blocks are dropped and counted in `n_dropped`; the file never grows beyond the bound.
    """

    def __init__(self, path: Path, header: Header, *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < MAX_BYTES_LEAST:
            raise RecordingError(f"a size bound of {max_bytes} bytes is below the least of {MAX_BYTES_LEAST}")
        self.path = path
        self.n_records = 0
        self.n_dropped = 0
        self._max_bytes = max_bytes
        self._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self._block = bytearray()
        self._n_in_block = 0
        self._size_bytes = 0
        self._is_full = False
        try:
            self._file: BinaryIO = path.open("wb", buffering=0)
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}") from error
        self._block += frame(_encoder.encode(msgspec.structs.replace(header, failslow_version=version("failslow"))))
        try:
            self.flush()
        except RecordingError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, RecordingError):
                self.close()
        finally:
            self._file.close()

    def write(self, record: Record) -> None:
        """Add one record. Raises RecordingError where the disk is full; what was flushed before stays readable."""
        if self._is_full:
            self.n_dropped += 1
            return
        self._block += frame(
            _encoder.encode(
                _Record(record.topic, record.partition, record.offset, record.time_ns, record.key, record.value)
            )
        )
        self._n_in_block += 1
        if len(self._block) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write out what is buffered as one block, so that it survives this process."""
        if not self._block:
            return
        content = self._compressor.compress(bytes(self._block))
        if self._max_bytes is not None and self._size_bytes + len(content) + _END_BYTES_MAX > self._max_bytes:
            self._is_full = True
            self.n_dropped += self._n_in_block
        else:
            self._append(content)
            self.n_records += self._n_in_block
        self._block.clear()
        self._n_in_block = 0

    def close(self) -> None:
        """Write out the rest and the end, which tells a complete recording from a cut one."""
        if self._file.closed:
            return
        try:
            self.flush()
            self._append(self._compressor.compress(frame(_encoder.encode(_End(self.n_records, self.n_dropped)))))
        finally:
            self._file.close()

    def _append(self, content: bytes) -> None:
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size_bytes)
            raise RecordingError(
                f"cannot go on writing {self.path}: {error.strerror}; the {self.n_records} records before it are kept"
            ) from error
        self._size_bytes += len(content)


def write_recording(path: Path, header: Header, *, max_bytes: int | None = None) -> RecordingWriter:
    """Open a new recording for writing, replacing the file. Raises RecordingError."""
    return RecordingWriter(path, header, max_bytes=max_bytes)


class Recording:
    """A recording on disk; iterating reads it anew from the start.

    `truncated` and `n_dropped` are known once an iteration has reached the end: `truncated` says why the recording ends
    early, and is None for a complete one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truncated: str | None = None
        self.n_dropped = 0
        self._ending = ""
        messages = self._messages()
        try:
            self.header = _read_header(path, next(messages, None))
        finally:
            messages.close()

    def __iter__(self) -> Iterator[Record]:
        self.truncated = None
        n_records = 0
        messages = self._messages()
        next(messages)
        for message in messages:
            try:
                content = _message_decoder.decode(message)
            except msgspec.DecodeError:
                self.truncated = f"damaged after {n_records} records; they are used, the rest is not"
                return
            if isinstance(content, _End):
                self.n_dropped = content.n_dropped
                if content.n_records != n_records:
                    self.truncated = f"holds {n_records} of {content.n_records} records; the others are missing"
                return
            n_records += 1
            yield Record(content.topic, content.partition, content.offset, content.time_ns, content.key, content.value)
        self.truncated = f"{self._ending} after {n_records} records; they are used, the rest is not"

    def _messages(self) -> Generator[bytes, None, None]:
        """Yield messages until the file ends or is damaged, and note which."""
        self._ending = "cut"
        deframer = Deframer()
        try:
            with self.path.open("rb") as file:
                for piece in _decompressed(file):
                    yield from deframer.feed(piece)
        except (zstandard.ZstdError, InvalidFrame):
            self._ending = "damaged"
        except OSError as error:
            raise RecordingError(f"cannot read {self.path}: {error.strerror}") from error


def read_recording(path: Path) -> Recording:
    """Open a recording for reading. Raises RecordingError for a file that is none, or of a newer format."""
    return Recording(path)


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Yield what the zstd frames hold: each whole frame once its checksum is right, and what a cut last one still has.

    Raises ZstdError at the first damaged frame, InvalidFrame at one that unfolds beyond all measure.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    unread = b""
    while piece := unread or file.read(_PIECE_BYTES):
        decoder = decompressor.decompressobj()
        parts = [decoder.decompress(piece)]
        n_bytes = len(parts[0])
        while not decoder.eof and (piece := file.read(_PIECE_BYTES)):
            parts.append(decoder.decompress(piece))
            n_bytes += len(parts[-1])
            if n_bytes > _FRAME_BYTES_MAX:
                raise InvalidFrame(f"a block is longer than {_FRAME_BYTES_MAX} bytes")
        yield b"".join(parts)
        unread = decoder.unused_data


def _read_header(path: Path, message: bytes | None) -> Header:
    try:
        header = _header_decoder.decode(message or b"")
    except msgspec.DecodeError:
        header = None
    if header is None or header.format != FORMAT:
        raise RecordingError(f"{path} is not a recording; `failslow record`, `simulate` and `import` make them")
    if header.format_version > FORMAT_VERSION:
        raise RecordingError(
            f"{path} has recording format {header.format_version}, written by failslow {header.failslow_version}; "
            f"this is failslow {version('failslow')}, which reads up to {FORMAT_VERSION}: update it"
        )
    return header
