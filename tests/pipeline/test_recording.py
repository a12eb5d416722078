"""A recording gives back what was written, and a clear statement where it cannot."""

import errno
import hashlib
import os
from pathlib import Path

import msgspec
import pytest
import zstandard

from pipeline import recording as recording_module
from pipeline.record import Record
from pipeline.recording import (
    MAX_BYTES_LEAST,
    Header,
    RecordingError,
    read_recording,
    write_recording,
)
from schemas.framing import frame

N_RECORDS = 97


def records(n_records: int = N_RECORDS, value_bytes: int = 211) -> list[Record]:
    return [
        Record(
            "failslow.events",
            i % 5,
            i // 5,
            10**18 + i,
            f"job/node-{i % 7}".encode(),
            incompressible(i, value_bytes),
        )
        for i in range(n_records)
    ]


def incompressible(seed: int, n_bytes: int) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(n_bytes)


def written(path: Path, content: list[Record], *, block_records: int = 13) -> Path:
    with write_recording(path, Header(source="a test", configuration={"threshold": 1.05})) as writer:
        for i, record in enumerate(content, 1):
            writer.write(record)
            if i % block_records == 0:
                writer.flush()
    return path


def test_records_and_header_come_back_as_written(tmp_path: Path) -> None:
    recording = read_recording(written(tmp_path / "a.fsr", records()))
    assert list(recording) == records()
    assert recording.truncated is None
    assert recording.header.source == "a test"
    assert recording.header.configuration == {"threshold": 1.05}
    assert recording.header.failslow_version


def test_a_recording_can_be_read_twice(tmp_path: Path) -> None:
    recording = read_recording(written(tmp_path / "a.fsr", records()))
    assert list(recording) == list(recording)


def test_equal_records_give_equal_files(tmp_path: Path) -> None:
    first = written(tmp_path / "a.fsr", records()).read_bytes()
    assert first == written(tmp_path / "b.fsr", records()).read_bytes()


def test_a_recording_without_records_is_complete(tmp_path: Path) -> None:
    recording = read_recording(written(tmp_path / "a.fsr", []))
    assert list(recording) == []
    assert recording.truncated is None


def test_a_recording_cut_anywhere_gives_a_prefix_and_says_so(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.fsr", records()).read_bytes()
    header_bytes = len(written(tmp_path / "b.fsr", []).read_bytes())
    cut = tmp_path / "cut.fsr"
    lengths = []
    for n_bytes in range(header_bytes, len(whole), 37):
        cut.write_bytes(whole[:n_bytes])
        recording = read_recording(cut)
        got = list(recording)
        assert got == records()[: len(got)]
        assert recording.truncated is not None
        assert f"cut after {len(got)} records" in recording.truncated
        lengths.append(len(got))
    assert lengths == sorted(lengths)
    assert lengths[-1] == N_RECORDS


def test_what_was_flushed_is_readable_while_the_writer_still_runs(tmp_path: Path) -> None:
    path = tmp_path / "a.fsr"
    with write_recording(path, Header()) as writer:
        for record in records(23):
            writer.write(record)
        writer.flush()
        recording = read_recording(path)
        assert list(recording) == records(23)
        assert recording.truncated is not None


def test_damage_gives_the_blocks_before_it_and_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "a.fsr", records())
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 0x55
    path.write_bytes(whole)
    recording = read_recording(path)
    got = list(recording)
    assert got == records()[: len(got)]
    assert 0 < len(got) < N_RECORDS
    assert recording.truncated is not None
    assert recording.truncated.startswith("damaged after")


