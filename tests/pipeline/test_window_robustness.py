"""Whatever a node sends, the window either refuses the batch or goes on."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.simulated import Cluster
from pipeline.observer import Counting
from pipeline.window import Window
from pipeline.window_params import WindowParams
from schemas.codec import InvalidRecord, decode_iterations, encode_iterations
from schemas.events import EventBatch, Sensor
from schemas.iterations import IterationBatch
from schemas.table import Table
from tests.pipeline.window_streams import answers, record, simulated

SENSORS = (
    "host_call gpu sync nvml host",
    "gpu",
    "gpu sync",
    "host_call gpu sync marker span",
    "host_call",
    "gpu marker span",
    "marker",
)
TABLES = ("calls", "spans", "syncs", "gpu_samples", "host_samples", "markers", "communicators")
SMALL = WindowParams(buffer_rows=211, ranks=3, keys=13, held_iterations=17, reorder_batches=1, gpu_wait_batches=1)


@cache
def job(sensors: str) -> tuple[EventBatch, ...]:
    return tuple(Cluster(simulated(sensors, iterations=37)).batches())


def corrupted(random: np.random.Generator, table: Table, share: float) -> Table:
    """Drop, shuffle, repeat, shift and overwrite, each with a probability."""
    if len(table) and random.random() < share:
        table = table.take(np.sort(random.choice(len(table), random.integers(1, len(table) + 1), replace=False)))
    if random.random() < share:
        table = table.take(random.permutation(len(table)))
    if len(table) and random.random() < share:
        table = type(table).concatenate([table, table.take(random.integers(0, len(table), 3))])
    columns: dict[str, Any] = {name: getattr(table, name) for name in table.to_wire() if name != "rank"}
    if len(table) and random.random() < share:
        name = str(random.choice(list(columns)))
        values = columns[name].copy()
        chosen = random.integers(0, len(table), 3)
        kind = values.dtype.kind
        values[chosen] = random.choice([np.nan, np.inf, -1, 0]) if kind == "f" else random.choice([0, 1, 2, 99])
        table = table.replace(**{name: values})
    if random.random() < share and "start_ns" in columns:
        shift = int(random.integers(-(10**10), 10**10))
        ends = {"end_ns": columns["end_ns"] + shift} if "end_ns" in columns else {}
        table = table.replace(start_ns=columns["start_ns"] + shift, **ends)
    return table


def disordered(random: np.random.Generator, batches: list[EventBatch]) -> list[EventBatch]:
    """Repeat, drop, restart the agent, or change its sensors."""
    for _ in range(int(random.integers(4))):
        place = int(random.integers(len(batches)))
        chosen, first = batches[place:], batches[place].seq
        match int(random.integers(4)):
            case 0:
                batches.insert(int(random.integers(len(batches))), batches[place])
            case 1:
                del batches[place]
            case 2:
                batches[place:] = [
                    replace(b, agent_start_ns=b.agent_start_ns + 7, seq=max(0, b.seq - first)) for b in chosen
                ]
            case _:
                sensors = Sensor(int(random.integers(128)))
                batches[place:] = [replace(b, sensors=sensors) for b in chosen]
    return batches


def check_sanity(answer: IterationBatch) -> None:
    again = decode_iterations(encode_iterations(answer))
    assert again.rows == answer.rows
    for name in ("duration_s", "compute_s", "communication_s", "host_wait_s"):
        values = getattr(answer.rows, name)
        assert (values[np.isfinite(values)] >= 0).all()
        assert not np.isinf(values).any()
    assert (np.diff(answer.communication.row.astype(int)) >= 0).all()
    assert (answer.communication.calls > 0).all()


@settings(max_examples=97)
@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.02, 0.1, 0.4]),
    params=st.sampled_from([WindowParams(), SMALL]),
)
def test_corrupted_batches_are_refused_or_answered_but_never_end_the_window(
    seed: int, share: float, params: WindowParams
) -> None:
    random = np.random.default_rng(seed)
    window = Window(Counting(), params)
    for events in disordered(random, list(job(str(random.choice(SENSORS))))):
        tables: dict[str, Any] = {name: corrupted(random, getattr(events, name), share) for name in TABLES}
        try:
            said = list(window.handle(record(replace(events, **tables, lost_events=int(random.random() < 0.1)))))
        except InvalidRecord:
            continue
        for answer in said:
            check_sanity(answer)


@settings(max_examples=31)
@given(data=st.data())
def test_any_interleaving_of_nodes_gives_each_node_the_same_answers(data: st.DataObject) -> None:
    by_node: dict[str, list[EventBatch]] = {}
    for events in job(SENSORS[0]):
        by_node.setdefault(events.node, []).append(events)
    order = data.draw(st.permutations([node for node, batches in by_node.items() for _ in batches]))
    waiting = {node: iter(batches) for node, batches in by_node.items()}
    mixed = answers([next(waiting[node]) for node in order]).batches
    for node, batches in by_node.items():
        alone = answers(batches).batches
        mine = [answer for answer in mixed if answer.node == node]
        assert [a.rows for a in mine] == [a.rows for a in alone]
        assert [a.communication for a in mine] == [a.communication for a in alone]


@settings(max_examples=31)
@given(data=st.data())
def test_duplicates_and_neighbours_that_change_places_change_nothing(data: st.DataObject) -> None:
    batches = [b for b in job(SENSORS[0]) if b.node == "node0"]
    arrived = list(batches[:-1])
    for place in data.draw(st.lists(st.integers(1, len(arrived) - 2), max_size=4)):
        arrived[place], arrived[place + 1] = arrived[place + 1], arrived[place]
    for place in data.draw(st.lists(st.integers(0, len(arrived) - 1), max_size=4)):
        arrived.insert(place + 1, arrived[place])
    said, plain = answers([*arrived, batches[-1]]).batches, answers(batches).batches
    assert [a.rows for a in said] == [a.rows for a in plain]


@pytest.mark.parametrize("sensors", SENSORS)
def test_a_recording_cut_anywhere_gives_a_prefix(sensors: str) -> None:
    batches = job(sensors)
    whole = answers(batches).batches
    for cut in (1, len(batches) // 3, len(batches) - 1):
        part = answers(batches[:cut]).batches
        assert [a.rows for a in part] == [a.rows for a in whole[: len(part)]]


def test_state_does_not_grow_with_time() -> None:
    """What a node remembers after many batches is what it remembered after few."""
    batches = [b for b in job(SENSORS[0]) if b.node == "node0"]
    sizes = []
    for n in (len(batches) // 2, len(batches) - 1):
        window = Window(Counting())
        answers(batches[:n], window)
        (tracked,) = window._nodes.values()
        streams = tracked.state._streams.values()
        held = tracked.state._held
        sizes.append(
            sum(stream.rows.shape[1] + len(stream.syncs) for stream in streams)
            + held._waiting.shape[1]
            + held._taken.shape[1]
        )
    per_batch = np.mean([len(b.calls) for b in batches])
    assert max(sizes) < 4 * per_batch
