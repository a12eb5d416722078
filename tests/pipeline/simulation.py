"""Simulated jobs as records, and what the stages make of them: shared by the tests of the whole path."""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from agents.simulated import Cluster, Scenario, load_scenario
from pipeline.engine import Engine
from pipeline.judge import Judge
from pipeline.observer import Observer
from pipeline.record import Record
from pipeline.window import Window
from schemas.alerts import Alert
from schemas.codec import encode_events, encode_iterations
from schemas.topics import EVENTS, ITERATIONS, events_key, job_key

SCENARIOS = Path(__file__).resolve().parent.parent.parent / "scenarios"


@cache
def scenario(name: str) -> Scenario:
    """Return a scenario of the repository by name."""
    return load_scenario(SCENARIOS / f"{name}.toml")


def event_records(of: Scenario) -> Iterator[Record]:
    """Yield a scenario's batches in the order of their arrival, as the events topic would hold them."""
    for offset, batch in enumerate(Cluster(of).batches()):
        key = events_key(batch.job_id, batch.node)
        yield Record(EVENTS, 0, offset, batch.flush_ns, key, encode_events(batch))


def iteration_records(events: Iterable[Record], window: Window | None = None) -> Iterator[Record]:
    """Yield what the window stage publishes of the events."""
    window = window or Window()
    offset = 0
    for record in events:
        for batch in window.handle(record):
            yield Record(ITERATIONS, 0, offset, record.time_ns, job_key(batch.job_id), encode_iterations(batch))
            offset += 1


def judged(records: Iterable[Record], judge: Judge | None = None) -> list[Alert]:
    """Return the alerts of records of the iterations topic."""
    judge = judge or Judge()
    return [alert for record in records for alert in judge.handle(record)]


def alerts_of(events: Iterable[Record], observer: Observer | None = None) -> list[Alert]:
    """Return the alerts of records of the events topic, by the composition of both stages."""
    engine = Engine(observer or Observer())
    return [alert for record in events for alert in engine.handle(record)]
