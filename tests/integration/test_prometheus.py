"""A real Prometheus with the deployed configuration scrapes metrics, and the dashboard finds its data."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import prometheus_client
import pytest

from pipeline.dead_letters import Cause
from pipeline.metrics import Metrics
from pipeline.observer import FrameSummary
from schemas.topics import ITERATIONS
from tests.integration.prometheus_server import PrometheusServer

FIRST_SCRAPE_S_MAX = 60.0  # Prometheus settles its list of targets for some seconds first
JOB = "job-17"
NODES = ("n0", "n0", "n1", "n1", "n2")
GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e")
SLOWDOWN = (1.0, 1.01, 1.37, math.nan, 0.99)


def frame(job_id: str) -> FrameSummary:
    return FrameSummary(
        job_id=job_id,
        incarnation="1",
        iteration=47,
        end_ns=1_700_000_000_000_000_000,
        iteration_s=1.37,
        reference_s=1.03,
        rank_slowdown=np.array(SLOWDOWN),
        node=NODES,
        gpu=GPUS,
        missing_ranks=1,
    )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(prometheus_client.CollectorRegistry())


@pytest.fixture
def prometheus(
    metrics: Metrics, repository: Path, tmp_path: Path, debian_tool: Callable[[str], str]
) -> Iterator[PrometheusServer]:
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", metrics.registry)
    deployed = repository / "deploy" / "prometheus.yml"
    try:
        with PrometheusServer(debian_tool("prometheus"), deployed, server.server_port, tmp_path) as started:
            yield started
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_what_the_stages_show_arrives_with_its_labels_and_goes_with_the_job(
    metrics: Metrics, prometheus: PrometheusServer
) -> None:
    metrics.dead_lettered(ITERATIONS, Cause.UNREADABLE)
    metrics.frame_judged(frame("job-19"))
    metrics.frame_judged(frame(JOB))

    slowdowns = f'failslow_component_slowdown_ratio{{job_id="{JOB}"}}'
    assert prometheus.wait_for(f"count({slowdowns}) == 4", within_s=FIRST_SCRAPE_S_MAX)
    slowdown = prometheus.query(slowdowns)

    seen = {(series["metric"]["node"], series["metric"]["gpu"]): float(series["value"][1]) for series in slowdown}
    known = [(node, gpu, ratio) for node, gpu, ratio in zip(NODES, GPUS, SLOWDOWN, strict=True) if math.isfinite(ratio)]
    assert seen == {(node, gpu): ratio for node, gpu, ratio in known}
    assert {series["metric"]["job"] for series in slowdown} == {
        "failslow"
    }  # the scrape's own label, not the training job
    assert prometheus.label_values("failslow_iteration_seconds", "job_id") == [JOB, "job-19"]
    assert prometheus.query("failslow_dead_letters_total")[0]["metric"]["topic"] == ITERATIONS

    metrics.job_ended(JOB, "1")

    assert prometheus.wait_for(f'absent(failslow_iteration_seconds{{job_id="{JOB}"}})', within_s=FIRST_SCRAPE_S_MAX)
    assert prometheus.query(f'{{job_id="{JOB}"}}') == []
    assert len(prometheus.query('failslow_iteration_seconds{job_id="job-19"}')) == 1
