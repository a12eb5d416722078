"""Slow links: transfers against their own past or their equals, intersected over communicators that share a path.

Every node's interface, every pair of nodes that talk, and every node's inner GPU fabric is a hypothesis; each predicts
which observable transfers it would slow. The one under which the observed ratios are most likely is named, together
with all others that predict the very same transfers, since no observation can separate those.
"""

from dataclasses import dataclass, replace

import numpy as np

from detectors.robust import MEDIAN_ERROR
from pipeline.groups import quiet_median, robust_scale
from pipeline.history import History
from pipeline.judge_params import JudgeParams
from pipeline.notes import NO_NOTES, Notes
from pipeline.paths import Paths
from pipeline.suspect import Span, Suspect
from pipeline.topology import Topology
from pipeline.watch import LinkWatch, ScaledWatch
from schemas.alerts import Component, ComponentName, ComponentType, Evidence, Kind
from schemas.table import BoolArray, FloatArray, IntArray

_SMALLEST_SCALE = 0.03  # of log transfer times: timers and clocks are no better
_FEWEST_EQUALS = 4
_FEWEST_TO_COST = 2  # equals: of so few none is the usual one, but if one is slow the other says what that costs
_RATIO_CAP = 3.0  # in natural logs: one absurd series does not outvote the rest
_MOST_AT_ONCE = 4
_OTHER_WAY = 1e-4  # chance that a transfer does not go over a link that it is taken to go over
_MOST_LIKELIER = 50.0  # as a logarithm: what one transfer that does not count as slow can say for a link
_FEWEST_SLOW = 3  # frames: of fewer, the iterations between are the better witness
_TWO_KINDS = 1.1  # from this ratio of iteration times on, a span of both is looked at in two parts
_CLEAR = 8.0  # by how much more likely, as a logarithm, the best hypothesis is than one that predicts otherwise


@dataclass(frozen=True, slots=True, eq=False)
class _Ratios:
    log_ratio: FloatArray  # (n_series,) NaN where not observed
    error: FloatArray
    reference_s: FloatArray
    level_s: FloatArray
    usual_s: FloatArray  # reference_s, or what equal transfers take: enough to tell a cost by, not a culprit


