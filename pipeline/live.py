"""The stages under Faust. Here alone the word agent means Faust's: a stream processor.

Faust acknowledges a record when its stream processor is left, in whatever way, and commits from what was acknowledged;
it also starts from what is committed, with no state. Both are replaced here: what is committed is how far the lanes
have come, and where a partition begins is where its lane begins (docs/decisions/0006-live-recovery.md).
"""

import asyncio
import contextlib
import logging
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

import faust
import uvloop
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode.utils.futures import notify

from pipeline.lookback import Partition
from pipeline.merging import HOLD_S, Merge
from pipeline.record import Record
from pipeline.settings import REQUEST_TIMEOUT_S, Settings
from pipeline.wiring import Parts, Stages, parts
from schemas.topics import EVENTS, MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)
_faust_logger = logging.getLogger("faust.worker")  # its services log under the module of their class otherwise

END_S_MAX = 10.0
FETCH_BYTES_MAX = 1 << 20  # of one partition at a time, so that others are heard of; a larger message still comes
_MAX_POLL_INTERVAL_S = 24 * 3600.0  # a broker that is away is waited for; a worker that is dead misses its heartbeats


def run(settings: Settings, stages: Stages | None = None) -> None:
    """Run one worker until it is told to end (SIGTERM, SIGINT).

    Raises TopicsMissing, BrokerUnreachable or InvalidSettings at the start. Later, whatever is no InvalidRecord ends
    the process at once and without a commit.
    """
    with parts(settings, stages) as made, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, made))


async def _serve(settings: Settings, made: Parts) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    with tempfile.TemporaryDirectory(prefix="failslow-") as folder:
        app = build(settings, made, folder)
        try:
            starting = asyncio.ensure_future(app.start())
            draining = asyncio.ensure_future(app.drain_for_ever())
            await app.wait_for_stopped(ending.wait())
            draining.cancel()
            if not ending.is_set():
                raise app.crash_reason or RuntimeError("Faust has stopped by itself")  # noqa: TRY301 - one way out
        except BaseException as error:  # noqa: BLE001 - stopping Faust in an orderly way would commit
            made.end_at_once(None, error)
        try:
            async with asyncio.timeout(END_S_MAX):
                await app.stop()
        except TimeoutError:
            logger.warning("ended while the broker was away")
        starting.cancel()


def build(settings: Settings, made: Parts, folder: str) -> "_App":
    """Return the Faust application, not yet started: one agent for each topic of the stage."""
    app = _App(
        settings.consumer_group,
        made=made,
        datadir=folder,
        broker=[f"kafka://{address.strip()}" for address in settings.bootstrap.split(",")],
        store="memory://",
        autodiscover=False,
        web_enabled=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        key_serializer="raw",
        value_serializer="raw",
        consumer_group_instance_id=settings.member or None,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=FETCH_BYTES_MAX,
        broker_session_timeout=settings.session_timeout_s,
        broker_heartbeat_interval=settings.session_timeout_s / 4,
        broker_request_timeout=REQUEST_TIMEOUT_S,
        broker_max_poll_interval=_MAX_POLL_INTERVAL_S,
        broker_commit_interval=settings.commit_interval_s,
        producer_max_request_size=MAX_MESSAGE_BYTES,
        stream_wait_empty=False,
        table_standby_replicas=0,  # Faust assigns round-robin then, so that a group may have workers of other stages
    )
    app.fetch_wait_ms = settings.fetch_wait_ms
    for name in settings.stage.topics:
        feed = _Feed(app, name)
        topic = app.topic(name, key_serializer="raw", value_serializer="raw", internal=True)
        app.agent(topic, name=name, concurrency=1)(feed.agent)
        app.feeds.append(feed)
    return app


