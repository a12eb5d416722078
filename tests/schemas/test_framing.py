"""Frames of messages survive any way of cutting the bytes that carry them."""

import pytest

from schemas.framing import MESSAGE_BYTES_MAX, Deframer, InvalidFrame, frame

MESSAGES = [b"", b"a", b"bc" * 211, b"", b"d" * 4099]


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 97, 100_003])
def test_messages_come_back_whatever_the_pieces_they_arrive_in(piece_bytes: int) -> None:
    content = b"".join(frame(message) for message in MESSAGES)
    deframer = Deframer()
    got: list[bytes] = []
    for start in range(0, len(content), piece_bytes):
        got.extend(deframer.feed(content[start : start + piece_bytes]))
    assert got == MESSAGES
    assert deframer.pending_bytes == 0


def test_an_incomplete_message_is_pending() -> None:
    deframer = Deframer()
    assert list(deframer.feed(frame(b"whole") + frame(b"half")[:-1])) == [b"whole"]
    assert deframer.pending_bytes == 7


def test_a_consumer_that_stops_early_loses_no_message() -> None:
    deframer = Deframer()
    messages = deframer.feed(frame(b"one") + frame(b"two"))
    assert next(messages) == b"one"
    del messages
    assert list(deframer.feed(b"")) == [b"two"]


def test_a_length_that_no_message_has_is_refused() -> None:
    with pytest.raises(InvalidFrame, match=str(MESSAGE_BYTES_MAX)):
        list(Deframer().feed(b"\xff\xff\xff\xff"))
