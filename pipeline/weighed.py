"""What ranks, links and telemetry were weighed by, put as hypotheses: the few that came nearest to their bounds."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

import numpy as np

from pipeline.excess import Excess, beyond_peers
from pipeline.frames import Signal
from pipeline.groups import Groups
from pipeline.hypotheses import Hypothesis, Number, Verdict, seconds_text
from pipeline.ranks import HOST_BOUND, LATE_SHARE, RankSearch
from pipeline.suspect import CLOCK_DROP, CLOCK_EVIDENCE, HOST_EVIDENCE, Span, Suspect
from pipeline.telemetry import EXPLAINED, QUEUE_RISE, Telemetry
from pipeline.topology import gpu_name
from schemas.alerts import ComponentName, ComponentType, Kind
from schemas.table import BoolArray, FloatArray, IntArray

Make = Callable[..., Hypothesis]  # a hypothesis of this iteration and question, given all else

_MOST_GPUS = 6
_MOST_HOSTS = 4
_MOST_LINKS = 8
_MOST_SAMPLES = 3

_UNMEASURED = (Kind.SLOW_JOB, Kind.STAGE_IMBALANCE, Kind.DATA_IMBALANCE)
_BOUNDS_MET = "within all of its bounds"


def of_suspect(make: Make, suspect: Suspect, *, reason: str = _BOUNDS_MET, is_measured: bool = True) -> Hypothesis:
    """Return a suspect with the evidence that an alert would show; without a measurement of it there is no score."""
    numbers = tuple(Number(what=e.what, value=e.value, unit=e.unit) for e in suspect.evidence)
    return make(
        kind=suspect.kind,
        candidates=suspect.component.candidates or (suspect.component.name,),
        excess_s=suspect.excess_s,
        score=suspect.z if is_measured and suspect.kind not in _UNMEASURED else float("nan"),
        score_unit="sigma",
        verdict=Verdict.SUSPECTED,
        reason=reason,
        numbers=numbers,
    )


def of_gpus(
    make: Make, search: RankSearch, compute: Excess, host: Excess, found: list[Suspect], span: Span, least_s: float
) -> Iterator[Hypothesis]:
    """Yield the ranks whose computation outlasts that of their peers most."""
    late = _late_share(search.history.compute(span.start, span.stop), compute, search.structure.groups)
    clock = search.telemetry.clock(span)
    accused = {rank: s for s in found for what, rank in s.claims if what == "rank"}
    told = {rank for rank, s in accused.items() if s.kind is not Kind.SLOW_HOST}
    for rank in _largest(compute.seconds, _MOST_GPUS, always=told):
        suspect = accused.get(rank)
        numbers = [
            Number(what="computation beyond peers'", value=compute.seconds[rank], unit="s", bound=least_s),
            Number(what="signal over noise", value=compute.z[rank], unit="sigma", bound=search.params.least_z),
            Number(what="late in iterations", value=late[rank], unit="share", bound=LATE_SHARE),
            Number(what="computation", value=compute.level[rank], unit="s"),
            Number(what="its host's time beyond peers'", value=host.seconds[rank], unit="s"),
            Number(what=CLOCK_EVIDENCE, value=clock[rank], unit="ratio"),
        ]
        is_own = suspect is not None and suspect.kind is not Kind.SLOW_HOST
        hypothesis = make(
            kind=suspect.kind if suspect is not None and is_own else Kind.SLOW_GPU,
            candidates=suspect.component.candidates
            if suspect is not None and is_own
            else (gpu_name(search.topology, rank),),
            excess_s=float(compute.seconds[rank]),
            score=float(compute.z[rank]),
            score_unit="sigma",
            verdict=Verdict.SUSPECTED,
            reason=_BOUNDS_MET,
            numbers=_known(numbers),
        )
        if suspect is not None and not is_own:
            reason = f"by its host, {suspect.component.name.node}, with {seconds_text(suspect.excess_s)}"
            yield _with(hypothesis, Verdict.OUTSCORED, reason)
        elif suspect is None:
            yield _below(hypothesis)
        else:
            yield hypothesis


def of_hosts(
    make: Make, search: RankSearch, compute: Excess, host: Excess, found: list[Suspect], span: Span, least_s: float
) -> Iterator[Hypothesis]:
    """Yield the hosts that wait least for their GPUs, each by its worst rank."""
    duration_s = float(np.nanmedian(search.history.durations(span.start, span.stop)))
    late = _late_share(search.history.host(span.start, span.stop), host, search.structure.groups)
    accused = {s.component.name.node for s in found if s.kind is Kind.SLOW_HOST}
    worst: dict[str, int] = {}
    for rank in _largest(host.seconds, len(host.seconds)):
        worst.setdefault(search.topology.node_by_rank[rank], rank)
    shown = list(worst)[:_MOST_HOSTS] + [node for node in list(worst)[_MOST_HOSTS:] if node in accused]
    for node in shown:
        rank = worst[node]
        is_gpu_late = compute.seconds[rank] >= least_s and compute.z[rank] >= search.params.least_z
        gpu_s = compute.seconds[rank] if is_gpu_late else float("nan")
        numbers = [
            Number(what="host's own time beyond peers'", value=host.seconds[rank], unit="s", bound=least_s),
            Number(what="signal over noise", value=host.z[rank], unit="sigma", bound=search.params.least_z),
            Number(what="late in iterations", value=late[rank], unit="share", bound=LATE_SHARE),
            _holds_up(host.level[rank] / duration_s, host.seconds[rank], gpu_s),
        ]
        name = ComponentName(type=ComponentType.HOST, node=node)
        hypothesis = make(
            kind=Kind.SLOW_HOST,
            candidates=(name,),
            excess_s=float(host.seconds[rank]),
            score=float(host.z[rank]),
            score_unit="sigma",
            verdict=Verdict.SUSPECTED,
            reason=_BOUNDS_MET,
            numbers=_known(numbers),
        )
        yield hypothesis if node in accused else _below(hypothesis)


def _holds_up(busy_share: float, host_s: float, gpu_s: float) -> Number:
    """Return the way of two in which a host is nearer to being what its GPU waits for."""
    busy = Number(what="host busy, of the iteration", value=busy_share, unit="share", bound=HOST_BOUND)
    if not gpu_s > 0:
        return busy
    explains = Number(what="its excess over its GPU's", value=host_s / gpu_s, unit="share", bound=EXPLAINED)
    return max(busy, explains, key=lambda number: number.nearness)


def of_links(
    make: Make,
    suspect: Suspect | None,
    scores: Mapping[ComponentName, tuple[float, bytes]],
    log_ratio: FloatArray,
    slow: BoolArray,
    told: BoolArray,
    predicted: Mapping[ComponentName, IntArray],
    least_s: float,
) -> Iterator[Hypothesis]:
    """Yield the links that make the transfer times most likely, then those that fit too few of the slow transfers."""
    winners = suspect.component.candidates if suspect is not None else ()
    best = scores[winners[0]][0] if winners else 0.0
    ranked = sorted((name for name in scores if name not in winners), key=lambda name: (-scores[name][0], name))
    if suspect is not None:
        seen = np.frombuffer(scores[winners[0]][1], np.int64)
        hypothesis = _link(make, winners, scores[winners[0]][0], seen, log_ratio, slow, told)
        numbers = (Number(what="transfers' excess of the worst rank", value=suspect.excess_s, unit="s", bound=least_s),)
        hypothesis = _with(hypothesis, Verdict.SUSPECTED, _BOUNDS_MET, numbers, excess_s=suspect.excess_s)
        yield hypothesis if not hypothesis.missed else _below(hypothesis)
    for name in ranked[: _MOST_LINKS - 1]:
        seen = np.frombuffer(scores[name][1], np.int64)
        behind = best - scores[name][0]
        reason = f"{behind:.1f} nats less likely than the best"
        rival = _link(make, (name,), scores[name][0], seen, log_ratio, slow, told)
        yield _with(rival, Verdict.OUTSCORED, reason)
    unfit = {name: int(slow[series].sum()) for name, series in predicted.items() if name not in scores}
    fitting = sorted((name for name in unfit if unfit[name]), key=lambda name: (-unfit[name], name))
    for name in fitting[: max(0, _MOST_LINKS - len(ranked) - 1)]:
        yield _below(_link(make, (name,), float("nan"), predicted[name], log_ratio, slow, told))


def _link(
    make: Make,
    names: tuple[ComponentName, ...],
    score: float,
    series: IntArray,
    log_ratio: FloatArray,
    slow: BoolArray,
    told: BoolArray,
) -> Hypothesis:
    known = series[np.isfinite(log_ratio[series])]
    share = np.count_nonzero(slow[series]) / max(int(np.count_nonzero(told[series])), 1)
    ratio = float(np.exp(np.median(log_ratio[known]))) if len(known) else float("nan")
    numbers = (
        Number(what="transfers it would slow", value=float(len(known)), unit="count"),
        Number(what="slow, of the clear ones", value=share, unit="share", bound=0.6),
        Number(what="their time over the reference", value=ratio, unit="ratio"),
        Number(what="likelihood gained", value=score, unit="nats"),
    )
    return make(
        kind=Kind.SLOW_LINK,
        candidates=names,
        excess_s=float("nan"),
        score=score,
        score_unit="nats",
        verdict=Verdict.BELOW,
        reason="",
        numbers=_known(list(numbers)),
    )


def of_telemetry(make: Make, read: Telemetry, span: Span, found: list[Suspect]) -> Iterator[Hypothesis]:
    """Yield the lowest clocks and the hosts whose processes were kept from running most."""
    taken = {suspect.component.candidates for suspect in found}
    clock = read.clock(span)
    for rank in _largest(-clock, _MOST_SAMPLES):
        number = Number(what=CLOCK_EVIDENCE, value=float(clock[rank]), unit="ratio", bound=CLOCK_DROP, at_most=True)
        name = gpu_name(read.topology, rank)
        if not any(name in names for names in taken):
            yield _below(_sample(make, Kind.SLOW_GPU, name, number))
    for signal, what in HOST_EVIDENCE.items():
        beyond = read.beyond_all(signal, span)
        rise = np.where(beyond > 0, beyond, np.nan) if signal is not Signal.RUN_QUEUE else beyond
        for rank in _largest(rise, 1):
            name = ComponentName(type=ComponentType.HOST, node=read.topology.node_by_rank[rank])
            number = Number(what=what, value=float(rise[rank]), unit="s/s", bound=QUEUE_RISE)
            if not any(name in names for names in taken):
                yield _below(_sample(make, Kind.SLOW_HOST, name, number))
    for suspect in found:
        reason = "its samples stand out; a coincidence in time and no measurement"
        yield of_suspect(make, suspect, reason=reason, is_measured=False)


def _sample(make: Make, kind: Kind, name: ComponentName, number: Number) -> Hypothesis:
    return make(
        kind=kind,
        candidates=(name,),
        excess_s=float("nan"),
        score=float("nan"),
        score_unit="",
        verdict=Verdict.BELOW,
        reason="",
        numbers=(number,),
    )


def _late_share(values: FloatArray, excess: Excess, groups: Groups) -> FloatArray:
    """Return (world_size,) in how many of the frames (n, world_size) a rank was beyond half of its excess."""
    beyond = np.where(excess.by_peers, beyond_peers(values, groups), values) - excess.usual
    with np.errstate(invalid="ignore"):
        late = np.count_nonzero(beyond > 0.5 * excess.seconds, axis=0)
    share: FloatArray = late / np.maximum(np.count_nonzero(np.isfinite(beyond), axis=0), 1)
    return share


def _largest(values: FloatArray, n: int, *, always: Set[int] = frozenset()) -> list[int]:
    """Return the indices of the n largest finite values, the largest first, and of those that have to be there."""
    order = np.argsort(-np.nan_to_num(values, nan=-np.inf), kind="stable")
    ranked = [int(i) for i in order if np.isfinite(values[i])]
    return ranked[:n] + [i for i in ranked[n:] if i in always]


def _below(hypothesis: Hypothesis) -> Hypothesis:
    missed = hypothesis.missed
    if not missed:
        return _with(hypothesis, Verdict.OUTSCORED, "within its bounds, but another explains as much or more of it")
    return _with(hypothesis, Verdict.BELOW, "short of " + ", ".join(number.what for number in missed))


def _with(
    hypothesis: Hypothesis,
    verdict: Verdict,
    reason: str,
    numbers: tuple[Number, ...] = (),
    *,
    excess_s: float | None = None,
) -> Hypothesis:
    changed = excess_s if excess_s is not None else hypothesis.excess_s
    return replace(
        hypothesis, verdict=verdict, reason=reason, numbers=(*hypothesis.numbers, *numbers), excess_s=changed
    )


def _known(numbers: list[Number]) -> tuple[Number, ...]:
    return tuple(replace(n, value=float(n.value)) for n in numbers if np.isfinite(n.value))
