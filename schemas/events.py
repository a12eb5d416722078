"""What a node's agent observed since its last flush: one EventBatch per node, job and flush interval.

Times are nanoseconds of the node's own clock since the epoch and may be off by milliseconds against other nodes; only
their differences on one node mean something. Durations are nanoseconds. NaN is "not seen", never zero.
"""

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

import msgspec

from schemas.table import AnyArray, Table, column

SCHEMA_VERSION = 1


class Op(IntEnum):
    """NCCL functions, by our own stable numbers."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    SEND = 5
    RECV = 6
    ALL_TO_ALL = 7
    OTHER = 255


class CallSource(IntEnum):
    """Where the times of a call come from; the two are never mixed."""

    HOST_CALL = 0  # the host thread inside the NCCL function, which only enqueues work
    GPU = 1  # execution on the GPU, waiting for the other members included


class SpanKind(IntEnum):
    """What a span of computation was for."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    GARBAGE_COLLECTION = 3


class MarkerKind(IntEnum):
    """What the training process, or the agent itself, said about a stretch of time."""

    ITERATION_END = 0
    CHECKPOINT = 1
    EVALUATION = 2
    PROFILING = 3  # by ourselves: our own disturbance is not a fault


class Sensor(IntFlag):
    """Which sources were switched on at the agent: what is not here is unknown, not healthy."""

    HOST_CALL = 1
    GPU = 2
    SYNC = 4
    NVML = 8
    HOST = 16
    MARKER = 32
    SPAN = 64
    HOST_DURATION = 128  # without it the host calls' durations are 0 and mean nothing
    NETWORK = 256  # state of TCP connections and RDMA ports


class ThrottleReason(IntFlag):
    """NVML's clocks-event reasons that mean "slower than it could be" (bits as in NVML's header)."""

    GPU_IDLE = 0x1
    APPLICATIONS_CLOCKS_SETTING = 0x2
    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    HW_POWER_BRAKE_SLOWDOWN = 0x80
    DISPLAY_CLOCK_SETTING = 0x100


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank process on this node. `gpu` indexes gpu_samples; the UUID is what survives a restart."""

    rank: int
    local_rank: int
    pid: int
    process_start_ns: int
    gpu: int | None
    gpu_uuid: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Communicators(Table):
    """Membership of this node's ranks: one row per (rank, communicator).

    A communicator that was split off another one, with members on other nodes, is known to each node by its own
    members alone: then size is 0 and comm_rank means nothing, and readers have to put the members together.
    """

    rank: AnyArray = column("u4")
    comm: AnyArray = column("u8")  # NCCL's communicator hash, alike on all members
    comm_rank: AnyArray = column("u4")
    size: AnyArray = column("u4")  # 0: unknown


@dataclass(frozen=True, slots=True, eq=False)
class Calls(Table):
    """NCCL calls in the order of their start; a run of equal calls is one row."""

    rank: AnyArray = column("u4")
    comm: AnyArray = column("u8")
    op: AnyArray = column("u1")
    source: AnyArray = column("u1")
    bytes: AnyArray = column("i8")  # of one call
    peer: AnyArray = column("u4", missing=0)  # rank in the communicator; of SEND and RECV alone
    count: AnyArray = column("u4")
    first_seq: AnyArray = column("i8")  # per communicator, function and rank, from 0 at the communicator's creation
    seq_known: AnyArray = column("u1")  # 0: counted from when the agent attached, not from the creation
    start_ns: AnyArray = column("i8")  # of the first call of the run
    end_ns: AnyArray = column("i8")  # of the last
    duration_ns: AnyArray = column("i8")  # total over the run
    duration_min_ns: AnyArray = column("i8")
    # 0: only how long it ran on the GPU is known, and start_ns is the earliest that it can have begun.
    is_timed: AnyArray = column("u1", missing=1)


@dataclass(frozen=True, slots=True, eq=False)
class Spans(Table):
    """Stretches of computation, from traces and profilers."""

    rank: AnyArray = column("u4")
    kind: AnyArray = column("u1")
    micro_batch: AnyArray = column("i4")
    start_ns: AnyArray = column("i8")
    duration_ns: AnyArray = column("i8")


@dataclass(frozen=True, slots=True, eq=False)
class Syncs(Table):
    """Waits of the host for its GPU (stream, event and device synchronisation)."""

    rank: AnyArray = column("u4")
    start_ns: AnyArray = column("i8")
    duration_ns: AnyArray = column("i8")


@dataclass(frozen=True, slots=True, eq=False)
class GpuSamples(Table):
    """NVML's view of one GPU at one instant."""

    gpu: AnyArray = column("u2")  # index on the node
    time_ns: AnyArray = column("i8")
    sm_clock_hz: AnyArray = column("f8", missing=float("nan"))
    sm_clock_max_hz: AnyArray = column("f8", missing=float("nan"))
    throttle_reasons: AnyArray = column("u8", missing=0)
    throttle_known: AnyArray = column("u1", missing=0)
    temperature_c: AnyArray = column("f4", missing=float("nan"))
    power_w: AnyArray = column("f4", missing=float("nan"))
    power_limit_w: AnyArray = column("f4", missing=float("nan"))
    utilization_ratio: AnyArray = column("f4", missing=float("nan"))
    ecc_uncorrected: AnyArray = column("f8", missing=float("nan"))  # since the driver was loaded
    xid: AnyArray = column("f4", missing=float("nan"))  # of the last error since the previous sample
    is_lost: AnyArray = column("u1", missing=0)  # fell off the bus: everything else is missing
    pcie_generation: AnyArray = column("f4", missing=float("nan"))
    pcie_width: AnyArray = column("f4", missing=float("nan"))
    pcie_replays: AnyArray = column("f8", missing=float("nan"))  # since the driver was loaded
    nvlink_errors: AnyArray = column("f8", missing=float("nan"))  # of all links and kinds, since the driver was loaded
    nvlinks_down: AnyArray = column("f4", missing=float("nan"))
    retired_pages: AnyArray = column("f8", missing=float("nan"))  # or remapped rows


