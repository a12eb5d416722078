"""Traces of ByteDance's StragglerAnalysis: every operation of sampled iterations of one Megatron job, as Parquet.

Source: Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025; files and
columns as in github.com/ByteDance-Seed/StragglerAnalysis. What the file cannot say stays unknown: nodes and GPUs (each
recorded rank gets a node of its own, named "rank-<n>"), sizes of transfers (bytes are 0, which no NCCL call has), and
the ranks of a tensor-parallel group beside the recorded one, which are not declared.

Iterations are sampled, from 16 to 1,238 in one file. They are laid one after another and numbered from 0 as they are
recorded: a delay of 3 is then three iterations that somebody saw. `Trace.steps` has the numbers of the trace itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.importers.layout import Axis, Layout, Placement
from schemas.events import (
    Calls,
    CallSource,
    Communicators,
    EventBatch,
    MarkerKind,
    Markers,
    Op,
    RankInfo,
    Sensor,
    SpanKind,
    Spans,
)

IntArray = npt.NDArray[np.int64]

_REQUIRED = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "mb_id")
_SPAN_KINDS = {
    "forward-compute": SpanKind.FORWARD,
    "backward-compute": SpanKind.BACKWARD,
    "optimizer": SpanKind.OPTIMIZER,
    "optimizer-clip-main-grad": SpanKind.OPTIMIZER,
    "gc": SpanKind.GARBAGE_COLLECTION,
}
# Operation, communicator, and how many stages on the other side of a transfer is.
_CALLS: dict[str, tuple[Op, Axis, int]] = {
    "forward-send": (Op.SEND, "pipeline", 1),
    "forward-recv": (Op.RECV, "pipeline", -1),
    "backward-send": (Op.SEND, "pipeline", -1),
    "backward-recv": (Op.RECV, "pipeline", 1),
    "grads-reduce-scatter": (Op.REDUCE_SCATTER, "data", 0),
    "params-all-gather": (Op.ALL_GATHER, "data", 0),
    "layernorm-grads-all-reduce": (Op.ALL_REDUCE, "tensor", 0),
    "embedding-grads-all-reduce": (Op.ALL_REDUCE, "embedding", 0),
}
_OPTYPES = (*_SPAN_KINDS, *_CALLS)


class InvalidTrace(ValueError):
    """A file that is not such a trace; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class _Operations:
    """All operations, sorted by rank and start; arrays are (n_operations,). `optype` indexes _OPTYPES."""

    rank: IntArray
    iteration: IntArray
    optype: IntArray
    micro_batch: IntArray
    start_ns: IntArray  # iterations are sampled and start at 0 each: here they are laid one after another
    duration_ns: IntArray
    comm: npt.NDArray[np.uint64]  # 0: not a call
    peer: IntArray
    seq: IntArray


@dataclass(frozen=True, slots=True)
class Trace:
    """One job as the batches its agents would have sent: one for each recorded rank and iteration."""

    job_id: str
    world_size: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...]  # the trace's own number of each iteration
    ignored_operations: dict[str, int]  # of unknown kind, by name
    _iteration_end_ns: IntArray  # (n_iterations,)
    _communicators: dict[int, Communicators]
    _operations: _Operations

    def __len__(self) -> int:
        return len(self.ranks) * len(self.steps)

    def batches(self) -> Iterator[EventBatch]:
        """Yield the batches, iteration by iteration and rank by rank."""
        interval_ns = int(np.median(np.diff(self._iteration_end_ns, prepend=0)))
        bounds = {
            (rank, iteration): _bounds(self._operations, rank, iteration)
            for rank in self.ranks
            for iteration in range(len(self.steps))
        }
        for iteration, end_ns in enumerate(self._iteration_end_ns.tolist()):
            for rank in self.ranks:
                yield EventBatch(
                    job_id=self.job_id,
                    incarnation="0",
                    node=f"rank-{rank}",
                    agent_version=f"import {version('failslow')}",
                    seq=iteration,
                    agent_start_ns=0,
                    flush_ns=end_ns,
                    flush_interval_ns=interval_ns,
                    world_size=self.world_size,
                    sensors=Sensor.GPU | Sensor.SPAN | Sensor.MARKER,
                    is_last=iteration == len(self.steps) - 1,
                    ranks=(RankInfo(rank=rank, local_rank=0, pid=0, process_start_ns=0, gpu=None, gpu_uuid=None),),
                    communicators=self._communicators[rank],
                    **_tables(self._operations, bounds[rank, iteration]),
                )


