"""What NVML and the scheduler say of each rank: clocks, throttling, and what kept a process from running."""

from dataclasses import dataclass, replace

import numpy as np

from pipeline.excess import Excess
from pipeline.frames import Signal
from pipeline.groups import quiet_median, robust_scale
from pipeline.history import History
from pipeline.judge_params import JudgeParams
from pipeline.suspect import CLOCK_DROP, CLOCK_EVIDENCE, HOST_EVIDENCE, LEAST_HOST_RATIO, Span, Suspect
from pipeline.topology import Topology, gpu_name
from pipeline.watch import ClockWatch, Watch
from schemas.alerts import Component, ComponentName, ComponentType, Evidence, Kind
from schemas.table import BoolArray, FloatArray, IntArray

QUEUE_RISE = 0.1
EXPLAINED = 0.5  # of what a GPU is late, that its host has to be late by to be the reason
_SAMPLE_S = 1.0  # that agents' samples are apart: of less time they tell a part only
_COMPUTE_SHARE = 0.9  # of a healthy iteration without pipeline: the rest is communication
_LASTING_SHARE = 0.75  # of the frames in which a clock has to be low to be low throughout
_SEEN_SHARE = 0.6  # of the frames in which it has to be known
_KEPT = (Signal.BLOCKED, Signal.STOPPED, Signal.THROTTLED)  # no process brings these upon itself by waiting for its GPU


