"""The benign classes: what slows or disturbs a healthy job and must not be taken for a fault. One function each."""

from agents.simulated.benign import Checkpoint
from agents.simulated.scenario import Scenario
from benchmarks.quality.draw import Draw
from benchmarks.quality.faults import EpisodeClass

_ITERATIONS = 200


def _healthy(draw: Draw) -> Scenario:
    return draw.scenario(iterations=_ITERATIONS)


def _checkpoint(draw: Draw) -> Scenario:
    pause_s = draw.between(0.5, 20.0) * draw.iteration_s
    checkpoint = Checkpoint(every=draw.integer(15, 60), pause_s=pause_s, marker=bool(draw.random.uniform() < 0.5))
    return draw.scenario(iterations=_ITERATIONS, benign=[checkpoint])


BENIGN: dict[str, EpisodeClass] = {
    "healthy": EpisodeClass(_healthy, 0.20, 300),
    "checkpoint": EpisodeClass(_checkpoint, 0.05, 300),
}
