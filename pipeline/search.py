"""The search for components that are slower than they should be, over ranks, links and telemetry alike."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from detectors.robust import MEDIAN_ERROR
from detectors.verify import LEAST_BEFORE, MOST_AFTER
from pipeline.claims import Claims
from pipeline.groups import median_error, quiet_median, robust_scale
from pipeline.history import History
from pipeline.judge_params import JudgeParams
from pipeline.links import LinkSearch
from pipeline.notes import NO_NOTES, Notes
from pipeline.ranks import SEEN_SHARE, RankSearch
from pipeline.slack import Slack
from pipeline.structure import Structure
from pipeline.suspect import FEWEST_REFERENCE, Span, Suspect
from pipeline.throttling import rarely_throttled
from pipeline.topology import Topology
from pipeline.watch import JobWatch, ScaledWatch
from schemas.alerts import Kind
from schemas.events import Sensor
from schemas.table import FloatArray, IntArray

_SURE = 2.0  # standard errors; whoever is let go is looked at again soon


@dataclass(slots=True, eq=False)
class Search:
    """Looks through what one job's history holds, as of its latest frame."""

    history: History
    topology: Topology
    structure: Structure
    params: JudgeParams
    sensors: Sensor
    throttle: IntArray  # (world_size,) reasons in the latest frame
    claimed: Claims  # what open incidents explain already
    notes: Notes = NO_NOTES

    def find(self, span: Span, least_excess_s: float, *, links: bool = True) -> list[Suspect]:
        """Return suspects that add at least `least_excess_s` to an iteration, the worst first."""
        self.notes.look(span, least_excess_s)
        found = self._ranks().find(span, least_excess_s)
        if links and self.sensors & (Sensor.GPU | Sensor.SPAN):
            found += self._links().find(span, least_excess_s)
        self.notes.found(found, self.claimed)
        return sorted((s for s in found if not self.claimed.cover(s, span)), key=lambda s: -s.excess_s)

    def by_telemetry(self, span: Span, excess_s: float, watch: JobWatch) -> list[Suspect]:
        """Return who the telemetry alone makes a suspect of a slowdown that no time can attribute."""
        telemetry = self._ranks().telemetry
        found = telemetry.suspects(span, excess_s, watch)
        self.notes.telemetry(telemetry, span, found)
        return found

    def has_lost_sight(self, span: Span) -> bool:
        """Whether ranks whose computation was known before have hardly been seen since."""
        before = np.isfinite(self.history.compute(span.reference_start, span.reference_stop))
        since = np.isfinite(self.history.compute(span.start, span.stop))
        return bool(np.any((before.mean(axis=0) >= SEEN_SHARE) & (since.mean(axis=0) < SEEN_SHARE)))

    def by_clock(self, span: Span, unfelt: set[int]) -> Iterator[tuple[Suspect, int]]:
        """Yield GPUs at low clocks that the job feels, with the frame since when: all there is where no times are seen.

        Ranks that made it no slower when their clocks fell are kept in `unfelt`.
        """
        n_stages = max(len(np.unique(self.structure.stages[self.structure.stages >= 0])), 1)
        suspects, first = self._ranks().telemetry.standing(span, n_stages), self.history.first
        unfelt &= {rank for suspect in suspects for _, rank in suspect.claims}
        duration_s = float(np.median(self.history.durations(span.start, span.stop)))
        for suspect in suspects:
            onset, ranks = self.since(suspect), {rank for _, rank in suspect.claims}
            has_past, gained_s = onset - first >= FEWEST_REFERENCE, suspect.excess_s
            if self.claimed.cover(suspect, span) or (ranks <= unfelt and not has_past):
                continue
            if has_past:
                past = self.history.durations(onset - self.params.reference_frames, onset)
                gained_s = duration_s - float(np.median(past))
            if gained_s >= (1 - 1 / self.params.accused_slowdown) * duration_s:
                yield _costing(suspect, gained_s), onset
            elif has_past:
                unfelt |= ranks

    def of_growth(self, span: Span, gained_s: float, reference_s: float) -> list[Suspect]:
        """Return who explains most of what a job has lost bit by bit: taken to be the reason of all of it, together."""
        suspects = [suspect for suspect in self.find(span, 0.5 * gained_s) if suspect.is_clear]
        if not suspects and not self.sensors & (Sensor.GPU | Sensor.SPAN):
            suspects = self.by_telemetry(span, gained_s, JobWatch(reference_s))
        all_s = sum(suspect.excess_s for suspect in suspects)
        return [_costing(suspect, gained_s * suspect.excess_s / all_s) for suspect in suspects]

    def beyond_other_stages(self, suspect: Suspect, span: Span) -> float:
        """Return what of a suspect's excess nothing hides: a short stage's slack absorbs it, or who else is late."""
        if suspect.kind is Kind.SLOW_LINK:
            healthy_s = self._links().healthy_s(suspect, span)
            most_s = Slack(self.history, self.topology, self.structure).most_felt(span, healthy_s)
            return min(self._felt_since(suspect, span), most_s)
        ranks = np.array([number for what, number in suspect.claims if what == "rank"])
        compute = self.history.compute(span.start, span.stop)
        if len(ranks) == 0 or not np.isfinite(compute).any():
            return suspect.excess_s
        own = np.max(_or_zero(compute[:, ranks]), axis=1)  # of ranks in turns, the last one counts
        compute[:, ranks] = np.nan  # a node may be a whole stage
        others = self._longest(compute)
        return float(np.median(np.maximum(own, others) - np.maximum(own - suspect.excess_s, others)))

    def _longest(self, compute: FloatArray) -> FloatArray:
        """Return (n,): how long the longest group of peers computes in each frame, seconds.

        That is what most of it take, and where work is uneven what the last one takes: it may be another each time.
        """
        median = self.structure.groups.lower_median(compute)
        last = np.max(np.nan_to_num(self.structure.groups.spread(compute)), axis=-1, initial=0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            uneven = quiet_median(last / median) >= self.params.data_imbalance_ratio
        longest: FloatArray = np.max(_or_zero(np.where(uneven, last, median)), axis=1, initial=0.0)
        return longest

    def _felt_since(self, suspect: Suspect, span: Span) -> float:
        """Return by how much iterations have become longer since a suspect is slow; its excess, where none was before.

        Transfers overlap with computation and with the work of other stages, so that a link may be slow unnoticed.
        """
        onset = self.since(suspect)
        after = self.history.durations(onset, span.stop)
        before = self.history.durations(self.history.first, onset)
        if len(before) < FEWEST_REFERENCE or len(after) == 0:
            return suspect.excess_s
        return float(np.median(after)) - self._healthy_s(before)

    def _healthy_s(self, before: FloatArray) -> float:
        """Return the level of the latest times, or of earlier ones clearly shorter: another fault may be on."""
        latest, n = before[-self.params.reference_frames :], self.params.window_frames
        level = float(np.median(latest))
        blocks = [float(np.median(before[i : i + n])) for i in range(0, len(before) - n + 1, n)]
        # Steps hardly show among the differences, whose variance is twice that of the times.
        error = MEDIAN_ERROR * float(robust_scale(np.diff(latest)[:, None])[0]) / np.sqrt(2 * n)
        lowest = min(blocks, default=level)
        return lowest if lowest < level - 2 * self.params.least_z * error else level

    def since(self, suspect: Suspect) -> int:
        """Return the frame since which the suspect has been slow, looking back over all that is held."""
        first = self.history.first
        excess = suspect.watch.excess(self.history, first, self.history.n_frames)
        seen = np.flatnonzero(np.isfinite(excess))
        known = excess[seen]
        smooth = np.array([np.median(known[max(0, i - 1) : i + 2]) for i in range(len(known))])
        good = np.flatnonzero(smooth < 0.5 * suspect.excess_s)
        return first + (int(seen[good[-1]]) + 1 if len(good) else 0)

    def felt_s(self, suspect: Suspect, span: Span, onset: int) -> float:
        """Return what a suspect, slow since a frame, costs an iteration, in seconds, beyond what others hide.

        Where the job has a past, and has become slower since by less than half of that for sure, the job is believed.
        """
        if onset >= self.history.n_frames:
            return 0.0  # it was slow, and is not any more
        effect_s = min(suspect.excess_s, self.beyond_other_stages(suspect, span))
        before = self.history.durations(max(self.history.first, onset - self.params.reference_frames), onset)
        after = self.history.durations(onset, self.history.n_frames)[-MOST_AFTER:]
        before, after = before[np.isfinite(before)], after[np.isfinite(after)]
        if len(before) < LEAST_BEFORE or len(after) == 0:
            return effect_s
        gained_s = float(np.median(after) - np.median(before))
        error_s = median_error(before) * float(np.sqrt(1 + len(before) / len(after)))
        return effect_s if gained_s + _SURE * error_s >= 0.5 * effect_s else max(gained_s, 0.0)

    def _links(self) -> LinkSearch:
        return LinkSearch(self.history, self.topology, self.structure.paths, self.params, self.notes)

    def _ranks(self) -> RankSearch:
        source = "span" if self.sensors & Sensor.SPAN else "gpu"
        throttled = rarely_throttled(self.throttle)
        return RankSearch(self.history, self.topology, self.structure, self.params, throttled, source, self.notes)


def as_felt(suspect: Suspect, effect_s: float) -> Suspect:
    """Return the suspect with no more excess than the job feels."""
    return suspect if suspect.excess_s <= effect_s else _costing(suspect, effect_s)


def _costing(suspect: Suspect, gained_s: float) -> Suspect:
    """Return the suspect with what the job has lost for its excess."""
    return replace(suspect, excess_s=gained_s, watch=ScaledWatch(suspect.watch, gained_s / suspect.excess_s))


def _or_zero(values: FloatArray) -> FloatArray:
    return np.nan_to_num(values, nan=0.0)
