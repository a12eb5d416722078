"""What can be slow, how slow, and when: factors that multiply durations from an onset to an end."""

from typing import Literal

import msgspec

ShapeName = Literal["step", "ramp", "staircase", "intermittent"]


class _Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base: durations are multiplied by `factor` in the iterations [onset, end); end None is the job's last.

    A ramp grows linearly over `ramp` iterations and stays; a staircase does so in `steps` equal steps, the first at its
    onset. An intermittent fault is there for the first `duty` share of every `period` iterations.
    """

    factor: float
    onset: int = 0
    end: int | None = None
    shape: ShapeName = "step"
    ramp: int = 40
    steps: int = 4
    period: int = 20
    duty: float = 0.5

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1 (1 is healthy), it is {self.factor}")
        if self.onset < 0 or (self.end is not None and self.end <= self.onset):
            raise ValueError(f"a fault needs 0 <= onset < end, these are {self.onset} and {self.end}")
        if min(self.ramp, self.steps, self.period) < 1 or not 0 < self.duty <= 1:
            raise ValueError("ramp, steps and period must be at least 1, duty above 0 and at most 1")

    @property
    def kind(self) -> str:
        """Return the kind as the file spells it."""
        return str(self.__struct_config__.tag)

    def factor_at(self, iteration: int) -> float:
        """Return by how much durations are multiplied in an iteration; 1.0 outside of the fault."""
        since = iteration - self.onset
        if since < 0 or (self.end is not None and iteration >= self.end):
            return 1.0
        if self.shape == "ramp":
            return 1.0 + (self.factor - 1.0) * min(1.0, (since + 1) / self.ramp)
        if self.shape == "staircase":
            return 1.0 + (self.factor - 1.0) * min(1.0, (since * self.steps // self.ramp + 1) / self.steps)
        if self.shape == "intermittent" and since % self.period >= self.duty * self.period:
            return 1.0
        return self.factor


class SlowGpu(_Fault, tag="slow_gpu", frozen=True, kw_only=True):
    """A GPU computes slower; it stays with the card whatever rank runs on it."""

    node: int
    gpu: int
    telemetry: bool = True  # whether clocks, throttle reasons and temperature show it
    cause: Literal["thermal", "power"] = "thermal"


class SlowHost(_Fault, tag="slow_host", frozen=True, kw_only=True):
    """A contended host launches work slower; above 1 / host_ratio it holds up its GPUs."""

    node: int
    telemetry: bool = True  # whether the run-queue delay shows it


class SlowNic(_Fault, tag="slow_nic", frozen=True, kw_only=True):
    """Everything to and from one node is slower."""

    node: int


class SlowLink(_Fault, tag="slow_link", frozen=True, kw_only=True):
    """Everything between two nodes is slower, both ways."""

    nodes: tuple[int, int]

    def __post_init__(self) -> None:
        _Fault.__post_init__(self)
        if self.nodes[0] == self.nodes[1]:
            raise ValueError(f"a slow_link needs two nodes, both are {self.nodes[0]}")


class SlowRank(_Fault, tag="slow_rank", frozen=True, kw_only=True):
    """A rank computes slower wherever it runs: its process or its share of the work is at fault, no card."""

    rank: int


class SlowJob(_Fault, tag="slow_job", frozen=True, kw_only=True):
    """Everybody computes slower at once: a power cap over all racks, a changed library, longer sequences."""


Fault = SlowGpu | SlowHost | SlowNic | SlowLink | SlowRank | SlowJob
