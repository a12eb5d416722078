"""Batches arrive in order and once; while the broker is away the newest are kept and the others counted."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from confluent_kafka import Consumer, TopicPartition

from agents.publisher import Publisher
from pipeline.broker import EmbeddedBroker
from schemas.codec import decode_events, encode_events
from schemas.events import EventBatch, Sensor, Syncs
from schemas.topics import EVENTS, MAX_MESSAGE_BYTES, TOPICS

pytestmark = pytest.mark.broker

DEADLINE_S = 30.0
N_BATCHES = 97


def batch(seq: int, node: str = "node-3") -> EventBatch:
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
    )


BATCH_BYTES = len(encode_events(batch(5)))


@contextlib.contextmanager
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(TOPICS) as started:
        yield started


def consumed(bootstrap: str, n_messages: int) -> list[EventBatch]:
    partitions = next(spec.partitions for spec in TOPICS if spec.name == EVENTS)
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "test", "log_level": 0, "fetch.wait.max.ms": 50})
    consumer.assign([TopicPartition(EVENTS, partition, 0) for partition in range(partitions)])
    deadline_s = time.monotonic() + DEADLINE_S
    batches: list[EventBatch] = []
    while len(batches) < n_messages:
        assert time.monotonic() < deadline_s, f"only {len(batches)} of {n_messages} batches came"
        batches += [decode_events(message.value()) for message in consumer.consume(500, 0.1)]
    assert consumer.consume(1, 0.2) == []
    consumer.close()
    return batches


def poll_until(publisher: Publisher, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        publisher.poll(0.05)


def test_batches_of_a_node_arrive_in_order_and_once_each_with_their_key() -> None:
    with broker() as started, Publisher(started.bootstrap, buffer_bytes_max=1 << 20) as publisher:
        for seq in range(N_BATCHES):
            for node in ("node-3", "node-5"):
                publisher.publish(batch(seq, node))
        assert publisher.close() == 0
        assert publisher.n_delivered == 2 * N_BATCHES
        batches = consumed(started.bootstrap, 2 * N_BATCHES)
        for node in ("node-3", "node-5"):
            assert [b.seq for b in batches if b.node == node] == list(range(N_BATCHES))


def test_a_broker_that_comes_back_gets_what_waited_for_it() -> None:
    with broker() as started, Publisher(started.bootstrap, buffer_bytes_max=1 << 20) as publisher:
        publisher.publish(batch(0))
        poll_until(publisher, lambda: publisher.n_delivered == 1)
        started.down()
        for seq in range(1, N_BATCHES):
            publisher.publish(batch(seq))
        started.up()
        poll_until(publisher, lambda: publisher.n_delivered == N_BATCHES)
        assert [b.seq for b in consumed(started.bootstrap, N_BATCHES)] == list(range(N_BATCHES))
        assert publisher.n_dropped == 0


def test_without_a_broker_the_newest_are_kept_within_the_bound_and_the_others_counted() -> None:
    # Nothing listens there, so what librdkafka holds and what waits here add up to what was not dropped.
    n_kept, n_dropped = 17, 293
    publisher = Publisher("127.0.0.1:1", buffer_bytes_max=n_kept * BATCH_BYTES)
    for seq in range(n_kept + n_dropped):
        publisher.publish(replace(batch(5), flush_ns=10**18 + seq))
        assert publisher.n_in_flight <= n_kept // 4
    assert publisher.n_dropped == n_dropped
    assert publisher.n_waiting == n_kept
    newest = [decode_events(value).flush_ns for _, value in publisher._waiting]
    n_in_flight = publisher.n_in_flight
    assert n_in_flight > 0
    assert newest == [10**18 + seq for seq in range(n_dropped + n_in_flight, n_dropped + n_kept)]
    assert publisher.close(0.1) == n_kept
    assert publisher.n_delivered == 0


def test_publishing_never_waits_for_a_broker_that_is_away() -> None:
    publisher = Publisher("127.0.0.1:1", buffer_bytes_max=1 << 20)
    done = threading.Event()

    def publish() -> None:
        for seq in range(1009):
            publisher.publish(batch(seq))
        done.set()

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    assert done.wait(DEADLINE_S)
    thread.join()
    publisher.close(0.1)


def test_what_no_message_can_hold_is_dropped_and_counted_and_the_agent_goes_on() -> None:
    n_rows = MAX_MESSAGE_BYTES // 16
    large = replace(batch(0), syncs=Syncs.build(n_rows, rank=0, start_ns=np.arange(n_rows), duration_ns=3))
    assert len(encode_events(large)) > MAX_MESSAGE_BYTES
    with broker() as started, Publisher(started.bootstrap, buffer_bytes_max=1 << 26) as publisher:
        publisher.publish(large)
        publisher.publish(batch(1))
        assert publisher.close() == 0
        assert (publisher.n_dropped, publisher.n_delivered) == (1, 1)
        (only,) = consumed(started.bootstrap, 1)
        assert (only.seq, only.lost_events) == (1, n_rows)


def test_a_batch_larger_than_the_buffer_is_sent_where_the_broker_takes_it() -> None:
    with broker() as started, Publisher(started.bootstrap, buffer_bytes_max=7) as publisher:
        for seq in range(3):
            publisher.publish(batch(seq))
            poll_until(publisher, lambda n=seq + 1: publisher.n_delivered == n)  # type: ignore[misc]
        assert publisher.n_dropped == 0
        assert publisher._waiting_bytes == publisher._in_flight_bytes == 0
