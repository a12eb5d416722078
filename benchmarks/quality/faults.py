"""The fault classes, one function each: to add one, write a function that draws an episode and enter it in FAULTS.

Shapes and their weights follow the published populations (Greyhound, ATC'25: of 65 slow jobs 55 by the network, 3 by
network and GPU, 5 by the host, 2 by a GPU; ByteDance, OSDI'25, and Alibaba, NSDI'26: computation mostly). The weights
are the mean of those two views and only serve the figures over all classes; every class is also told by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from agents.simulated.benign import Benign, Checkpoint, GcPauses, Restart, VariableSequenceLength
from agents.simulated.faults import Fault, SlowGpu, SlowHost, SlowJob, SlowLink, SlowNic, SlowRank
from agents.simulated.hypotheses import LinkHypotheses
from agents.simulated.layout import Placement
from agents.simulated.scenario import Scenario
from benchmarks.quality.draw import Draw, calibrated

_TIMED = ("inspector", "inspector_alone")  # settings that see more than the job's iteration time


@dataclass(frozen=True, slots=True)
class EpisodeClass:
    """One class: how an episode is drawn, its share among the classes, and how many episodes the corpus has."""

    make: Callable[[Draw], Scenario]
    weight: float
    episodes: int = 600
    needs_stages: bool = False  # whether it makes sense with pipeline stages only


Place = Callable[[Draw, Scenario], Fault]


def slow_gpu(draw: Draw, _: Scenario) -> SlowGpu:
    """Return a card; of five, four show it by their clocks."""
    has_telemetry = bool(draw.random.uniform() < 0.8)
    is_thermal = draw.random.uniform() < 0.5
    return SlowGpu(
        factor=2.0,
        node=draw.node(),
        gpu=draw.gpu(),
        telemetry=has_telemetry,
        cause="thermal" if is_thermal else "power",
    )


def slow_host(draw: Draw, _: Scenario) -> SlowHost:
    """Return a host; of five, four show it by their run queues."""
    return SlowHost(factor=2.0, node=draw.node(), telemetry=bool(draw.random.uniform() < 0.8))


def slow_nic(draw: Draw, _: Scenario) -> SlowNic:
    """Return a node's interface."""
    return SlowNic(factor=2.0, node=draw.node())


def slow_link(draw: Draw, scenario: Scenario) -> SlowLink:
    """Return a link that more than the four bytes of the world's all-reduce go over."""
    hypotheses, n_nodes = LinkHypotheses(Placement(scenario, 0, 0)), scenario.n_nodes
    pairs = [
        (one, other)
        for one in range(n_nodes)
        for other in range(one + 1, n_nodes)
        if any(kind != "WORLD" for kind, _, _ in hypotheses.predicted((one, other)))
    ]
    return SlowLink(factor=2.0, nodes=pairs[draw.integer(0, len(pairs))])


def slow_job(_: Draw, __: Scenario) -> SlowJob:
    """Return everybody."""
    return SlowJob(factor=2.0)


def any_network(draw: Draw, scenario: Scenario) -> Fault:
    """Return an interface or a link."""
    return (slow_nic if draw.random.uniform() < 0.5 else slow_link)(draw, scenario)


def _step(draw: Draw, place: Place, benign: Sequence[Benign] = ()) -> Scenario:
    """Return a job that a fault hits at once and for good, or until some time before the job's end."""
    onset, lasts = draw.integer(45, 80), draw.integer(35, 60)
    recovers = draw.random.uniform() < 0.5
    scenario = draw.scenario(iterations=onset + lasts + (25 if recovers else 0), benign=benign)
    placed = calibrated(scenario, place(draw, scenario), draw.slowdown())
    return replace(scenario, faults=(replace(placed, onset=onset, end=onset + lasts if recovers else None),))


def _ramp(draw: Draw, place: Place) -> Scenario:
    """Return a fault that grows over 20 to 100 iterations."""
    onset, ramp = draw.integer(45, 70), draw.integer(20, 100)
    scenario = draw.scenario(iterations=onset + ramp + draw.integer(30, 50))
    placed = calibrated(scenario, place(draw, scenario), draw.slowdown())
    return replace(scenario, faults=(replace(placed, onset=onset, shape="ramp", ramp=ramp),))


def _staircase(draw: Draw, place: Place) -> Scenario:
    """Return a fault that grows in 3 to 6 steps of 3 to 9 % of the iteration, each some 10 to 30 iterations long."""
    onset, steps, width = draw.integer(45, 70), draw.integer(3, 7), draw.integer(10, 31)
    scenario = draw.scenario(iterations=onset + steps * width + draw.integer(20, 40))
    placed = calibrated(scenario, place(draw, scenario), 1 + steps * draw.between(0.03, 0.09))
    return replace(scenario, faults=(replace(placed, onset=onset, shape="staircase", ramp=steps * width, steps=steps),))