@dataclass(frozen=True, slots=True, eq=False)
class HostSamples(Table):
    """What the kernel did to one rank process over the interval that ends at time_ns; ratios are seconds per second."""

    rank: AnyArray = column("u4")
    time_ns: AnyArray = column("i8")
    run_queue_ratio: AnyArray = column("f4", missing=float("nan"))  # runnable, but not running
    blocked_ratio: AnyArray = column("f4", missing=float("nan"))  # off-CPU in uninterruptible sleep
    softirq_ratio: AnyArray = column("f4", missing=float("nan"))
    steal_ratio: AnyArray = column("f4", missing=float("nan"))
    memory_pressure_ratio: AnyArray = column("f4", missing=float("nan"))
    tcp_retransmits: AnyArray = column("f4", missing=float("nan"))  # in the interval, of the rank's network namespace
    off_cpu_ratio: AnyArray = column("f4", missing=float("nan"))  # asleep or blocked, of all threads together
    stopped_ratio: AnyArray = column("f4", missing=float("nan"))  # by a signal or a debugger
    throttled_ratio: AnyArray = column("f4", missing=float("nan"))  # of its control group, by a CPU quota
    reclaim_ratio: AnyArray = column("f4", missing=float("nan"))  # freeing memory for itself
    context_switches: AnyArray = column("f4", missing=float("nan"))  # in the interval
    page_faults: AnyArray = column("f4", missing=float("nan"))  # in the interval
    block_io_s: AnyArray = column("f4", missing=float("nan"))  # mean latency of its requests to block devices


