"""Ranks that compute longer than their peers, told apart into slow GPUs, slow hosts and ranks of either kind.

In a synchronous job everybody slows down together, and the victims show the longest waits; only the culprit's own
computation (iteration less communication) or its host's own time (iteration less the wait for the GPU) grows. Both are
compared with the peers, and with what was usual between them before, where that is known.
"""

from dataclasses import dataclass, replace

import numpy as np

from pipeline.frames import Signal
from pipeline.groups import Groups, quiet_median, robust_scale
from pipeline.history import History
from pipeline.judge_params import JudgeParams
from pipeline.structure import Structure
from pipeline.suspect import (
    CLOCK_DROP,
    CLOCK_EVIDENCE,
    FEWEST_REFERENCE,
    HOST_EVIDENCE,
    LEAST_HOST_RATIO,
    Span,
    Suspect,
)
from pipeline.topology import Topology, gpu_name, rank_name
from pipeline.watch import RankWatch, Watch
from schemas.alerts import Component, ComponentName, ComponentType, Evidence, Kind
from schemas.table import BoolArray, FloatArray, IntArray

_FEWEST_PEERS = 3
_FEWEST_TURNS = 4  # frames after which ranks of a slow host, late in turns, no longer pass for one slow rank
_TURNS_SHARE = 0.2  # of frames in which a rank has to be late to count as one of several that are
_QUEUE_RISE = 0.1
_DOUBTFUL_Z = 3.0  # from which a late host may be the reason, though it need not be
_EXPLAINED = 0.5  # of what a GPU is late, that its host has to be late by to be the reason
_SAMPLE_S = 1.0  # that agents' samples are apart: of less time they tell a part only
_KEPT = (Signal.BLOCKED, Signal.STOPPED, Signal.THROTTLED)  # no process brings these upon itself by waiting for its GPU
_SEEN_SHARE = 0.6  # of the frames in which a rank has to be comparable to be judged
_HOST_BOUND = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Excess:
    """Per rank, (world_size,): seconds beyond the peers, their standard error, and what was usual before."""

    seconds: FloatArray
    error: FloatArray
    usual: FloatArray
    by_peers: BoolArray
    level: FloatArray

    @property
    def z(self) -> FloatArray:
        """Signal over noise."""
        return self.seconds / np.maximum(self.error, 1e-9)


def beyond_peers(values: FloatArray, groups: Groups) -> FloatArray:
    """Return values (n, world_size) less the lower median of the peers; NaN in frames with fewer than three of them."""
    enough = groups.known(values) >= _FEWEST_PEERS
    return np.where(enough, values - groups.to_ranks(groups.lower_median(values)), np.nan)


def rank_excess(values: FloatArray, reference: FloatArray, groups: Groups) -> Excess:
    """Compare values (n, world_size) with the peers in each frame, and with reference (b, world_size), b may be 0.

    Ranks with fewer than three peers, themselves included, are compared with their past and the job's common change.
    """
    n, b = len(values), len(reference)
    beyond = beyond_peers(values, groups)
    level = quiet_median(values)
    by_peers = groups.known(level) >= _FEWEST_PEERS
    noise = robust_scale(beyond) if n >= FEWEST_REFERENCE else np.full(values.shape[1], np.nan)
    usual = np.zeros(values.shape[1])
    if b >= FEWEST_REFERENCE:
        before = beyond_peers(reference, groups)
        usual = np.nan_to_num(quiet_median(before))
        noise = np.fmax(noise, robust_scale(before))
        own = quiet_median(reference)
        change = level / own
        common = np.nanmedian(change) if np.isfinite(change).any() else 1.0
        alone = (change - common) * own
        usual = np.where(by_peers, usual, own)
        own_noise = robust_scale(reference)
        noise = np.where(by_peers, noise, np.fmax(own_noise, 0.0))
    else:
        alone = np.full(values.shape[1], np.nan)
    pooled = np.nanmedian(noise) if np.isfinite(noise).any() else np.nan
    seen = np.maximum(np.count_nonzero(np.isfinite(np.where(by_peers, beyond, values)), axis=0), 1)
    error = 1.253 * np.fmax(noise, pooled) * np.sqrt(1 / seen + (1 / b if b else 0.0))
    seconds = np.where(by_peers, quiet_median(beyond) - np.where(by_peers, usual, 0.0), alone)
    return Excess(seconds, error, usual, by_peers, level)


