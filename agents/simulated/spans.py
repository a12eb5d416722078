"""Spans of computation as a profiler would report them: tensor-parallel all-reduces are inside, as they are there."""

import numpy as np

from agents.simulated.benign import GcPauses
from agents.simulated.rows import NodeTemplate, nanoseconds
from agents.simulated.timeline import Passed
from schemas.events import SpanKind
from schemas.table import IntArray

SPAN_START = 4
_NO_MICRO_BATCH = 0  # of an optimizer or a garbage collection, which have none


def span_lines(template: NodeTemplate, passed: Passed, gc: GcPauses | None) -> IntArray:
    """Return a node's spans of a pass: ready, rank, kind, micro-batch, start and duration, (6, spans), true time."""
    parts = [np.empty((6, 0), np.int64)]
    n_before = 0
    for stage, columns in template.pieces:
        times, program = passed.times.stages[stage], passed.program.stages[stage]
        start = nanoseconds(times.compute_start.reshape(len(program.computes), -1)[:, columns])
        end = nanoseconds(times.compute_end.reshape(len(program.computes), -1)[:, columns])
        ranks = template.ranks[n_before : n_before + start.shape[1]]
        n_before += len(ranks)
        kinds = np.array([compute.kind for compute in program.computes])
        numbers = np.array([max(compute.micro_batch, _NO_MICRO_BATCH) for compute in program.computes])
        lines = [end, ranks[None, :], kinds[:, None], numbers[:, None], start, end - start]
        parts.append(np.stack([np.broadcast_to(line, start.shape).reshape(-1) for line in lines]))
    for rank, start_s in passed.times.gc_pauses:
        if gc and rank in template.ranks:
            start_ns, duration_ns = round(start_s * 1e9), round(gc.pause_s * 1e9)
            pause = [start_ns + duration_ns, rank, SpanKind.GARBAGE_COLLECTION, _NO_MICRO_BATCH, start_ns, duration_ns]
            parts.append(np.array(pause, np.int64)[:, None])
    return np.concatenate(parts, axis=1)
