"""Why an incident is what it is: all that the judge weighed on the way to it, kept while a recording is replayed."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from pipeline.hypotheses import Hypothesis, Question
from pipeline.observer import Counting, FrameSummary
from schemas.alerts import Alert, Severity

_MOST_HELD = 8192  # hypotheses of one job, about 400 iterations
_LONGEST_WAY = 150  # iterations before its detection that an explanation goes back to
_LAST_LOOKS = 12  # at an incident that is resolved

_WORST = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)


@dataclass(slots=True)
class Explanation:
    """One incident, numbered as replay lists it: what was weighed from its onset to its detection, and at its end."""

    number: int
    first: Alert
    last: Alert
    severity: Severity
    on_the_way: tuple[Hypothesis, ...] = ()
    at_the_end: tuple[Hypothesis, ...] = ()

    @property
    def rank(self) -> tuple[int, float]:
        """The greater, the worse."""
        return _WORST.index(self.severity), self.last.lost_gpu_s

    @property
    def deciding(self) -> tuple[Hypothesis, ...]:
        """What was weighed in the iteration in which the incident was detected, but for other incidents' lives."""
        at = self.first.as_of_iteration
        return tuple(h for h in self.on_the_way if h.iteration == at and h.question is not Question.LASTS)

    def as_json(self) -> bytes:
        """Return it in one line: the first and the last alert as on the topic, and the hypotheses in their order."""
        hypotheses = (*self.on_the_way, *self.at_the_end)
        return msgspec.json.encode(
            {"number": self.number, "first": self.first, "last": self.last, "hypotheses": hypotheses}
        )


@dataclass(slots=True)
class Explaining(Counting):
    """Keeps the last hypotheses of each job, and of each incident those that led to it."""

    wants_hypotheses: ClassVar[bool] = True

    explanations: list[Explanation] = field(default_factory=list)
    _held: dict[tuple[str, str], deque[Hypothesis]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_MOST_HELD))
    )
    _open: dict[tuple[str, str], Explanation] = field(default_factory=dict)  # by job and fingerprint
    _new: list[Explanation] = field(default_factory=list)  # in this frame
    _over: list[Explanation] = field(default_factory=list)

    def weighed(self, hypothesis: Hypothesis, /) -> None:
        """Keep it for a while."""
        self._held[hypothesis.job_id, hypothesis.incarnation].append(hypothesis)

    def alert_made(self, alert: Alert, /) -> None:
        """Begin an explanation, or note what became of its incident."""
        key = (alert.job_id, alert.fingerprint)
        explanation = self._open.get(key)
        if explanation is None:
            explanation = Explanation(len(self.explanations) + 1, alert, alert, alert.severity)
            self.explanations.append(explanation)
            self._new.append(explanation)
            self._open[key] = explanation
        explanation.last = alert
        explanation.severity = max(explanation.severity, alert.severity, key=_WORST.index)
        if alert.resolution is not None:
            del self._open[key]
            self._over.append(explanation)

    def frame_judged(self, frame: FrameSummary, /) -> None:
        """Take over what was weighed for the incidents that began or ended in this frame."""
        Counting.frame_judged(self, frame)
        self._take_over(frame.job_id, frame.incarnation)

    def job_ended(self, job_id: str, incarnation: str, /) -> None:
        """Let go of what nobody will ask for."""
        self._take_over(job_id, incarnation)
        self._held.pop((job_id, incarnation), None)

    def _take_over(self, job_id: str, incarnation: str) -> None:
        held = self._held[job_id, incarnation]
        for explanation in self._new:
            until = explanation.first.as_of_iteration
            since = max(min(explanation.first.onset_iteration, until), until - _LONGEST_WAY)
            explanation.on_the_way = tuple(h for h in held if since <= h.iteration <= until)
        for explanation in self._over:
            looks = [h for h in held if h.fingerprint == explanation.last.fingerprint and h.question is Question.LASTS]
            explanation.at_the_end = tuple(looks[-_LAST_LOOKS:])
        self._new.clear()
        self._over.clear()

    def worst(self) -> Explanation:
        """Return that of the worst incident, of two equal ones the earlier. Raises ValueError where there is none."""
        return max(self.explanations, key=lambda e: (*e.rank, -e.number))

    def named(self, which: str) -> list[Explanation]:
        """Return those of the incidents with a number, or whose fingerprint begins so."""
        by_number = [e for e in self.explanations if str(e.number) == which]
        return by_number or [e for e in self.explanations if e.first.fingerprint.startswith(which)]