def read_trace(path: Path) -> Trace:
    """Read a trace. The world size comes from the `meta-*.yaml` beside it, else from the highest rank.

    Raises InvalidTrace.
    """
    table = _read_table(path)
    columns = {name: table[name].to_numpy() for name in _REQUIRED if name != "optype"}
    columns["optype"] = np.asarray(pc.index_in(table["optype"].cast(pa.string()), pa.array(_OPTYPES)).fill_null(-1))
    unknown = pc.value_counts(table.filter(pa.array(columns["optype"] < 0))["optype"].cast(pa.string())).to_pylist()
    is_known = columns["optype"] >= 0
    columns = {name: values[is_known] for name, values in columns.items()}
    if not len(columns["rank"]):
        raise InvalidTrace(f"{path} holds no operation that is known: {', '.join(_OPTYPES)}")
    placements = _placements(columns)
    world_size = _world_size(path, max(placements))
    job_id = path.stem
    has_embedding = columns["optype"] == _OPTYPES.index("embedding-grads-all-reduce")
    layout = Layout(job_id, placements, world_size, embedding_ranks=set(columns["rank"][has_embedding].tolist()))
    operations, steps, iteration_end_ns = _operations(columns, layout)
    return Trace(
        job_id=job_id,
        world_size=world_size,
        ranks=tuple(placements),
        ignored_operations={count["values"]: count["counts"] for count in unknown},
        steps=steps,
        _iteration_end_ns=iteration_end_ns,
        _communicators={rank: layout.membership(rank) for rank in placements},
        _operations=operations,
    )


