"""The benign classes: what slows or disturbs a healthy job and must not be taken for a fault. One function each.

Shapes and numbers are those that the characterisation studies warn of: stages, sequence lengths and garbage collection
(ByteDance, OSDI'25), storage and evaluation (Alibaba, NSDI'26), warm-up, checkpoints and experts (Greyhound, ATC'25).
"""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from agents.simulated.benign import (
    Benign,
    Checkpoint,
    DataStalls,
    DuplicatedBatches,
    Evaluation,
    GcPauses,
    LateBatches,
    LongLastStage,
    LostBatches,
    MoeImbalance,
    Restart,
    SlowSpells,
    ThrottleReports,
    VariableSequenceLength,
    WarmUp,
)
from agents.simulated.faults import SlowHost
from agents.simulated.scenario import Clocks, LateAgent, Scenario
from benchmarks.quality.draw import SETTINGS, Draw, calibrated
from benchmarks.quality.faults import EpisodeClass, slow_link

_ITERATIONS = 160


def _with(benign: Callable[[Draw], Sequence[Benign]], draw: Draw) -> Scenario:
    return draw.scenario(iterations=_ITERATIONS, benign=benign(draw))


def _entry(benign: Callable[[Draw], Sequence[Benign]], weight: float, episodes: int = 300) -> EpisodeClass:
    return EpisodeClass(partial(_with, benign), weight, episodes)


def _checkpoint(draw: Draw) -> list[Benign]:
    pause_s = draw.between(0.5, 20.0) * draw.iteration_s
    return [Checkpoint(every=draw.integer(15, 60), pause_s=pause_s, marker=False)]


def _evaluation(draw: Draw) -> list[Benign]:
    return [Evaluation(every=draw.integer(20, 60), micro_batches=draw.integer(2, 16), marker=False)]


def _marked(draw: Draw) -> Scenario:
    """Return checkpoints and evaluations of which the training process speaks."""
    both = [
        replace(_one(_checkpoint(draw), Checkpoint), marker=True),
        replace(_one(_evaluation(draw), Evaluation), marker=True),
    ]
    scenario = draw.scenario(iterations=_ITERATIONS, benign=both)
    return _with_markers(draw, scenario)


def _profiling(draw: Draw) -> Scenario:
    """Return our own profiling, 5 to 30 iterations at a time."""
    spells = SlowSpells(
        every=draw.integer(40, 70),
        iterations=draw.integer(5, 31),
        factor=1 + draw.between(0.05, 0.5),
        is_profiling=True,
    )
    return _with_markers(draw, draw.scenario(iterations=_ITERATIONS, benign=[spells]))


def _with_markers(draw: Draw, scenario: Scenario) -> Scenario:
    sensors = (*SETTINGS[draw.setting], "marker")
    return replace(scenario, agents=replace(scenario.agents, sensors=sensors))


def _recompilation(draw: Draw) -> list[Benign]:
    return [SlowSpells(every=draw.integer(25, 60), iterations=draw.integer(1, 3), factor=draw.between(1.3, 6.0))]


def _warm_up(draw: Draw) -> list[Benign]:
    return [WarmUp(iterations=draw.integer(3, 13), factor=draw.between(1.5, 8.0))]


def _gc_pauses(draw: Draw) -> list[Benign]:
    """Return pauses that hit an iteration of the job in 2 to 20 of 100."""
    rate = draw.between(0.02, 0.2) / draw.layout.shape.world_size
    return [GcPauses(probability=rate, pause_s=draw.between(0.2, 2.0) * draw.iteration_s)]


def _allocator(draw: Draw) -> list[Benign]:
    """Return short stalls in a third of the iterations, as of an allocator that has to give memory back."""
    return [GcPauses(probability=0.4 / draw.layout.shape.world_size, pause_s=0.1 * draw.iteration_s)]


def _data_stalls(draw: Draw) -> list[Benign]:
    is_shared = bool(draw.random.uniform() < 0.5)
    rate = draw.between(0.02, 0.15) / (1 if is_shared else draw.layout.shape.world_size)
    return [DataStalls(probability=rate, pause_s=draw.between(0.2, 3.0) * draw.iteration_s, is_shared=is_shared)]


def _restart(draw: Draw) -> list[Benign]:
    shift = draw.integer(0, draw.layout.n_nodes)
    return [Restart(at_iteration=draw.integer(60, 100), pause_s=60.0, node_shift=shift)]


