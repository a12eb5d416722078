"""What is shown of frames, alerts and partitions, within which bounds, and when it goes."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pipeline import metrics as module
from pipeline.dead_letters import Cause
from pipeline.metrics import Metrics, PartitionObserver
from pipeline.observer import FrameSummary
from tests.integration.fake_stages import expected

NAN = float("nan")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def frame(
    job_id: str = "job-a", slowdown: tuple[float, ...] = (1.0, 1.5, NAN), iteration_s: float = 0.5
) -> FrameSummary:
    n = len(slowdown)
    return FrameSummary(
        job_id=job_id,
        incarnation="i0",
        iteration=7,
        end_ns=10**18,
        iteration_s=iteration_s,
        reference_s=0.4,
        rank_slowdown=np.array(slowdown),
        node=tuple(f"n{rank}" for rank in range(n)),
        gpu=tuple(str(rank) for rank in range(n)),
        missing_ranks=1,
    )


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def names(metrics: Metrics) -> set[str]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {line.split("{")[0] for line in lines if "{" in line}


def test_a_frame_is_shown_and_what_is_not_known_is_not(metrics: Metrics) -> None:
    metrics.frame_judged(frame())
    assert value(metrics, "failslow_iteration_seconds", job_id="job-a") == 0.5
    assert value(metrics, "failslow_reference_seconds", job_id="job-a") == 0.4
    assert value(metrics, "failslow_component_slowdown_ratio", job_id="job-a", node="n1", gpu="1") == 1.5
    assert value(metrics, "failslow_component_slowdown_ratio", job_id="job-a", node="n2", gpu="2") is None
    assert value(metrics, "failslow_frames_judged_total") == 1
    assert value(metrics, "failslow_frame_ranks_missing_total") == 1
    metrics.frame_judged(frame(iteration_s=NAN))
    assert value(metrics, "failslow_iteration_seconds", job_id="job-a") == 0.5


def test_the_series_of_a_job_go_when_it_ends(metrics: Metrics) -> None:
    metrics.frame_judged(frame())
    metrics.frame_judged(frame("job-b"))
    metrics.job_ended("job-a", "i0")
    metrics.job_ended("never seen", "i0")
    shown = generate_latest(metrics.registry).decode()
    assert "job-a" not in shown
    assert value(metrics, "failslow_iteration_seconds", job_id="job-b") == 0.5


def test_the_series_of_a_job_go_with_its_partition(metrics: Metrics) -> None:
    here, elsewhere = PartitionObserver(metrics), PartitionObserver(metrics)
    here.frame_judged(frame("job-a"))
    here.frame_judged(frame("job-b"))
    here.job_ended("job-b", "i0")
    elsewhere.frame_judged(frame("job-b"))
    elsewhere.counted("rows_late", 2)
    here.forget()
    shown = generate_latest(metrics.registry).decode()
    assert "job-a" not in shown
    assert value(metrics, "failslow_iteration_seconds", job_id="job-b") == 0.5
    assert value(metrics, "failslow_occurrences_total", what="rows_late") == 2


def test_series_are_bounded_and_what_is_dropped_is_counted(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPONENTS_MAX", 5)
    monkeypatch.setattr(module, "JOBS_MAX", 3)
    for job in "abcd":
        metrics.frame_judged(frame(job, slowdown=(1.0, 1.1)))
    shown = generate_latest(metrics.registry).decode()
    assert shown.count("failslow_component_slowdown_ratio{") == 5
    assert shown.count("failslow_iteration_seconds{") == 3
    dropped = "failslow_series_dropped_total"
    assert value(metrics, dropped, metric="failslow_component_slowdown_ratio") == 1
    assert value(metrics, dropped, metric="failslow_iteration_seconds") == 1
    metrics.job_ended("a", "i0")
    metrics.frame_judged(frame("d", slowdown=(1.0,)))
    assert value(metrics, "failslow_iteration_seconds", job_id="d") == 0.5


def test_open_incidents_are_counted_by_job_and_kind_and_go_when_they_are_over(metrics: Metrics) -> None:
    metrics.show_firing([expected("job-a", 20)[0], expected("job-b", 20)[0]])
    metrics.show_firing([expected("job-b", 20)[0]])
    assert value(metrics, "failslow_alerts_firing", job_id="job-a", kind="slow_host") is None
    assert value(metrics, "failslow_alerts_firing", job_id="job-b", kind="slow_host") == 1


def test_lag_is_shown_where_the_end_is_known_and_goes_with_the_partition(metrics: Metrics) -> None:
    metrics.show_lags({("t", 0): 7, ("t", 1): 5, ("t", 2): 9}, lambda partition: (11, None, 8)[partition[1]])
    assert value(metrics, "failslow_lag_records", topic="t", partition="0") == 4
    assert value(metrics, "failslow_lag_records", topic="t", partition="1") is None
    assert value(metrics, "failslow_lag_records", topic="t", partition="2") == 0
    metrics.show_assignment([("t", 1), ("t", 2), ("u", 0)], ["t", "u", "v"])
    assert value(metrics, "failslow_lag_records", topic="t", partition="0") is None
    assert [value(metrics, "failslow_partitions_assigned", topic=topic) for topic in "tuv"] == [2, 1, 0]


def test_records_and_dead_letters_are_counted_by_topic(metrics: Metrics) -> None:
    metrics.record_handled("t", 10**18, is_rebuilding=True)
    metrics.record_handled("t", 10**18 + 10**9, is_rebuilding=False)
    metrics.dead_lettered("t", Cause.POISON)
    metrics.counted("rows_late", 3)
    assert value(metrics, "failslow_records_total", topic="t") == 2
    assert value(metrics, "failslow_records_rebuilt_total", topic="t") == 1
    assert value(metrics, "failslow_last_record_timestamp_seconds", topic="t") == 10**9 + 1
    assert value(metrics, "failslow_dead_letters_total", topic="t", reason="poison") == 1
    assert value(metrics, "failslow_occurrences_total", what="rows_late") == 3
    assert all(name.startswith("failslow_") for name in names(metrics))
