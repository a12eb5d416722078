"""A seeded cluster that runs slow on order: the agents of demos, tests and benchmarks."""

from agents.simulated.cluster import Cluster
from agents.simulated.scenario import InvalidScenario, Scenario, load_scenario
from agents.simulated.timeline import Truth

__all__ = ["Cluster", "InvalidScenario", "Scenario", "Truth", "load_scenario"]
