"""Scores of many episodes, per class and over all classes by their weights, with 95 % intervals.

Clear faults are those that ask for an incident and shift the iteration time by 3.3 standard deviations of its noise or
more. Delays count the slow iterations that were seen until the incident was known, that one included. Precision is the
share of incidents above information that say the right thing, or that the job is slower while it is.

Intervals over all classes are those of resampled episodes, and no narrower than those of as many equally weighted
cases: resampling a few episodes that all went well would promise that all others will.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from benchmarks.quality.corpus import CLASSES
from benchmarks.quality.intervals import Interval, bootstrap, bootstrap_rate, poisson, wilson
from benchmarks.quality.matching import Finding, Matched
from schemas.table import FloatArray, IntArray

CLEAR_SIGMAS = 3.3
_PROMPT_FLUSH_S = 1.0  # seconds of delay are told of agents that send every second


class Share(msgspec.Struct, frozen=True):
    """A share with its interval."""

    value: float
    n: int
    interval: Interval

    @classmethod
    def of(cls, flags: Iterable[bool]) -> "Share":
        """Return the share of true ones."""
        known = list(flags)
        return cls(sum(known) / len(known) if known else float("nan"), len(known), wilson(sum(known), len(known)))


class Quantile(msgspec.Struct, frozen=True):
    """A median and a 95th percentile, each with its interval."""

    median: float
    p95: float
    n: int
    median_interval: Interval
    p95_interval: Interval

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantile":
        """Return them of independent values."""
        if not values:
            nothing = (float("nan"), float("nan"))
            return cls(float("nan"), float("nan"), 0, nothing, nothing)
        given = np.array(values, np.float64)
        return cls(_median(given), _p95(given), len(given), bootstrap(values, _median), bootstrap(values, _p95))


class Rate(msgspec.Struct, frozen=True):
    """False incidents per 10,000 healthy iterations."""

    value: float
    iterations: int
    interval: Interval


class ClassScores(msgspec.Struct, frozen=True, kw_only=True):
    """One class. Shares about faults are of the clear ones, but for recall_any (all that ask for an incident)."""

    episodes: int
    recall: Share
    recall_any: Share
    precision: Share
    component_first: Share
    kind: Share
    in_time: Share  # found before it had cost too much
    informed: Share  # of the information that is due: on faults of 5 to 10 %, and on the workload itself
    false_episodes: Share  # with a false incident
    delay_iterations: Quantile
    delay_s: Quantile
    onset_error: Quantile
    openings_per_fault: float
    false_per_10000: Rate


def is_clear(finding: Finding) -> bool:
    """Whether nobody could miss it."""
    return finding.answer.asked == "incident" and finding.answer.shift_sigmas >= CLEAR_SIGMAS


def delay(finding: Finding) -> int:
    """Return how many slow iterations were seen before it was said."""
    return max(finding.said[0].detected - finding.answer.onset, 0) + 1


def is_in_time(finding: Finding) -> bool:
    """Whether it was said before it had cost too much."""
    return bool(finding.standing) or (bool(finding.said) and finding.said[0].detected <= finding.answer.deadline)


def is_prompt(finding: Finding) -> bool:
    """Whether its delay counts: it was there in full at once, after a healthy past, and no incident stood already."""
    is_sudden = finding.answer.has_past and finding.answer.shape in {"step", "intermittent"}
    return is_sudden and bool(finding.said) and not finding.standing


def class_scores(matched: Sequence[Matched]) -> ClassScores:
    """Score the episodes of one class."""
    clear = [(m, f) for m in matched for f in m.findings if is_clear(f)]
    found = [(m, f) for m, f in clear if f.is_found]
    opened = [(m, f) for m, f in found if f.said]
    asked = [f for m in matched for f in m.findings if f.answer.asked == "incident"]
    false = [m.n_false_while_healthy for m in matched]
    healthy = [m.healthy_iterations for m in matched]
    per_10000 = tuple(1e4 * bound for bound in bootstrap_rate(false, healthy))
    return ClassScores(
        episodes=len(matched),
        recall=Share.of(f.is_found for _, f in clear),
        recall_any=Share.of(f.is_found for f in asked),
        precision=Share.of(ok for m in matched for ok in _incidents(m)),
        component_first=Share.of(f.names_component_first for _, f in found),
        kind=Share.of(f.names_kind for _, f in found),
        in_time=Share.of(is_in_time(f) for _, f in clear),
        informed=Share.of(told for m in matched for told in _told(m)),
        false_episodes=Share.of(bool(m.false) for m in matched),
        delay_iterations=Quantile.of([delay(f) for _, f in opened]),
        delay_s=Quantile.of(
            [f.said[0].detected_s - f.answer.onset_s for m, f in opened if m.outcome.flush_s <= _PROMPT_FLUSH_S]
        ),
        onset_error=Quantile.of([abs(f.said[0].onset - f.answer.onset) for _, f in opened]),
        openings_per_fault=sum(len(f.said) for _, f in opened) / len(opened) if opened else float("nan"),
        false_per_10000=Rate(
            1e4 * sum(false) / sum(healthy) if sum(healthy) else float("nan"),
            sum(healthy),
            (per_10000[0], per_10000[1]),
        ),
    )


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """Over all classes by their weights, and the worst class of each bar."""

    episodes: int
    recall: float
    precision: float
    component_first: float
    kind: float
    in_time: float
    delay_iterations_median: float
    delay_iterations_p95: float
    false_incidents_per_10000: float
    intervals: dict[str, Interval]
    classes: dict[str, ClassScores]


_RESAMPLES = 400
_SEED = 777


def headline(matched: Sequence[Matched]) -> Headline:
    """Score all episodes."""
    by_class = {name: [m for m in matched if m.outcome.class_name == name] for name in CLASSES}
    by_class = {name: given for name, given in by_class.items() if given}
    tables = {name: _Table.of(given) for name, given in by_class.items()}
    weights = {name: CLASSES[name].weight for name in by_class}
    random = np.random.default_rng(_SEED)
    resamples = []
    for _ in range(_RESAMPLES):
        picked = {name: table.take(random.integers(0, table.n, table.n)) for name, table in tables.items()}
        resamples.append(_weighted(picked, weights))
    bounds = {
        name: (float(np.nanquantile(values, 0.025)), float(np.nanquantile(values, 0.975)))
        for name in (resamples[0] if resamples else {})
        if not np.isnan(values := np.array([one[name] for one in resamples])).all()
    }
    for name, (low, high) in _least_wide(tables, weights).items():
        if name in bounds:
            bounds[name] = (min(bounds[name][0], low), max(bounds[name][1], high))
    return Headline(
        episodes=len(matched),
        intervals=bounds,
        classes={name: class_scores(given) for name, given in by_class.items()},
        **_weighted(tables, weights),
    )


class _Table:
    """One class as rows of numbers per episode, to resample whole episodes."""

    def __init__(self, rows: FloatArray, delays: list[FloatArray]) -> None:
        self.rows, self.delays = rows, delays  # rows (n, len(_COLUMNS))

    @property
    def n(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, matched: Sequence[Matched]) -> "_Table":
        rows, delays = [], []
        for m in matched:
            clear = [f for f in m.findings if is_clear(f)]
            found = [f for f in clear if f.is_found]
            incidents = list(_incidents(m))
            rows.append(
                [
                    len(clear),
                    len(found),
                    sum(f.names_component_first for f in found),
                    sum(f.names_kind for f in found),
                    sum(is_in_time(f) for f in found),
                    len(incidents),
                    sum(incidents),
                    m.n_false_while_healthy,
                    m.healthy_iterations,
                ]
            )
            delays.append(np.array([delay(f) for f in found if is_prompt(f)], np.float64))
        return cls(np.array(rows, np.float64), delays)

    def take(self, index: IntArray) -> "_Table":
        return _Table(self.rows[index], [self.delays[i] for i in index.tolist()])


_SHARES = {"recall": (1, 0), "component_first": (2, 1), "kind": (3, 1), "in_time": (4, 0), "precision": (6, 5)}
_FALSE, _HEALTHY = 7, 8  # columns, as those of the shares' hits and cases


def _least_wide(tables: dict[str, _Table], weights: dict[str, float]) -> dict[str, Interval]:
    """Return the intervals of shares and of the rate, as if the weighted cases were as many equally weighted ones."""
    sums = np.array([table.rows.sum(axis=0) for table in tables.values()])
    weight = np.array([weights[name] / table.n for name, table in tables.items()])
    found: dict[str, Interval] = {}
    for name, (hits, cases) in _SHARES.items():
        n = _effective(weight, sums[:, cases])
        found[name] = wilson(n * _ratio(float(weight @ sums[:, hits]), float(weight @ sums[:, cases])), n)
    exposure = _effective(weight, sums[:, _HEALTHY])
    rate = _ratio(float(weight @ sums[:, _FALSE]), float(weight @ sums[:, _HEALTHY]))
    low, high = poisson(rate * exposure, exposure)
    return found | {"false_incidents_per_10000": (1e4 * low, 1e4 * high)}


def _effective(weight: FloatArray, cases: FloatArray) -> float:
    """Return how many equally weighted cases tell as much (L. Kish, Survey Sampling, 1965)."""
    return _ratio(float(weight @ cases) ** 2, float(weight**2 @ cases)) if cases.any() else 0.0


def _weighted(tables: dict[str, _Table], weights: dict[str, float]) -> dict[str, float]:
    total = np.zeros(9)
    delays, shares = [], []
    for name, table in tables.items():
        weight = weights[name] / table.n
        total += weight * table.rows.sum(axis=0)
        found = np.concatenate(table.delays) if table.delays else np.empty(0)
        delays.append(found)
        shares.append(np.full(len(found), weight))
    clear, found_, component, kind, in_time, incidents, right, false, healthy = total.tolist()
    values, share = np.concatenate(delays), np.concatenate(shares)
    return {
        "recall": _ratio(found_, clear),
        "precision": _ratio(right, incidents),
        "component_first": _ratio(component, found_),
        "kind": _ratio(kind, found_),
        "in_time": _ratio(in_time, clear),
        "delay_iterations_median": _weighted_quantile(values, share, 0.5),
        "delay_iterations_p95": _weighted_quantile(values, share, 0.95),
        "false_incidents_per_10000": 1e4 * _ratio(false, healthy),
    }


def _incidents(matched: Matched) -> list[bool]:
    n_false = len(matched.false)
    return [True] * (matched.n_accusing - n_false) + [False] * n_false


def _told(matched: Matched) -> Iterator[bool]:
    """Yield for each information that is due, of small faults and of the workload itself, whether it was given."""
    openings = matched.outcome.openings
    for answer in (f.answer for f in matched.findings if f.answer.asked == "information"):
        yield any(answer.onset <= o.detected < answer.end for o in openings)
    for kind in matched.outcome.hints:
        yield any(o.kind is kind for o in openings)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _median(values: FloatArray) -> float:
    return float(np.median(values))


def _p95(values: FloatArray) -> float:
    return float(np.quantile(values, 0.95))


def _weighted_quantile(values: FloatArray, weights: FloatArray, probability: float) -> float:
    if len(values) == 0:
        return float("nan")
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, probability)), len(values) - 1)])
