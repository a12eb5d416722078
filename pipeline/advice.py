"""What to look at and what to do for each kind of incident: act once waiting has cost as much (ski rental)."""

from collections.abc import Sequence

from pipeline.frames import Signal
from pipeline.suspect import CLOCK_DROP, CLOCK_EVIDENCE, HOST_EVIDENCE, LEAST_HOST_RATIO
from schemas.alerts import Evidence, Kind
from schemas.events import ThrottleReason

RESTART_GPU_S_PER_RANK = 390.0  # a checkpoint restart costs each GPU about 6.5 minutes at 8,192 GPUs (TrainMover)
REBALANCE_GPU_S_PER_RANK = 60.0  # re-balancing micro-batches or moving ranks pauses the job about a minute (Greyhound)

_CAUSES: dict[Kind, tuple[str, ...]] = {
    Kind.SLOW_GPU: ("thermal throttling", "power cap or clock limit", "degraded memory or PCIe link"),
    Kind.SLOW_HOST: ("CPU contention by another process", "interrupt load", "slow storage or data loading"),
    Kind.SLOW_RANK: ("slow GPU", "contended host", "stalls in the training process itself"),
    Kind.SLOW_LINK: ("congestion", "degraded link or network interface", "routing onto a shared path"),
    Kind.SLOW_JOB: ("a component these sensors cannot see", "shared storage or fabric", "a change of the workload"),
    Kind.STAGE_IMBALANCE: ("layers unevenly divided over the stages", "embedding or loss on the last stage"),
    Kind.DATA_IMBALANCE: ("sequences of unequal length", "uneven expert load"),
    Kind.HANG: ("a rank that stopped",),
}

_THROTTLE_CAUSES = (
    (ThrottleReason.HW_THERMAL_SLOWDOWN | ThrottleReason.SW_THERMAL_SLOWDOWN, "thermal throttling"),
    (ThrottleReason.HW_POWER_BRAKE_SLOWDOWN | ThrottleReason.SW_POWER_CAP, "power cap or power brake"),
    (ThrottleReason.HW_SLOWDOWN, "hardware slowdown"),
)
_CAUSES_OF_SLOW_CLOCKS = ("thermal throttling", "power cap or clock limit")
_HOST_CAUSES = {
    Signal.RUN_QUEUE: "CPU contention by another process",
    Signal.BLOCKED: "slow storage or data loading",
    Signal.STOPPED: "a debugger, checkpointer or operator that stops the process",
    Signal.THROTTLED: "CPU quota of its container or control group",
}


def causes(kind: Kind, throttle_reasons: int, evidence: Sequence[Evidence]) -> tuple[str, ...]:
    """Return cause candidates, those that the telemetry supports first, the strongest of them before all.

    What the telemetry contradicts comes last: samples are taken now and then, and a throttled GPU may not show.
    """
    supported: list[str] = []
    contradicted: list[str] = []
    if kind is Kind.SLOW_GPU:
        supported = [cause for bits, cause in _THROTTLE_CAUSES if throttle_reasons & bits]
        clock = [e.value for e in evidence if e.what == CLOCK_EVIDENCE]
        if clock and min(clock) > CLOCK_DROP and not supported:
            contradicted = [cause for cause in _CAUSES[kind] if cause in _CAUSES_OF_SLOW_CLOCKS]
    if kind is Kind.SLOW_HOST:
        seen = {e.what: e.value for e in evidence if e.source == "host" and e.value >= LEAST_HOST_RATIO}
        strength = {_HOST_CAUSES[signal]: seen[what] for signal, what in HOST_EVIDENCE.items() if what in seen}
        supported = sorted(strength, key=lambda cause: -strength[cause])
        # A process that is out of quota stands in the queue as well: nobody contends for the CPU.
        if _HOST_CAUSES[Signal.THROTTLED] in supported:
            supported = [cause for cause in supported if cause != _HOST_CAUSES[Signal.RUN_QUEUE]]
    others = [cause for cause in _CAUSES[kind] if cause not in supported and cause not in contradicted]
    return (*supported, *others, *contradicted)


def advice(kind: Kind, lost_gpu_s: float, world_size: int) -> str:
    """Return the suggested action: wait while the loss is small against the cheapest remedy, then escalate."""
    if kind in (Kind.STAGE_IMBALANCE, Kind.DATA_IMBALANCE):
        return "no component is at fault: re-balance the workload when convenient"
    if kind is Kind.SLOW_JOB:
        return "no component can be named: switch on GPU-side timing (NCCL Inspector), and check shared services"
    rebalance, restart = REBALANCE_GPU_S_PER_RANK * world_size, RESTART_GPU_S_PER_RANK * world_size
    if lost_gpu_s < rebalance:
        return f"watch: lost {lost_gpu_s:.0f} GPU-s, less than any remedy costs ({rebalance:.0f})"
    if lost_gpu_s < restart:
        remedy = (
            "move the link off the critical path" if kind is Kind.SLOW_LINK else "re-balance micro-batches away from it"
        )
        return f"{remedy}: lost {lost_gpu_s:.0f} GPU-s, more than that costs ({rebalance:.0f})"
    remedy = "drain the link" if kind is Kind.SLOW_LINK else "replace the node"
    return f"{remedy} and restart from a checkpoint: lost {lost_gpu_s:.0f} GPU-s, more than a restart ({restart:.0f})"
