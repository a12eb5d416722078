"""The reader of the kernel's ring, on a file laid out as the kernel lays one out."""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agents.ebpf.ring import Ring

PAGE = mmap.PAGESIZE
DTYPE = np.dtype([("number", "<u8"), ("square", "<u8")])
RECORD = DTYPE.itemsize + 8
BUSY, DISCARDED = 1 << 31, 1 << 30


class Writer:
    """What the kernel does."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._file.truncate(2 * PAGE + 2 * PAGE)
        self.n_bytes = 0
        self.fd = self._file.fileno()

    def write(self, number: int, header: int = DTYPE.itemsize) -> int:
        content = struct.pack("<IIQQ", header, 0, number, number * number)
        place = self.n_bytes
        for i, byte in enumerate(content):  # both copies
            for copy in range(2):
                self._put(2 * PAGE + (place + i) % PAGE + copy * PAGE, bytes([byte]))
        self.n_bytes += RECORD
        self._put(PAGE, struct.pack("<Q", self.n_bytes))
        return place

    def commit(self, place: int) -> None:
        for copy in range(2):
            self._put(2 * PAGE + place % PAGE + copy * PAGE, struct.pack("<I", DTYPE.itemsize))

    @property
    def n_read(self) -> int:
        self._file.seek(0)
        return int(struct.unpack("<Q", self._file.read(8))[0])

    def close(self) -> None:
        self._file.close()

    def _put(self, place: int, content: bytes) -> None:
        self._file.seek(place)
        self._file.write(content)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "ring")
    yield writer
    writer.close()


@pytest.fixture
def ring(writer: Writer) -> Iterator[Ring]:
    ring = Ring(writer.fd, PAGE, DTYPE)
    yield ring
    ring.close()


def numbers(ring: Ring) -> list[int]:
    rows = ring.read()
    assert (rows["square"] == rows["number"] ** 2).all()
    return [int(number) for number in rows["number"]]


def test_records_are_read_once_and_their_room_is_given_back(ring: Ring, writer: Writer) -> None:
    assert numbers(ring) == []
    for number in range(7):
        writer.write(number)
    assert numbers(ring) == list(range(7))
    assert writer.n_read == 7 * RECORD
    assert numbers(ring) == []


def test_the_end_of_the_ring_is_no_end(ring: Ring, writer: Writer) -> None:
    """A page does not hold a whole number of records, so that each round cuts another one in two."""
    assert PAGE % RECORD
    for start in range(0, 1009, 101):
        for number in range(start, start + 101):
            writer.write(number)
        assert numbers(ring) == list(range(start, start + 101))


def test_a_record_that_is_still_written_holds_up_those_behind_it(ring: Ring, writer: Writer) -> None:
    writer.write(1)
    place = writer.write(2, BUSY | DTYPE.itemsize)
    writer.write(3)
    assert numbers(ring) == [1]
    assert writer.n_read == RECORD
    assert numbers(ring) == []
    writer.commit(place)
    assert numbers(ring) == [2, 3]


def test_a_record_that_was_given_up_is_left_out(ring: Ring, writer: Writer) -> None:
    writer.write(1)
    writer.write(2, DISCARDED | DTYPE.itemsize)
    writer.write(3)
    assert numbers(ring) == [1, 3]
    assert writer.n_read == 3 * RECORD


def test_what_was_read_does_not_change_when_the_ring_goes_on(ring: Ring, writer: Writer) -> None:
    writer.write(1)
    rows = ring.read()
    for number in range(2, 400):
        writer.write(number)
        ring.read()
    assert rows["number"].tolist() == [1]