@dataclass(slots=True, eq=False)
class LinkSearch:
    """Looks for slow links in one span of frames."""

    history: History
    topology: Topology
    paths: Paths
    params: JudgeParams
    notes: Notes = NO_NOTES

    def find(self, span: Span, least_excess_s: float) -> list[Suspect]:
        """Return suspects that add at least `least_excess_s` to an iteration, the worst first."""
        ratios = self._ratios(span)
        least = np.log(self.params.least_link_ratio)
        with np.errstate(invalid="ignore"):
            slow = (ratios.log_ratio >= least) & (ratios.log_ratio >= 4 * ratios.error)
        found: list[Suspect] = []
        open_ = np.isfinite(ratios.log_ratio)
        while slow.any() and len(found) < _MOST_AT_ONCE:
            suspect, explained = self._best(ratios, open_, slow, least_excess_s)
            if suspect is None:
                break
            open_[explained] = False
            slow[explained] = False
            if suspect.excess_s >= least_excess_s:
                found.append(suspect)
        return sorted(found, key=lambda s: -s.excess_s)

    def healthy_s(self, suspect: Suspect, span: Span) -> FloatArray:
        """Return (n_series,): the least that transfers would take without a suspect, seconds; NaN if not known."""
        ratios = self._ratios(span)
        may_be_slowed = np.zeros(len(ratios.level_s), bool)
        for name in suspect.component.candidates:
            may_be_slowed[self.paths.predicted.get(name, np.zeros(0, np.int64))] = True
        return np.fmin(ratios.usual_s, np.where(may_be_slowed, np.nan, ratios.level_s))

    def _ratios(self, span: Span) -> _Ratios:
        n_series = len(self.paths.calls)
        values = _logs(self.history.transfers(span.start, span.stop, n_series))[_slow_frames(self.history, span)]
        level = quiet_median(values)
        noise = robust_scale(values)
        count = np.maximum(np.count_nonzero(np.isfinite(values), axis=0), 1)
        if span.has_reference:
            before = _logs(self.history.transfers(span.reference_start, span.reference_stop, n_series))
            reference = quiet_median(before)
            noise = np.fmax(noise, robust_scale(before))
            variance = 1 / count + 1 / np.maximum(np.count_nonzero(np.isfinite(before), axis=0), 1)
        else:
            reference = self._of_equals(level, _FEWEST_EQUALS)
            variance = 1 / count + 1 / _FEWEST_EQUALS
        typical = np.nanmedian(noise) if np.isfinite(noise).any() else _SMALLEST_SCALE
        error = MEDIAN_ERROR * np.fmax(np.fmax(noise, typical), _SMALLEST_SCALE) * np.sqrt(variance)
        usual = np.where(np.isfinite(reference), reference, self._like_equals(reference))
        if not span.has_reference:
            usual = np.where(np.isfinite(usual), usual, self._of_equals(level, _FEWEST_TO_COST))
        return _Ratios(level - reference, error, np.exp(reference), np.exp(level), np.exp(usual))

    def _of_equals(self, level: FloatArray, fewest: int) -> FloatArray:
        """Return the lower quartile of equal transfers, so that three quarters may be slow; NaN with too few equals.

        Of fewer than four it is the least, as all others may be slow.
        """
        reference = np.full(len(level), np.nan)
        for number in np.unique(self.paths.equals):
            equal = np.flatnonzero((self.paths.equals == number) & np.isfinite(level))
            if len(equal) >= fewest:
                is_few = len(equal) < _FEWEST_EQUALS
                reference[equal] = level[equal].min() if is_few else np.quantile(level[equal], 0.25)
        return reference

    def _like_equals(self, reference: FloatArray) -> FloatArray:
        """Return the median reference of each transfer's equals; NaN where none has any."""
        usual = np.full(len(reference), np.nan)
        for number in np.unique(self.paths.equals[np.isfinite(reference)]):
            equal = self.paths.equals == number
            usual[equal] = np.nanmedian(reference[equal])
        return usual

    def _best(
        self,
        ratios: _Ratios,
        open_: BoolArray,
        slow: BoolArray,
        least_excess_s: float,
    ) -> tuple[Suspect | None, IntArray]:
        with np.errstate(invalid="ignore"):
            is_open_question = ~slow & (ratios.log_ratio + 4 * ratios.error >= np.log(self.params.least_link_ratio))
        scores: dict[ComponentName, tuple[float, bytes]] = {}
        for name in self.paths.predicted:
            seen = self._telling(name, open_, slow)
            n_told = np.count_nonzero(~is_open_question[seen])
            if n_told == 0 or np.count_nonzero(slow[seen]) < 0.6 * n_told:
                continue
            scores[name] = (_gain(ratios.log_ratio[seen], ratios.error[seen], slow[seen]), seen.tobytes())
        if not scores:
            self.notes.links(None, scores, ratios.log_ratio, slow, ~is_open_question, self.paths.predicted)
            return None, np.zeros(0, np.int64)
        winner = max(scores, key=lambda name: scores[name][0])
        alike = [name for name in scores if scores[name][1] == scores[winner][1]]
        seen = self._telling(winner, open_, slow)
        rivals = [score for name, (score, _) in scores.items() if name not in alike]
        is_clear = max(rivals, default=-np.inf) < scores[winner][0] - _CLEAR
        suspects = self._by_prediction(alike, seen, ratios)
        enough = [one for one in suspects if one.excess_s >= least_excess_s] or suspects
        is_clear &= len(enough) == 1 or not self._may_be_seen(alike, ratios)
        suspect = replace(_either(enough), is_clear=is_clear)
        self.notes.links(suspect, scores, ratios.log_ratio, slow, ~is_open_question, self.paths.predicted)
        return suspect, seen

    def _by_prediction(self, alike: list[ComponentName], seen: IntArray, ratios: _Ratios) -> list[Suspect]:
        """Return a suspect for each prediction of links that slow the same transfers of those `seen`, and others."""
        by_unseen: dict[bytes, list[ComponentName]] = {}
        for name in sorted(alike):
            by_unseen.setdefault(self._unseen(name, ratios).tobytes(), []).append(name)
        return [
            self._suspect(tuple(names), seen, self._unseen(names[0], ratios), ratios) for names in by_unseen.values()
        ]

    def _may_be_seen(self, alike: list[ComponentName], ratios: _Ratios) -> bool:
        """Return whether more frames may show what was not seen: not if no agent is there to report it."""
        unseen = np.unique(np.concatenate([self._unseen(name, ratios) for name in alike]))
        held = self.history.transfers(self.history.first, self.history.n_frames, len(self.paths.calls))
        return bool(np.isfinite(held[:, unseen]).any())

    def _unseen(self, name: ComponentName, ratios: _Ratios) -> IntArray:
        """Return the large transfers that a link would slow, and that were not seen."""
        series = self.paths.predicted[name]
        is_lost = np.isnan(ratios.level_s[series]) & np.isfinite(ratios.usual_s[series])
        return series[is_lost & self.paths.is_large[series]]

    def _of_few_equals(self, names: tuple[ComponentName, ...], ratios: _Ratios) -> list[int]:
        """Return the transfers that one of these links would slow, and that are slow beside their only equals."""
        may_be_slowed = np.unique(np.concatenate([self.paths.predicted[name] for name in names]))
        with np.errstate(invalid="ignore"):
            beyond = np.log(ratios.level_s / ratios.usual_s)
            slow = (beyond >= np.log(self.params.least_link_ratio)) & (beyond >= 4 * ratios.error)
        slow &= np.isnan(ratios.log_ratio)  # the others are judged by their own
        return [int(i) for i in may_be_slowed[slow[may_be_slowed]]]

    def _telling(self, name: ComponentName, open_: BoolArray, slow: BoolArray) -> IntArray:
        """Return the transfers that a link would slow; small ones that are not slow say nothing of its bandwidth."""
        series = self.paths.predicted[name]
        series = series[open_[series]]
        is_large = self.paths.is_large[series]
        return series[is_large | slow[series]] if is_large.any() else series

    def _suspect(
        self, candidates: tuple[ComponentName, ...], series: IntArray, unseen: IntArray, ratios: _Ratios
    ) -> Suspect:
        slowing = np.exp(float(np.median(ratios.log_ratio[series]))) - 1
        beyond = np.maximum(ratios.level_s - ratios.usual_s, 0.0) * self.paths.calls
        beyond[unseen] = slowing * ratios.usual_s[unseen] * self.paths.calls[unseen]
        lost: dict[int, float] = {}
        touching: dict[int, list[int]] = {}
        wanted = {*series.tolist(), *unseen.tolist(), *self._of_few_equals(candidates, ratios)}
        for rank, own in self.topology.series_by_rank.items():
            touching[rank] = [i for i in own if i in wanted]
            lost[rank] = float(sum(beyond[i] for i in touching[rank]))
        worst = max(lost, key=lambda rank: (lost[rank], -rank))
        # Who loses most may do so in transfers that nobody reports: another one is watched in its place then.
        seen = set(series.tolist())
        shown = max(lost, key=lambda rank: (not seen.isdisjoint(touching[rank]), lost[rank], -rank))
        watched = np.array(sorted(touching[shown]))
        watch = LinkWatch(watched, ratios.usual_s[watched], self.paths.calls[watched])
        z = ratios.log_ratio[series] / ratios.error[series]
        top = int(series[np.argmax(beyond[series])])
        evidence = Evidence(
            what=f"shortest transfer of {self._describe(top)}",
            value=float(ratios.level_s[top]),
            unit="s",
            reference=float(ratios.reference_s[top]),
            source="gpu",
        )
        spread = Evidence(what="transfers slowed alike", value=float(len(series)), unit="count", source="gpu")
        return Suspect(
            kind=Kind.SLOW_LINK,
            component=Component(type=ComponentType.LINK, name=candidates[0], candidates=candidates),
            excess_s=lost[worst],
            z=float(np.median(z) * np.sqrt(len(series))),
            watch=watch if shown == worst else ScaledWatch(watch, lost[worst] / lost[shown]),
            sources=("gpu",),
            evidence=(evidence, spread),
            claims=frozenset(("series", i) for i in wanted),
        )

    def _describe(self, index: int) -> str:
        key = self.topology.series[index].key
        if key.source < 0:
            return f"communicator {key.comm:016x}"
        members = self.topology.members.get(key.comm, {})
        return f"rank {members.get(key.source)} to rank {members.get(key.target)}"


