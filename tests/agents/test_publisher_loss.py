"""What an agent drops for lack of room is counted, event by event, in what its node says next."""

from typing import Any

import pytest

from agents.publisher import Publisher
from schemas.codec import decode_events, encode_events
from schemas.events import Calls, EventBatch, Markers, Sensor

NOWHERE = "127.0.0.1:1"


def batch(seq: int, *, node: str = "node-3", calls: int = 0, lost_events: int = 0) -> EventBatch:
    return EventBatch(
        job_id="job",
        incarnation="0",
        node=node,
        agent_version="0.1",
        seq=seq,
        agent_start_ns=13,
        flush_ns=10**18 + seq,
        flush_interval_ns=10**9,
        world_size=23,
        sensors=Sensor.GPU,
        lost_events=lost_events,
        calls=Calls.build(
            2, rank=0, comm=1, op=0, source=0, bytes=8, count=calls, first_seq=0, seq_known=1, start_ns=0, end_ns=0,
            duration_ns=0, duration_min_ns=0,
        ),
        markers=Markers.build(3, rank=0, kind=0, iteration=seq, time_ns=0),
    )  # fmt: skip


class Taken:
    """A producer that takes nothing until it is told to, and what it took is acknowledged when it is polled."""

    def __init__(self) -> None:
        self.is_full = True
        self.batches: list[EventBatch] = []
        self.unacknowledged: list[Any] = []

    def produce(self, topic: str, *, value: bytes, key: bytes, on_delivery: Any) -> None:
        if self.is_full:
            raise BufferError
        self.batches.append(decode_events(value))
        self.unacknowledged.append(on_delivery)

    def poll(self, timeout_s: float) -> None:
        while self.unacknowledged:
            self.unacknowledged.pop(0)(None, None)

    def __len__(self) -> int:
        return len(self.unacknowledged)


@pytest.fixture
def taken() -> Taken:
    return Taken()


@pytest.fixture
def publisher(taken: Taken) -> Publisher:
    made = Publisher(NOWHERE, buffer_bytes_max=7 * len(encode_events(batch(0))) + 1)
    made._producer = taken
    return made


def test_dropped_events_are_counted_into_the_next_batch_of_their_node(publisher: Publisher, taken: Taken) -> None:
    for seq in range(5):
        publisher.publish(batch(seq, calls=11, lost_events=int(seq == 1)))
        publisher.publish(batch(seq, node="node-5"))
    taken.is_full = False
    publisher.publish(batch(5))
    while publisher.n_waiting:
        publisher.poll(0)
    said = {(one.node, one.seq): one.lost_events for one in taken.batches}
    # Four had to go: batches 0 and 1 of either node.
    assert publisher.n_dropped == 4
    assert said == {
        ("node-3", 2): 2 * (2 * 11 + 3) + 1,
        ("node-3", 3): 0,
        ("node-3", 4): 0,
        ("node-3", 5): 0,
        ("node-5", 2): 2 * 3,
        ("node-5", 3): 0,
        ("node-5", 4): 0,
    }


def test_nothing_is_counted_where_nothing_was_dropped(publisher: Publisher, taken: Taken) -> None:
    taken.is_full = False
    for seq in range(7):
        publisher.publish(batch(seq, lost_events=seq))
    publisher.poll(0)
    assert [one.lost_events for one in taken.batches] == list(range(7))