class _Feed:
    """Hands the records of one topic to its lanes: events in order of time, iterations as they come.

    A job's iterations are all in one partition; its events are in many.
    """

    def __init__(self, app: "_App", topic: str) -> None:
        self._app = app
        self._topic = topic
        self._merge = Merge() if topic == EVENTS else None
        self._draining = asyncio.Lock()

    async def agent(self, stream: Any) -> None:
        """Take records from Faust for as long as the worker runs."""
        async for event in stream.events():
            message = event.message
            record = Record(
                message.topic,
                message.partition,
                message.offset,
                round(message.timestamp * 1000) * 1_000_000,
                message.key or b"",
                message.value or b"",
            )
            if self._merge is None:
                await self._handle(record)
            else:
                self._merge.add(record, time.monotonic())
                await self.drain()

    async def drain(self) -> None:
        """Handle what is known to be next."""
        async with self._draining:
            while self._merge is not None:
                assigned = self._app.made.lanes.assigned(self._topic)
                record = self._merge.pop(assigned, self._is_behind, time.monotonic())
                if record is None:
                    return
                if self._merge.n_forced:
                    self._app.made.metrics.counted("records_not_merged", self._merge.n_forced)
                    self._merge.n_forced = 0
                await self._handle(record)

    def clear(self) -> None:
        """Forget what was fetched and not handled: it will be fetched again."""
        if self._merge is not None:
            self._merge.clear()

    def _is_behind(self, partition: Partition, offset: int) -> bool:
        return self._app.made.lanes.is_behind(partition, offset, self._app.end_of(partition))

    async def _handle(self, record: Record) -> None:
        try:
            await _handle(self._app.made, record)
        except asyncio.CancelledError:
            raise  # the worker is told to end; the lane has not moved, so nothing of this is committed
        except BaseException as error:  # noqa: BLE001 - Faust would go on with the next record
            self._app.made.end_at_once(record, error)


async def _handle(made: Parts, record: Record) -> None:
    lane = made.lanes.get((record.topic, record.partition))
    if lane is None:
        return  # it was fetched before the partition went to another worker
    outgoing = lane.handle(record)
    for published in [made.publisher.publish(message.topic, message.key, message.value) for message in outgoing]:
        await asyncio.wrap_future(published)
    made.lanes.done(lane, record, outgoing)


class _App(faust.App):  # type: ignore[misc] # Faust is not typed for mypy's strict mode
    """Faust's application with a consumer that follows the lanes."""

    logger = _faust_logger
    fetch_wait_ms: int

    def __init__(self, *arguments: Any, made: Parts, **options: Any) -> None:
        self.made = made
        self.feeds: list[_Feed] = []
        super().__init__(*arguments, **options)

    def end_of(self, partition: Partition) -> int | None:
        """Return what the client knows of a partition's end, None where it is not assigned or was never fetched."""
        with contextlib.suppress(AssertionError):  # aiokafka's, of a partition that is not assigned
            end: int | None = self.consumer.highwater(TP(*partition))
            return end
        return None

    async def drain_for_ever(self) -> None:
        """Let go of records that have waited long enough for others, which may never come."""
        while True:
            await asyncio.sleep(HOLD_S / 4)
            for feed in self.feeds:
                await feed.drain()

    def _new_transport(self) -> "_Transport":
        return _Transport(self.conf.broker_consumer, self)


class _ConsumerThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    logger = _faust_logger

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        # Faust has 1.5 s here, which is what an embedded broker, that never answers a fetch early, would take.
        consumer._fetch_max_wait_ms = self.app.fetch_wait_ms  # noqa: SLF001
        return consumer


class _Consumer(driver.Consumer):  # type: ignore[misc]
    """Begins where the lanes begin and commits how far they have come."""

    logger = _faust_logger

    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def perform_seek(self) -> None:
        """Seek every assigned partition to where its lane begins, which for a new one is before what is committed."""
        for feed in self.app.feeds:
            feed.clear()
        found = await self.seek_to_committed()
        committed = {(tp.topic, tp.partition): offset for tp, offset in found.items()}
        loop = asyncio.get_running_loop()
        starts = await loop.run_in_executor(None, self.app.made.lanes.assign, committed)
        await self.seek_wait({TP(*partition): offset for partition, offset in starts.items()})
        self._committed_offset.update({TP(*partition): offset or None for partition, offset in committed.items()})

    def ack(self, message: Any) -> bool:
        """Take note that a record has left its stream processor, which says nothing about its being done."""
        if message.acked:
            return False
        message.acked = True
        self._unacked_messages.discard(message)
        notify(self._waiting_for_ack)
        return True

    def _filter_tps_with_pending_acks(self, _topics: Any = None) -> Iterable[Any]:
        return ()

    def _filter_committable_offsets(self, _tps: Any) -> Mapping[Any, int]:
        self.app.made.metrics.show_lags(self.app.made.lanes.positions, self.app.end_of)
        return {
            tp: position
            for partition, position in self.app.made.lanes.positions.items()
            if (tp := TP(*partition)) in self.assignment() and position > (self._committed_offset[tp] or 0)
        }


class _Transport(driver.Transport):  # type: ignore[misc]
    Consumer = _Consumer