@dataclass(frozen=True, slots=True, eq=False)
class PeerSamples(Table):
    """The TCP connections of one rank process to one address, over the interval that ends at time_ns."""

    rank: AnyArray = column("u4")
    time_ns: AnyArray = column("i8")
    peer_high: AnyArray = column("u8")  # of the IPv6 address, network byte order; IPv4 is mapped (RFC 4291)
    peer_low: AnyArray = column("u8")
    connections: AnyArray = column("u4")
    delivery_bytes_per_s: AnyArray = column("f8", missing=float("nan"))  # of the fastest connection, as TCP estimates
    busy_ratio: AnyArray = column("f4", missing=float("nan"))  # with data to send, of the busiest connection
    send_buffer_limited_ratio: AnyArray = column("f4", missing=float("nan"))
    receive_window_limited_ratio: AnyArray = column("f4", missing=float("nan"))
    round_trip_s: AnyArray = column("f4", missing=float("nan"))  # smoothed, of the slowest connection
    retransmits: AnyArray = column("f4", missing=float("nan"))  # in the interval


@dataclass(frozen=True, slots=True, eq=False)
class PortSamples(Table):
    """Counters of one InfiniBand or RoCE port over the interval that ends at time_ns."""

    port: AnyArray = column("u2")  # index into EventBatch.ports
    time_ns: AnyArray = column("i8")
    is_active: AnyArray = column("u1")
    rate_bits_per_s: AnyArray = column("f8", missing=float("nan"))
    sent_bytes_per_s: AnyArray = column("f8", missing=float("nan"))
    received_bytes_per_s: AnyArray = column("f8", missing=float("nan"))
    send_wait_ratio: AnyArray = column("f4", missing=float("nan"))  # had data, but no credit to send it
    congestion_notifications: AnyArray = column("f8", missing=float("nan"))  # received or handled, in the interval
    out_of_sequence: AnyArray = column("f8", missing=float("nan"))  # packets, in the interval
    timeouts: AnyArray = column("f8", missing=float("nan"))  # of acknowledgements, in the interval
    symbol_errors: AnyArray = column("f8", missing=float("nan"))  # in the interval
    link_downs: AnyArray = column("f8", missing=float("nan"))  # in the interval


@dataclass(frozen=True, slots=True, eq=False)
class Markers(Table):
    """Explicit statements: an iteration, or a pause of some length, ended at time_ns."""

    rank: AnyArray = column("u4")
    kind: AnyArray = column("u1")
    iteration: AnyArray = column("i8")
    time_ns: AnyArray = column("i8")
    duration_ns: AnyArray = column("i8", missing=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Everything one agent has to say about one job at one flush; sent even when empty: silence is information."""

    job_id: str
    incarnation: str  # changes when the job restarts; alike on all nodes
    node: str
    agent_version: str
    seq: int  # of the batches of (job_id, incarnation, node), from 0
    agent_start_ns: int  # tells a restarted agent, whose seq begins at 0 again, from a duplicate
    flush_ns: int
    flush_interval_ns: int
    world_size: int
    sensors: Sensor
    lost_events: int = 0  # that the agent knows to have lost since its last flush
    clock_error_ns: int | None = None  # bound on this node's clock error; None is unknown
    is_last: bool = False  # the job's processes on this node have ended
    ranks: tuple[RankInfo, ...] = ()
    ports: tuple[str, ...] = ()  # names of RDMA ports, such as mlx5_0/1
    communicators: Communicators = field(default_factory=Communicators.empty)
    calls: Calls = field(default_factory=Calls.empty)
    spans: Spans = field(default_factory=Spans.empty)
    syncs: Syncs = field(default_factory=Syncs.empty)
    gpu_samples: GpuSamples = field(default_factory=GpuSamples.empty)
    host_samples: HostSamples = field(default_factory=HostSamples.empty)
    markers: Markers = field(default_factory=Markers.empty)
    peer_samples: PeerSamples = field(default_factory=PeerSamples.empty)
    port_samples: PortSamples = field(default_factory=PortSamples.empty)
