"""From the times of a pass to Calls rows: what is the same in every iteration is laid out once per node."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from agents.simulated.layout import Axis, Placement
from agents.simulated.program import Program, StageProgram
from agents.simulated.stage import StageTimes
from schemas.events import Calls, CallSource, Op, Sensor
from schemas.table import AnyArray, FloatArray, IntArray

# Lines of the integer matrices that carry one column per row of Calls.
READY, START, END, TOTAL, LEAST, FIRST_SEQ, TEMPLATE = range(7)


def nanoseconds(seconds: FloatArray) -> IntArray:
    """Return seconds as whole nanoseconds."""
    return np.rint(seconds * 1e9).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class NodeTemplate:
    """Where the ranks of one node lie in the stages' arrays, and the constant columns of their rows."""

    pieces: tuple[tuple[int, slice], ...]  # stage, and which of its dp * tp ranks
    ranks: IntArray
    columns: dict[str, AnyArray]
    offset: dict[int, int]  # by id of a program: its first row in the columns


@dataclass(eq=False)
class CallRows:
    """Turns the passes of one incarnation into matrices, counting sequence numbers on."""

    placement: Placement
    programs: tuple[Program, ...]
    sensors: Sensor
    _counts: dict[tuple[int, Axis, Op], int] = field(default_factory=Counter)

    @property
    def sources(self) -> tuple[CallSource, ...]:
        """Return the sources that are switched on, in the order of their rows."""
        by_sensor = {Sensor.HOST_CALL: CallSource.HOST_CALL, Sensor.GPU: CallSource.GPU}
        return tuple(source for sensor, source in by_sensor.items() if sensor & self.sensors)

    def template(self, node: int) -> NodeTemplate:
        """Return what is constant on one node."""
        shape = self.placement.shape
        first = self.placement.first_rank_on(node)
        ranks = np.arange(first, first + shape.gpus_per_node)
        per_stage = shape.dp * shape.tp
        pieces = tuple(
            (int(stage), slice(int(members[0]) % per_stage, int(members[-1]) % per_stage + 1))
            for stage in np.unique(ranks // per_stage)
            if len(members := ranks[ranks // per_stage == stage])
        )
        tables, offset, n_rows = [], {}, 0
        for program in self.programs:
            offset[id(program)] = n_rows
            for stage, columns in pieces:
                tables.append(self._constants(program.stages[stage], stage * per_stage + np.arange(per_stage)[columns]))
                n_rows += len(tables[-1]["rank"])
        columns_ = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
        return NodeTemplate(pieces, ranks, columns_, offset)

    def _constants(self, program: StageProgram, ranks: IntArray) -> dict[str, AnyArray]:
        """Return the constant columns of (source, row, rank) rows, flattened in that order."""
        shape = (len(self.sources), len(program.rows), len(ranks))
        by_row = {
            "op": np.array([row.op for row in program.rows], "<u1"),
            "bytes": np.array([row.bytes for row in program.rows], "<i8"),
            "peer": np.array([row.peer for row in program.rows], "<u4"),
            "count": np.array([row.count for row in program.rows], "<u4"),
        }
        columns = {name: np.broadcast_to(values[:, None], shape).ravel() for name, values in by_row.items()}
        comm = [self.placement.comm[row.axis].ravel()[ranks] for row in program.rows]
        columns["comm"] = np.broadcast_to(np.array(comm, "<u8").reshape(shape[1:]), shape).ravel()
        columns["rank"] = np.broadcast_to(ranks.astype("<u4"), shape).ravel()
        sources = np.array(self.sources, "<u1")
        columns["source"] = np.broadcast_to(sources[:, None, None], shape).ravel()
        return columns

    def matrices(self, program: Program, stages: list[StageTimes]) -> list[IntArray]:
        """Return per stage the lines READY to FIRST_SEQ of all its rows, (6, sources, rows, dp * tp)."""
        return [
            self._matrix(number, stage, times)
            for number, (stage, times) in enumerate(zip(program.stages, stages, strict=True))
        ]

    def _matrix(self, number: int, program: StageProgram, times: StageTimes) -> IntArray:
        n_rows = len(program.rows)
        matrix = np.empty((6, len(self.sources), n_rows, times.host_call.size), np.int64)
        is_single = np.array([row.count == 1 for row in program.rows], bool)
        for place, source in enumerate(self.sources):
            lines = matrix[:, place]
            if source == CallSource.GPU:
                seconds = (times.start, times.end, times.total, times.least)
            else:
                count = np.array([row.count for row in program.rows])[:, None, None]
                least = np.broadcast_to(times.host_call, times.start.shape)
                seconds = (times.host_start, times.host_end, count * least, least)
            for line, values in zip((START, END, TOTAL, LEAST), seconds, strict=True):
                lines[line] = nanoseconds(values.reshape(n_rows, times.host_call.size))
            lines[TOTAL, is_single] = lines[LEAST, is_single] = (lines[END] - lines[START])[is_single]
            lines[READY] = lines[END]
        matrix[FIRST_SEQ] = self._first_seq(number, program)[:, None]
        return matrix

    def _first_seq(self, number: int, program: StageProgram) -> IntArray:
        first = np.empty(len(program.rows), np.int64)
        for place, row in enumerate(program.rows):
            key = (number, row.axis, row.op)
            first[place] = self._counts[key]
            self._counts[key] += row.count
        return first


def cut(template: NodeTemplate, program: Program, matrices: list[IntArray]) -> IntArray:
    """Return one node's part of a pass as a matrix with all lines, (7, rows)."""
    parts = [matrices[stage][:, :, :, columns].reshape(TEMPLATE, -1) for stage, columns in template.pieces]
    n_rows = sum(part.shape[1] for part in parts)
    whole = np.empty((TEMPLATE + 1, n_rows), np.int64)
    np.concatenate(parts, axis=1, out=whole[:TEMPLATE])
    first = template.offset[id(program)]
    whole[TEMPLATE] = np.arange(first, first + n_rows)
    return whole


def calls(template: NodeTemplate, lines: IntArray) -> Calls:
    """Return the rows of a matrix as Calls, in the order of their start."""
    lines = lines[:, np.argsort(lines[START], kind="stable")]
    constants = {name: column[lines[TEMPLATE]] for name, column in template.columns.items()}
    return Calls(
        **constants,
        seq_known=np.ones(lines.shape[1], "<u1"),
        start_ns=lines[START],
        end_ns=lines[END],
        duration_ns=lines[TOTAL],
        duration_min_ns=lines[LEAST],
        first_seq=lines[FIRST_SEQ],
        is_timed=np.ones(lines.shape[1], "<u1"),
    )
