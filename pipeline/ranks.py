"""Ranks that compute longer than their peers, told apart into slow GPUs, slow hosts and ranks of either kind.

In a synchronous job everybody slows down together, and the victims show the longest waits; only the culprit's own
computation (iteration less communication) or its host's own time (iteration less the wait for the GPU) grows. Both are
compared with the peers, and with what was usual between them before, where that is known.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.excess import Excess, beyond_others, beyond_peers, rank_excess, with_wander
from pipeline.frames import Signal
from pipeline.groups import Groups
from pipeline.history import History
from pipeline.judge_params import JudgeParams
from pipeline.notes import NO_NOTES, Notes
from pipeline.structure import Structure
from pipeline.suspect import (
    CLOCK_EVIDENCE,
    Span,
    Suspect,
)
from pipeline.telemetry import EXPLAINED, QUEUE_RISE, Telemetry
from pipeline.topology import Topology, gpu_name, rank_name
from pipeline.watch import RankWatch, Watch
from schemas.alerts import Component, ComponentName, ComponentType, Evidence, Kind
from schemas.table import BoolArray, FloatArray, IntArray

_FEWEST_PEERS = 3
_FEWEST_TURNS = 4  # frames after which ranks of a slow host, late in turns, no longer pass for one slow rank
_PAST_FRAMES = 64  # in which it is looked how far ranks wander among their peers
_MANY_RANKS = 512
_TURNS_SHARE = 0.2  # of frames in which a rank has to be late to count as one of several that are
_DOUBTFUL_Z = 2.0  # from which a late host may be the reason, though it need not be
SEEN_SHARE = 0.6  # of the frames in which a rank has to be comparable to be judged
HOST_BOUND = 0.5  # of an iteration: a host that is busy for longer holds up its GPU
_BOUND_ALONE = 0.7  # likewise, of one that is compared with hosts whose work is a little different
LATE_SHARE = 0.75  # of the frames in which a rank has to be late to be late throughout


@dataclass(slots=True, eq=False)
class RankSearch:
    """Looks for slow ranks in one span of frames."""

    history: History
    topology: Topology
    structure: Structure
    params: JudgeParams
    throttled: BoolArray  # (world_size,) a throttle reason that slows was seen in the latest frame
    compute_source: str = "gpu"  # or "span", where profiles say how long computation took
    notes: Notes = NO_NOTES
    telemetry: Telemetry = field(init=False)

    def __post_init__(self) -> None:
        self.telemetry = Telemetry(self.history, self.topology, self.params, self.throttled)

    def find(self, span: Span, least_excess_s: float) -> list[Suspect]:
        """Return suspects that add at least `least_excess_s` to an iteration, the worst first."""
        compute = self._excess(self.history.compute, span, self.structure.groups)
        host = self._excess(self.history.host, span, self.structure.host_groups)
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
        self.notes.ranks(self, compute, host, suspects)
        return sorted(suspects, key=lambda s: -s.excess_s)

    def _busy_hosts(self, host: Excess, compute: Excess, span: Span, least_excess_s: float) -> list[Suspect]:
        """Return nodes whose hosts wait least for their GPUs, and so little that they hold them up.

        A host that is ahead of its GPU may be late without harm; where the GPU's own times are known, it is seen to
        wait for a host that holds it up. A slow GPU does not make its host late.
        """
        duration_s = float(np.nanmedian(self.history.durations(span.start, span.stop)))
        with np.errstate(invalid="ignore"):
            holds_up = host.level >= np.where(self.structure.is_alone, _BOUND_ALONE, HOST_BOUND) * duration_s
            holds_up |= self._significant(compute, least_excess_s) & (host.seconds >= EXPLAINED * compute.seconds)
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

    def _excess(self, read: "object", span: Span, groups: Groups) -> Excess:
        values = read(span.start, span.stop)  # type: ignore[operator]
        reference = read(span.reference_start, span.reference_stop)  # type: ignore[operator]
        found = rank_excess(values, reference, groups)
        # Where ranks are many, those of the span tell how far they wander.
        past = _PAST_FRAMES if values.shape[1] <= _MANY_RANKS else 0
        before = read(span.start - past, span.start)  # type: ignore[operator]
        return with_wander(found, beyond_others(before, groups), beyond_others(values, groups))

    def _significant(self, excess: Excess, least_excess_s: float) -> BoolArray:
        with np.errstate(invalid="ignore"):
            return (excess.seconds >= least_excess_s) & (excess.z >= self.params.least_z)

    def _persistent(self, excess: Excess, span: Span, *, of_host: bool) -> BoolArray:
        """Return who was beyond half its excess in three quarters of the frames: alternating stragglers are not."""
        values = (self.history.host if of_host else self.history.compute)(span.start, span.stop)
        beyond = np.where(excess.by_peers, beyond_peers(values, self._groups(of_host=of_host)), values) - excess.usual
        with np.errstate(invalid="ignore"):
            n_late = np.count_nonzero(beyond > 0.5 * excess.seconds, axis=0)
        n_seen = np.count_nonzero(np.isfinite(beyond), axis=0)
        share: BoolArray = (n_late >= LATE_SHARE * n_seen) & (n_seen >= SEEN_SHARE * len(values))
        return share

    def _groups(self, *, of_host: bool) -> Groups:
        return self.structure.host_groups if of_host else self.structure.groups

    def _watch(self, ranks: IntArray, excess: Excess, *, of_host: bool) -> RankWatch:
        by_peers = bool(excess.by_peers[ranks].all())
        groups = self._groups(of_host=of_host)
        peers = groups.members[groups.of_rank[ranks]] if by_peers else np.empty((len(ranks), 0), np.int64)
        return RankWatch(ranks, peers, excess.usual[ranks], of_host)

    def _host(
        self, node: str, ranks: IntArray, excess: Excess, span: Span, watch: Watch, sources: tuple[str, ...]
    ) -> Suspect:
        name = ComponentName(type=ComponentType.HOST, node=node)
        worst = ranks[np.argmax(excess.seconds[ranks])]
        is_busy = sources == ("sync",)
        evidence = [self._compute_evidence(int(worst), excess, "host time" if is_busy else "computation")]
        if kept_from_running := self.telemetry.kept_from_running(int(worst), span):
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
            is_clear=is_busy or not excess.wanders,
        )

    def _gpus(self, ranks: IntArray, compute: Excess, span: Span, host: Excess) -> list[Suspect]:
        suspects, by_node = [], dict[str, list[int]]()
        clock, queue = self.telemetry.clock(span), self.telemetry.beyond_all(Signal.RUN_QUEUE, span)
        is_kept, slowed = self.telemetry.is_kept(compute, span), self.telemetry.is_slowed(span)
        with np.errstate(invalid="ignore"):
            may_be_host = (host.seconds >= EXPLAINED * compute.seconds) & (host.z >= _DOUBTFUL_Z)
        for rank in ranks.tolist():
            by_node.setdefault(self.topology.node_by_rank[rank], []).append(rank)
        for node, members in by_node.items():
            of, local = np.array(members), self.structure.ranks_by_node[node]
            host_unseen = not np.isfinite(host.seconds[of]).any()
            if host_unseen and span.stop - span.start < _FEWEST_TURNS:
                continue
            in_turns = host_unseen and _take_turns(self._beyond(compute, span)[:, local])
            all_slow = host_unseen and len(local) >= 2 and len(members) >= 0.75 * len(local)
            whole_node = in_turns or (all_slow and not slowed[of].any())
            queued = np.isfinite(queue[of]).any() and np.nanmax(queue[of]) >= QUEUE_RISE
            if whole_node or is_kept[of].any() or (host_unseen and queued and not slowed[of].any()):
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
                    slowed=bool(slowed[rank]),
                )
                for rank in members
            ]
        return suspects

    def _gpu(
        self, rank: int, compute: Excess, *, host_seen: bool, host_doubtful: bool, clock: FloatArray, slowed: bool
    ) -> Suspect:
        is_gpu = (host_seen and not host_doubtful) or slowed
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
            is_clear=slowed or not (host_doubtful or compute.wanders),
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


def _take_turns(beyond: FloatArray) -> bool:
    """Whether several of a node's ranks (n, n_ranks) are late, now one and now another: what they share is the host."""
    worst = np.max(np.where(np.isfinite(beyond), beyond, 0.0))
    with np.errstate(invalid="ignore"):
        late = beyond > 0.5 * worst
    return bool(np.count_nonzero(late.mean(axis=0) >= _TURNS_SHARE) >= 2)
