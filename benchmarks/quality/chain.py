"""The product's own chain on a bare series of iteration times: a job of one rank that reports nothing else.

What is judged is what a worker would judge: records of the iterations topic through Judge.handle, defaults unless said.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy

import numpy as np

from benchmarks.quality.baselines.baseline import Detection, Input, Observed
from pipeline.judge import Judge
from pipeline.judge_params import DEFAULTS, JudgeParams
from pipeline.record import Record
from schemas.alerts import AlertState, Severity
from schemas.codec import encode_iterations
from schemas.events import Sensor
from schemas.iterations import IterationBatch, IterationRows, Numbering
from schemas.table import FloatArray
from schemas.topics import ITERATIONS, job_key

_JOB = "series"
_FLUSH_NS = 1_000_000_000


class Chain:
    """Every incident that fires is a statement; incidents of severity `info` are information."""

    needs = frozenset({Input.DURATION})
    is_online = True

    def __init__(self, params: JudgeParams = DEFAULTS, *, name: str = "failslow") -> None:
        self.name = name
        self.params = params

    def judges(self, observed: Observed) -> list[Detection]:
        """Return the incidents in the order in which they fire."""
        return list(_said(Judge(params=self.params), one_rank_records(observed.duration_s)))

    def judges_alike(self, series: Sequence[FloatArray], *, until: int) -> Iterator[list[Detection]]:
        """Yield what `judges` returns of each of several series (n,) that are the same before the iteration `until`.

        What is the same is judged once.
        """
        judge = Judge(params=self.params)
        before = list(_said(judge, (r for r in one_rank_records(series[0]) if r.offset < until)))
        for one in series:
            if not np.array_equal(one[:until], series[0][:until], equal_nan=True):
                raise ValueError(f"these series differ before iteration {until}: judge them one by one")
            yield [*before, *_said(deepcopy(judge), (r for r in one_rank_records(one) if r.offset >= until))]


def _said(judge: Judge, records: Iterable[Record]) -> Iterator[Detection]:
    for record in records:
        for alert in judge.handle(record):
            if alert.state is AlertState.FIRING and alert.as_of_iteration == alert.detected_iteration:
                yield Detection(
                    at=alert.detected_iteration,
                    onset=alert.onset_iteration,
                    is_information=alert.severity is Severity.INFO,
                )


def one_rank_records(duration_s: FloatArray) -> Iterator[Record]:
    """Yield the records of a job of one rank with these iteration times (n,), seconds; NaN is not reported."""
    end_ns = (np.cumsum(np.nan_to_num(duration_s)) * 1e9).astype(np.int64)
    for iteration in np.flatnonzero(np.isfinite(duration_s)).tolist():
        rows = IterationRows.build(
            1,
            rank=np.zeros(1, np.int64),
            iteration=iteration,
            numbering=int(Numbering.MARKER),
            segment=0,
            end_ns=int(end_ns[iteration]),
            duration_s=float(duration_s[iteration]),
        )
        batch = IterationBatch(
            job_id=_JOB,
            incarnation="1",
            node="node-0000",
            seq=iteration,
            agent_start_ns=0,
            flush_ns=int(end_ns[iteration]),
            flush_interval_ns=_FLUSH_NS,
            world_size=1,
            sensors=Sensor.HOST_CALL,
            rows=rows,
        )
        yield Record(ITERATIONS, 0, iteration, batch.flush_ns, job_key(_JOB), encode_iterations(batch))
