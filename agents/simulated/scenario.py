"""What a simulated job is told to do: one TOML file, checked in full before anything runs.

Every field has its unit in its name; docs/scenarios.md explains them one by one. `title` and `expected` are for people
and tests and never reach the events.
"""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from agents.simulated.benign import Benign, BenignT, Restart
from agents.simulated.faults import Fault, SlowGpu, SlowHost, SlowLink, SlowNic, SlowRank
from schemas.events import Sensor

SensorName = Literal["host_call", "gpu", "sync", "nvml", "host", "marker", "span"]


class InvalidScenario(ValueError):
    """A scenario that cannot be simulated; the message names the field and the remedy."""


class Parallelism(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Degrees of parallelism; rank = tp + TP * (dp + DP * pp), and nodes take ranks in order."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, it is {getattr(self, name)}")
        if self.world_size % self.gpus_per_node:
            raise ValueError(
                f"tp * pp * dp = {self.world_size} ranks do not fill nodes of {self.gpus_per_node} GPUs; "
                "choose gpus_per_node to divide it"
            )

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.pp * self.dp


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one healthy rank computes in an iteration."""

    forward_s: float = 0.003  # of one micro-batch on one stage
    stage_ratios: tuple[float, ...] = ()  # per stage, of forward_s; empty is all equal
    backward_ratio: float = 2.0  # of the forward
    optimizer_s: float = 0.002
    tp_calls: int = 4  # tensor-parallel all-reduces in one forward, and in one backward
    host_ratio: float = 0.3  # host time to launch a piece of work, of the GPU time to do it
    host_call_s: float = 4e-6  # inside one NCCL function
    sync_every: int = 1  # iterations between two synchronisations of host and GPU

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_ratio", "optimizer_s", "host_call_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, it is {getattr(self, name)}")
        if self.tp_calls < 1 or self.sync_every < 1:
            raise ValueError("tp_calls and sync_every must be at least 1")
        if not 0 < self.host_ratio < 1:
            raise ValueError(f"host_ratio must be between 0 and 1, it is {self.host_ratio}: a healthy host runs ahead")
        if any(ratio <= 0 for ratio in self.stage_ratios):
            raise ValueError("stage_ratios must be positive")


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message sizes of one call, and what carries them; the defaults are a 200 Gbit/s interface per GPU and NVLink."""

    p2p_bytes: int = 5_000_000
    tp_bytes: int = 1_000_000
    dp_bytes: int = 75_000_000
    between_bytes_per_s: float = 25e9
    within_bytes_per_s: float = 200e9
    between_latency_s: float = 5e-6
    within_latency_s: float = 2e-6

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, it is {getattr(self, name)}")


class Jitter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of variation; the first three as measured in Greyhound (ATC'25), whose worst for RDMA is 0.29."""

    compute_cv: float = 0.01
    within_node_cv: float = 0.02
    rdma_cv: float = 0.2  # of one transfer between two nodes; a ring averages over its many chunks
    launch_cv: float = 0.05
    iteration_cv: float = 0.003  # shared by all ranks: what the data of one iteration ask for
    gpu_spread_cv: float = 0.004  # lasting differences between healthy GPUs

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), it is {getattr(self, name)}")


class LateAgent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent that attaches when the job already runs."""

    node: int
    at_iteration: int


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the nodes' agents observe and send."""

    sensors: tuple[SensorName, ...] = ("host_call", "gpu", "sync", "nvml", "host", "marker")
    flush_interval_s: float = 1.0
    sample_interval_s: float = 1.0
    delivery_s: float = 0.01  # mean way from a flush to the broker
    gpu_delay_flushes: float = 1.5  # GPU times follow their host calls by up to so many flush intervals
    late: tuple[LateAgent, ...] = ()

    def __post_init__(self) -> None:
        for name in ("flush_interval_s", "sample_interval_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, it is {getattr(self, name)}")
        if self.delivery_s < 0 or self.gpu_delay_flushes < 0:
            raise ValueError("delivery_s and gpu_delay_flushes must not be negative")

    @property
    def sensor_flags(self) -> Sensor:
        """Return the sensors as flags."""
        flags = Sensor(0)
        for name in self.sensors:
            flags |= Sensor[name.upper()]
        return flags


class Clocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every node's clock is off by a constant within +-skew_s; error_s is the bound on it that the agents may know."""

    skew_s: float = 0.003
    error_s: float = 0.005
    is_error_known: bool = True

    def __post_init__(self) -> None:
        if self.skew_s < 0:
            raise ValueError(f"skew_s must not be negative, it is {self.skew_s}")
        if self.is_error_known and self.error_s < self.skew_s:
            raise ValueError(f"error_s = {self.error_s} is no bound on skew_s = {self.skew_s}")


