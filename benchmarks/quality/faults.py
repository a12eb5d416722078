"""The fault classes, one function each: to add one, write a function that draws an episode and enter it in FAULTS.

Shapes and their weights follow the published populations (Greyhound, ATC'25: of 65 slow jobs 55 by the network, 3 by
network and GPU, 5 by the host, 2 by a GPU; ByteDance, OSDI'25, and Alibaba, NSDI'26: computation mostly). The weights
are the mean of those two views and only serve the figures over all classes; every class is also told by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from agents.simulated.faults import Fault, SlowGpu, SlowHost, SlowLink, SlowNic
from agents.simulated.scenario import Scenario
from benchmarks.quality.draw import Draw, calibrated


@dataclass(frozen=True, slots=True)
class EpisodeClass:
    """One class: how an episode is drawn, its share among the classes, and how many episodes the corpus has."""

    make: Callable[[Draw], Scenario]
    weight: float
    episodes: int = 600


def _slow_gpu(draw: Draw) -> SlowGpu:
    has_telemetry = bool(draw.random.uniform() < 0.8)
    is_thermal = draw.random.uniform() < 0.5
    return SlowGpu(
        factor=2.0,
        node=draw.node(),
        gpu=draw.gpu(),
        telemetry=has_telemetry,
        cause="thermal" if is_thermal else "power",
    )


def _slow_host(draw: Draw) -> SlowHost:
    return SlowHost(factor=2.0, node=draw.node(), telemetry=bool(draw.random.uniform() < 0.8))


def _slow_nic(draw: Draw) -> SlowNic:
    return SlowNic(factor=2.0, node=draw.node())


def _slow_link(draw: Draw) -> SlowLink:
    """Return a link that something goes over, where chance finds one soon."""
    one = draw.node()
    return SlowLink(factor=2.0, nodes=(one, (one + draw.integer(1, draw.layout.n_nodes)) % draw.layout.n_nodes))


def _step(draw: Draw, fault: Fault) -> Scenario:
    """Return a job that a fault hits at once and for good, or until some time before the job's end."""
    onset, lasts = draw.integer(45, 90), draw.integer(40, 70)
    recovers = draw.random.uniform() < 0.5
    scenario = draw.scenario(iterations=onset + lasts + (30 if recovers else 0))
    placed = calibrated(scenario, fault, draw.slowdown())
    return replace(scenario, faults=(replace(placed, onset=onset, end=onset + lasts if recovers else None),))


FAULTS: dict[str, EpisodeClass] = {
    "gpu_step": EpisodeClass(lambda draw: _step(draw, _slow_gpu(draw)), 0.10),
    "host_step": EpisodeClass(lambda draw: _step(draw, _slow_host(draw)), 0.06),
    "nic_step": EpisodeClass(lambda draw: _step(draw, _slow_nic(draw)), 0.12),
    "link_step": EpisodeClass(lambda draw: _step(draw, _slow_link(draw)), 0.12),
}
