"""What a driver owes its lanes: nothing counts as done before the broker has it."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from pipeline import live, plain
from pipeline.lanes import Lane, Lanes
from pipeline.metrics import Metrics, PartitionObserver
from pipeline.poison import Hand, Ledger
from pipeline.record import Record
from pipeline.settings import Settings
from pipeline.wiring import Parts
from schemas.codec import encode_events
from schemas.topics import EVENTS, ITERATIONS
from tests.integration.fake_stages import STAGES, FakeWindow, batch

RECORD = Record(EVENTS, 0, 0, 0, b"job-a/n0", encode_events(batch("job-a", 0)))


@dataclass
class SlowPublisher:
    """Acknowledges when the test says so."""

    futures: "list[Future[None]]" = field(default_factory=list)

    def publish(self, topic: str, key: bytes | None, value: bytes) -> "Future[None]":
        assert topic == ITERATIONS
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def publisher() -> SlowPublisher:
    return SlowPublisher()


@pytest.fixture
def parts(tmp_path: Path, publisher: SlowPublisher) -> Parts:
    metrics, hand, ledger = Metrics(CollectorRegistry()), Hand(tmp_path / "hand"), Ledger(tmp_path / "ledger.json")
    lanes = Lanes(Settings(), STAGES, metrics, hand, ledger)
    lanes._lanes[EVENTS, 0] = Lane(
        partition=(EVENTS, 0), stage=FakeWindow(metrics), position=0, committed=0, end=0, published=None,
        metrics=metrics, observer=PartitionObserver(metrics), hand=hand, ledger=ledger,
    )  # fmt: skip
    return Parts(lanes, cast("Any", publisher), metrics)


def test_faust_has_nothing_to_commit_before_the_broker_has_what_came_of_a_record(
    parts: Parts, publisher: SlowPublisher
) -> None:
    async def drive() -> None:
        handling = asyncio.ensure_future(live._handle(parts, RECORD))
        while not publisher.futures:
            await asyncio.sleep(0)
        assert parts.lanes.positions == {}
        publisher.futures[0].set_result(None)
        await handling
        assert parts.lanes.positions == {(EVENTS, 0): 1}

    asyncio.run(drive())


def test_a_record_whose_handling_was_cancelled_is_not_done(parts: Parts, publisher: SlowPublisher) -> None:
    async def drive() -> None:
        handling = asyncio.ensure_future(live._handle(parts, RECORD))
        while not publisher.futures:
            await asyncio.sleep(0)
        handling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handling

    asyncio.run(drive())
    assert parts.lanes.positions == {}


def test_the_plain_loop_has_nothing_to_commit_when_it_is_told_to_end_during_an_outage(
    parts: Parts, publisher: SlowPublisher
) -> None:
    loop = plain._Loop(Settings(bootstrap="127.0.0.1:1"), parts)
    loop._is_ending = True
    with pytest.raises(plain._Ended):
        loop._handle(RECORD)
    assert len(publisher.futures) == 1
    assert parts.lanes.positions == {}


def test_a_record_of_a_partition_that_is_gone_is_left_to_its_new_owner(parts: Parts, publisher: SlowPublisher) -> None:
    other = Record(EVENTS, 5, 0, 0, RECORD.key, RECORD.value)
    asyncio.run(live._handle(parts, other))
    plain._Loop(Settings(bootstrap="127.0.0.1:1"), parts)._handle(other)
    assert publisher.futures == []
