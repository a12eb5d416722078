"""What chance decides about one episode: the job, its noise, its sensors, where and how hard it is hit, and since when.

Everything follows from the class and the seed. Severities are drawn as slowdowns of the iteration, since that is what
a user feels, and the fault's factor is found from a run without noise.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from agents.simulated.benign import Benign, LongLastStage, LostBatches
from agents.simulated.faults import Fault
from agents.simulated.layout import Placement
from agents.simulated.physics import JobState, Physics
from agents.simulated.program import training
from agents.simulated.scenario import (
    AgentSettings,
    Clocks,
    Jitter,
    LateAgent,
    Network,
    Scenario,
    SensorName,
    Work,
)
from benchmarks.quality.layouts import LAYOUTS, Layout

SETTINGS: dict[str, tuple[SensorName, ...]] = {
    "uprobes": ("host_call", "sync"),
    "uprobes_nvml": ("host_call", "sync", "host", "nvml"),
    "inspector": ("host_call", "sync", "host", "nvml", "gpu"),
    "inspector_alone": ("host_call", "gpu"),
    "losses": ("host_call", "sync", "host", "nvml", "gpu"),
    "agent_missing": ("host_call", "sync", "host", "nvml", "gpu"),
}
_SETTING_SHARES = {
    "uprobes": 0.15,
    "uprobes_nvml": 0.15,
    "inspector": 0.45,
    "inspector_alone": 0.10,
    "losses": 0.075,
    "agent_missing": 0.075,
}
_COMMUNICATION_SHARE = (0.04, 0.12)  # of the iteration, in the data-parallel collectives of a healthy job
_PROMPT_SHARE = 0.15  # the others send at every sixth iteration, which costs a fraction to simulate and judge
_LARGEST_FACTOR = 400.0  # a link at 1/400 of its speed is down for all that matters
_PASSES = 2


@dataclass(slots=True)
class Draw:
    """The random numbers of one episode, and the job that they have decided so far."""

    class_name: str
    seed: int
    layouts: tuple[str, ...] = tuple(LAYOUTS)  # to choose from
    random: np.random.Generator = field(init=False)
    layout_name: str = field(init=False)
    setting: str = field(init=False)
    is_prompt: bool = field(init=False)  # whether its agents send every second
    iteration_s: float = field(init=False)
    noise_cv: float = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng([self.seed, zlib.crc32(self.class_name.encode())])
        self.layout_name = self.one_of(self.layouts, [LAYOUTS[name].share for name in self.layouts])
        self.setting = self.one_of(list(_SETTING_SHARES), list(_SETTING_SHARES.values()))
        self.is_prompt = self.random.uniform() < _PROMPT_SHARE
        self.iteration_s = self.between(0.3, 1.0 if self.is_prompt else 3.0)
        self.noise_cv = self.between(0.005, 0.11)

    @property
    def layout(self) -> Layout:
        """The job's layout."""
        return LAYOUTS[self.layout_name]

    def one_of(self, names: Sequence[str], shares: Sequence[float] | None = None) -> str:
        """Return one name; shares need not add up to 1."""
        weights = None if shares is None else np.array(shares) / sum(shares)
        return names[int(self.random.choice(len(names), p=weights))]

    def between(self, low: float, high: float) -> float:
        """Return a number whose logarithm is uniform."""
        return float(low * (high / low) ** self.random.uniform())

    def integer(self, low: int, high: int) -> int:
        """Return an integer of [low, high)."""
        return int(self.random.integers(low, high))

    def node(self) -> int:
        """Return a node."""
        return self.integer(0, self.layout.n_nodes)

    def gpu(self) -> int:
        """Return the index of a GPU on its node."""
        return self.integer(0, self.layout.shape.gpus_per_node)

    def slowdown(self) -> float:
        """Return how much longer an iteration shall take: 3 % to 10 times, mostly a tenth to twice."""
        low, high = ((1.03, 1.10), (1.10, 2.0), (2.0, 10.0))[int(self.random.choice(3, p=(0.15, 0.70, 0.15)))]
        return 1 + self.between(low - 1, high - 1)

    def scenario(self, *, iterations: int, benign: Sequence[Benign] = (), **changes: Any) -> Scenario:
        """Return the job without faults; `changes` are fields of Scenario."""
        shape, micro_batches = self.layout.shape, self.layout.micro_batches
        scale = self.iteration_s / (3 * (micro_batches + shape.pp - 1))
        ring_bytes = self.random.uniform(*_COMMUNICATION_SHARE) / 2 * self.iteration_s * Network().between_bytes_per_s
        flush_s = 1.0 if self.is_prompt else max(1.0, 6 * self.iteration_s)
        late: tuple[LateAgent, ...] = ()
        losses: tuple[LostBatches, ...] = ()
        if self.setting == "agent_missing":
            late = (LateAgent(node=self.node(), at_iteration=iterations),)
        if self.setting == "losses":
            losses = (LostBatches(probability=0.05, known=bool(self.random.uniform() < 0.5)),)
        given: dict[str, Any] = {
            "layout": shape,
            "micro_batches": micro_batches,
            "work": Work(forward_s=0.88 * scale, optimizer_s=0.02 * self.iteration_s),
            "network": Network(
                p2p_bytes=int(5e8 * scale), tp_bytes=int(2e8 * scale), dp_bytes=int(max(ring_bytes, 1e6))
            ),
            "jitter": Jitter(iteration_cv=self.noise_cv),
            "agents": AgentSettings(sensors=SETTINGS[self.setting], flush_interval_s=flush_s, late=late),
            "clocks": Clocks(),
        }
        return Scenario(
            title=f"{self.class_name} {self.seed}",
            seed=self.seed + (zlib.crc32(self.class_name.encode()) << 20),
            iterations=iterations,
            benign=(*benign, *losses),
            **(given | changes),
        )


def calibrated(scenario: Scenario, fault: Fault, slowdown: float) -> Fault:
    """Return the fault with the factor at which iterations take `slowdown` times as long, as nearly as it gets there.

    Where slack absorbs the fault at any factor, that is the largest factor.
    """
    quiet = replace(
        scenario,
        jitter=Jitter(compute_cv=0, within_node_cv=0, rdma_cv=0, launch_cv=0, iteration_cv=0),
        benign=tuple(benign for benign in scenario.benign if isinstance(benign, LongLastStage)),
    )
    steady = replace(fault, shape="step", onset=0, end=None)
    healthy_s = _pass_s(quiet, ())
    low, high = 1.0, _LARGEST_FACTOR
    if _pass_s(quiet, (replace(steady, factor=high),)) / healthy_s <= slowdown:
        return replace(fault, factor=high)
    for _ in range(14):
        middle = (low * high) ** 0.5
        if _pass_s(quiet, (replace(steady, factor=middle),)) / healthy_s < slowdown:
            low = middle
        else:
            high = middle
    return replace(fault, factor=round((low * high) ** 0.5, 4))


def _pass_s(scenario: Scenario, faults: Sequence[Fault]) -> float:
    placement = Placement(scenario, 0, 0)
    physics, program = Physics(placement, faults, 0), training(scenario)
    state = JobState.at(0.0, placement)
    for iteration in range(_PASSES):
        last = physics.train(program, iteration, state)
    return last.end_s - last.start_s