class ExpectedIncident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The right answer as a person writes it: `gpu 2/5`, `host 1`, `rank 7`, `nic 3`, `link 0-4` or `job`."""

    kind: str
    candidates: tuple[str, ...]
    onset: int
    end: int | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated job, from its first iteration to its last."""

    title: str
    seed: int
    iterations: int
    layout: Parallelism
    micro_batches: int = 8
    job_id: str = ""
    epoch_ns: int = 1_700_000_000_000_000_000
    work: Work = Work()
    network: Network = Network()
    jitter: Jitter = Jitter()
    agents: AgentSettings = AgentSettings()
    clocks: Clocks = Clocks()
    faults: tuple[Fault, ...] = ()
    benign: tuple[Benign, ...] = ()
    expected: tuple[ExpectedIncident, ...] = ()

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.micro_batches < 1 or self.seed < 0:
            raise ValueError("iterations and micro_batches must be at least 1, seed must not be negative")
        if self.work.stage_ratios and len(self.work.stage_ratios) != self.layout.pp:
            raise ValueError(
                f"work.stage_ratios has {len(self.work.stage_ratios)} entries, layout.pp is {self.layout.pp}"
            )
        for fault in self.faults:
            self._check_place(fault)
            if fault.onset >= self.iterations or (fault.end is not None and fault.end > self.iterations):
                raise ValueError(f"a {fault.kind} lies outside of the {self.iterations} iterations")
        for late in self.agents.late:
            self._check_node(late.node)
        self._check_restarts([benign for benign in self.benign if isinstance(benign, Restart)])

    def _check_restarts(self, given: list[Restart]) -> None:
        for restart in given:
            if restart.pause_s < 3 * self.agents.flush_interval_s:
                raise ValueError("a restart's pause_s must be at least three flush intervals: agents see it end first")
            if restart.dp is not None:
                msgspec.structs.replace(self.layout, dp=restart.dp)  # refuses what does not fill its nodes
        restarts = [restart.at_iteration for restart in given]
        if restarts != sorted(set(restarts)) or any(not 0 < at < self.iterations for at in restarts):
            raise ValueError("restarts must be in order and between the first and the last iteration")

    @property
    def n_nodes(self) -> int:
        """Return the number of nodes."""
        return self.layout.world_size // self.layout.gpus_per_node

    @property
    def job(self) -> str:
        """Return the job's id: job_id, or one made from the seed, since a telling name would be a label."""
        return self.job_id or f"simulated-{self.seed}"

    def find(self, kind: type[BenignT]) -> BenignT | None:
        """Return the first benign disturbance of a kind, or None."""
        return next((benign for benign in self.benign if isinstance(benign, kind)), None)

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.n_nodes:
            raise ValueError(f"there is no node {node}: the job has nodes 0 to {self.n_nodes - 1}")

    def _check_place(self, fault: Fault) -> None:
        match fault:
            case SlowGpu(node=node, gpu=gpu):
                self._check_node(node)
                if not 0 <= gpu < self.layout.gpus_per_node:
                    raise ValueError(f"there is no gpu {gpu}: a node has GPUs 0 to {self.layout.gpus_per_node - 1}")
            case SlowHost(node=node) | SlowNic(node=node):
                self._check_node(node)
            case SlowLink(nodes=nodes):
                for node in nodes:
                    self._check_node(node)
            case SlowRank(rank=rank):
                if not 0 <= rank < self.layout.world_size:
                    raise ValueError(f"there is no rank {rank}: the job has ranks 0 to {self.layout.world_size - 1}")


def load_scenario(source: Path | str) -> Scenario:
    """Read a scenario from a path, or from TOML text (anything with a line break or an equals sign).

    Raises InvalidScenario, naming the file or field and what to do about it.
    """
    text, name = _read(source)
    try:
        return msgspec.convert(tomllib.loads(text), Scenario)
    except tomllib.TOMLDecodeError as error:
        raise InvalidScenario(f"{name} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise InvalidScenario(f"{name}: {error}; docs/scenarios.md lists all fields") from error


def _read(source: Path | str) -> tuple[str, str]:
    if isinstance(source, str) and ("\n" in source or "=" in source):
        return source, "the scenario"
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidScenario(f"cannot read the scenario {path}: {error}; scenarios/ has examples") from error
