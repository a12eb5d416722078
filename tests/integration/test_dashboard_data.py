"""A live worker judges a simulated job with a slow GPU; a real Prometheus scrapes it; every panel has data."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from pipeline.agent_process import simulated
from pipeline.broker import EmbeddedBroker
from schemas.topics import EVENTS, PARTITIONER
from tests import dashboard
from tests.integration.prometheus_server import PrometheusServer

pytestmark = pytest.mark.broker

STARTED_S_MAX = 60.0
JUDGED_S_MAX = 90.0
ENDED_S_MAX = 30.0
POLL_S = 0.1
SERVED = re.compile(r"metrics on http://127\.0\.0\.1:(\d+)/metrics")

# The job goes on for ever: nothing after this share of the scenario is sent, while its slow GPU is still slow.
SHARE_SENT = 0.6


@pytest.fixture
def worker_port(embedded: EmbeddedBroker, tmp_path: Path) -> Iterator[int]:
    """A worker as `failslow run` starts it: the port of its metrics."""
    log = tmp_path / "worker.log"
    command = [sys.executable, "-m", "pipeline", "run", "--bootstrap", embedded.bootstrap, "--metrics-port", "0"]
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*command, "--state-dir", str(tmp_path / "state")], stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        deadline = time.monotonic() + STARTED_S_MAX
        while not (served := SERVED.search(log.read_text())):
            assert process.poll() is None, f"the worker ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"the worker serves no metrics:\n{log.read_text()}"
            time.sleep(POLL_S)
        yield int(served.group(1))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(ENDED_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        sys.stdout.write(log.read_text()[-4000:])  # pytest shows it where the test fails


@pytest.fixture
def prometheus(
    worker_port: int, repository: Path, tmp_path: Path, debian_tool: Callable[[str], str]
) -> Iterator[PrometheusServer]:
    deployed = repository / "deploy" / "prometheus.yml"
    with PrometheusServer(debian_tool("prometheus"), deployed, worker_port, tmp_path) as started:
        yield started


def send(bootstrap: str, scenario: Path) -> None:
    """Send the first share of a scenario, one batch twice, and one record that nobody can read."""
    batches = list(simulated(scenario))
    batches = batches[: int(len(batches) * SHARE_SENT)]
    producer = Producer({"bootstrap.servers": bootstrap, "partitioner": PARTITIONER, "compression.type": "zstd"})
    for batch in [*batches, batches[-1]]:
        producer.produce(EVENTS, batch.value, batch.key, timestamp=batch.time_ns // 1_000_000)
        producer.poll(0)
    producer.produce(EVENTS, b"\xc1 not a batch", b"job/node")
    assert producer.flush(30) == 0


def test_every_query_of_the_dashboard_returns_data_while_a_gpu_is_slow(
    embedded: EmbeddedBroker, prometheus: PrometheusServer, repository: Path
) -> None:
    send(embedded.bootstrap, repository / "scenarios" / "slow_gpu.toml")

    firing = prometheus.wait_for("failslow_alerts_firing > 0", within_s=JUDGED_S_MAX)
    assert {series["metric"]["kind"] for series in firing} == {"slow_gpu"}

    (job_id,) = {series["metric"]["job_id"] for series in firing}
    empty = [
        f"{title}: {query}"
        for title, query in dashboard.queries()
        if not prometheus.wait_for(query, within_s=JUDGED_S_MAX / 10)
    ]
    assert empty == []
    for metric, label in dashboard.variables():
        assert prometheus.label_values(metric, label) == [job_id]

    slowest = prometheus.query("topk(1, failslow_component_slowdown_ratio)")
    assert float(slowest[0]["value"][1]) == pytest.approx(1.4, abs=0.15)
