"""Laws of the whole path from events to alerts, on simulated jobs with real faults."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.simulated import Scenario, load_scenario
from pipeline.judge import Judge
from pipeline.observer import Counting
from pipeline.record import Record
from pipeline.window import Window
from schemas.alerts import Alert, AlertState, Kind
from schemas.codec import decode_events, decode_iterations, encode_alert
from schemas.iterations import Numbering
from tests.pipeline.simulation import alerts_of, event_records, iteration_records, judged

SMALL = """
title = "sixteen ranks on four nodes, one GPU slow for a while"
seed = 31
iterations = 83
micro_batches = 4
job_id = "{job}"
[layout]
tp = 2
pp = 2
dp = 4
gpus_per_node = 4
[agents]
flush_interval_s = 0.3
{agents}
[[faults]]
kind = "slow_gpu"
node = 1
gpu = 2
factor = 1.6
onset = 37
end = 61
"""
CULPRIT = "node1"


def small(job: str = "small", agents: str = "") -> Scenario:
    return load_scenario(SMALL.format(job=job, agents=agents))


@cache
def events() -> tuple[Record, ...]:
    return tuple(event_records(small()))


@cache
def iterations() -> tuple[Record, ...]:
    return tuple(iteration_records(events()))


@cache
def answer() -> tuple[bytes, ...]:
    return tuple(map(encode_alert, judged(iterations())))


def said(alerts: list[Alert]) -> tuple[bytes, ...]:
    return tuple(map(encode_alert, alerts))


def by_node(records: tuple[Record, ...]) -> dict[str, list[Record]]:
    nodes: dict[str, list[Record]] = {}
    for record in records:
        node = (
            decode_iterations(record.value).node if "iterations" in record.topic else decode_events(record.value).node
        )
        nodes.setdefault(node, []).append(record)
    return nodes


def interleaved(records: tuple[Record, ...], seed: int, spread_s: float) -> list[Record]:
    """Another arrival order that keeps each node's own: every node is late by its own, changing amount."""
    random = np.random.default_rng(seed)
    arrivals: list[tuple[float, int, Record]] = []
    for number, (_, own) in enumerate(sorted(by_node(records).items())):
        late = np.maximum.accumulate([r.time_ns / 1e9 + random.uniform(0, spread_s) for r in own])
        arrivals += [(float(t), number, r) for t, r in zip(late, own, strict=True)]
    return [record for _, _, record in sorted(arrivals, key=lambda a: a[:2])]


def test_the_fault_is_found_or_the_laws_below_would_be_empty() -> None:
    alerts = judged(iterations())
    assert alerts[0].state is AlertState.FIRING
    assert (alerts[0].kind, alerts[0].component.name.node) == (Kind.SLOW_GPU, CULPRIT)
    assert alerts[-1].state is AlertState.RESOLVED


def test_the_composition_of_the_stages_equals_the_way_through_the_topic() -> None:
    assert said(alerts_of(events())) == answer()


def test_the_same_records_give_the_same_alerts_byte_for_byte() -> None:
    assert said(judged(iterations())) == answer()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_interleaving_of_nodes_within_the_lateness_bound_changes_an_alert(seed: int) -> None:
    order = interleaved(iterations(), seed, spread_s=0.9)
    assert order != list(iterations())
    assert said(judged(order)) == answer()


def test_an_interleaving_of_events_changes_no_alert_either() -> None:
    assert said(alerts_of(interleaved(events(), 5, spread_s=0.9))) == answer()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_duplicates_anywhere_later_change_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    records = list(iterations())
    for _ in range(23):
        source = int(random.integers(len(records)))
        records.insert(int(random.integers(source, len(records))) + 1, records[source])
    assert said(judged(records)) == answer()


def test_duplicated_events_change_nothing() -> None:
    assert said(alerts_of([r for r in events() for _ in range(2)])) == answer()


@settings(max_examples=10, deadline=None)
@given(share=st.floats(0, 1))
def test_a_recording_cut_anywhere_gives_a_prefix_of_the_alerts(share: float) -> None:
    cut = said(judged(iterations()[: int(share * len(iterations()))]))
    assert cut == answer()[: len(cut)]


def test_two_jobs_in_one_stream_do_not_touch_each_other() -> None:
    other = list(iteration_records(event_records(small("other"))))
    both = sorted([*iterations(), *other], key=lambda r: r.time_ns)
    alerts = judged(both)
    assert said([a for a in alerts if a.job_id == "small"]) == answer()
    assert len(alerts) == 2 * len(answer())


def test_beyond_the_bound_the_frame_closes_without_the_late_ranks_and_says_so() -> None:
    nodes = by_node(iterations())
    late = nodes.pop("node3")
    cut = len(late) // 4
    running = [r for own in nodes.values() for r in own if not decode_iterations(r.value).is_last]
    on_time = sorted(running + late[:cut], key=lambda r: r.time_ns)
    observer = Counting()
    judge = Judge(observer)
    alerts = judged(on_time, judge)
    assert observer.counts["ranks_missing"] > 0
    judged(late[cut:], judge)
    assert observer.counts["rows_late"] > 0
    assert alerts[0].component.name.node == CULPRIT


@pytest.mark.parametrize("sensors", ['["host_call", "gpu", "sync"]', '["host_call", "gpu", "sync", "nvml", "host"]'])
def test_without_markers_iterations_are_numbered_by_nccl_and_judged_alike(sensors: str) -> None:
    records = tuple(iteration_records(event_records(small(agents=f"sensors = {sensors}"))))
    numberings = {n for r in records for n in decode_iterations(r.value).rows.numbering.tolist()}
    assert numberings == {int(Numbering.SEQUENCE)}
    alerts = judged(records)
    assert (alerts[0].kind, alerts[0].component.name.node) == (Kind.SLOW_GPU, CULPRIT)
    assert abs(alerts[0].onset_iteration - 37) <= 2


def test_an_agent_that_joins_late_is_aligned_or_unknown_and_accuses_nobody_wrongly() -> None:
    agents = 'sensors = ["host_call", "gpu", "sync"]\nlate = [{ node = 2, at_iteration = 19 }]'
    alerts = alerts_of(event_records(small(agents=agents)))
    assert {(a.kind, a.component.name.node) for a in alerts} == {(Kind.SLOW_GPU, CULPRIT)}


def test_a_window_restarted_in_mid_job_keeps_its_ranks_aligned() -> None:
    agents = 'sensors = ["host_call", "gpu", "sync"]'
    given_events = tuple(event_records(small(agents=agents)))
    middle = len(given_events) // 3
    first, second = Window(), Window()
    records = [
        *iteration_records(given_events[:middle], first),
        *iteration_records(given_events[middle:], second),
    ]
    alerts = judged(records)
    assert {(a.kind, a.component.name.node) for a in alerts} == {(Kind.SLOW_GPU, CULPRIT)}
    assert abs(alerts[0].onset_iteration - 37) <= 2
