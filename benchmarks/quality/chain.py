"""The product's own chain on a bare series of iteration times: a job of one rank that reports nothing else.

What is judged is what a worker would judge: records of the iterations topic through Judge.handle, defaults unless said.
"""

from collections.abc import Iterator

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
        judge = Judge(params=self.params)
        return [
            Detection(
                at=alert.detected_iteration,
                onset=alert.onset_iteration,
                is_information=alert.severity is Severity.INFO,
            )
            for record in one_rank_records(observed.duration_s)
            for alert in judge.handle(record)
            if alert.state is AlertState.FIRING and alert.as_of_iteration == alert.detected_iteration
        ]


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