def _elastic(draw: Draw) -> list[Benign]:
    """Return a job that goes on with half its replicas, each with as many micro-batches as before or twice as many."""
    if draw.setting == "agent_missing":
        draw.setting = "inspector"  # the node without an agent may be one that is left
    micro_batches = draw.layout.micro_batches * draw.integer(1, 3)
    restart = Restart(
        at_iteration=draw.integer(60, 100),
        pause_s=60.0,
        node_shift=0,
        dp=draw.layout.shape.dp // 2,
        micro_batches=micro_batches,
    )
    return [restart]


def _delivery(draw: Draw) -> list[Benign]:
    return [
        LostBatches(probability=0.03, known=bool(draw.random.uniform() < 0.5)),
        DuplicatedBatches(probability=0.05, delay_s=2.0),
        LateBatches(probability=0.03, delay_s=draw.between(1.0, 10.0)),
    ]


def _clock_skew(draw: Draw) -> Scenario:
    """Return clocks that are off by up to a second, some of whose agents attach late."""
    skew_s = draw.between(0.005, 1.0)
    clocks = Clocks(skew_s=skew_s, error_s=2 * skew_s, is_error_known=bool(draw.random.uniform() < 0.5))
    scenario = draw.scenario(iterations=_ITERATIONS, clocks=clocks)
    late = tuple(LateAgent(node=n, at_iteration=draw.integer(5, 60)) for n in range(1, draw.layout.n_nodes, 2))
    return replace(scenario, agents=replace(scenario.agents, late=scenario.agents.late or late))


def _absorbed_host(draw: Draw) -> Scenario:
    """Return a contended host that still launches ahead of its GPUs."""
    scenario = draw.scenario(iterations=_ITERATIONS)
    factor = 1 + float(draw.random.uniform(0.2, 1.2))
    return replace(scenario, faults=(SlowHost(factor=factor, node=draw.node(), onset=60),))


def _absorbed_link(draw: Draw) -> Scenario:
    """Return a slow link that costs the iteration no more than 3 %."""
    scenario = draw.scenario(iterations=_ITERATIONS)
    placed = calibrated(scenario, slow_link(draw, scenario), 1 + draw.between(0.005, 0.03))
    return replace(scenario, faults=(replace(placed, onset=60),))


def _network_jitter(draw: Draw) -> Scenario:
    scenario = draw.scenario(iterations=_ITERATIONS)
    return replace(scenario, jitter=replace(scenario.jitter, rdma_cv=float(draw.random.uniform(0.3, 0.6))))


def _one(given: Sequence[Benign], kind: type) -> Benign:
    return next(benign for benign in given if isinstance(benign, kind))


BENIGN: dict[str, EpisodeClass] = {
    "healthy": _entry(lambda _: (), 0.10, 600),
    "checkpoint": _entry(_checkpoint, 0.02),
    "evaluation": _entry(_evaluation, 0.02),
    "marked_pauses": EpisodeClass(_marked, 0.02, 300),
    "own_profiling": EpisodeClass(_profiling, 0.01, 300),
    "recompilation": _entry(_recompilation, 0.01),
    "warm_up": _entry(_warm_up, 0.01),
    "sequence_lengths": _entry(lambda draw: [VariableSequenceLength(cv=draw.between(0.05, 0.4))], 0.03),
    "moe_imbalance": _entry(lambda draw: [MoeImbalance(cv=draw.between(0.03, 0.2), memory=draw.integer(1, 7))], 0.02),
    "long_last_stage": EpisodeClass(
        partial(_with, lambda draw: [LongLastStage(factor=draw.between(1.1, 2.1))]), 0.02, 300, needs_stages=True
    ),
    "gc_pauses": _entry(_gc_pauses, 0.02),
    "allocator": _entry(_allocator, 0.01),
    "data_stalls": _entry(_data_stalls, 0.02),
    "restart": _entry(_restart, 0.01),
    "elastic": _entry(_elastic, 0.01),
    "delivery": _entry(_delivery, 0.01),
    "clock_skew": EpisodeClass(_clock_skew, 0.01, 300),
    "network_jitter": EpisodeClass(_network_jitter, 0.02, 300),
    "throttle_reports": _entry(
        lambda draw: [ThrottleReports(share=draw.between(0.05, 0.5), probability=draw.between(0.02, 0.5))], 0.02
    ),
    "absorbed_host": EpisodeClass(_absorbed_host, 0.02, 300),
    "absorbed_link": EpisodeClass(_absorbed_link, 0.02, 300),
}
