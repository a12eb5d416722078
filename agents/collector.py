"""What every collector is: one source on one node, opened once and read again and again.

Order of calls: open(), then collect() about once per flush interval, then close(). A source that is not there raises
NotAvailable from open(), and may be tried again later; the loop goes on with the others. collect() never blocks for
longer than a few milliseconds, never raises for one bad process, GPU or file where the others can be read, and reports
nothing twice. It is told which rank processes there are; those that it did not know before are new, those that are no
longer there have ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from schemas.events import (
    Calls,
    Communicators,
    GpuSamples,
    HostSamples,
    Markers,
    PeerSamples,
    PortSamples,
    RankInfo,
    Sensor,
    Spans,
    Syncs,
)


class ProcessKey(NamedTuple):
    """A process for good: numbers are used again, but not with the same start."""

    pid: int  # in the agent's PID namespace
    start_ticks: int  # field 22 of /proc/PID/stat: clock ticks since the machine's boot


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One rank of one job, running on this node."""

    key: ProcessKey
    job_id: str
    incarnation: str
    world_size: int
    rank: int
    local_rank: int
    namespace_pid: int  # as the process itself knows it, and names its files after it
    start_ns: int  # since the epoch
    gpu: int | None = None
    gpu_uuid: str | None = None

    @property
    def info(self) -> RankInfo:
        """What is published of it."""
        return RankInfo(
            rank=self.rank,
            local_rank=self.local_rank,
            pid=self.key.pid,
            process_start_ns=self.start_ns,
            gpu=self.gpu,
            gpu_uuid=self.gpu_uuid,
        )


class NotAvailable(Exception):
    """A source that cannot be read on this node; the reason names what is missing, the remedy what a person can do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason = reason
        self.remedy = remedy


class CollectorError(Exception):
    """A reading that failed as a whole, this time: it is said once, counted, and tried again."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that a working collector cannot see, why, and what would change that; for people."""

    what: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """What was seen since the last collect().

    The column `rank` of every table holds a place in the sequence that collect() was given, not a rank: two jobs on a
    node have the same ranks. Times are nanoseconds since the epoch by the node's clock.
    """

    calls: Calls = field(default_factory=Calls.empty)
    communicators: Communicators = field(default_factory=Communicators.empty)
    spans: Spans = field(default_factory=Spans.empty)
    syncs: Syncs = field(default_factory=Syncs.empty)
    gpu_samples: GpuSamples = field(default_factory=GpuSamples.empty)
    host_samples: HostSamples = field(default_factory=HostSamples.empty)
    markers: Markers = field(default_factory=Markers.empty)
    peer_samples: PeerSamples = field(default_factory=PeerSamples.empty)
    port_samples: PortSamples = field(default_factory=PortSamples.empty)
    ports: tuple[str, ...] = ()
    lost_events: int = 0  # that are known to have been seen and then lost, nobody knows of which rank
    lost_by_rank: Mapping[int, int] = field(default_factory=dict)  # by place, where it is known


class Collector(Protocol):
    """Reads one source."""

    name: str

    @property
    def sensors(self) -> Sensor:
        """What it observes at present; nothing before open() and while its source is gone."""

    def open(self) -> None:
        """Begin. Raises NotAvailable."""

    def collect(self, ranks: Sequence[RankProcess]) -> Observations:
        """Return what is new. Raises CollectorError where nothing could be read."""

    def limits(self) -> Sequence[Limit]:
        """Return what cannot be seen, as far as is known by now."""

    def close(self) -> None:
        """End, leaving nothing behind; may be called twice, and without open()."""
