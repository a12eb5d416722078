"""One episode the whole way: simulated, through the window and judge stages, and what was said beside what is right."""

from collections.abc import Iterator

import msgspec

from agents.simulated import Cluster, Scenario
from agents.simulated.layout import incarnations
from benchmarks.quality.answers import Answer, answers, clock, hints
from benchmarks.quality.corpus import Episode
from pipeline.engine import Engine
from pipeline.observer import Counting
from pipeline.record import Record
from schemas.alerts import Alert, AlertState, ComponentName, Kind, Resolution, Severity
from schemas.codec import encode_events
from schemas.topics import EVENTS, events_key

_NOT_SEEN = ("ranks_missing", "frames_not_comparable", "frames_sparse", "events_lost", "batches_lost")


class Opening(msgspec.Struct, kw_only=True):
    """An incident from its firing to its resolution; iterations are those of the whole job."""

    kind: Kind
    candidates: frozenset[ComponentName]
    severity: Severity  # the gravest that it reached
    onset: int
    detected: int  # the last iteration known when it first had a severity above information, else when it fired
    detected_s: float  # when the record came that made it known, since the scenario's epoch
    ratio: float
    resolved: int | None = None
    resolution: Resolution | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one episode: all that scoring reads."""

    class_name: str
    seed: int
    layout: str
    setting: str
    ranks: int
    iterations: int
    sigma: float
    flush_s: float
    answers: tuple[Answer, ...]
    hints: tuple[Kind, ...]  # information about the workload itself that is due
    openings: tuple[Opening, ...]
    unseen: dict[str, int]  # what the stages say that they could not see


def records(scenario: Scenario) -> Iterator[Record]:
    """Yield the scenario's batches as the events topic would hold them."""
    for offset, batch in enumerate(Cluster(scenario).batches()):
        key = events_key(batch.job_id, batch.node)
        yield Record(EVENTS, 0, offset, batch.flush_ns, key, encode_events(batch))


def outcome(episode: Episode) -> Outcome:
    """Run an episode."""
    draw, scenario = episode.draw()
    times = clock(scenario)
    counting = Counting()
    book = _Book(scenario)
    engine = Engine(counting)
    for record in records(scenario):
        for alert in engine.handle(record):
            book.take(alert, (record.time_ns - scenario.epoch_ns) / 1e9)
    return Outcome(
        class_name=episode.class_name,
        seed=episode.seed,
        layout=draw.layout_name,
        setting=draw.setting,
        ranks=scenario.layout.world_size,
        iterations=scenario.iterations,
        sigma=times.sigma,
        flush_s=scenario.agents.flush_interval_s,
        answers=answers(scenario, draw.setting, times),
        hints=hints(scenario, draw.setting),
        openings=tuple(book.openings),
        unseen={name: counting.counts[name] for name in _NOT_SEEN if name in counting.counts},
    )


class _Book:
    """Alerts to openings."""

    def __init__(self, scenario: Scenario) -> None:
        self.openings: list[Opening] = []
        self._open: dict[str, Opening] = {}
        # Without markers every incarnation counts from 0.
        has_markers = "marker" in scenario.agents.sensors
        self._first = {one.name: 0 if has_markers else first for one, first, _ in incarnations(scenario)}

    def take(self, alert: Alert, time_s: float) -> None:
        first = self._first[alert.incarnation]
        opening = self._open.get(alert.fingerprint)
        if opening is None:
            opening = Opening(
                kind=alert.kind,
                candidates=frozenset(alert.component.candidates),
                severity=alert.severity,
                onset=first + alert.onset_iteration,
                detected=first + alert.as_of_iteration,
                detected_s=time_s,
                ratio=alert.slowdown_ratio,
            )
            self._open[alert.fingerprint] = opening
            self.openings.append(opening)
        elif opening.severity is Severity.INFO and alert.severity is not Severity.INFO:
            opening.severity, opening.detected_s = alert.severity, time_s
            opening.detected = first + alert.as_of_iteration
        if alert.state is AlertState.RESOLVED:
            opening.resolved = first + (alert.resolved_iteration or alert.as_of_iteration)
            opening.resolution = alert.resolution
            del self._open[alert.fingerprint]