def _read_table(path: Path) -> Any:
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidTrace(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error
    missing = [name for name in _REQUIRED if name not in table.column_names]
    if missing:
        raise InvalidTrace(
            f"{path} has no column {', '.join(missing)}; a StragglerAnalysis trace has {', '.join(_REQUIRED)}"
        )
    for name in _REQUIRED:
        is_text = pa.types.is_dictionary(table[name].type) or pa.types.is_string(table[name].type)
        if is_text != (name == "optype"):
            raise InvalidTrace(f"{path}: column {name} is of type {table[name].type}")
        if table[name].null_count:
            raise InvalidTrace(f"{path}: column {name} lacks {table[name].null_count} values")
    for name in ("start_ts", "duration"):
        values = table[name].to_numpy()
        if not np.all(np.isfinite(values) & (values >= 0)):
            raise InvalidTrace(f"{path}: column {name} must hold seconds from 0 on")
    if len(table) and pc.min(table["rank"]).as_py() < 0:
        raise InvalidTrace(f"{path}: column rank must not be negative")
    return table


def _placements(columns: dict[str, Any]) -> dict[int, Placement]:
    """Return where each recorded rank stands, in rank order."""
    taken: dict[tuple[int, int], int] = {}
    placements = {}
    ranks, first = np.unique(columns["rank"], return_index=True)
    for rank, row in zip(ranks.tolist(), first.tolist(), strict=True):
        place = int(columns["stage"][row]), int(columns["dp_rank"][row])
        shard = taken[place] = taken.get(place, -1) + 1
        placements[rank] = Placement(*place, shard)
    return placements


def _world_size(path: Path, rank_max: int) -> int:
    meta = path.with_name(path.stem.replace("trace", "meta", 1) + ".yaml")
    try:
        lines = meta.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return rank_max + 1
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    text = values.get("world_size", "").strip()
    if not text.isdecimal() or int(text) <= rank_max:
        raise InvalidTrace(f"{meta}: world_size is {text or 'missing'}, but {path.name} has rank {rank_max}")
    return int(text)


def _operations(columns: dict[str, Any], layout: Layout) -> tuple[_Operations, tuple[int, ...], IntArray]:
    """Lay the iterations one after another and number the calls of each communicator and function."""
    start_ns = np.rint(columns["start_ts"].astype(np.float64) * 1e9).astype(np.int64)
    duration_ns = np.rint(columns["duration"].astype(np.float64) * 1e9).astype(np.int64)
    steps, place = np.unique(columns["step"], return_inverse=True)
    length_ns = np.zeros(len(steps), np.int64)
    np.maximum.at(length_ns, place, start_ns + duration_ns)
    end_ns = np.cumsum(length_ns)
    start_ns += (end_ns - length_ns)[place]
    order = np.lexsort((columns["optype"], start_ns, columns["rank"]))
    rank, optype = columns["rank"][order].astype(np.int64), columns["optype"][order].astype(np.int64)
    comm = np.zeros(len(order), np.uint64)
    peer = np.zeros(len(order), np.int64)
    op = np.full(len(order), -1)
    for name, (function, kind, stages_away) in _CALLS.items():
        is_this = optype == _OPTYPES.index(name)
        op[is_this] = function
        for member in np.unique(rank[is_this]).tolist():
            rows = is_this & (rank == member)
            comm[rows] = layout.comm(member, kind)
            if stages_away:
                peer[rows] = (layout.placements[member].stage + stages_away) % layout.n_stages
    operations = _Operations(
        rank=rank,
        iteration=place[order],
        optype=optype,
        micro_batch=np.maximum(columns["mb_id"][order].astype(np.int64), 0),
        start_ns=start_ns[order],
        duration_ns=duration_ns[order],
        comm=comm,
        peer=peer,
        seq=_running_count(rank, comm, op),
    )
    return operations, tuple(steps.tolist()), end_ns


def _running_count(*keys: npt.NDArray[Any]) -> IntArray:
    """Return for each row how many rows before it have the same keys."""
    order = np.lexsort(keys)
    is_new = np.ones(len(order), bool)
    is_new[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    group_start = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    count = np.empty(len(order), np.int64)
    count[order] = np.arange(len(order)) - group_start
    return count


def _bounds(operations: _Operations, rank: int, iteration: int) -> slice:
    """Return the rows of one rank and iteration; rows are sorted by both, as time runs on from one to the next."""
    start, end = np.searchsorted(operations.rank, [rank, rank + 1])
    first, last = np.searchsorted(operations.iteration[start:end], [iteration, iteration + 1])
    return slice(int(start + first), int(start + last))


def _tables(operations: _Operations, rows: slice) -> dict[str, Any]:
    rank, optype = operations.rank[rows], operations.optype[rows]
    if not len(rank):
        return {}
    start_ns, duration_ns = operations.start_ns[rows], operations.duration_ns[rows]
    is_span = optype < len(_SPAN_KINDS)
    is_call = operations.comm[rows] != 0
    kinds = np.array(list(_SPAN_KINDS.values()))
    functions = np.array([function for function, _, _ in _CALLS.values()])
    return {
        "spans": Spans.build(
            int(is_span.sum()),
            rank=rank[is_span],
            kind=kinds[optype[is_span]],
            micro_batch=operations.micro_batch[rows][is_span],
            start_ns=start_ns[is_span],
            duration_ns=duration_ns[is_span],
        ),
        "calls": Calls.build(
            int(is_call.sum()),
            rank=rank[is_call],
            comm=operations.comm[rows][is_call],
            op=functions[optype[is_call] - len(_SPAN_KINDS)],
            source=CallSource.GPU,
            bytes=0,
            peer=operations.peer[rows][is_call],
            count=1,
            first_seq=operations.seq[rows][is_call],
            seq_known=1,
            start_ns=start_ns[is_call],
            end_ns=(start_ns + duration_ns)[is_call],
            duration_ns=duration_ns[is_call],
            duration_min_ns=duration_ns[is_call],
        ),
        "markers": Markers.build(
            1,
            rank=rank[:1],
            kind=MarkerKind.ITERATION_END,
            iteration=operations.iteration[rows][:1],
            time_ns=(start_ns + duration_ns).max(keepdims=True),
        ),
    }