def _either(suspects: list[Suspect]) -> Suspect:
    """Return one suspect for several that what was seen cannot tell apart, of the least that any of them explains."""
    least = min(suspects, key=lambda one: one.excess_s)
    names = tuple(sorted(name for one in suspects for name in one.component.candidates))
    return replace(least, component=Component(type=ComponentType.LINK, name=names[0], candidates=names))


def _slow_frames(history: History, span: Span) -> BoolArray:
    """Return (n,): the frames of a span in which the job was slow, where it was now and then; else all of them.

    A fault that comes and goes leaves transfers of two kinds, whose median says little and whose spread hides both.
    """
    logs = np.log(history.durations(span.start, span.stop))
    fewest = _FEWEST_SLOW if span.has_reference else max(_FEWEST_SLOW, len(logs) // 2)
    every = np.ones(len(logs), bool)
    if len(logs) < 2 * _FEWEST_SLOW:
        return every
    ordered = np.sort(logs)
    cut = int(np.argmax(np.diff(ordered))) + 1
    low, high = ordered[:cut], ordered[cut:]
    between = float(np.median(high) - np.median(low))
    are_two_kinds = between >= np.log(_TWO_KINDS) and max(np.ptp(low), np.ptp(high)) <= 0.5 * between
    return logs >= high[0] if are_two_kinds and len(high) >= fewest else every


def _gain(log_ratio: FloatArray, error: FloatArray, slow: BoolArray) -> float:
    """Return by how much likelier these log ratios are if a link slows them all than if none does, as a logarithm.

    Less bandwidth slows one transfer by more than another, so the slow ones are taken as they are. The others should
    be about as slow as the least of those; that one is not may also mean that it takes another way than was inferred.
    """
    weight = 1 / (2 * error**2)
    capped = np.clip(log_ratio, -_RATIO_CAP, _RATIO_CAP)
    expected = float(np.quantile(capped[slow], 0.25)) if slow.any() else 0.0
    likelier = np.exp(np.minimum(expected * (2 * capped - expected) * weight, _MOST_LIKELIER))
    return float(np.sum(np.where(slow, capped**2 * weight, np.log(_OTHER_WAY + (1 - _OTHER_WAY) * likelier))))


def _logs(times: FloatArray) -> FloatArray:
    """Return logarithms, NaN for times that are not above 0."""
    return np.log(np.where(times > 0, times, np.nan))
