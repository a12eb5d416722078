"""Notes taken: what the judge says of its reasoning becomes hypotheses, the observer's at the end of each frame."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, isfinite, log

import numpy as np

from detectors.verify import Outcome, Shift, confirm
from pipeline import weighed
from pipeline.changes import Change
from pipeline.claims import Claims
from pipeline.excess import Excess
from pipeline.history import History
from pipeline.hypotheses import Hypothesis, Number, Question, Verdict
from pipeline.incident import Incident
from pipeline.incidents import WORKLOAD, JobIdentity
from pipeline.judge_params import JudgeParams
from pipeline.notes import Notes
from pipeline.observer import Observer
from pipeline.ranks import RankSearch
from pipeline.suspect import Span, Suspect
from pipeline.telemetry import Telemetry
from schemas.alerts import Alert, Component, ComponentName, ComponentType, Kind, fingerprint
from schemas.table import BoolArray, FloatArray, IntArray

_OUTCOMES = {
    Outcome.CONFIRMED: Verdict.CONFIRMED,
    Outcome.REFUTED: Verdict.REFUTED,
    Outcome.UNDECIDED: Verdict.UNDECIDED,
}
_JOB = ComponentName(type=ComponentType.JOB)
_WHOLE_JOB = Component(type=ComponentType.JOB, name=_JOB, candidates=(_JOB,))
_Key = tuple[Question, Kind, tuple[ComponentName, ...]]


@dataclass(slots=True, eq=False)
class Weighing(Notes):
    """The hypotheses of one incarnation in its latest frame; those of a frame that is over are the observer's."""

    identity: JobIdentity
    params: JudgeParams
    observer: Observer
    _history: History | None = None
    _span: Span | None = None
    _least_s: float = 0.0
    _held: dict[_Key, Hypothesis] = field(default_factory=dict)

    def frame(self, history: History, /) -> None:
        """Begin the latest frame."""
        self._history = history
        self._held.clear()

    def compared(self, found: Shift, onset: int, /, *, evidence: float | None = None) -> None:
        """Note that times were compared: a slowdown may be behind it, or nothing."""
        history = self._history
        if history is None or not isfinite(found.log_ratio) or found.log_ratio <= 0:
            return
        decision = confirm(found, self.params.least_slowdown)
        verdict, reason = _OUTCOMES[decision.outcome], decision.reason.value
        least = log(self.params.least_slowdown)
        added_up: tuple[Number, ...] = ()
        if evidence is not None:
            least = 0.0
            verdict = Verdict.CONFIRMED if found.lower > 0 else Verdict.UNDECIDED
            reason = "the evidence of the whole level has added up"
            added_up = (Number(what="evidence", value=evidence, unit="nats", bound=self.params.evidence),)
        duration_s = float(np.median(history.durations(onset, history.n_frames)))
        numbers = (
            Number(what="iteration time over what it was", value=exp(found.log_ratio), unit="ratio"),
            Number(what="its lower bound", value=exp(found.lower), unit="ratio", bound=exp(least)),
            Number(what="iterations since", value=float(found.n_after), unit="count"),
            Number(what="iterations before", value=float(found.n_before), unit="count"),
            Number(what="since iteration", value=float(history.iteration_at(onset)), unit="iteration"),
            *added_up,
        )
        self._hold(
            self._make(Question.CHANGE)(
                kind=Kind.SLOW_JOB,
                candidates=(_JOB,),
                excess_s=duration_s * (1 - exp(-found.log_ratio)),
                score=exp(found.lower),
                score_unit="ratio",
                verdict=verdict,
                reason=reason,
                numbers=numbers,
            )
        )

    def explained(self, change: Change, grown_s: float, /) -> None:
        """Note whether open incidents grew by half of what the job got slower by."""
        held = self._held.get((Question.CHANGE, Kind.SLOW_JOB, (_JOB,)))
        least_s = 0.5 * (change.after_s - change.before_s)
        if held is None or grown_s < least_s:
            return
        number = Number(what="growth of open incidents", value=grown_s, unit="s", bound=least_s)
        reason = "open incidents grew by as much"
        self._hold(replace(held, verdict=Verdict.CLAIMED, reason=reason, numbers=(*held.numbers, number)))

    def look(self, span: Span, least_excess_s: float, /) -> None:
        """Begin to look for components that add so much to an iteration."""
        self._span, self._least_s = span, least_excess_s

    def ranks(self, search: RankSearch, compute: Excess, host: Excess, found: list[Suspect], /) -> None:
        """Note the ranks and hosts nearest to their bounds."""
        if self._span is None:
            return
        of = (search, compute, host, found, self._span, self._least_s)
        for hypotheses in (weighed.of_gpus, weighed.of_hosts):
            for hypothesis in hypotheses(self._make(self._asked), *of):
                self._hold(hypothesis)

    def links(
        self,
        suspect: Suspect | None,
        scores: Mapping[ComponentName, tuple[float, bytes]],
        log_ratio: FloatArray,
        slow: BoolArray,
        told: BoolArray,
        predicted: Mapping[ComponentName, IntArray],
        /,
    ) -> None:
        """Note the likeliest links; in a second round only the winner is news."""
        make = self._make(self._asked)
        for hypothesis in weighed.of_links(make, suspect, scores, log_ratio, slow, told, predicted, self._least_s):
            key = (hypothesis.question, hypothesis.kind, hypothesis.candidates)
            if hypothesis.verdict is Verdict.SUSPECTED or key not in self._held:
                self._hold(hypothesis)

    def telemetry(self, read: Telemetry, span: Span, found: list[Suspect], /) -> None:
        """Note whose samples stand out."""
        self._span = span
        for hypothesis in weighed.of_telemetry(self._make(self._asked), read, span, found):
            key = (hypothesis.question, hypothesis.kind, hypothesis.candidates)
            if hypothesis.verdict is Verdict.SUSPECTED or key not in self._held:
                self._hold(hypothesis)

    def found(self, suspects: list[Suspect], claimed: Claims, /) -> None:
        """End the look; what open incidents have claimed is accused no further."""
        for suspect in suspects:
            key = self._key_of(suspect)
            if key not in self._held:
                self._hold(weighed.of_suspect(self._make(self._asked), suspect))
            if self._span is not None and claimed.cover(suspect, self._span):
                self._settle(suspect, Verdict.CLAIMED, "an incident that is open covers it")

    def absorbed(self, suspect: Suspect, effect_s: float, least_s: float, /) -> None:
        """Note that a suspect outlasts all others by too little."""
        number = Number(what="outlasts all others by", value=effect_s, unit="s", bound=least_s)
        self._settle(suspect, Verdict.ABSORBED, "others take as long, so that the job hardly waits", number)

    def waiting(self, suspects: list[Suspect], deadline: int, /) -> None:
        """Note that it is not known yet who it is."""
        history = self._history
        if history is None:
            return
        left = deadline - history.n_frames
        reason = f"looked at again, for at most {left} iterations more"
        for suspect in suspects:
            doubt = "" if suspect.is_clear else "it may be another one, or pass as ranks wander; "
            self._settle(suspect, Verdict.WAITING, doubt + reason)
        if not suspects:
            self._about_job(Verdict.WAITING, "nobody stands out; " + reason)

    def passing(self, change: Change, /) -> None:
        """Note that a slowdown without a culprit was no incident."""
        number = Number(what="iteration time over what it was", value=change.ratio, unit="ratio")
        self._about_job(Verdict.PASSED, "nobody stands out, and it did not last", number)

    def balanced(self, what: str, ratio: float, least_ratio: float, excess_s: float, /) -> None:
        """Note how uneven the job's own work was."""
        is_stage = what.startswith("stage")
        name = ComponentName(type=ComponentType.STAGE, stage=int(what.split()[1])) if is_stage else None
        number = Number(
            what="longest over the others" if is_stage else what, value=ratio, unit="ratio", bound=least_ratio
        )
        is_met = ratio >= least_ratio
        self._hold(
            self._make(Question.BALANCE)(
                kind=Kind.STAGE_IMBALANCE if is_stage else Kind.DATA_IMBALANCE,
                candidates=(name,) if name is not None else (_JOB,),
                excess_s=excess_s,
                score=ratio,
                score_unit="ratio",
                verdict=Verdict.SUSPECTED if is_met else Verdict.BELOW,
                reason="uneven" if is_met else "short of " + number.what,
                numbers=(number,),
            )
        )

    def accused(self, suspect: Suspect, reference_s: float, accused_slowdown: float, /) -> None:
        """Note an incident, and what would have had to be otherwise."""
        slowdown = 1 + suspect.excess_s / max(reference_s, 1e-9)
        number = Number(what="the job's slowdown by it", value=slowdown, unit="ratio", bound=accused_slowdown)
        if suspect.kind in WORKLOAD:
            number = replace(number, bound=None)
        is_told = suspect.kind in WORKLOAD or not number.is_met
        kind, component = suspect.kind, suspect.component
        if not number.is_met:
            kind, component = Kind.SLOW_JOB, _WHOLE_JOB
        if self._find(suspect) is None:
            question = Question.BALANCE if suspect.kind in WORKLOAD else self._asked
            self._hold(weighed.of_suspect(self._make(question), suspect))
        reason = "the job's own work, nobody's fault" if suspect.kind in WORKLOAD else "too small to accuse anybody"
        if suspect.kind is Kind.SLOW_JOB and number.is_met:
            reason = "no component explains it"
        elif not is_told:
            reason = "all bounds are met"
        name = fingerprint(self.identity.job_id, kind, component)
        verdict = Verdict.INFORMED if is_told else Verdict.ACCUSED
        self._settle(suspect, verdict, reason, number, name=name)

    def follow(self, incidents: Iterable[Incident], /) -> None:
        """Note how much each open incident still adds."""
        history = self._history
        if history is None:
            return
        for incident in incidents:
            if incident.kind in WORKLOAD:
                continue
            now = history.n_frames
            latest = incident.suspect.watch.excess(history, now - 1, now)
            excess_s = float(latest[0]) if len(latest) else float("nan")
            number = Number(what="excess in this iteration", value=excess_s, unit="s", bound=incident.good_s)
            verdict = Verdict.LASTS if number.is_met or not isfinite(excess_s) else Verdict.GOOD
            hold = f"of {incident.hold} iterations in a row 70 % have to be good, and their median"
            self._hold(
                self._make(Question.LASTS)(
                    kind=incident.kind,
                    candidates=incident.component.candidates or (incident.component.name,),
                    excess_s=excess_s,
                    score=excess_s / max(incident.excess_s, 1e-12),
                    score_unit="ratio",
                    verdict=verdict,
                    reason="not seen in this iteration" if not isfinite(excess_s) else hold,
                    numbers=(number,) if isfinite(excess_s) else (),
                    fingerprint=incident.fingerprint,
                )
            )

    def told(self, alert: Alert, /) -> None:
        """Note that an incident was told of again, or resolved."""
        for key, held in self._held.items():
            if held.question is Question.LASTS and held.fingerprint == alert.fingerprint:
                verdict, reason = Verdict.RESTATED, f"{alert.slowdown_ratio:.2f}x slower now"
                if alert.resolution is not None:
                    verdict = Verdict.RESOLVED
                    reason = f"{alert.resolution.replace('_', ' ')}, as of iteration {alert.resolved_iteration}"
                self._held[key] = replace(held, verdict=verdict, reason=reason)
                return

    def judged(self) -> None:
        """End the frame: hand over what was weighed in it."""
        for hypothesis in self._held.values():
            self.observer.weighed(hypothesis)
        self._held.clear()
        self._span = None

    @property
    def _asked(self) -> Question:
        return Question.CULPRIT if self._span is not None and self._span.reference_stop > 0 else Question.PEERS

    def _make(self, question: Question) -> weighed.Make:
        assert self._history is not None
        return partial(
            Hypothesis,
            job_id=self.identity.job_id,
            incarnation=self.identity.incarnation,
            iteration=self._history.iteration_at(self._history.n_frames - 1),
            question=question,
        )

    def _about_job(self, verdict: Verdict, reason: str, *numbers: Number) -> None:
        make = self._make(Question.CULPRIT)
        nan = float("nan")
        self._hold(
            make(
                kind=Kind.SLOW_JOB,
                candidates=(_JOB,),
                excess_s=nan,
                score=nan,
                score_unit="",
                verdict=verdict,
                reason=reason,
                numbers=numbers,
            )
        )

    def _hold(self, hypothesis: Hypothesis) -> None:
        key = (hypothesis.question, hypothesis.kind, hypothesis.candidates)
        self._held.pop(key, None)
        self._held[key] = hypothesis

    def _find(self, suspect: Suspect) -> _Key | None:
        kind, candidates = suspect.kind, _candidates(suspect.component)
        keys = [key for key in self._held if key[1:] == (kind, candidates) and _is_about_who(key[0])]
        return keys[-1] if keys else None

    def _key_of(self, suspect: Suspect) -> _Key:
        return (self._asked, suspect.kind, _candidates(suspect.component))

    def _settle(
        self, suspect: Suspect, verdict: Verdict, reason: str, *numbers: Number, name: str | None = None
    ) -> None:
        key = self._find(suspect)
        if key is not None:
            held = self._held[key]
            if suspect.excess_s < 0.99 * held.excess_s:
                numbers = (Number(what="of which the job feels", value=suspect.excess_s, unit="s"), *numbers)
            numbers = (*held.numbers, *numbers)
            settled = replace(held, verdict=verdict, reason=reason, numbers=numbers, excess_s=suspect.excess_s)
            self._hold(replace(settled, fingerprint=name))


def _candidates(component: Component) -> tuple[ComponentName, ...]:
    return component.candidates or (component.name,)


def _is_about_who(question: Question) -> bool:
    return question not in (Question.CHANGE, Question.LASTS)
