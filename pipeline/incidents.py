"""The life of incidents: firing, restated while they last, resolved with a reason. One per component and kind.

An incident resolves after `hold_frames` good frames. One that was bad for a short spell only has to be good for longer
than that, and one that came back soon after for longer each time, so that an intermittent fault is one incident
and not many. What begins as information about the job grows with all that the job has lost since.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec.structs import replace as replace_struct

from detectors.robust import MEDIAN_ERROR
from pipeline.advice import advice, causes
from pipeline.claims import Claims
from pipeline.groups import median_error, quiet_median, robust_scale
from pipeline.history import History
from pipeline.incident import Incident, count_spell
from pipeline.judge_params import JudgeParams
from pipeline.slow_job import slow_job, whole_job
from pipeline.suspect import CLOCK_EVIDENCE, Span, Suspect
from pipeline.watch import JobWatch
from schemas.alerts import (
    ALERT_SCHEMA_VERSION,
    Alert,
    AlertState,
    Evidence,
    Kind,
    Resolution,
    Severity,
    fingerprint,
)
from schemas.table import IntArray

_RECENT_FRAMES = 8  # of telemetry, that a restatement shows
_FLAP_FRAMES = 60  # coming back within so many frames of its resolution is flapping
_LONGEST_HOLD = 80
_SURE = 2.5  # standard errors between a median and what counts as recovered
_RESTATE_CHANGE = 0.33
_SHORT_SPELL = 20  # slow frames; a fault that comes and goes is there for less at a time, and gone for up to twice that
_SPELLS = 3  # times as long as its longest spell that a fault is waited for
_MOST_BAD = 0.2  # of the frames of a hold: less than the one spell that it may begin with
_GROWN_FRAMES = (12, 24, 48, 96)  # in which a job has to be slow enough to accuse somebody
_LASTING_FRAMES = _GROWN_FRAMES[1:]  # likewise, at the bound for what lasts
_GROWN_Z = 2.5  # standard errors of their median, less which it still has to be
WORKLOAD = (Kind.STAGE_IMBALANCE, Kind.DATA_IMBALANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """Whose incidents they are."""

    job_id: str
    incarnation: str
    world_size: int


@dataclass(slots=True)
class IncidentBook:
    """The incidents of one incarnation; revisions and holds outlive it, since components do."""

    identity: JobIdentity
    params: JudgeParams
    revisions: dict[str, int]
    holds: dict[str, int]
    owners: dict[str, str]  # which incarnation an incident belongs to now
    open: dict[str, Incident] = field(default_factory=dict)
    _resolved_frame: dict[str, int] = field(default_factory=dict)

    def claimed(self) -> Claims:
        """Return what open incidents explain already."""
        return Claims.of(i.suspect for i in self.open.values() if i.severity is not Severity.INFO)

    def grown_s(self, history: History, span: Span) -> float:
        """Return by how much more open incidents add to an iteration than in the frames before, seconds."""
        grown_s = 0.0
        for incident in self.open.values():
            if incident.kind not in WORKLOAD:
                excess = incident.suspect.watch.excess
                before = quiet_median(excess(history, span.reference_start, span.reference_stop)[:, None])[0]
                since = quiet_median(excess(history, span.start, span.stop)[:, None])[0]
                grown_s += max(float(np.nan_to_num(since) - np.fmax(before, 0.0)), 0.0)
        return grown_s

    def accused_slowdown(self, history: History) -> float:
        """Return from which slowdown on an incident is more than information: less, where such information lasts."""
        information = [i for i in self.open.values() if i.kind is Kind.SLOW_JOB and i.severity is Severity.INFO]
        has_lasted = any(history.n_frames - i.opened_frame >= _LASTING_FRAMES[0] for i in information)
        return self.params.lasting_slowdown if has_lasted else self.params.accused_slowdown

    def underestimated(self, history: History) -> tuple[Incident, float] | None:
        """Return the information about the job once it is enough to accuse somebody, and the seconds lost now.

        Whatever was measured when it began, the job's time says what it has lost since it was fastest: a first stair
        below the least slowdown that is told was one as well.
        """
        for incident in self.open.values():
            is_new = incident.opened_frame == history.n_frames
            if is_new or incident.kind is not Kind.SLOW_JOB or incident.severity is not Severity.INFO:
                continue
            opened, fastest_s = incident.opened_frame, incident.fastest_s
            level_s = _level_beyond(history, opened, self.params.accused_slowdown * fastest_s, _GROWN_FRAMES)
            if level_s is None:
                level_s = _level_beyond(history, opened, self.params.lasting_slowdown * fastest_s, _LASTING_FRAMES)
            incident.grown = 0 if level_s is None else incident.grown + 1
            if level_s is not None:
                return incident, level_s - incident.fastest_s
        return None

    def raise_job(self, incident: Incident, history: History, excess_s: float) -> Iterator[Alert]:
        """Say that the job as a whole has become so much slower that it is information no longer."""
        incident.reference_s = incident.fastest_s
        incident.suspect = slow_job(incident.reference_s, excess_s, incident.suspect.z)
        incident.excess_s = incident.restated_excess_s = excess_s
        incident.severity = self._severity(Kind.SLOW_JOB, incident.slowdown, 1.0)
        incident.restated_frame = history.n_frames
        yield self._alert(incident, history, AlertState.FIRING)

    def start(
        self,
        suspect: Suspect,
        *,
        onset_frame: int,
        onset_iteration: int,
        reference_s: float,
        history: History,
        confidence: float,
        throttle_reasons: int,
        accused_slowdown: float,
    ) -> Iterator[Alert]:
        """Open an incident, unless the same one is open; one below `accused_slowdown` is information about the job."""
        slowdown = 1.0 + suspect.excess_s / reference_s
        severity = self._severity(suspect.kind, slowdown, accused_slowdown)
        kind, component = suspect.kind, suspect.component
        if severity is Severity.INFO and kind not in WORKLOAD:
            kind, component = Kind.SLOW_JOB, whole_job()
        name = fingerprint(self.identity.job_id, kind, component)
        if name in self.open:
            yield from self._grow(self.open[name], suspect, reference_s, history)
            return
        now = history.n_frames
        hold = self._hold(name, now)
        incident = Incident(
            suspect=suspect,
            component=component,
            kind=kind,
            fingerprint=name,
            severity=severity,
            onset_iteration=onset_iteration,
            onset_time_ns=history.time_at(onset_frame),
            detected_iteration=history.iteration_at(now - 1),
            reference_s=reference_s,
            excess_s=suspect.excess_s,
            confidence=confidence,
            opened_frame=now,
            hold=hold,
            throttle_reasons=throttle_reasons,
            restated_frame=now,
            restated_excess_s=suspect.excess_s,
            spell=now - onset_frame,
            fastest_s=min(reference_s, self._fastest_s(history, onset_frame)),
            longest_spell=now - onset_frame,
        )
        since = suspect.watch.excess(history, onset_frame, now)
        incident.lost_gpu_s = self.identity.world_size * float(np.nansum(np.maximum(since, 0.0)))
        self.open[name] = incident
        self.owners[name] = self.identity.incarnation
        yield self._alert(incident, history, AlertState.FIRING)

    def _fastest_s(self, history: History, onset_frame: int) -> float:
        """Return the job's own time at its lowest before an incident, seconds; none while another one explains it."""
        is_explained = any(incident.severity is not Severity.INFO for incident in self.open.values())
        return float("inf") if is_explained else history.fastest(onset_frame)

    def _grow(self, incident: Incident, suspect: Suspect, reference_s: float, history: History) -> Iterator[Alert]:
        """Add what came on top of information about the job, if that makes it more than information."""
        total_s = suspect.excess_s + max(reference_s - incident.reference_s, 0.0)
        is_more = 1 + total_s / incident.reference_s >= self.params.accused_slowdown
        if incident.severity is Severity.INFO and suspect.kind is incident.kind is Kind.SLOW_JOB and is_more:
            yield from self.raise_job(incident, history, total_s)

    def outlast(self, name: str, n_frames: int) -> None:
        """Let an incident that comes and goes be over only once it has been away for twice as long as it was."""
        if (incident := self.open.get(name)) is not None:
            incident.hold = self.holds[name] = min(max(incident.hold, 2 * n_frames), _LONGEST_HOLD)

    def _hold(self, name: str, now: int) -> int:
        """Return how many good frames to wait for: twice as many for an incident that came back soon."""
        resolved = self._resolved_frame.get(name)
        hold = self.params.hold_frames
        if resolved is not None and now - resolved <= _FLAP_FRAMES:
            hold = min(2 * self.holds.get(name, hold), _LONGEST_HOLD)
        self.holds[name] = hold
        return hold

    def _severity(self, kind: Kind, slowdown: float, accused_slowdown: float) -> Severity:
        if kind in WORKLOAD or slowdown < accused_slowdown:
            return Severity.INFO
        return Severity.CRITICAL if slowdown >= self.params.critical_slowdown else Severity.WARNING

    def follow(self, history: History, throttle_reasons: IntArray) -> Iterator[Alert]:
        """Take in the latest frame, with each rank's throttle reasons: count the cost, restate, resolve."""
        for incident in list(self.open.values()):
            ranks = [number for what, number in incident.suspect.claims if what == "rank"]
            if ranks and incident.kind is Kind.SLOW_GPU:
                incident.throttle_reasons |= int(np.bitwise_or.reduce(throttle_reasons[ranks]))
            yield from self._follow(incident, history)

    def _follow(self, incident: Incident, history: History) -> Iterator[Alert]:
        now = history.n_frames
        watch = incident.suspect.watch
        latest = watch.excess(history, now - 1, now)
        if len(latest) and np.isfinite(latest[0]):
            incident.unseen = 0
            count_spell(incident, is_slow=float(latest[0]) > 0.5 * incident.excess_s)
            incident.lost_gpu_s += self.identity.world_size * max(float(latest[0]), 0.0)
        else:
            incident.unseen += 1
        if incident.unseen >= self.params.lost_sight_frames:
            yield self._resolve(incident, history, Resolution.LOST_SIGHT, history.iteration_at(now - 1))
            return
        recovered = None if incident.kind in WORKLOAD else self._recovered_at(incident, history)
        if recovered is not None:
            self._measure_anew(incident, history.n_frames)
            yield self._resolve(incident, history, Resolution.RECOVERED, recovered)
            return
        if self._restatement_due(incident, history):
            yield self._alert(incident, history, AlertState.FIRING)

    def _measure_anew(self, recovered: Incident, now: int) -> None:
        """Compare the job with what it was before an incident that is over, where that lay in its past.

        What came on top of it seemed small then, and is all there is now.
        """
        for other in self.open.values():
            if other.kind is not Kind.SLOW_JOB or other.opened_frame < recovered.opened_frame:
                continue
            other.reference_s = min(other.reference_s, recovered.reference_s)
            other.fastest_s = min(other.fastest_s, other.reference_s)
            other.restated_frame = now  # the frames before it were slow for two reasons
            watch = other.suspect.watch
            if isinstance(watch, JobWatch):
                other.suspect = replace(other.suspect, watch=replace(watch, reference_s=other.reference_s))

    def _recovered_at(self, incident: Incident, history: History) -> int | None:
        """Return the iteration from which on the excess was gone, once it has been for long enough."""
        now, hold = history.n_frames, incident.hold
        if incident.longest_spell <= _SHORT_SPELL:
            hold = max(hold, _SPELLS * incident.longest_spell)
        hold = max(hold, self._frames_to_tell(incident, history))
        start = max(now - hold, incident.opened_frame - 1)
        recent = incident.suspect.watch.excess(history, start, now)
        known = np.isfinite(recent)
        if now - start < hold or np.count_nonzero(known) < 0.6 * hold:
            return None
        small = incident.good_s
        if float(np.median(recent[known])) > small or np.count_nonzero(recent[known] <= small) < 0.7 * known.sum():
            return None
        if np.count_nonzero(recent[known] > 0.5 * incident.excess_s) > _MOST_BAD * known.sum():
            return None
        earlier = incident.suspect.watch.excess(history, max(incident.opened_frame - 1, now - 3 * hold), now)
        last_bad = np.flatnonzero(np.nan_to_num(earlier, nan=0.0) > 0.5 * incident.excess_s)
        last_bad = last_bad[last_bad < len(earlier) - hold // 2 - 1]
        good = (last_bad[-1] + 1) if len(last_bad) else 0
        return history.iteration_at(now - len(earlier) + int(good))

    def _frames_to_tell(self, incident: Incident, history: History) -> int:
        """Return how many frames it takes to tell a recovered suspect from a slow one whose excess varies so much."""
        start = max(history.n_frames - 2 * self.params.hold_frames, incident.opened_frame - 1)
        scale = float(robust_scale(incident.suspect.watch.excess(history, start, history.n_frames)[:, None])[0])
        if not scale > 0 or not incident.good_s > 0:
            return 0
        return min(int((_SURE * MEDIAN_ERROR * scale / incident.good_s) ** 2) + 1, _LONGEST_HOLD)

    def _restatement_due(self, incident: Incident, history: History) -> bool:
        """Bring the incident's size up to date and say whether that is worth another revision."""
        now = history.n_frames
        waited = now - incident.restated_frame
        if waited < self.params.restate_frames:
            return False
        recent = incident.suspect.watch.excess(history, now - self.params.restate_frames, now)
        level = float(quiet_median(recent[:, None])[0])
        if level > incident.good_s:  # also of a suspect that recovered in part
            incident.excess_s = level
        change = abs(incident.excess_s - incident.restated_excess_s)
        is_same = incident.kind in WORKLOAD or change <= _RESTATE_CHANGE * incident.restated_excess_s
        if is_same and waited < self.params.update_frames << min(incident.n_updates, 6):
            return False
        incident.n_updates += 1
        incident.restated_frame, incident.restated_excess_s = now, incident.excess_s
        incident.suspect = _with_present_clock(incident.suspect, history)
        grown = self._severity(incident.suspect.kind, incident.slowdown, self.params.accused_slowdown)
        if incident.kind is incident.suspect.kind and grown is not Severity.INFO:
            incident.severity = grown
        return True

    def end(self, history: History, resolution: Resolution, kinds: frozenset[Kind] | None = None) -> Iterator[Alert]:
        """Resolve all open incidents, or those of some kinds, for one reason."""
        for incident in list(self.open.values()):
            if kinds is None or incident.kind in kinds:
                if self.owners.get(incident.fingerprint) != self.identity.incarnation:
                    del self.open[incident.fingerprint]  # a later incarnation goes on with it
                    continue
                yield self._resolve(incident, history, resolution, history.iteration_at(history.n_frames - 1))

    def _resolve(self, incident: Incident, history: History, resolution: Resolution, resolved_iteration: int) -> Alert:
        del self.open[incident.fingerprint]
        self._resolved_frame[incident.fingerprint] = history.n_frames
        return self._alert(incident, history, AlertState.RESOLVED, resolution, resolved_iteration)

    def _alert(
        self,
        incident: Incident,
        history: History,
        state: AlertState,
        resolution: Resolution | None = None,
        resolved_iteration: int | None = None,
    ) -> Alert:
        revision = self.revisions[incident.fingerprint] = self.revisions.get(incident.fingerprint, 0) + 1
        latest = (history.n_frames - 1) % history.capacity
        return Alert(
            schema_version=ALERT_SCHEMA_VERSION,
            fingerprint=incident.fingerprint,
            revision=revision,
            state=state,
            severity=incident.severity,
            job_id=self.identity.job_id,
            incarnation=self.identity.incarnation,
            kind=incident.kind,
            component=incident.component,
            onset_iteration=incident.onset_iteration,
            detected_iteration=incident.detected_iteration,
            as_of_iteration=int(history.iterations[latest]),
            resolved_iteration=resolved_iteration,
            resolution=resolution,
            onset_time_ns=incident.onset_time_ns,
            as_of_time_ns=int(history.end_ns[latest]),
            slowdown_ratio=_rounded(incident.slowdown),
            lost_gpu_s=_rounded(incident.lost_gpu_s),
            confidence=_rounded(incident.confidence),
            sources=incident.suspect.sources,
            evidence=tuple(_tidy(e) for e in incident.suspect.evidence if np.isfinite(e.value))
            if incident.severity is not Severity.INFO or incident.kind is not Kind.SLOW_JOB
            else (),
            causes=causes(incident.kind, incident.throttle_reasons, incident.suspect.evidence),
            advice=advice(incident.kind, incident.lost_gpu_s, self.identity.world_size),
        )


def _level_beyond(history: History, opened_frame: int, least_s: float, lengths: tuple[int, ...]) -> float | None:
    """Return the job's iteration time if it is beyond `least_s` for sure, by as many frames as that takes to tell."""
    for n_frames in lengths:
        if n_frames > _GROWN_FRAMES[0] and history.n_frames - n_frames < opened_frame:
            break
        recent = history.durations(history.n_frames - n_frames, history.n_frames)
        level_s = float(np.median(recent))
        if level_s - _GROWN_Z * median_error(recent) >= least_s:
            return level_s
    return None


def _with_present_clock(suspect: Suspect, history: History) -> Suspect:
    """Return the suspect with its clock as of now: samples come a second apart, and the first revision is quicker."""
    ranks = [number for what, number in suspect.claims if what == "rank"]
    if not ranks or all(e.what != CLOCK_EVIDENCE for e in suspect.evidence):
        return suspect
    level = quiet_median(history.clock(history.n_frames - _RECENT_FRAMES, history.n_frames))
    if not np.isfinite(level[ranks]).any():
        return suspect
    ratio = float(np.nanmin(level[ranks]) / np.nanmedian(level))
    evidence = tuple(replace_struct(e, value=ratio) if e.what == CLOCK_EVIDENCE else e for e in suspect.evidence)
    return replace(suspect, evidence=evidence)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _tidy(evidence: Evidence) -> Evidence:
    return Evidence(
        what=evidence.what,
        value=_rounded(evidence.value),
        unit=evidence.unit,
        reference=None if evidence.reference is None else _rounded(evidence.reference),
        source=evidence.source,
    )
