"""Several faults at once: each is told from those that are open, and from what hides it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from agents.simulated import load_scenario
from benchmarks.synthetic_job import SyntheticJob
from pipeline.changes import ChangeSearch
from pipeline.judge import Judge
from pipeline.search import Search
from schemas.alerts import Alert, AlertState, Kind, Severity
from schemas.table import FloatArray
from tests.pipeline.simulation import alerts_of, event_records

GPU = '{ kind = "slow_gpu", node = 1, gpu = 0, factor = 1.5, onset = 53, telemetry = true }'
HOST = '{ kind = "slow_host", node = 1, factor = 7.0, onset = 53 }'
TIMED = '"gpu", "sync", "nvml", "host", "marker"'
UNTIMED = '"host_call", "sync", "nvml", "host", "marker"'


def told(faults: str, sensors: str) -> list[Alert]:
    """Return what is first said of each incident above information in a simulated job of eight ranks."""
    text = f"""
title = "several faults"
seed = 17
iterations = 127
micro_batches = 2
layout = {{ tp = 1, pp = 1, dp = 8, gpus_per_node = 2 }}
faults = [{faults}]
agents = {{ sensors = [{sensors}], flush_interval_s = 0.1 }}
"""
    return first_said(alerts_of(event_records(load_scenario(text))))


def first_said(alerts: list[Alert]) -> list[Alert]:
    firing = [a for a in alerts if a.state is AlertState.FIRING and a.severity is not Severity.INFO]
    by_name: dict[str, Alert] = {}
    for alert in firing:
        by_name.setdefault(alert.fingerprint, alert)
    return list(by_name.values())


def test_a_clock_that_was_as_low_before_is_no_reason_for_the_next_slowdown() -> None:
    first, second = told(GPU + ', { kind = "slow_job", factor = 1.5, onset = 83 }', UNTIMED)
    assert (first.kind, first.component.name.node) == (Kind.SLOW_GPU, "node1")
    assert (second.kind, second.onset_iteration) == (Kind.SLOW_JOB, 83)


def test_of_two_low_clocks_only_the_one_that_fell_is_named() -> None:
    later = '{ kind = "slow_gpu", node = 2, gpu = 1, factor = 2.2, onset = 83, telemetry = true }'
    first, second = told(f"{GPU}, {later}", UNTIMED)
    assert [one.node for one in first.component.candidates] == ["node1"]
    assert [one.node for one in second.component.candidates] == ["node2"]


def test_a_host_is_named_though_one_of_its_gpus_is_slow() -> None:
    later = '{ kind = "slow_host", node = 1, factor = 12.0, onset = 83 }'
    first, second = told(f"{GPU}, {later}", TIMED)
    assert (first.kind, first.component.name.node) == (Kind.SLOW_GPU, "node1")
    assert (second.kind, second.component.name.node) == (Kind.SLOW_HOST, "node1")


def test_a_gpu_is_named_by_its_clock_though_its_host_is_slow() -> None:
    later = '{ kind = "slow_gpu", node = 1, gpu = 0, factor = 3.0, onset = 83, telemetry = true }'
    first, second = told(f"{HOST}, {later}", TIMED)
    assert (first.kind, first.component.name.node) == (Kind.SLOW_HOST, "node1")
    assert (second.kind, second.component.name.node) == (Kind.SLOW_GPU, "node1")
    assert second.detected_iteration - 83 <= 3


def judged(slowdown: Callable[[int], FloatArray], n: int, noise: float = 0.01) -> list[Alert]:
    job = SyntheticJob(1, 1, 16, seed=7, noise=noise)
    judge = Judge()
    return [a for i in range(n) for record in job.records(i, slowdown(i)) for a in judge.handle(record)]


def uneven(seed: int, cv: float, factor: float, onset: int) -> Iterator[FloatArray]:
    """Yield how long the ranks compute: of uneven work, and rank 5 by `factor` longer since the onset."""
    random = np.random.default_rng(seed)
    for iteration in range(onset + 60):
        work = np.maximum(1 + cv * random.standard_normal(16), 0.5)
        work[5] *= factor if iteration >= onset else 1.0
        yield work


@pytest.mark.parametrize("seed", range(4))
def test_what_uneven_work_hides_accuses_nobody(seed: int) -> None:
    times = list(uneven(seed, 0.12, 1.2, 40))
    with_fault, without = (np.median([max(t) for t in part]) for part in (times[40:], times[:40]))
    assert with_fault / without < 1.08
    assert first_said(judged(lambda i: times[i], len(times))) == []


def test_where_work_is_even_the_same_fault_is_named() -> None:
    times = list(uneven(0, 0.01, 1.2, 40))
    (alert,) = first_said(judged(lambda i: times[i], len(times)))
    assert (alert.kind, alert.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00005")


def test_ordinary_noise_among_the_others_hides_no_slowdown_of_an_eighth() -> None:
    times = list(uneven(0, 0.02, 1.125, 0))
    (alert,) = first_said(judged(lambda i: times[i], len(times)))
    assert alert.component.name.gpu == "GPU-00005"


def test_what_a_fault_has_hidden_is_looked_for_when_it_is_over_whoever_else_is_accused() -> None:
    """All become slower as rank 5 recovers; rank 12 is accused by then."""

    def slowdown(iteration: int) -> FloatArray:
        work = np.ones(16)
        if iteration >= 45:
            work[12] = 1.3
        if 61 <= iteration < 97:
            work[5] = 2.4
        if iteration >= 97:
            work *= 1.4
        return work

    kinds = {alert.kind for alert in first_said(judged(slowdown, 137))}
    assert kinds == {Kind.SLOW_GPU, Kind.SLOW_JOB}


def test_what_an_open_incident_has_grown_by_in_the_meantime_is_nobody_elses() -> None:
    def slowdown(iteration: int) -> FloatArray:
        work = np.ones(16)
        if iteration >= 45:
            work[12] = 1.3 if iteration < 80 else 1.8
        if 61 <= iteration < 97:
            work[5] = 2.4
        return work

    named = [alert.component.name.gpu for alert in first_said(judged(slowdown, 137))]
    assert named == ["GPU-00012", "GPU-00005"]


def test_a_pause_just_before_a_slowdown_does_not_hide_who_it_is() -> None:
    def slowdown(iteration: int) -> FloatArray:
        work = np.ones(16) * (1.4 if 57 <= iteration < 60 else 1.0)
        work[5] *= 1.4 if iteration >= 62 else 1.0
        return work

    first = first_said(judged(slowdown, 97))[0]
    assert (first.kind, first.component.name.gpu) == (Kind.SLOW_GPU, "GPU-00005")


@pytest.mark.parametrize("is_clear", [True, False])
@pytest.mark.parametrize("onset", [0, 45])
def test_who_may_be_another_is_looked_at_for_longer_before_peers_accuse_it(
    monkeypatch: pytest.MonkeyPatch, onset: int, *, is_clear: bool
) -> None:
    find = Search.find
    monkeypatch.setattr(Search, "find", lambda *a, **k: [replace(s, is_clear=is_clear) for s in find(*a, **k)])
    monkeypatch.setattr(ChangeSearch, "update", lambda *_: None)
    work = np.where(np.arange(16) == 5, 1.4, 1.0)
    (alert,) = first_said(judged(lambda i: work if i >= onset else np.ones(16), 97))
    waited = alert.detected_iteration - onset
    if onset == 0:  # the first iterations warm up, and more of them would be too many
        assert waited <= 19
    else:
        assert waited <= 8 if is_clear else 16 <= waited <= 20
