"""What the window stage says of one node: each rank's complete iterations, in order, with their communication."""

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

from schemas.events import Communicators, RankInfo, Sensor
from schemas.table import AnyArray, Table, column

NAN = float("nan")


class Numbering(IntEnum):
    """Where a row's iteration number comes from, best first."""

    MARKER = 0  # said by the training process
    SEQUENCE = 1  # counted by NCCL's own sequence numbers since the communicator's creation: alike on all ranks
    LOCAL = 2  # counted by this window since it first saw the rank; the judge has to find the offset


class Quality(IntFlag):
    """What is odd about a row; 0 is an ordinary, complete iteration."""

    INCOMPLETE = 1  # touched by loss: accuses nobody
    OTHER_WORK = 2  # the calls differ from the learnt iteration (evaluation, a longer iteration): not comparable
    BLOCK_MEAN = 4  # the host ran ahead: duration is the mean over a synchronised block
    PAUSED = 8  # a checkpoint, evaluation or profiling marker lies in it
    NO_GPU_TIMES = 16  # the agent has GPU-side durations, but not for this iteration


@dataclass(frozen=True, slots=True, eq=False)
class IterationRows(Table):
    """One row per rank and iteration. Seconds; NaN is unknown."""

    rank: AnyArray = column("u4")
    iteration: AnyArray = column("i8")
    numbering: AnyArray = column("u1")
    segment: AnyArray = column("i8")  # LOCAL numbers are comparable within a segment (time of its first event, ns) only
    end_ns: AnyArray = column("i8")  # node clock
    duration_s: AnyArray = column("f8")
    compute_s: AnyArray = column("f8", missing=NAN)  # neither communicating nor waiting for others
    forward_s: AnyArray = column("f8", missing=NAN)  # from spans alone
    backward_s: AnyArray = column("f8", missing=NAN)
    host_wait_s: AnyArray = column("f8", missing=NAN)  # host waiting for its GPU
    communication_s: AnyArray = column("f8", missing=NAN)  # GPU inside collectives, waiting for others included
    quality: AnyArray = column("u2", missing=0)
    sm_clock_ratio: AnyArray = column("f4", missing=NAN)  # SM clock over its maximum
    throttle_reasons: AnyArray = column("u8", missing=0)
    throttle_known: AnyArray = column("u1", missing=0)
    temperature_c: AnyArray = column("f4", missing=NAN)
    run_queue_ratio: AnyArray = column("f4", missing=NAN)
    blocked_ratio: AnyArray = column("f4", missing=NAN)
    stopped_ratio: AnyArray = column("f4", missing=NAN)
    throttled_ratio: AnyArray = column("f4", missing=NAN)


@dataclass(frozen=True, slots=True, eq=False)
class CommunicationRows(Table):
    """One row per rank, iteration, communicator, op and (for send and receive) peer; in the order of `row`."""

    row: AnyArray = column("u4")  # index into the IterationRows of the same batch
    comm: AnyArray = column("u8")
    op: AnyArray = column("u1")
    peer: AnyArray = column("u4", missing=0)  # rank in the communicator; of SEND and RECV alone
    order: AnyArray = column("u2", missing=0)  # position of its first call within the iteration
    first_seq: AnyArray = column("i8")
    last_seq: AnyArray = column("i8")
    seq_known: AnyArray = column("u1")
    calls: AnyArray = column("u4")
    bytes: AnyArray = column("i8")  # over all calls
    busy_s: AnyArray = column("f8", missing=NAN)  # GPU time over all calls, waiting included
    least_s: AnyArray = column("f8", missing=NAN)  # the shortest call


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationBatch:
    """The window stage's answer to one EventBatch; sent even without rows, since a pulse moves event time on."""

    job_id: str
    incarnation: str
    node: str
    seq: int  # of the EventBatch that it answers
    agent_start_ns: int
    flush_ns: int
    flush_interval_ns: int
    world_size: int
    sensors: Sensor
    lost_events: int = 0  # by the agent, or batches missing before this one
    clock_error_ns: int | None = None
    is_last: bool = False
    ranks: tuple[RankInfo, ...] = ()
    communicators: Communicators = field(default_factory=Communicators.empty)
    rows: IterationRows = field(default_factory=IterationRows.empty)
    communication: CommunicationRows = field(default_factory=CommunicationRows.empty)
