"""What NCCL's Inspector plug-in writes, line by line: how long each operation took on the GPU, and its number.

Source: NVIDIA/nccl, plugins/profiler/inspector (ext-profiler/inspector before 2.29.7) and src/plugin/profiler.cc,
at 2.28, 2.29, 2.30 and the development line of 2.31. One JSON object per line:

v4.0       header and metadata in every line, with coll_perf or, from 2.30, p2p_perf.
v4.1, v4.2 the same, and before the records of a dump one line with dump_stats; v4.2 adds coll_algo and coll_proto.
v4.3       header and metadata in the dump_stats line alone: they go for the coll_records + p2p_records +
           proxy_records lines that follow.

Numbers. `coll_sn` is comm->seqNumber[function]: per communicator and function, 0 for the first, raised by one for each
task that NCCL launches, recorded or not (ncclProfilerStartTaskEvents copies it and then adds one). That is `first_seq`
of Calls, as long as the calls that NCCL makes no task of are not counted: those of no elements, those on communicators
of one rank (both return from taskAppend before), and those that fail. NCCL sorts the collectives of one group by size,
so that within a group the order may differ from that of the calls; it sorts alike on all ranks. The replays of a graph
count, while the host calls once, when it captures: from then on the two counts differ. `p2p_sn` is something else: the
plug-in's own count, from 1, of all sends and receives of a communicator together that are large enough to be recorded,
in the order in which NCCL starts them (sorted by peer within a group); records come in the order of completion.

Sizes. coll_msg_size_bytes is the call's count times the size of its type: of one rank's part for AllGather (what it
sends) and ReduceScatter (what it receives), which is the count argument of the call, and so `bytes` of Calls. The
plug-in does not know ncclUint8 and multiplies by -1; the count of bytes is got back from the 64-bit overflow.

Times. coll_exec_time_us is measured on the GPU where coll_timing_source says kernel_gpu, and by the CPU that polls the
kernel's progress where it says kernel_cpu; collective_cpu is the host's launch and says nothing of the GPU. Only
verbose records (event_trace_ts) say when: microseconds of the node's clock at which a CPU thread saw the kernel begin.
What all records say is when they were dumped, by which they were over.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from schemas.events import Op

LINE_BYTES_MAX = 1 << 20  # a line that grows beyond this is not one of the plug-in's
MEMBERSHIPS_MAX = 4096  # communicators of one process

_OPS = {
    "AllReduce": int(Op.ALL_REDUCE),
    "AllGather": int(Op.ALL_GATHER),
    "ReduceScatter": int(Op.REDUCE_SCATTER),
    "Broadcast": int(Op.BROADCAST),
    "Reduce": int(Op.REDUCE),
    "Send": int(Op.SEND),
    "Recv": int(Op.RECV),
    "All2All": int(Op.ALL_TO_ALL),
}
_ON_GPU = (None, "kernel_gpu", "kernel_cpu")
_POINT_TO_POINT = (int(Op.SEND), int(Op.RECV))
_LONGEST_US = 1e12
_HALF, _WHOLE = 1 << 63, 1 << 64


class Record(NamedTuple):
    """One operation of one rank, done."""

    comm: int  # NCCL's communicator hash
    op: int  # schemas.events.Op
    number: int  # coll_sn, or p2p_sn: not comparable with each other, see above
    peer: int | None  # rank in the communicator; of SEND and RECV alone
    bytes: int
    duration_ns: int
    start_ns: int | None  # since the epoch; known of verbose records alone
    dump_ns: int | None  # it was over by then


class Member(NamedTuple):
    """A place in a communicator."""

    rank: int
    size: int


class Context(msgspec.Struct, frozen=True):
    """What the lines without a header belong to."""

    comm: int | None = None
    dump_ns: int | None = None
    n_owed: int | None = 0  # how many more; None is any number


class _KernelTimes(msgspec.Struct, gc=False):
    kernel_start_ts: int = 0


class _Times(msgspec.Struct, gc=False):
    kernel_events: list[_KernelTimes] = []


class _Collective(msgspec.Struct, gc=False):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: float
    coll_timing_source: str | None = None
    event_trace_ts: _Times | None = None


class _PointToPoint(msgspec.Struct, gc=False):
    p2p: str
    p2p_sn: int
    p2p_peer: int
    p2p_msg_size_bytes: int
    p2p_exec_time_us: float
    p2p_timing_source: str | None = None
    event_trace_ts: _Times | None = None


class _Header(msgspec.Struct, gc=False):
    id: str
    rank: int
    n_ranks: int


class _Metadata(msgspec.Struct, gc=False):
    inspector_output_format_version: str = ""
    dump_timestamp_us: int | None = None


class _DumpStats(msgspec.Struct, gc=False):
    coll_records: int | None = None
    p2p_records: int = 0
    proxy_records: int = 0
    coll_dropped_since_last_dump: int = 0
    p2p_dropped_since_last_dump: int = 0


class _ProxyTrace(msgspec.Struct, gc=False):
    """How the CPU moved the data of an operation, which is of no interest here."""


class _Line(msgspec.Struct, gc=False):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    p2p_perf: _PointToPoint | None = None
    dump_stats: _DumpStats | None = None
    proxy_trace: _ProxyTrace | None = None


_NOBODY: tuple[int | None, Member | None] = (None, None)


@dataclass(slots=True)
class Counts:
    """What has been read so far."""

    records: int = 0
    garbage: int = 0  # lines that are not the plug-in's, or damaged
    other: int = 0  # functions that are not told apart here, such as AllGatherV
    not_on_gpu: int = 0  # timed on the host alone
    without_header: int = 0  # of which the communicator is not known
    dropped: int = 0  # by the plug-in, for want of room, as far as it says so


@dataclass(slots=True)
class Parser:
    """The lines of one file, in any pieces. `is_cut` says that the next piece may begin within a line."""

    is_cut: bool = False
    counts: Counts = field(default_factory=Counts)
    memberships: dict[int, Member] = field(default_factory=dict)
    version: str = ""
    _rest: bytes = b""
    _headers: dict[str, tuple[int | None, Member | None]] = field(default_factory=dict)
    _context: tuple[int | None, int | None] = (None, None)  # what a line without a header belongs to, and its dump
    _n_owed: int | None = 0  # lines without a header that belong to it; None is any number
    _decoder: "msgspec.json.Decoder[_Line]" = field(default_factory=lambda: msgspec.json.Decoder(_Line))

    def feed(self, content: bytes) -> list[Record]:
        """Take in more of the file and return the records that are complete with it; a cut last line is kept."""
        whole, newline, rest = content.rpartition(b"\n")
        if not newline:
            self._keep(self._rest + rest)
            return []
        whole = self._rest + whole
        self._keep(rest)
        if self.is_cut:
            self.is_cut = False
            _, newline, whole = whole.partition(b"\n")
        if b"\0" in whole:  # the hole that is left where a file was truncated under its writer
            whole = whole.replace(b"\0", b"")
        records: list[Record] = []
        try:
            lines = self._decoder.decode_lines(whole)
        except msgspec.DecodeError:
            lines = [line for text in whole.split(b"\n") if (line := self._decode(text)) is not None]
        for line in lines:
            self._take(line, records)
        self.counts.records += len(records)
        return records

    def restart(self, *, is_cut: bool) -> None:
        """Take it that what comes next does not continue what came before."""
        self._rest, self.is_cut = b"", is_cut
        self._context, self._n_owed = (None, None), 0

    @property
    def n_kept(self) -> int:
        """How many bytes of a cut last line are kept."""
        return len(self._rest)

    @property
    def context(self) -> Context:
        """What is needed to continue at the last whole line."""
        return Context(*self._context, self._n_owed)

    @context.setter
    def context(self, context: Context) -> None:
        self._context, self._n_owed = (context.comm, context.dump_ns), context.n_owed

    def _keep(self, rest: bytes) -> None:
        if len(rest) <= LINE_BYTES_MAX:
            self._rest = rest
            return
        self.counts.garbage += 1
        self._rest, self.is_cut = b"", True

    def _decode(self, text: bytes) -> _Line | None:
        if not text.strip():
            return None
        # A bandwidth of infinity, of an operation of less than a microsecond, is printed in a form that JSON lacks.
        for attempt in (text, text.replace(b":inf", b":0").replace(b":-nan", b":0").replace(b":nan", b":0")):
            try:
                return self._decoder.decode(attempt)
            except msgspec.DecodeError:
                continue
        self.counts.garbage += 1
        return None

    def _take(self, line: _Line, records: list[Record]) -> None:
        comm, dump_ns = self._context_of(line) if line.header is None else self._open(line, line.header)
        perf, p2p = line.coll_perf, line.p2p_perf
        peer = None
        if perf is not None:
            function, number, source, times = perf.coll, perf.coll_sn, perf.coll_timing_source, perf.event_trace_ts
            size, took_us = perf.coll_msg_size_bytes, perf.coll_exec_time_us
        elif p2p is not None:
            function, number, source, times = p2p.p2p, p2p.p2p_sn, p2p.p2p_timing_source, p2p.event_trace_ts
            size, took_us, peer = p2p.p2p_msg_size_bytes, p2p.p2p_exec_time_us, p2p.p2p_peer
        else:
            self.counts.garbage += line.dump_stats is None and line.proxy_trace is None
            return
        op = _OPS.get(function)
        if comm is None:
            self.counts.without_header += 1
        elif op is None or (peer is not None) != (op in _POINT_TO_POINT):
            self.counts.other += 1
        elif source not in _ON_GPU:
            self.counts.not_on_gpu += 1
        elif number < 0 or size < 0 or not 0 <= took_us < _LONGEST_US or (peer is not None and peer < 0):
            self.counts.garbage += 1
        else:
            size = size if size < _HALF else _WHOLE - size
            start_ns = None if times is None else _start_ns(times)
            records.append(Record(comm, op, number, peer, size, round(took_us * 1000), start_ns, dump_ns))

    def _context_of(self, line: _Line) -> tuple[int | None, int | None]:
        """Return the communicator of a line without a header, and when it was dumped."""
        if self._n_owed == 0 or (line.coll_perf is None and line.p2p_perf is None and line.proxy_trace is None):
            return None, None
        if self._n_owed is not None:
            self._n_owed -= 1
        return self._context

    def _open(self, line: _Line, header: _Header) -> tuple[int | None, int | None]:
        """Return the communicator of a line with a header, and when it was dumped."""
        comm, member = self._headers.get(header.id, _NOBODY)
        if member is None or member.rank != header.rank or member.size != header.n_ranks:
            comm = self._learn(header)
        dump_ns = None
        if line.metadata is not None:
            self.version = line.metadata.inspector_output_format_version
            if line.metadata.dump_timestamp_us is not None:
                dump_ns = line.metadata.dump_timestamp_us * 1000
        stats = line.dump_stats
        if stats is not None:
            owed = None if stats.coll_records is None else stats.coll_records + stats.p2p_records + stats.proxy_records
            self._context, self._n_owed = (comm, dump_ns), owed
            self.counts.dropped += stats.coll_dropped_since_last_dump + stats.p2p_dropped_since_last_dump
        return comm, dump_ns

    def _learn(self, header: _Header) -> int | None:
        """Take note of a membership, and return the communicator; None where the header makes no sense."""
        try:
            comm = int(header.id, 16)
        except ValueError:
            return None
        if not 0 <= comm < _WHOLE or not 0 <= header.rank < header.n_ranks:
            return None
        if len(self._headers) < MEMBERSHIPS_MAX or header.id in self._headers:
            self.memberships[comm] = Member(header.rank, header.n_ranks)
            self._headers[header.id] = comm, self.memberships[comm]
        return comm


def _start_ns(times: _Times) -> int | None:
    starts = [event.kernel_start_ts for event in times.kernel_events if event.kernel_start_ts > 0]
    return min(starts) * 1000 if starts else None