def _intermittent(draw: Draw, place: Place) -> Scenario:
    """Return a fault that comes and goes: there for a third to two thirds of every 10 to 30 iterations."""
    onset = draw.integer(45, 70)
    scenario = draw.scenario(iterations=onset + draw.integer(80, 120))
    placed = calibrated(scenario, place(draw, scenario), draw.slowdown())
    times = {"period": draw.integer(10, 31), "duty": float(draw.random.uniform(0.35, 0.65))}
    return replace(scenario, faults=(replace(placed, onset=onset, shape="intermittent", **times),))


def _from_start(draw: Draw, place: Place) -> Scenario:
    """Return a fault that is there from the first iteration, with sensors that can show it."""
    draw.setting = draw.one_of(_TIMED, (0.7, 0.3))
    scenario = draw.scenario(iterations=draw.integer(60, 90))
    placed = calibrated(scenario, place(draw, scenario), draw.slowdown())
    return replace(scenario, faults=(placed,))


def _restart(draw: Draw, scenario_of: Callable[[Scenario], Fault]) -> Scenario:
    """Return a fault that is there before and after the job restarts on other nodes."""
    onset, at = draw.integer(45, 60), draw.integer(100, 120)
    restart = Restart(at_iteration=at, pause_s=60.0, node_shift=draw.integer(1, draw.layout.n_nodes))
    scenario = draw.scenario(iterations=at + draw.integer(50, 70), benign=[restart])
    placed = calibrated(scenario, scenario_of(scenario), draw.slowdown())
    return replace(scenario, faults=(replace(placed, onset=onset),))


def _compound(draw: Draw, n_faults: int) -> Scenario:
    """Return two or three faults of different kinds that overlap."""
    places: dict[str, Place] = {"gpu": slow_gpu, "host": slow_host, "network": any_network}
    onset, lasts = draw.integer(45, 60), draw.integer(70, 90)
    scenario = draw.scenario(iterations=onset + lasts + 40)
    kinds = draw.random.permutation(list(places)).tolist()[:n_faults]
    faults = []
    for number, kind in enumerate(kinds):
        placed = calibrated(scenario, places[kind](draw, scenario), 1 + draw.between(0.1, 1.5))
        begin = onset + number * draw.integer(15, 30)
        end = None if draw.random.uniform() < 0.4 else onset + lasts + draw.integer(-15, 15)
        faults.append(replace(placed, onset=begin, end=end))
    return replace(scenario, faults=tuple(faults))


def _disturbed(draw: Draw) -> Scenario:
    """Return a step in a job whose sequences vary in length, or whose hosts collect garbage and write checkpoints."""
    benign: list[Benign]
    if draw.random.uniform() < 0.5:
        benign = [VariableSequenceLength(cv=float(draw.random.uniform(0.1, 0.25)))]
    else:
        pause_s = draw.iteration_s
        benign = [
            GcPauses(probability=0.02 / draw.layout.shape.world_size, pause_s=pause_s),
            Checkpoint(every=draw.integer(20, 40), pause_s=4 * pause_s, marker=False),
        ]
    places: list[Place] = [slow_gpu, slow_host, any_network]
    return _step(draw, places[draw.integer(0, len(places))], benign)


def _entry(make: Callable[..., Scenario], place: Place, weight: float, episodes: int = 600) -> EpisodeClass:
    return EpisodeClass(partial(make, place=place), weight, episodes)


FAULTS: dict[str, EpisodeClass] = {
    "gpu_step": _entry(_step, slow_gpu, 0.07),
    "gpu_ramp": _entry(_ramp, slow_gpu, 0.04),
    "gpu_staircase": _entry(_staircase, slow_gpu, 0.02),
    "gpu_intermittent": _entry(_intermittent, slow_gpu, 0.03),
    "gpu_from_start": _entry(_from_start, slow_gpu, 0.05),
    "gpu_restart": EpisodeClass(lambda draw: _restart(draw, partial(slow_gpu, draw)), 0.02),
    "rank_restart": EpisodeClass(
        lambda draw: _restart(draw, lambda s: SlowRank(factor=2.0, rank=draw.integer(0, s.layout.world_size))), 0.01
    ),
    "host_step": _entry(_step, slow_host, 0.04),
    "host_intermittent": _entry(_intermittent, slow_host, 0.02),
    "host_from_start": _entry(_from_start, slow_host, 0.01),
    "nic_step": _entry(_step, slow_nic, 0.08),
    "nic_staircase": _entry(_staircase, slow_nic, 0.05),
    "nic_intermittent": _entry(_intermittent, slow_nic, 0.04),
    "link_step": _entry(_step, slow_link, 0.06),
    "link_ramp": _entry(_ramp, slow_link, 0.02),
    "network_from_start": _entry(_from_start, any_network, 0.03, 900),
    "job_step": _entry(_step, slow_job, 0.03),
    "disturbed_step": EpisodeClass(_disturbed, 0.04, 650),
    "compound_two": EpisodeClass(partial(_compound, n_faults=2), 0.03, 400),
    "compound_three": EpisodeClass(partial(_compound, n_faults=3), 0.01, 300),
}
