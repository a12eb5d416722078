"""One episode the whole way: simulated, through the window and judge stages, and what was said beside what is right."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from benchmarks.quality.corpus import Episode
from benchmarks.quality.given import NOT_SEEN, Given, given
from benchmarks.quality.outcome import Opening, Outcome
from pipeline.judge import Judge
from pipeline.judge_params import DEFAULTS, JudgeParams
from pipeline.observer import Counting
from pipeline.record import Record
from schemas.alerts import Alert, AlertState, Severity

Listener = Callable[[Record], None]
_UNREPORTED = "ranks that no agent reports"


def outcome(episode: Episode, *, listener: Listener | None = None, folder: Path | None = None) -> Outcome:
    """Run an episode; the listener is given the very records that the judge is given. folder: see given()."""
    heard = given(episode, folder)
    if listener is not None:
        for record in heard.records():
            listener(record)
    return judged(heard)


def judged(heard: Given, params: JudgeParams = DEFAULTS) -> Outcome:
    """Return what comes of an episode with these parameters."""
    counting, book = Counting(), _Book(heard)
    judge = Judge(counting, params)
    for record in heard.records():
        for alert in judge.handle(record):
            book.take(alert, (record.time_ns - heard.epoch_ns) / 1e9)
    counts = Counter(heard.due.unseen) + Counter(counting.counts)
    unseen = {name: counts[name] for name in NOT_SEEN if name in counts}
    return replace(heard.due, openings=tuple(book.openings), unseen=unseen)


class _Book:
    """Alerts to openings."""

    def __init__(self, heard: Given) -> None:
        self.openings: list[Opening] = []
        self._open: dict[str, Opening] = {}
        self._first = heard.first_iterations

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
