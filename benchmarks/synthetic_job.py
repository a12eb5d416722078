"""Iteration batches of a healthy or slowed job, made directly and fast: input for benchmarks and tests of the judge.

No dependencies between ranks are simulated (agents/simulated does that): each rank computes for about one second, and
waits for the slowest in its reduce-scatter.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeline.record import Record
from schemas.codec import encode_iterations
from schemas.events import Communicators, Op, RankInfo, Sensor
from schemas.iterations import CommunicationRows, IterationBatch, IterationRows, Numbering
from schemas.table import FloatArray, IntArray
from schemas.topics import ITERATIONS, job_key

SENSORS = Sensor.HOST_CALL | Sensor.GPU | Sensor.SYNC | Sensor.NVML | Sensor.HOST


@dataclass(slots=True)
class SyntheticJob:
    """A job of tensor x pipeline x data parallel ranks, eight to a node."""

    tensor: int
    pipeline: int
    data: int
    seed: int
    job_id: str = "synthetic"
    noise: float = 0.01
    sensors: Sensor = SENSORS
    random: np.random.Generator = field(init=False)
    communicators: list[Communicators] = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.communicators = [self._memberships(self.ranks_of(n)) for n in range(self.n_nodes)]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.tensor * self.pipeline * self.data

    @property
    def n_nodes(self) -> int:
        """How many nodes there are, the last one maybe not full."""
        return -(-self.world_size // 8)

    def ranks_of(self, node: int) -> IntArray:
        """Return the ranks of a node."""
        return np.arange(8 * node, min(8 * node + 8, self.world_size))

    def _memberships(self, ranks: IntArray) -> Communicators:
        t, d, p = self.position(ranks)
        kinds = [
            (np.full(len(ranks), 1), ranks, self.world_size),
            (1000 + d + self.data * p, t, self.tensor),
            (1_000_000 + t + self.tensor * p, d, self.data),
            (2_000_000 + t + self.tensor * d, p, self.pipeline),
        ]
        tables = [
            Communicators.build(len(ranks), rank=ranks, comm=comm, comm_rank=position, size=size)
            for comm, position, size in kinds
            if size > 1
        ]
        return Communicators.concatenate(tables)

    def position(self, ranks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the tensor, data and pipeline rank of each rank."""
        return ranks % self.tensor, ranks // self.tensor % self.data, ranks // (self.tensor * self.data)

    def batches(self, iteration: int, slowdown: FloatArray | float = 1.0) -> Iterator[IterationBatch]:
        """Yield one batch per node for one iteration; slowdown (world_size,) multiplies each rank's computation."""
        compute = slowdown * (1 + self.noise * self.random.standard_normal(self.world_size))
        transfer = 0.05 * (1 + 0.1 * self.random.standard_normal())
        duration = float(compute.max()) + transfer
        _, data, _ = self.position(np.arange(self.world_size))
        lanes = np.arange(self.world_size) - self.tensor * data  # the first rank of each data-parallel group
        slowest = np.zeros(self.world_size)
        np.maximum.at(slowest, lanes, compute)
        slowest = slowest[lanes]
        for node in range(self.n_nodes):
            ranks = self.ranks_of(node)
            wait = transfer + slowest[ranks] - compute[ranks]
            yield self._batch(node, ranks, iteration, compute[ranks], wait, duration)

    def _batch(
        self, node: int, ranks: IntArray, iteration: int, compute: FloatArray, wait: FloatArray, duration: float
    ) -> IterationBatch:
        n = len(ranks)
        end_ns = (iteration + 1) * 1_000_000_000
        rows = IterationRows.build(
            n,
            rank=ranks,
            iteration=iteration,
            numbering=int(Numbering.SEQUENCE),
            segment=0,
            end_ns=end_ns,
            duration_s=duration,
            compute_s=compute,
            host_wait_s=0.7 * duration,
            communication_s=duration - compute,
            sm_clock_ratio=1.0,
            run_queue_ratio=0.01,
            throttle_known=1,
        )
        name = f"node-{node:04d}"
        return IterationBatch(
            job_id=self.job_id,
            incarnation="1",
            node=name,
            seq=iteration,
            agent_start_ns=0,
            flush_ns=end_ns,
            flush_interval_ns=1_000_000_000,
            world_size=self.world_size,
            sensors=self.sensors,
            ranks=tuple(
                RankInfo(rank=r, local_rank=r % 8, pid=1000 + r, process_start_ns=0, gpu=r % 8, gpu_uuid=f"GPU-{r:05d}")
                for r in ranks.tolist()
            ),
            communicators=self.communicators[node],
            rows=rows,
            communication=self._communication(ranks, iteration, wait),
        )

    def _communication(self, ranks: IntArray, iteration: int, wait: FloatArray) -> CommunicationRows:
        t, d, p = self.position(ranks)
        n, least = len(ranks), 0.002 * (1 + 0.05 * self.random.standard_normal())
        kinds = [
            (1000 + d + self.data * p, Op.ALL_REDUCE, 64, 1 << 20, np.full(n, least), np.full(n, self.tensor > 1)),
            (1_000_000 + t + self.tensor * p, Op.REDUCE_SCATTER, 1, 1 << 28, wait, np.full(n, self.data > 1)),
            (2_000_000 + t + self.tensor * d, Op.SEND, 8, 1 << 22, np.full(n, least), p < self.pipeline - 1),
            (2_000_000 + t + self.tensor * d, Op.RECV, 8, 1 << 22, np.full(n, 2 * least), p > 0),
            (np.full(n, 1), Op.ALL_REDUCE, 1, 4, np.full(n, 2e-5), np.ones(n, bool)),
        ]
        tables = []
        for order, (comm, op, calls, size, shortest, mask) in enumerate(kinds):
            peer = np.where(op == Op.SEND, p + 1, np.maximum(p - 1, 0)) if op in (Op.SEND, Op.RECV) else 0
            table = CommunicationRows.build(
                n,
                row=np.arange(n),
                comm=comm,
                op=int(op),
                peer=peer,
                order=order,
                first_seq=iteration * calls,
                last_seq=(iteration + 1) * calls - 1,
                seq_known=1,
                calls=calls,
                bytes=calls * size,
                busy_s=shortest * calls,
                least_s=shortest,
            )
            tables.append(table.take(mask))
        table = CommunicationRows.concatenate(tables)
        return table.take(np.argsort(table.row, kind="stable"))

    def records(self, iteration: int, slowdown: FloatArray | float = 1.0) -> Iterator[Record]:
        """Yield the records of one iteration, as the iterations topic would carry them."""
        for batch in self.batches(iteration, slowdown):
            yield Record(ITERATIONS, 0, iteration, batch.flush_ns, job_key(batch.job_id), encode_iterations(batch))
