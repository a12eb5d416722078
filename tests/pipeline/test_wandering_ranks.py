"""Ranks that are slow for some iterations, one after another, since work is dealt out anew with a memory."""

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.synthetic_job import SyntheticJob
from pipeline.judge import Judge
from pipeline.record import Record
from schemas.alerts import Alert, Kind, Severity
from schemas.codec import decode_iterations, encode_iterations
from schemas.iterations import IterationBatch
from schemas.table import FloatArray

RANKS, N, ONSET, MEMORY = 32, 97, 51, 5
SLOW, NODE = [5], list(range(8))
WAITED = 9  # iterations after which a suspect is looked at no longer


def dealt_out(memory: int) -> Iterator[FloatArray]:
    """Yield how long ranks compute: what each has to do is a mean over the last iterations' draws."""
    draws = np.random.default_rng(3).standard_normal((N + memory, RANKS))
    for number in range(N):
        yield 1 + 0.02 * draws[number : number + memory].sum(axis=0) / np.sqrt(memory)


def accused(
    ranks: list[int], n: int = N, *, memory: int = MEMORY, clock: float = 1.0, host_is_seen: bool = True
) -> list[Alert]:
    """Return what is first said above information of ranks that are slow for n iterations."""
    job, judge, alerts = SyntheticJob(1, 1, RANKS, seed=7), Judge(), list[Alert]()
    for number, work in enumerate(dealt_out(memory)):
        is_slow = np.isin(np.arange(RANKS), ranks) & (ONSET <= number < ONSET + n)
        for record in job.records(number, work + 0.4 * is_slow):
            batch = decode_iterations(record.value)
            own = {"sm_clock_ratio": np.where(is_slow[batch.rows.rank], clock, 1.0)}
            if not host_is_seen:
                own["host_wait_s"] = np.full(len(batch.rows.rank), np.nan)
            values = {f: getattr(batch, f) for f in batch.__dataclass_fields__} | {"rows": batch.rows.replace(**own)}
            made = encode_iterations(IterationBatch(**values))
            alerts += judge.handle(Record(record.topic, 0, 0, record.time_ns, record.key, made))
    return [a for a in alerts if a.severity is not Severity.INFO and a.as_of_iteration == a.detected_iteration]


def after(alert: Alert) -> int:
    """Return how many slow iterations there were before it was said, that one included."""
    return alert.detected_iteration - ONSET + 1


def test_a_rank_that_is_slow_for_as_long_as_ranks_are_at_times_is_not_accused() -> None:
    assert accused(SLOW, MEMORY) == []


@pytest.mark.parametrize(("memory", "longest"), [(MEMORY, WAITED), (1, 3)])
def test_a_rank_that_stays_slow_is_accused_once_that_has_lasted(memory: int, longest: int) -> None:
    first = accused(SLOW, memory=memory)[0]
    assert (first.kind, first.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00005")
    assert longest - 2 <= after(first) <= longest


def test_a_low_clock_needs_no_waiting() -> None:
    first = accused(SLOW, clock=0.7)[0]
    assert (first.kind, first.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00005")
    assert after(first) <= 3


@pytest.mark.parametrize(("memory", "longest"), [(MEMORY, WAITED), (1, 5)])
def test_a_node_whose_ranks_are_all_slow_is_accused_once_that_has_lasted(memory: int, longest: int) -> None:
    first = accused(NODE, memory=memory, host_is_seen=False)[0]
    assert (first.kind, first.component.name.node) == (Kind.SLOW_HOST, "node-0000")
    assert longest - 2 <= after(first) <= longest
