"""What the ranks of the testbed do in one iteration, and who shares a communicator with whom."""

from typing import Literal

import msgspec

Axis = Literal["tp", "dp", "pp"]


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training job. Times are of a healthy GPU, sizes are of one call as NCCL counts them, per rank.

    Ranks are numbered as usual: neighbours in a tensor-parallel group first, then data-parallel, then pipeline stages.
    """

    tp: int = 1
    dp: int = 4
    pp: int = 1
    iterations: int = 0  # 0 is until stopped
    micro_batches: int = 2
    forward_ms: float = 3.0  # of one micro-batch on one stage; backward takes twice as long
    optimizer_ms: float = 2.0
    tp_calls: int = 2  # all-reduces in one forward, and in one backward
    tp_bytes: int = 49_152
    p2p_bytes: int = 65_536
    dp_calls: int = 3  # buckets of gradients
    dp_bytes: int = 131_072
    dp_kind: Literal["all_reduce", "reduce_scatter"] = "reduce_scatter"  # the latter with an all-gather afterwards
    rare_every: int = 0  # iterations between calls of the rarer functions; 0 is never
    sync_every: int = 1  # iterations between synchronisations of host and GPU
    sync_kind: Literal["stream", "event", "device"] = "stream"
    host_ms: float = 0.0  # of processor time on a free core, each iteration, before the GPU is given work
    read_bytes: int = 0  # of training data, each iteration, past the page cache
    marker_socket: str | None = None  # Unix datagram socket that is told of each iteration and pause

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp

    def degree(self, axis: Axis) -> int:
        """Return how many ranks share a communicator along an axis."""
        return {"tp": self.tp, "dp": self.dp, "pp": self.pp}[axis]

    def place(self, rank: int, axis: Axis) -> int:
        """Return a rank's place along an axis."""
        return {
            "tp": rank % self.tp,
            "dp": rank // self.tp % self.dp,
            "pp": rank // (self.tp * self.dp),
        }[axis]

    def group(self, rank: int, axis: Axis) -> list[int]:
        """Return the ranks that differ from this one along an axis only, itself included, in the axis's order."""
        step = {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp}[axis]
        first = rank - step * self.place(rank, axis)
        return [first + step * i for i in range(self.degree(axis))]


class RankPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank process is told when it starts, beside its environment."""

    workload: Workload
    directory: str  # of the job: control block, unique ids, truths
    libraries: str  # folder of libnccl.so.2 and libcudart.so.12
    network_namespace: str | None = None  # file to enter
    hostname: str | None = None
    host_loops: int = 0  # rounds of the fixed host work
    data_file: str | None = None