def test_a_missing_block_in_the_middle_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.fsr"
    with write_recording(path, Header()) as writer:
        sizes = []
        for record in records(3):
            writer.write(record)
            writer.flush()
            sizes.append(path.stat().st_size)
    whole = path.read_bytes()
    path.write_bytes(whole[: sizes[0]] + whole[sizes[1] :])
    recording = read_recording(path)
    assert len(list(recording)) == 2
    assert recording.truncated == "holds 2 of 3 records; the others are missing"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PAR1 something else",
        zstandard.compress(b"plain text, long enough to look like a length"),
        zstandard.compress(frame(msgspec.msgpack.encode({"format": "another"}))),
        zstandard.compress(frame(msgspec.msgpack.encode([1, 2]))),
    ],
)
def test_a_file_of_another_kind_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"is not a recording; .*make them"):
        read_recording(path)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot read .*absent.fsr: No such file"):
        read_recording(tmp_path / "absent.fsr")


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.fsr"
    with write_recording(path, Header(format_version=99)):
        pass
    with pytest.raises(RecordingError, match=r"recording format 99.*update it"):
        read_recording(path)


def test_fields_that_a_later_version_adds_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "a.fsr"
    header = {**msgspec.to_builtins(Header()), "mood": "cheerful"}
    record = ["r", "failslow.events", 2, 3, 5, b"key", b"value", "more"]
    messages = [header, record, ["e", 1, 0, "more"]]
    path.write_bytes(zstandard.compress(b"".join(frame(msgspec.msgpack.encode(m)) for m in messages)))
    recording = read_recording(path)
    assert list(recording) == [Record("failslow.events", 2, 3, 5, b"key", b"value")]
    assert recording.truncated is None


def test_a_size_bound_is_kept_and_what_it_dropped_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.fsr"
    # Blocks of some hundred bytes, so that the last one that fits comes close to the bound.
    content = [Record("failslow.events", 0, i, i, b"k", incompressible(i, 83)) for i in range(1009)]
    with write_recording(path, Header(), max_bytes=MAX_BYTES_LEAST) as writer:
        for record in content:
            writer.write(record)
            writer.flush()
    assert MAX_BYTES_LEAST - 400 < path.stat().st_size <= MAX_BYTES_LEAST
    recording = read_recording(path)
    got = list(recording)
    assert got == content[: len(got)]
    assert 0 < len(got) < len(content)
    assert recording.n_dropped == len(content) - len(got) == writer.n_dropped
    assert recording.truncated is None


def test_a_size_bound_too_small_for_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="below the least"):
        write_recording(tmp_path / "a.fsr", Header(), max_bytes=1000)


def test_a_full_disk_is_a_clear_error_and_what_was_written_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.fsr"
    with pytest.raises(RecordingError, match="No space left on device; the 23 records before it are kept"):  # noqa: PT012, SIM117
        with write_recording(path, Header()) as writer:
            for record in records(23):
                writer.write(record)
            writer.flush()
            monkeypatch.setattr(writer, "_file", FullDisk(writer._file))
            size_bytes = path.stat().st_size
            writer.write(records(24)[-1])
            writer.flush()
    assert path.stat().st_size == size_bytes
    recording = read_recording(path)
    assert list(recording) == records(23)
    assert recording.truncated is not None


class FullDisk:
    """A file whose disk takes ten more bytes of a write and then no more."""

    def __init__(self, file: object) -> None:
        self._file = file
        self._is_full = False

    def write(self, content: memoryview) -> int:
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._is_full = True
        return int(self._file.write(content[:10]))  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def test_a_directory_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot write .*: No such file"):
        write_recording(tmp_path / "absent" / "a.fsr", Header())


def test_a_block_that_unfolds_beyond_all_measure_is_damage_not_an_exhausted_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_module, "_FRAME_BYTES_MAX", 1 << 16)
    path = written(tmp_path / "a.fsr", records(5))
    longer = Record("failslow.events", 0, 5, 5, b"k", incompressible(1, 1 << 17))
    with write_recording(tmp_path / "empty.fsr", Header()) as writer:
        end_bytes = -writer.path.stat().st_size
    end_bytes += writer.path.stat().st_size
    with write_recording(tmp_path / "longer.fsr", Header()) as writer:
        header_bytes = writer.path.stat().st_size
        writer.write(longer)
    # The end of the first file is replaced by the one long block of the second.
    path.write_bytes(path.read_bytes()[:-end_bytes] + (tmp_path / "longer.fsr").read_bytes()[header_bytes:])
    recording = read_recording(path)
    assert list(recording) == records(5)
    assert recording.truncated is not None
    assert recording.truncated.startswith("damaged")
