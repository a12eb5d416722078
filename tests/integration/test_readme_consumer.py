"""The alert consumer of the README, run as printed against a broker that holds alerts."""

import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from pipeline.broker import EmbeddedBroker
from schemas.codec import encode_alert
from schemas.topics import ALERTS, job_key
from tests.pipeline.simulation import alerts_of, event_records, scenario
from tests.test_documentation import consumer

pytestmark = pytest.mark.broker
PRINTED = "localhost:9092"


def test_it_prints_every_revision_once(tmp_path: Path) -> None:
    alerts = alerts_of(event_records(scenario("slow_gpu")))
    with EmbeddedBroker() as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for alert in [*alerts, *alerts]:  # at least once: a consumer has to live with repetition
            producer.produce(ALERTS, key=job_key(alert.job_id), value=encode_alert(alert))
        assert producer.flush(30) == 0
        code = consumer()
        assert PRINTED in code
        program = tmp_path / "consumer.py"
        program.write_text(code.replace(PRINTED, broker.bootstrap))
        ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=True)
    lines = ran.stdout.splitlines()
    assert len(lines) == len(alerts)
    assert all(alert.job_id in line and alert.kind in line for alert, line in zip(alerts, lines, strict=True))
