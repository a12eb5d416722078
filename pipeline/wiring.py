"""Puts one worker together: the only place of the live pipeline that names the stages."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry

from pipeline import topics
from pipeline.lanes import Lanes, StageFactory
from pipeline.metrics import Metrics
from pipeline.poison import Hand, Ledger
from pipeline.publisher import Publisher
from pipeline.record import Record
from pipeline.settings import InvalidSettings, Settings
from schemas.topics import ALERTS, EVENTS, ITERATIONS

logger = logging.getLogger(__name__)

EXIT_ABNORMAL = 70  # EX_SOFTWARE of sysexits.h
HAND = "hand"
LEDGER = "ended-workers.json"

Stages = Mapping[str, StageFactory]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a driver drives."""

    lanes: Lanes
    publisher: Publisher
    metrics: Metrics

    def end_at_once(self, record: Record | None, error: BaseException) -> NoReturn:
        """End the process as it is, blaming a record: what has been committed is all that counts as done."""
        if record is None:
            logger.critical("the worker ends", exc_info=error)
        else:
            self.lanes.blame(record)
            where = (record.topic, record.partition, record.offset)
            logger.critical("%s/%d offset %d ends the worker", *where, exc_info=error)
        logging.shutdown()
        os._exit(EXIT_ABNORMAL)


def default_stages() -> Stages:
    """Return the real stages by the topic that they consume."""
    from pipeline.judge import Judge  # noqa: PLC0415 - a window worker does not load the judge, nor the other way round
    from pipeline.window import Window  # noqa: PLC0415

    return {EVENTS: Window, ITERATIONS: Judge}


@contextmanager
def parts(settings: Settings, stages: Stages | None = None) -> Iterator[Parts]:
    """Check the broker, serve the metrics and yield what a driver needs.

    Raises TopicsMissing, BrokerUnreachable or InvalidSettings, each with its remedy, before anything is consumed.
    """
    counts = topics.check(settings.bootstrap)
    if counts[ITERATIONS] != counts[ALERTS]:
        raise topics.TopicsMissing(
            f"{ITERATIONS} has {counts[ITERATIONS]} partitions and {ALERTS} has {counts[ALERTS]}: "
            "give both the same number, or what was published of a job cannot be found again"
        )
    registry = CollectorRegistry()
    for collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
        registry.register(collector)
    metrics = Metrics(registry)
    try:
        port = metrics.serve(settings.metrics_host, settings.metrics_port)
    except OSError as error:
        raise InvalidSettings(
            f"cannot serve metrics on {settings.metrics_host}:{settings.metrics_port} ({error.strerror}): "
            "choose another --metrics-port, or 0 for any free one"
        ) from error
    logger.info("metrics on http://%s:%d/metrics", settings.metrics_host, port)
    folder = settings.state_folder
    with Hand(folder / HAND) as hand, Publisher(settings.bootstrap) as publisher:
        ledger = Ledger(folder / LEDGER)
        lanes = Lanes(settings, stages or default_stages(), metrics, hand, ledger)
        yield Parts(lanes, publisher, metrics)