@dataclass(slots=True, eq=False)
class Telemetry:
    """Reads the samples of one span of frames."""

    history: History
    topology: Topology
    params: JudgeParams
    throttled: BoolArray  # (world_size,) a throttle reason that slows was seen in the latest frame

    def clock(self, span: Span) -> FloatArray:
        """Return (world_size,) SM clock over the median of all GPUs of the job."""
        level = quiet_median(self.history.clock(span.start, span.stop))
        middle = np.nanmedian(level) if np.isfinite(level).any() else np.nan
        return level / middle

    def _latest_clock(self, span: Span) -> FloatArray:
        return self.clock(Span(start=max(span.start, span.stop - 2), stop=span.stop))

    def is_slowed(self, span: Span) -> BoolArray:
        """Return (world_size,): whose clock is low, or has just become so, or is unknown while it is being throttled.

        A throttle reason beside a clock that is as high as everybody's slows nothing: cards report their power cap
        whenever they touch it.
        """
        clock = self.clock(span)
        latest = self._latest_clock(span)
        with np.errstate(invalid="ignore"):
            is_low = (clock <= CLOCK_DROP) | (self.throttled & (latest <= CLOCK_DROP))
        is_slowed: BoolArray = is_low | (self.throttled & ~np.isfinite(clock))
        return is_slowed

    def _was_slow(self, span: Span) -> BoolArray:
        """Return (world_size,): whose clock was as low before, so that it is no reason for what has happened since.

        Before is all of the past or the last of it, whichever was faster: some clocks fall slowly, some now and then.
        """
        if not span.has_reference:
            return np.zeros(len(self.throttled), bool)
        past = Span(start=span.reference_start, stop=span.reference_stop)
        latest = Span(start=span.reference_stop - self.params.window_frames, stop=span.reference_stop)
        since = np.fmin(self.clock(span), self._latest_clock(span))
        with np.errstate(invalid="ignore"):
            was_slow: BoolArray = since > CLOCK_DROP * np.fmax(self.clock(past), self.clock(latest))
        return was_slow

    def standing(self, span: Span, n_stages: int) -> list[Suspect]:
        """Return GPUs that were throttled to low clocks throughout, whatever the past: what they cost is estimated.

        A pipeline of n stages that has twice as many micro-batches keeps each of them busy for 2n of 3n - 1 turns.
        """
        clock = self.history.clock(span.start, span.stop)
        seen = np.isfinite(clock)
        with np.errstate(invalid="ignore"):
            is_low = clock <= CLOCK_DROP * quiet_median(clock.T)[:, None]
        n_seen, n_low = (np.count_nonzero(flags, axis=0) for flags in (seen, is_low))
        lasting = (n_low >= _LASTING_SHARE * n_seen) & (n_seen >= _SEEN_SHARE * len(clock))
        ranks = np.flatnonzero(lasting & self.throttled)
        if len(ranks) > max(1, len(lasting) // 4):
            return []  # so many are no exception
        share = _COMPUTE_SHARE * 2 * n_stages / (3 * n_stages - 1)
        level = self.clock(span)
        found = []
        for rank in ranks.tolist():
            watch = ClockWatch(np.array([rank]), share)
            excess_s = float(np.nanmedian(watch.excess(self.history, span.start, span.stop)))
            evidence = [
                Evidence(what=CLOCK_EVIDENCE, value=float(level[rank]), unit="ratio", reference=1.0, source="nvml"),
                Evidence(what="computation's part of an iteration: assumed", value=share, unit="ratio"),
            ]
            names = {gpu_name(self.topology, rank)}
            suspect = self._suspect(Kind.SLOW_GPU, names, np.array([rank]), excess_s, watch, evidence)
            found.append(replace(suspect, sources=("nvml",)))
        return found

    def is_kept(self, compute: Excess, span: Span) -> BoolArray:
        """Return (world_size,): whether the kernel let a process not run for half of what its GPU is late, or more.

        A process that is stopped while it waits for its GPU seems to wait for longer, and not to be busy for longer.
        """
        duration_s = float(np.nanmedian(self.history.durations(span.start, span.stop)))
        told = min(1.0, (span.stop - span.start) * duration_s / _SAMPLE_S)
        least = np.maximum(LEAST_HOST_RATIO, EXPLAINED * told * compute.seconds / duration_s)
        with np.errstate(invalid="ignore"):
            is_kept: BoolArray = np.logical_or.reduce([self._rise(signal, span) >= least for signal in _KEPT])
        return is_kept

    def kept_from_running(self, rank: int, span: Span) -> list[Evidence]:
        """Return what the kernel did to a rank's process more than to the others': the queue, and what stands out."""
        found = []
        for signal, what in HOST_EVIDENCE.items():
            value = float(self.beyond_all(signal, span)[rank])
            if np.isfinite(value) and (signal is Signal.RUN_QUEUE or value >= LEAST_HOST_RATIO):
                found.append(Evidence(what=what, value=value, unit="s/s", source="host"))
        return found

    def beyond_all(self, signal: Signal, span: Span) -> FloatArray:
        """Return (world_size,) one of the host's signals beyond the median of all ranks."""
        level = quiet_median(self.history.host_signal(signal, span.start, span.stop))
        middle = np.nanmedian(level) if np.isfinite(level).any() else np.nan
        return level - middle

    def _rise(self, signal: Signal, span: Span) -> FloatArray:
        """Return (world_size,) one of the host's signals beyond the median of all ranks and what was usual before."""
        rise = self.beyond_all(signal, span)
        if span.has_reference:
            before = Span(start=span.reference_start, stop=span.reference_stop)
            rise = rise - np.maximum(np.nan_to_num(self.beyond_all(signal, before)), 0.0)
        return rise

    def suspects(self, span: Span, excess_s: float, watch: Watch) -> list[Suspect]:
        """Return who the telemetry alone makes a suspect of a slowdown that no time can attribute: never a proof."""
        clock, slow = self.clock(span), np.flatnonzero(self.is_slowed(span) & ~self._was_slow(span))
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
            return [self._suspect(Kind.SLOW_GPU, names, slow, excess_s, watch, [evidence])]
        return self._hosts(span, excess_s, watch)

    def _hosts(self, span: Span, excess_s: float, watch: Watch) -> list[Suspect]:
        """Return the hosts that the kernel kept from running more than others, by the signal that stands out most."""
        most = max(1, len(set(self.topology.node_by_rank)) // 4)
        before = Span(start=span.reference_start, stop=span.reference_stop)
        strongest, found = 0.0, list[Suspect]()
        for signal in HOST_EVIDENCE:
            rise = self._rise(signal, span)
            past = self.history.host_signal(signal, before.start, before.stop)
            noise = np.nan_to_num(robust_scale(past - quiet_median(past.T)[:, None]))
            with np.errstate(invalid="ignore"):
                ranks = np.flatnonzero(rise >= np.maximum(QUEUE_RISE, self.params.least_z * noise))
            hosts = {ComponentName(type=ComponentType.HOST, node=self.topology.node_by_rank[int(r)]) for r in ranks}
            if 0 < len(hosts) <= most and (value := float(rise[ranks].max())) > strongest:
                strongest = value
                evidence = self.kept_from_running(int(ranks[np.argmax(rise[ranks])]), span)
                found = [self._suspect(Kind.SLOW_HOST, hosts, ranks, excess_s, watch, evidence)]
        return found

    def _suspect(
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