@dataclass(slots=True, eq=False)
class RankSearch:
    """Looks for slow ranks in one span of frames."""

    history: History
    topology: Topology
    structure: Structure
    params: JudgeParams
    throttled: BoolArray  # (world_size,) a throttle reason that slows was seen in the latest frame
    compute_source: str = "gpu"  # or "span", where profiles say how long computation took

    def find(self, span: Span, least_excess_s: float) -> list[Suspect]:
        """Return suspects that add at least `least_excess_s` to an iteration, the worst first."""
        compute = self._excess(self.history.compute, span)
        host = self._excess(self.history.host, span)
        suspects = self._busy_hosts(host, compute, span, least_excess_s)
        taken = np.zeros(len(self.throttled), bool)
        taken[[rank for s in suspects for _, rank in s.claims]] = True
        if np.isfinite(compute.seconds).any():
            slow = self._significant(compute, least_excess_s) & self._persistent(compute, span, of_host=False) & ~taken
            found = self._gpus(np.flatnonzero(slow), compute, span, host)
            taken[[rank for s in found for _, rank in s.claims]] = True
            suspects += found
            if not np.isfinite(host.seconds).any():
                suspects += self._nodes_in_turns(compute, span, least_excess_s, taken)
        return sorted(suspects, key=lambda s: -s.excess_s)

    def _busy_hosts(self, host: Excess, compute: Excess, span: Span, least_excess_s: float) -> list[Suspect]:
        """Return nodes whose hosts wait least for their GPUs, and so little that they hold them up.

        A host that is ahead of its GPU may be late without harm; where the GPU's own times are known, it is seen to
        wait for a host that holds it up. A slow GPU does not make its host late.
        """
        duration_s = float(np.nanmedian(self.history.durations(span.start, span.stop)))
        with np.errstate(invalid="ignore"):
            holds_up = host.level >= _HOST_BOUND * duration_s
            holds_up |= self._significant(compute, least_excess_s) & (host.seconds >= _EXPLAINED * compute.seconds)
            slow = self._significant(host, least_excess_s) & holds_up
        slow &= self._persistent(host, span, of_host=True)
        by_node: dict[str, list[int]] = {}
        for rank in np.flatnonzero(slow).tolist():
            by_node.setdefault(self.topology.node_by_rank[rank], []).append(rank)
        return [
            self._host(node, np.array(ranks), host, span, self._watch(np.array(ranks), host, of_host=True), ("sync",))
            for node, ranks in by_node.items()
        ]

    def _nodes_in_turns(self, compute: Excess, span: Span, least_excess_s: float, taken: BoolArray) -> list[Suspect]:
        """Return nodes of which one rank or another is late in nearly every iteration: the host they have in common."""
        places = [(n, r) for n, r in self.structure.ranks_by_node.items() if len(r) >= 2]
        if span.stop - span.start < _FEWEST_TURNS or len(places) < _FEWEST_PEERS:
            return []
        beyond = self._beyond(compute, span)
        starts = np.cumsum([0, *(len(r) for _, r in places)])[:-1]
        by_node = np.where(np.isfinite(beyond), beyond, -np.inf)[:, np.concatenate([r for _, r in places])]
        level = np.quantile(np.maximum.reduceat(by_node, starts, axis=1), 0.25, axis=0, method="lower")
        known = np.isfinite(level)
        if np.count_nonzero(known) < _FEWEST_PEERS:
            return []
        usual = float(np.median(level[known]))
        noise = 1.4826 * float(np.median(np.abs(level[known] - usual))) + float(np.nanmedian(compute.error))
        suspects = []
        for i in np.flatnonzero((level - usual >= least_excess_s) & (level - usual >= self.params.least_z * noise)):
            node, ranks = places[int(i)]
            if taken[ranks].any() or not _take_turns(beyond[:, ranks]):
                continue
            watch = replace(self._watch(ranks, compute, of_host=False), by_worst=True)
            suspect = self._host(node, ranks, compute, span, watch, (self.compute_source,))
            excess_s = float(level[i]) - usual
            suspects.append(replace(suspect, excess_s=excess_s, z=excess_s / noise))
        return suspects

    def _beyond(self, compute: Excess, span: Span) -> FloatArray:
        """Return (n, world_size) computation beyond the peers and what was usual before."""
        values = self.history.compute(span.start, span.stop)
        return beyond_peers(values, self.structure.groups) - compute.usual

    def _excess(self, read: "object", span: Span) -> Excess:
        values = read(span.start, span.stop)  # type: ignore[operator]
        reference = read(span.reference_start, span.reference_stop)  # type: ignore[operator]
        return rank_excess(values, reference, self.structure.groups)

    def _significant(self, excess: Excess, least_excess_s: float) -> BoolArray:
        with np.errstate(invalid="ignore"):
            return (excess.seconds >= least_excess_s) & (excess.z >= self.params.least_z)

    def _persistent(self, excess: Excess, span: Span, *, of_host: bool) -> BoolArray:
        """Return who was beyond half its excess in three quarters of the frames: alternating stragglers are not."""
        values = (self.history.host if of_host else self.history.compute)(span.start, span.stop)
        beyond = np.where(excess.by_peers, beyond_peers(values, self.structure.groups), values) - excess.usual
        with np.errstate(invalid="ignore"):
            n_late = np.count_nonzero(beyond > 0.5 * excess.seconds, axis=0)
        n_seen = np.count_nonzero(np.isfinite(beyond), axis=0)
        share: BoolArray = (n_late >= 0.75 * n_seen) & (n_seen >= _SEEN_SHARE * len(values))
        return share

    def _watch(self, ranks: IntArray, excess: Excess, *, of_host: bool) -> RankWatch:
        by_peers = bool(excess.by_peers[ranks].all())
        peers = (
            self.structure.groups.members[self.structure.groups.of_rank[ranks]]
            if by_peers
            else np.empty((len(ranks), 0), np.int64)
        )
        return RankWatch(ranks, peers, excess.usual[ranks], of_host)

    def _host(
        self, node: str, ranks: IntArray, excess: Excess, span: Span, watch: Watch, sources: tuple[str, ...]
    ) -> Suspect:
        name = ComponentName(type=ComponentType.HOST, node=node)
        worst = ranks[np.argmax(excess.seconds[ranks])]
        evidence = [self._compute_evidence(int(worst), excess, "host time" if sources == ("sync",) else "computation")]
        if kept_from_running := self._kept_from_running(int(worst), span):
            evidence += kept_from_running
            sources = (*sources, "host")
        return Suspect(
            kind=Kind.SLOW_HOST,
            component=Component(type=ComponentType.HOST, name=name, candidates=(name,)),
            excess_s=float(np.max(excess.seconds[ranks])),
            z=float(np.max(excess.z[ranks])),
            watch=watch,
            sources=sources,
            evidence=tuple(evidence),
            claims=frozenset(("rank", int(r)) for r in self.structure.ranks_by_node[node]),
        )

    def _gpus(self, ranks: IntArray, compute: Excess, span: Span, host: Excess) -> list[Suspect]:
        suspects, by_node = [], dict[str, list[int]]()
        clock, queue = self._clock(span), self._beyond_all(Signal.RUN_QUEUE, span)
        is_kept = self._is_kept(compute, span)
        with np.errstate(invalid="ignore"):
            may_be_host = (host.seconds >= _EXPLAINED * compute.seconds) & (host.z >= _DOUBTFUL_Z)
        for rank in ranks.tolist():
            by_node.setdefault(self.topology.node_by_rank[rank], []).append(rank)
        for node, members in by_node.items():
            of, local = np.array(members), self.structure.ranks_by_node[node]
            host_unseen = not np.isfinite(host.seconds[of]).any()
            if host_unseen and span.stop - span.start < _FEWEST_TURNS:
                continue
            in_turns = host_unseen and _take_turns(self._beyond(compute, span)[:, local])
            all_slow = host_unseen and len(local) >= 2 and len(members) >= 0.75 * len(local)
            whole_node = in_turns or (all_slow and not self.throttled[of].any())
            queued = np.isfinite(queue[of]).any() and np.nanmax(queue[of]) >= _QUEUE_RISE
            if whole_node or is_kept[of].any() or (host_unseen and queued and not self.throttled[of].any()):
                of = local if in_turns else of
                watch = replace(self._watch(of, compute, of_host=False), by_worst=in_turns)
                suspects.append(self._host(node, of, compute, span, watch, (self.compute_source,)))
                continue
            suspects += [
                self._gpu(
                    rank,
                    compute,
                    host_seen=bool(np.isfinite(host.seconds[rank])),
                    host_doubtful=bool(may_be_host[rank]),
                    clock=clock,
                )
                for rank in members
            ]
        return suspects

    def _gpu(self, rank: int, compute: Excess, *, host_seen: bool, host_doubtful: bool, clock: FloatArray) -> Suspect:
        slow_clock = self.throttled[rank] or (np.isfinite(clock[rank]) and clock[rank] <= CLOCK_DROP)
        is_gpu = (host_seen and not host_doubtful) or bool(slow_clock)
        name = gpu_name(self.topology, rank) if is_gpu else rank_name(self.topology, rank)
        kind = Kind.SLOW_GPU if name.type is ComponentType.GPU else Kind.SLOW_RANK
        evidence = [self._compute_evidence(rank, compute, "computation")]
        sources = [self.compute_source, *(["sync"] if host_seen else [])]
        if np.isfinite(clock[rank]):
            evidence.append(
                Evidence(what=CLOCK_EVIDENCE, value=float(clock[rank]), unit="ratio", reference=1.0, source="nvml")
            )
            sources.append("nvml")
        return Suspect(
            kind=kind,
            component=Component(type=name.type, name=name, candidates=(name,)),
            excess_s=float(compute.seconds[rank]),
            z=float(compute.z[rank]),
            watch=self._watch(np.array([rank]), compute, of_host=False),
            sources=tuple(sources),
            evidence=tuple(evidence),
            claims=frozenset({("rank", rank)}),
            is_clear=not host_doubtful or bool(slow_clock),
        )

    def _compute_evidence(self, rank: int, excess: Excess, what: str) -> Evidence:
        level = float(excess.level[rank])
        source = "sync" if what == "host time" else self.compute_source
        return Evidence(
            what=f"{what} of rank {rank} per iteration",
            value=level,
            unit="s",
            reference=level - float(excess.seconds[rank]),
            source=source,
        )

    def _clock(self, span: Span) -> FloatArray:
        """Return (world_size,) SM clock over the median of all GPUs of the job."""
        level = quiet_median(self.history.clock(span.start, span.stop))
        middle = np.nanmedian(level) if np.isfinite(level).any() else np.nan
        return level / middle

    def _is_kept(self, compute: Excess, span: Span) -> BoolArray:
        """Return (world_size,): whether the kernel let a process not run for half of what its GPU is late, or more.

        A process that is stopped while it waits for its GPU seems to wait for longer, and not to be busy for longer.
        """
        duration_s = float(np.nanmedian(self.history.durations(span.start, span.stop)))
        told = min(1.0, (span.stop - span.start) * duration_s / _SAMPLE_S)
        least = np.maximum(LEAST_HOST_RATIO, _EXPLAINED * told * compute.seconds / duration_s)
        with np.errstate(invalid="ignore"):
            is_kept: BoolArray = np.logical_or.reduce([self._rise(signal, span) >= least for signal in _KEPT])
        return is_kept

    def _kept_from_running(self, rank: int, span: Span) -> list[Evidence]:
        """Return what the kernel did to a rank's process more than to the others': the queue, and what stands out."""
        found = []
        for signal, what in HOST_EVIDENCE.items():
            value = float(self._beyond_all(signal, span)[rank])
            if np.isfinite(value) and (signal is Signal.RUN_QUEUE or value >= LEAST_HOST_RATIO):
                found.append(Evidence(what=what, value=value, unit="s/s", source="host"))
        return found

    def _beyond_all(self, signal: Signal, span: Span) -> FloatArray:
        """Return (world_size,) one of the host's signals beyond the median of all ranks."""
        level = quiet_median(self.history.host_signal(signal, span.start, span.stop))
        middle = np.nanmedian(level) if np.isfinite(level).any() else np.nan
        return level - middle

    def _rise(self, signal: Signal, span: Span) -> FloatArray:
        """Return (world_size,) one of the host's signals beyond the median of all ranks and what was usual before."""
        rise = self._beyond_all(signal, span)
        if span.has_reference:
            before = Span(start=span.reference_start, stop=span.reference_stop)
            rise = rise - np.maximum(np.nan_to_num(self._beyond_all(signal, before)), 0.0)
        return rise

    def by_telemetry(self, span: Span, excess_s: float, watch: Watch) -> list[Suspect]:
        """Return who the telemetry alone makes a suspect of a slowdown that no time can attribute: never a proof."""
        clock = self._clock(span)
        with np.errstate(invalid="ignore"):
            slow = np.flatnonzero(self.throttled | (clock <= CLOCK_DROP))
        names = {gpu_name(self.topology, int(r)) for r in slow}
        if 0 < len(names) <= max(1, len(clock) // 4):
            known = clock[slow][np.isfinite(clock[slow])]
            value = float(known.min()) if len(known) else float(np.count_nonzero(self.throttled[slow]))
            evidence = Evidence(
                what=CLOCK_EVIDENCE if len(known) else "GPUs with a throttle reason that others do not show",
                value=value,
                unit="ratio" if len(known) else "count",
                reference=1.0 if len(known) else 0.0,
                source="nvml",
            )
            return [self._by_telemetry(Kind.SLOW_GPU, names, slow, excess_s, watch, [evidence])]
        return self._hosts_by_telemetry(span, excess_s, watch)

    def _hosts_by_telemetry(self, span: Span, excess_s: float, watch: Watch) -> list[Suspect]:
        """Return the hosts that the kernel kept from running more than others, by the signal that stands out most."""
        most = max(1, len(set(self.topology.node_by_rank)) // 4)
        before = Span(start=span.reference_start, stop=span.reference_stop)
        strongest, found = 0.0, list[Suspect]()
        for signal in HOST_EVIDENCE:
            rise = self._rise(signal, span)
            past = self.history.host_signal(signal, before.start, before.stop)
            noise = np.nan_to_num(robust_scale(past - quiet_median(past.T)[:, None]))
            with np.errstate(invalid="ignore"):
                ranks = np.flatnonzero(rise >= np.maximum(_QUEUE_RISE, self.params.least_z * noise))
            hosts = {ComponentName(type=ComponentType.HOST, node=self.topology.node_by_rank[int(r)]) for r in ranks}
            if 0 < len(hosts) <= most and (value := float(rise[ranks].max())) > strongest:
                strongest = value
                evidence = self._kept_from_running(int(ranks[np.argmax(rise[ranks])]), span)
                found = [self._by_telemetry(Kind.SLOW_HOST, hosts, ranks, excess_s, watch, evidence)]
        return found

    def _by_telemetry(
        self,
        kind: Kind,
        names: set[ComponentName],
        ranks: IntArray,
        excess_s: float,
        watch: Watch,
        evidence: list[Evidence],
    ) -> Suspect:
        candidates = tuple(sorted(names))
        return Suspect(
            kind=kind,
            component=Component(type=candidates[0].type, name=candidates[0], candidates=candidates),
            excess_s=excess_s,
            z=self.params.least_z - 2,  # a coincidence in time, not a measurement of the culprit
            watch=watch,
            sources=("host_call", evidence[0].source),
            evidence=tuple(evidence),
            claims=frozenset(("rank", int(r)) for r in ranks),
        )


def _take_turns(beyond: FloatArray) -> bool:
    """Whether several of a node's ranks (n, n_ranks) are late, now one and now another: what they share is the host."""
    worst = np.max(np.where(np.isfinite(beyond), beyond, 0.0))
    with np.errstate(invalid="ignore"):
        late = beyond > 0.5 * worst
    return bool(np.count_nonzero(late.mean(axis=0) >= _TURNS_SHARE) >= 2)
