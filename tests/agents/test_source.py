"""One collector's failure is said once, with its remedy, and leaves the others alone."""

import logging
from collections.abc import Sequence
from itertools import pairwise

import pytest

from agents.collector import CollectorError, Limit, NotAvailable, Observations, RankProcess
from agents.source import RETRY_S_MAX, RETRY_S_MIN, Source
from schemas.events import Sensor


class FakeCollector:
    """Does what it is told to."""

    name = "fake"

    def __init__(self) -> None:
        self.refusal: NotAvailable | None = None
        self.failure: Exception | None = None
        self.n_opened = 0
        self.n_closed = 0

    @property
    def sensors(self) -> Sensor:
        return Sensor.NVML

    def open(self) -> None:
        self.n_opened += 1
        if self.refusal:
            raise self.refusal

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        if self.failure:
            raise self.failure
        return Observations(lost_events=7)

    def limits(self) -> Sequence[Limit]:
        return ()

    def close(self) -> None:
        self.n_closed += 1


def test_a_source_that_is_not_there_is_tried_again_less_and_less_often_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    collector = FakeCollector()
    collector.refusal = NotAvailable("no driver", "install one")
    source = Source(collector)
    tries = []
    for now_s in range(2000):
        before = collector.n_opened
        source.try_open(float(now_s))
        if collector.n_opened > before:
            tries.append(now_s)
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps[0] == RETRY_S_MIN
    assert gaps == sorted(gaps)
    assert gaps[-1] == RETRY_S_MAX
    assert [r.getMessage() for r in caplog.records] == ["fake is not observed: no driver: install one"]
    assert source.sensors == Sensor(0)
    collector.refusal = None
    source.try_open(1e9)
    assert source.is_open
    assert source.sensors == Sensor.NVML


@pytest.mark.parametrize("failure", [CollectorError("no answer"), ZeroDivisionError("7 / 0")])
def test_a_failing_source_gives_nothing_claims_nothing_and_recovers(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    collector = FakeCollector()
    source = Source(collector)
    source.try_open(0.0)
    collector.failure = failure
    assert [source.collect(()).lost_events for _ in range(3)] == [0, 0, 0]
    assert source.sensors == Sensor(0)
    assert source.n_failures == 3
    collector.failure = None
    assert source.collect(()).lost_events == 7
    assert source.sensors == Sensor.NVML
    assert [r.levelname for r in caplog.records] == ["INFO", "ERROR", "INFO"]


def test_a_source_that_goes_away_is_closed_and_opened_anew() -> None:
    collector = FakeCollector()
    source = Source(collector)
    source.try_open(0.0)
    collector.failure = NotAvailable("the driver was unloaded", "load it")
    assert source.collect(()).lost_events == 0
    assert (source.is_open, collector.n_closed) == (False, 1)
    collector.failure = None
    source.try_open(0.0)
    assert source.collect(()).lost_events == 7
