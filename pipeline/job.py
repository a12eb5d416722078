"""One incarnation of one job, frames in, alerts out: two questions, always both.

Is the job slower than it was (a verified change), and is a component slower than its equals (peers)? The first is blind
to a job slow from the start, the second to everybody slowing down at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from detectors.verify import MOST_AFTER
from pipeline.changes import Change, ChangeSearch
from pipeline.frames import Frame, FrameAssembler, Lateness, Signal
from pipeline.history import History
from pipeline.imbalance import find_imbalance
from pipeline.incidents import WORKLOAD, IncidentBook, JobIdentity
from pipeline.inquiry import QUICK, SPELL_FRAMES, Inquiry, Spell, as_of_now, lasts
from pipeline.judge_params import JudgeParams
from pipeline.notes import NO_NOTES, Notes
from pipeline.observer import Observer
from pipeline.search import Search, as_felt
from pipeline.slow_job import slow_job
from pipeline.structure import Structure
from pipeline.summary import summary
from pipeline.suspect import Span, Suspect
from pipeline.topology import Topology
from pipeline.unreported import with_unreported
from pipeline.watch import JobWatch
from pipeline.weighing import Weighing
from schemas.alerts import Alert, Kind, Resolution
from schemas.events import Sensor
from schemas.iterations import IterationBatch, Quality
from schemas.table import FloatArray, IntArray

_NOT_COMPARABLE = int(Quality.INCOMPLETE | Quality.OTHER_WORK | Quality.PAUSED)
_BALANCED_LOOKS = 3
_TELEMETRY_LAG_S = 2.5  # two samples, a second apart, and their flush
_LONGEST_PATIENCE = 40


@dataclass(slots=True)
class Job:
    """State of one (job, incarnation)."""

    identity: JobIdentity
    params: JudgeParams
    observer: Observer
    revisions: dict[str, int]
    holds: dict[str, int]
    owners: dict[str, str]
    lateness: Lateness
    topology: Topology = field(init=False)
    assembler: FrameAssembler = field(init=False)
    history: History = field(init=False)
    book: IncidentBook = field(init=False)
    changes: ChangeSearch = field(init=False)
    notes: Notes = field(init=False)
    sensors: Sensor = field(default_factory=lambda: Sensor(0))
    nodes_seen: set[str] = field(default_factory=set)
    nodes_ended: set[str] = field(default_factory=set)
    warmed: int = 0
    first_iteration: int | None = None
    _structure: Structure | None = None
    _inquiry: Inquiry | None = None
    _last_change: Change | None = None
    _spell: Spell | None = None  # the last slowdown that passed
    _balanced: int = 0  # looks in succession that found no imbalance
    _throttle: IntArray = field(init=False)
    _unfelt: set[int] = field(default_factory=set)  # ranks at low clocks that did not make the job slower

    def __post_init__(self) -> None:
        self.topology = Topology(self.identity.world_size)
        self.assembler = FrameAssembler(self.topology, self.observer, self.lateness)
        self.history = History(self.identity.world_size)
        self.book = IncidentBook(self.identity, self.params, self.revisions, self.holds, self.owners)
        listens = self.observer.wants_hypotheses
        self.notes = Weighing(self.identity, self.params, self.observer) if listens else NO_NOTES
        self.changes = ChangeSearch(self.params, notes=self.notes)
        self._throttle = np.zeros(self.identity.world_size, np.int64)

    def handle(self, batch: IterationBatch) -> Iterator[Alert]:
        """Take in one node's batch and judge the frames that it completes."""
        self.sensors |= batch.sensors
        self.nodes_seen.add(batch.node)
        if batch.is_last:
            self.nodes_ended.add(batch.node)
        self.topology.learn(batch.node, batch.ranks, batch.communicators, batch.rows.rank)
        self.assembler.add(batch)
        for frame in self.assembler.ready():
            yield from self._saying_unreported(self._judge(frame))

    @property
    def has_ended(self) -> bool:
        """Whether every node that was seen has said its last."""
        return bool(self.nodes_seen) and self.nodes_ended >= self.nodes_seen

    def end(self, resolution: Resolution) -> Iterator[Alert]:
        """Judge what is left and resolve what is open."""
        for frame in self.assembler.ready(ending=True):
            yield from self._saying_unreported(self._judge(frame))
        yield from self._saying_unreported(self.book.end(self.history, resolution))

    def _saying_unreported(self, alerts: Iterator[Alert]) -> Iterator[Alert]:
        for alert in alerts:
            yield with_unreported(alert, self.topology.node_by_rank.count(""))

    def _judge(self, frame: Frame) -> Iterator[Alert]:
        if self.first_iteration is None:
            self.first_iteration = frame.iteration
        if frame.missing:
            self.observer.counted("ranks_missing", frame.missing)
        usable = frame.present & ((frame.quality & _NOT_COMPARABLE) == 0)
        duration_s = _median(frame.signal(Signal.DURATION)[usable])
        if 2 * np.count_nonzero(usable) < np.count_nonzero(frame.present) or not duration_s > 0:
            self.observer.counted("frames_not_comparable", 1)
            return
        self.warmed += 1
        if self.warmed <= self.params.warm_up_frames:
            return
        structure = self._current_structure()
        self.history.push(frame, duration_s, frame.transfers(structure.expected), usable)
        self._throttle = frame.throttle.astype(np.int64)
        self.notes.frame(self.history)
        change = self.changes.update(self.history)
        self.notes.follow(self.book.open.values())
        for alert in self.book.follow(self.history, self._throttle):
            yield alert
            self.notes.told(alert)
            self._doubt(alert)
        if again := self._recurring():
            yield from self._tell_recurring(again, structure)
        elif change is not None and change.ratio > 1:
            yield from self._inquire(change, structure)
        elif self._inquiry is not None:
            yield from self._continue_inquiry(structure)
        else:
            yield from self._look_at_peers(structure)
        yield from self._reconsider()
        yield from self._look_at_balance(structure)
        self.notes.judged()
        self.observer.frame_judged(summary(self.identity, frame, duration_s, usable, structure, self._reference_s()))

    def _doubt(self, alert: Alert) -> None:
        """Look for another culprit, where one has recovered and its job is slower than those who are left explain."""
        if alert.resolution is not Resolution.RECOVERED or self._inquiry is not None:
            return
        change, now = self._last_change, self.history.n_frames
        if change is None:
            return
        onset = now - self.params.hold_frames
        before_s = change.before_s + self.book.grown_s(self.history, change.span(onset, now))
        least = max(1 + self.params.explained_share * (change.ratio - 1), self.params.accused_slowdown)
        recent_s = float(np.median(self.history.durations(onset, now)))
        if recent_s >= least * before_s:
            again = replace(change, onset=onset, before_s=before_s, after_s=recent_s, ratio=recent_s / before_s)
            self._inquiry = Inquiry(again, now + self.params.inquiry_frames)

    def _accusing(self) -> list[str]:
        return [name for name, incident in self.book.open.items() if incident.kind not in WORKLOAD]

    def _current_structure(self) -> Structure:
        if self._structure is None or self._structure.version != self.topology.version:
            self._structure = Structure.of(self.topology)
        return self._structure

    def _inquire(self, change: Change, structure: Structure) -> Iterator[Alert]:
        if self._is_explained(change):
            return
        if self._inquiry is not None:
            first = self._inquiry.change
            if change.after_s < self.params.least_slowdown * first.after_s:
                yield from self._continue_inquiry(structure)
                return
            change = change.since(first)
        self._last_change = change
        now = self.history.n_frames
        # What took long to be seen needs no further frames to look at.
        deadline = max(now, now + self._patience(change.after_s) + QUICK - change.n_after)
        self._inquiry = Inquiry(change, deadline)
        yield from self._continue_inquiry(structure)

    def _patience(self, iteration_s: float) -> int:
        """Return for how many frames to look for a component: fewer where nothing could show one."""
        timed = Sensor.GPU | Sensor.SPAN | Sensor.SYNC
        frames = self.params.inquiry_frames if self.sensors & timed else self.params.transient_frames
        if self.sensors & (Sensor.NVML | Sensor.HOST) and not self.sensors & (Sensor.GPU | Sensor.SPAN):
            frames = max(self.params.inquiry_frames, min(int(_TELEMETRY_LAG_S / iteration_s) + 1, _LONGEST_PATIENCE))
        return frames

    def _is_explained(self, change: Change) -> bool:
        """Whether an open incident grew by as much: one that comes and goes is no news."""
        now, gained_s = self.history.n_frames, change.after_s - change.before_s
        grown_s = 0.0
        for name in self._accusing():
            watch = self.book.open[name].suspect.watch
            if isinstance(watch, JobWatch):
                continue  # it would explain whatever happens to the job
            before = watch.excess(self.history, change.reference_start, change.onset)
            after = watch.excess(self.history, change.onset, now)
            if np.isfinite(before).any() and np.isfinite(after).any():
                # It may have grown little since just before, and a lot since the times that are compared with.
                latest = before[-8:] if np.isfinite(before[-8:]).any() else before
                grown_s += float(np.nanmedian(after) - min(np.nanmedian(before), np.nanmedian(latest)))
        self.notes.explained(change, grown_s)
        return grown_s >= 0.5 * gained_s

    def _continue_inquiry(self, structure: Structure) -> Iterator[Alert]:
        """Look for the component of a verified slowdown; say "the job" once there has been time enough to see more."""
        inquiry = self._inquiry
        assert inquiry is not None
        change, now = as_of_now(inquiry.change, self.history, self.params), self.history.n_frames
        gained_s = change.after_s - change.before_s
        span = change.span(max(change.onset, now - 2 * self.params.window_frames), now)
        # A second culprit may be small beside the first, and still cost a tenth of a healthy iteration.
        worth_s = (self.params.accused_slowdown - 1) * change.before_s
        least_s = max(
            min(self.params.explained_share * gained_s, worth_s),
            0.5 * (self.params.least_slowdown - 1) * change.before_s,
        )
        search = self._search(structure)
        suspects = search.find(span, least_s)
        if not suspects and now >= inquiry.deadline:
            # A pause just before it has passed for its beginning: the latter half was slow for sure.
            suspects = search.find(change.span(now - (now - span.start) // 2, now), least_s)
        if not suspects and not self.sensors & (Sensor.GPU | Sensor.SPAN):
            watch = JobWatch(change.before_s, 1.25 * gained_s)
            suspects = search.by_telemetry(span, gained_s, watch)
        # It may be one of whom nothing has been seen since: batches get lost, or are late.
        patience = self.params.window_frames if not suspects and search.has_lost_sight(span) else 0
        if now < inquiry.deadline + patience and not (suspects and all(suspect.is_clear for suspect in suspects)):
            self.notes.waiting(suspects, inquiry.deadline + patience)
            return
        has_lasted = True if suspects else lasts(change, self.history, self.params)
        if has_lasted is None and now - change.onset < MOST_AFTER:
            self.notes.waiting(suspects, change.onset + MOST_AFTER)
            return
        self._inquiry = None
        if not has_lasted:
            self.notes.passing(change)
            if self._spell is None or inquiry.change.onset >= self._spell.stop:  # else it has been seen once more
                self._spell = Spell.of(inquiry.change, self.history)
            if self.changes.level_start == inquiry.change.onset:
                self.changes.retract()
            self.observer.counted("changes_transient", 1)
            return
        yield from self._tell(change, suspects or self._beyond_times(search, span, change))

    def _beyond_times(self, search: Search, span: Span, change: Change) -> list[Suspect]:
        """Return who telemetry alone makes a suspect of a slowdown without a culprit, or else the whole job."""
        gained_s = change.after_s - change.before_s
        whole = slow_job(change.before_s, gained_s, self.params.least_z)
        return search.by_telemetry(span, gained_s, JobWatch(change.before_s, 1.25 * gained_s)) or [whole]

    def _tell(self, change: Change, suspects: list[Suspect]) -> Iterator[Alert]:
        iteration = self.history.iteration_at(change.onset)
        for suspect in suspects:
            felt = as_felt(suspect, change.after_s - change.before_s)
            yield from self._open(felt, change.onset, iteration, change.before_s, 0.99)

    def _recurring(self) -> Change | None:
        """Return what has come back after it had passed, unless somebody is accused: it may be the same."""
        return self._spell.recurs(self.history, self.params) if self._spell and not self._accusing() else None

    def _tell_recurring(self, change: Change, structure: Structure) -> Iterator[Alert]:
        now = self.history.n_frames
        self._inquiry, spell, self._spell, self._last_change = None, self._spell, None, change
        span = change.span(now - SPELL_FRAMES, now)
        search = self._search(structure)
        suspects = search.find(span, (self.params.accused_slowdown - 1) * change.before_s)
        for alert in self._tell(change, suspects or self._beyond_times(search, span, change)):
            self.book.outlast(alert.fingerprint, now - SPELL_FRAMES - spell.stop if spell else 0)
            yield alert

    def _reconsider(self) -> Iterator[Alert]:
        """Look for the culprit of what was too little to accuse anybody when it began, and has grown since."""
        if (grown := self.book.underestimated(self.history)) is None or self._inquiry is not None:
            return
        incident, gained_s = grown
        now, held = self.history.n_frames, self.history.iterations_held()
        onset = int(np.searchsorted(held, incident.onset_iteration)) + self.history.first
        before = max(onset - self.params.reference_frames, self.history.first)
        span = Span(start=now - self.params.window_frames, stop=now, reference_start=before, reference_stop=onset)
        search = self._search(self._current_structure())
        # Without a past, what was always usual between peers would count as growth.
        suspects = search.of_growth(span, gained_s, incident.fastest_s) if span.has_reference else []
        may_show = bool(self.sensors & (Sensor.GPU | Sensor.SPAN))  # who it is, in some more frames
        if not suspects and (not may_show or incident.grown > 3 * self.params.window_frames):
            yield from self.book.raise_job(incident, self.history, gained_s)
        for suspect in suspects:
            yield from self._open(suspect, onset, incident.onset_iteration, incident.fastest_s, 0.99)

    def _look_at_peers(self, structure: Structure) -> Iterator[Alert]:
        """Ask whether a component has been slower than its equals for a while, whatever the past."""
        now, stride, first = self.history.n_frames, self.params.peer_stride, self.params.window_frames
        if now < first or now % (stride if now >= 2 * first else stride // 2):
            return  # what was slow from the start is looked for twice as often, at the start
        span = Span(start=now - self.params.window_frames, stop=now)
        duration_s = float(np.median(self.history.durations(span.start, span.stop)))
        share = 1 - 1 / self.params.accused_slowdown
        search = self._search(structure)
        for suspect in search.find(span, share * duration_s, links=now % (2 * stride) == 0):
            onset = search.since(suspect)
            if not suspect.is_clear and self.history.first < onset and now - onset < 2 * first:
                self.notes.waiting([suspect], onset + 2 * first)
                continue
            effect_s = search.felt_s(suspect, span, onset)
            if effect_s < share * duration_s:
                self.notes.absorbed(suspect, effect_s, share * duration_s)
                self.observer.counted("suspects_absorbed", 1)
                continue
            iteration = self._first_slow(onset)
            yield from self._open(as_felt(suspect, effect_s), onset, iteration, duration_s - effect_s, 0.95)
        if self.sensors & Sensor.NVML and not self.sensors & (Sensor.GPU | Sensor.SPAN):
            for suspect, onset in search.by_clock(span, self._unfelt):
                iteration, reference_s = self._first_slow(onset), duration_s - suspect.excess_s
                yield from self._open(suspect, onset, iteration, reference_s, 0.95)

    def _first_slow(self, onset: int) -> int:
        """Return the iteration of an onset's frame; a suspect slow in the first frame was so in the warm-up."""
        iteration = self.first_iteration if onset == 0 else self.history.iteration_at(onset)
        assert iteration is not None
        return iteration

    def _search(self, structure: Structure) -> Search:
        return Search(
            self.history,
            self.topology,
            structure,
            self.params,
            self.sensors,
            self._throttle,
            self.book.claimed(),
            self.notes,
        )

    def _reference_s(self) -> float:
        """Return the healthy iteration time."""
        reference = [i.reference_s for i in self.book.open.values() if i.kind not in WORKLOAD]
        start = max(self.changes.level_start, self.history.n_frames - self.params.reference_frames)
        return reference[0] if reference else float(np.median(self.history.durations(start, self.history.n_frames)))

    def _open(
        self, suspect: Suspect, onset_frame: int, onset_iteration: int, reference_s: float, certainty: float
    ) -> Iterator[Alert]:
        accused_slowdown = self.book.accused_slowdown(self.history)
        if suspect.kind is not Kind.SLOW_JOB and 1 + suspect.excess_s / reference_s >= accused_slowdown:
            yield from self.book.end(self.history, Resolution.SUPERSEDED, frozenset({Kind.SLOW_JOB}))
        ranks = [number for what, number in suspect.claims if what == "rank"]
        throttle = int(np.bitwise_or.reduce(self._throttle[ranks])) if ranks else 0
        self.notes.accused(suspect, reference_s, accused_slowdown)
        yield from self.book.start(
            suspect,
            onset_frame=onset_frame,
            onset_iteration=onset_iteration,
            reference_s=max(reference_s, 1e-9),
            history=self.history,
            confidence=certainty * (1 - 0.5 * float(np.exp(-max(suspect.z, 0.0) / 4))),
            throttle_reasons=throttle,
            accused_slowdown=accused_slowdown,
        )

    def _look_at_balance(self, structure: Structure) -> Iterator[Alert]:
        now = self.history.n_frames
        if now % self.params.imbalance_frames or self._accusing():
            return
        found = find_imbalance(self.history, structure.groups, structure.stages, self.params, now, self.notes)
        self._balanced = 0 if found else self._balanced + 1
        if found is None:
            if self._balanced >= _BALANCED_LOOKS:
                yield from self.book.end(self.history, Resolution.RECOVERED, frozenset(WORKLOAD))
            return
        duration_s = float(np.median(self.history.durations(now - self.params.imbalance_frames, now)))
        yield from self._open(
            Suspect(
                kind=found.kind,
                component=found.component,
                excess_s=found.excess_s,
                z=self.params.least_z,
                watch=JobWatch(duration_s - found.excess_s),
                sources=(found.evidence.source,),
                evidence=(found.evidence,),
            ),
            self.history.first,
            self.history.iteration_at(self.history.first),
            duration_s - found.excess_s,
            0.95,
        )


def _median(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
