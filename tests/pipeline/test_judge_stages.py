"""A node that is a whole pipeline stage: nobody does the same work elsewhere, and its host is compared all the same."""

import numpy as np
import pytest

from benchmarks.synthetic_job import SyntheticJob
from pipeline.judge import Judge
from pipeline.record import Record
from schemas.alerts import Alert, Kind, Severity
from schemas.codec import decode_iterations, encode_iterations
from schemas.events import Sensor

NODE = "node-0002"
UNTIMED = Sensor.HOST_CALL | Sensor.SYNC


def judged(busy_share: float, onset: int, sensors: Sensor, n: int = 97) -> list[Alert]:
    """Judge a job of four stages, a node each; one host is busy for a share of the iteration, the others for 0.3."""
    job = SyntheticJob(2, 4, 4, seed=7)

    def records() -> list[Record]:
        given = []
        for iteration in range(n):
            is_slow = iteration >= onset
            slowdown = np.where((np.arange(32) // 8 == 2) & is_slow, 1.3, 1.0)
            for record in job.records(iteration, slowdown):
                batch = decode_iterations(record.value)
                values = {f: getattr(batch, f) for f in batch.__dataclass_fields__} | {"sensors": sensors}
                rows = batch.rows
                if batch.node == NODE and is_slow:
                    rows = rows.replace(host_wait_s=(1 - busy_share) * rows.duration_s)
                if not sensors & Sensor.GPU:
                    rows = rows.replace(compute_s=np.nan, communication_s=np.nan, sm_clock_ratio=np.nan)
                values["rows"] = rows
                given.append(
                    Record(record.topic, 0, 0, record.time_ns, record.key, encode_iterations(type(batch)(**values)))
                )
        return given

    judge = Judge()
    return [alert for record in records() for alert in judge.handle(record)]


@pytest.mark.parametrize("sensors", [UNTIMED, UNTIMED | Sensor.GPU])
@pytest.mark.parametrize("onset", [0, 61])
def test_a_host_that_never_waits_for_its_gpus_is_named_though_all_its_peers_are_as_slow(
    onset: int, sensors: Sensor
) -> None:
    alerts = [alert for alert in judged(0.9, onset, sensors) if alert.severity is not Severity.INFO]
    assert [(alert.kind, alert.component.name.node) for alert in alerts[:1]] == [(Kind.SLOW_HOST, NODE)]
    assert alerts[0].detected_iteration <= (20 if onset == 0 else 64)


def test_a_host_that_is_busier_in_one_stage_than_in_others_is_left_alone_while_it_waits_for_its_gpus() -> None:
    assert judged(0.6, 0, UNTIMED) == []
