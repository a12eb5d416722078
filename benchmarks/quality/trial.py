"""One episode the whole way: simulated, through the window and judge stages, and what was said beside what is right."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from agents.simulated import Cluster, Scenario
from agents.simulated.layout import incarnations
from benchmarks.quality.answers import Answer, Said, answers, clock, hints
from benchmarks.quality.corpus import Episode
from pipeline.engine import Engine
from pipeline.judge import Judge
from pipeline.judge_params import DEFAULTS, JudgeParams
from pipeline.observer import Counting, Observer
from pipeline.record import Record
from schemas.alerts import Alert, AlertState, ComponentName, Kind, Resolution, Severity
from schemas.codec import encode_events
from schemas.events import EventBatch
from schemas.topics import EVENTS, events_key

Listener = Callable[[Record], None]
_NOT_SEEN = ("ranks_missing", "frames_not_comparable", "frames_sparse", "events_lost", "batches_lost")
_UNREPORTED = "ranks that no agent reports"


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
    also: tuple[Said, ...] = ()  # what else it may mean, where whoever said it claims no kind
    unreported: int = 0  # ranks that it says no agent reports


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
    unreported: int = 0  # ranks that no agent reports, in truth
    lost_batches: int = 0  # that never arrived, or arrived without their events


def outcome(episode: Episode, *, params: JudgeParams = DEFAULTS, listener: Listener | None = None) -> Outcome:
    """Run an episode; the listener is given the very records that the judge is given, before it."""
    draw, scenario = episode.draw()
    times = clock(scenario)
    counting = Counting()
    book, losses = _Book(scenario), _Losses()
    engine = Engine(counting)
    engine.judge = _Overheard(counting, params, listener)
    for record in records(scenario, losses.note):
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
        unreported=_unreported(scenario),
        lost_batches=losses.total,
    )


def judged_again(scenario: Scenario, iterations: Iterable[Record], params: JudgeParams) -> tuple[Opening, ...]:
    """Return what a judge with these parameters makes of records of the iterations topic."""
    judge, book = Judge(params=params), _Book(scenario)
    for record in iterations:
        for alert in judge.handle(record):
            book.take(alert, (record.time_ns - scenario.epoch_ns) / 1e9)
    return tuple(book.openings)


def records(scenario: Scenario, note: Callable[[EventBatch], None] = lambda _: None) -> Iterator[Record]:
    """Yield the scenario's batches as the events topic would hold them; `note` is told of each."""
    for offset, batch in enumerate(Cluster(scenario).batches()):
        note(batch)
        key = events_key(batch.job_id, batch.node)
        yield Record(EVENTS, 0, offset, batch.flush_ns, key, encode_events(batch))


def first_iterations(scenario: Scenario) -> dict[str, int]:
    """Return, by incarnation, what its own iteration numbers count from; without markers each counts from 0."""
    has_markers = "marker" in scenario.agents.sensors
    return {one.name: 0 if has_markers else first for one, first, _ in incarnations(scenario)}


def _unreported(scenario: Scenario) -> int:
    silent = {late.node for late in scenario.agents.late if late.at_iteration >= scenario.iterations}
    return len(silent) * scenario.layout.gpus_per_node


class _Overheard(Judge):
    """The judge, with somebody listening to what it is given."""

    def __init__(self, observer: Observer, params: JudgeParams, listener: Listener | None) -> None:
        super().__init__(observer, params)
        self._listener = listener

    def handle(self, record: Record) -> Iterator[Alert]:
        if self._listener is not None:
            self._listener(record)
        return super().handle(record)


@dataclass(slots=True)
class _Losses:
    """What never arrived, by the gaps in the batches' numbers, and what arrived without its events."""

    _numbers: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    _n_emptied: int = 0

    def note(self, batch: EventBatch) -> None:
        self._numbers.setdefault((batch.node, batch.agent_start_ns), set()).add(batch.seq)
        self._n_emptied += batch.lost_events > 0

    @property
    def total(self) -> int:
        return self._n_emptied + sum(max(numbers) + 1 - len(numbers) for numbers in self._numbers.values())


class _Book:
    """Alerts to openings."""

    def __init__(self, scenario: Scenario) -> None:
        self.openings: list[Opening] = []
        self._open: dict[str, Opening] = {}
        self._first = first_iterations(scenario)

    def take(self, alert: Alert, time_s: float) -> None:
        first = self._first[alert.incarnation]
        opening = self._open.get(alert.fingerprint)
        if opening is None:
            opening = self._open[alert.fingerprint] = Opening(
                kind=alert.kind,
                candidates=frozenset(alert.component.candidates),
                severity=alert.severity,
                onset=first + alert.onset_iteration,
                detected=first + alert.as_of_iteration,
                detected_s=time_s,
                ratio=alert.slowdown_ratio,
            )
            self.openings.append(opening)
        elif opening.severity is Severity.INFO and alert.severity is not Severity.INFO:
            opening.severity, opening.detected_s = alert.severity, time_s
            opening.detected = first + alert.as_of_iteration
        opening.unreported = max(opening.unreported, _said_unreported(alert))
        if alert.state is AlertState.RESOLVED:
            opening.resolved = first + (alert.resolved_iteration or alert.as_of_iteration)
            opening.resolution = alert.resolution
            del self._open[alert.fingerprint]


def _said_unreported(alert: Alert) -> int:
    return max((int(one.value) for one in alert.evidence if one.what.startswith(_UNREPORTED)), default=0)
