"""How much of a slow link the job feels: two pipelines of two stages, a rank and a node each."""

import numpy as np
import pytest

from pipeline.claims import Claims
from pipeline.frames import Frame, Signal
from pipeline.history import History
from pipeline.judge_params import DEFAULTS
from pipeline.search import Search
from pipeline.slack import Slack
from pipeline.structure import Structure
from pipeline.suspect import Span, Suspect
from pipeline.topology import Topology
from pipeline.watch import LinkWatch
from schemas.alerts import Component, ComponentName, ComponentType, Kind
from schemas.events import Communicators, Op, Sensor

PIPELINES, DATA = {10: (0, 2), 11: (1, 3)}, {30: (0, 1), 31: (2, 3)}
MICRO_BATCHES, FRAMES = 4, 40
COMPUTE_S, TRANSFER_S = 0.8, 0.01
HEALTHY_S = COMPUTE_S + COMPUTE_S / MICRO_BATCHES + 2 * MICRO_BATCHES * TRANSFER_S + TRANSFER_S
SLOW_S = 0.21  # of the reduce-scatter of the second stage


@pytest.fixture
def topology() -> Topology:
    made = Topology(4)
    for rank in range(4):
        for comm, members in (PIPELINES | DATA).items():
            if rank in members:
                place = members.index(rank)
                table = Communicators.build(1, rank=rank, comm=[comm], comm_rank=place, size=2)
                made.learn(f"node{rank}", (), table, np.array([rank]))
                if comm in DATA:
                    made.series_index(rank, comm, int(Op.REDUCE_SCATTER), 0, 1, 1 << 20)
                for op in (Op.SEND, Op.RECV) if comm in PIPELINES else ():
                    made.series_index(rank, comm, int(op), 1 - place, MICRO_BATCHES, 1 << 20)
    return made


def history(
    topology: Topology, durations_s: list[float], slow_from: int, unseen: frozenset[int] = frozenset()
) -> History:
    """Return frames of these iteration times; the second stage's reduce-scatter is slow from some frame on."""
    made = History(4)
    slow = np.array([one.key.comm == 31 for one in topology.series])
    for number, duration_s in enumerate(durations_s):
        frame = Frame.empty(number, 4, 0)
        frame.values[Signal.COMPUTE] = COMPUTE_S
        times = np.where(slow & (number >= slow_from), SLOW_S, TRANSFER_S)
        made.push(frame, duration_s, np.where(number in unseen, np.nan, times), np.ones(4, bool))
    return made


def felt(topology: Topology, of: History, span: Span) -> float:
    return Slack(of, topology, Structure.of(topology)).most_felt(span, np.full(len(topology.series), TRANSFER_S))


def search(topology: Topology, of: History) -> Search:
    none = np.zeros(4, np.int64)
    return Search(of, topology, Structure.of(topology), DEFAULTS, Sensor.GPU, none, Claims())


def suspect(topology: Topology) -> Suspect:
    (index,) = (i for i, one in enumerate(topology.series) if one.key.comm == 31)
    name = ComponentName(type=ComponentType.LINK, node="node2", peer="node3")
    return Suspect(
        kind=Kind.SLOW_LINK,
        component=Component(type=ComponentType.LINK, name=name, candidates=(name,)),
        excess_s=SLOW_S - TRANSFER_S,
        z=9.0,
        watch=LinkWatch(np.array([index]), np.array([TRANSFER_S]), np.array([1.0])),
        sources=("gpu",),
        evidence=(),
        claims=frozenset({("series", index)}),
    )


@pytest.mark.parametrize("lost_s", [0.0, 0.13])
def test_a_job_feels_what_its_iterations_last_beyond_work_transfers_and_the_filling_of_its_pipeline(
    topology: Topology, lost_s: float
) -> None:
    of = history(topology, [HEALTHY_S + lost_s] * FRAMES, 0)
    assert felt(topology, of, Span(start=0, stop=FRAMES)) == pytest.approx(lost_s, abs=1e-6)


def test_nothing_bounds_what_is_felt_where_computation_is_not_seen(topology: Topology) -> None:
    of = History(4)
    for number in range(FRAMES):
        of.push(Frame.empty(number, 4, 0), 1.0, np.full(len(topology.series), TRANSFER_S), np.ones(4, bool))
    assert felt(topology, of, Span(start=0, stop=FRAMES)) == float("inf")


def test_a_link_that_no_iteration_got_longer_by_is_absorbed(topology: Topology) -> None:
    of = history(topology, [2 * HEALTHY_S] * FRAMES, FRAMES - 8)  # slack of another kind than a pipeline's
    found = search(topology, of).beyond_other_stages(suspect(topology), Span(start=FRAMES - 8, stop=FRAMES))
    assert found == pytest.approx(0.0, abs=1e-9)


def test_a_link_slow_from_the_start_is_felt_as_far_as_nothing_else_takes_as_long(topology: Topology) -> None:
    of = history(topology, [HEALTHY_S + 0.13] * FRAMES, 0)
    found = search(topology, of).beyond_other_stages(suspect(topology), Span(start=FRAMES - 8, stop=FRAMES))
    assert found == pytest.approx(0.13, abs=1e-6)


def test_a_link_that_grows_slow_beside_another_fault_is_measured_by_the_times_before_both(topology: Topology) -> None:
    of = history(topology, [HEALTHY_S] * 16 + [HEALTHY_S + 0.1] * 16 + [HEALTHY_S + 0.13] * 8, FRAMES - 8)
    found = search(topology, of).beyond_other_stages(suspect(topology), Span(start=FRAMES - 8, stop=FRAMES))
    assert found == pytest.approx(0.13, abs=1e-6)


def test_frames_without_a_transfer_do_not_move_the_onset(topology: Topology) -> None:
    of = history(topology, [HEALTHY_S] * FRAMES, 25, unseen=frozenset({30, 31, 33, 34, 39}))
    assert search(topology, of).since(suspect(topology)) == 25


def test_a_transfer_that_was_not_seen_is_taken_to_be_as_slow_as_the_others(topology: Topology) -> None:
    of = History(4)
    of.push(Frame.empty(0, 4, 0), 1.0, np.array([0.05, np.nan]), np.ones(4, bool))
    of.push(Frame.empty(1, 4, 0), 1.0, np.array([np.nan, np.nan]), np.ones(4, bool))
    watch = LinkWatch(np.array([0, 1]), np.array([0.01, 0.03]), np.array([2.0, 1.0]))
    excess = watch.excess(of, 0, 2)
    assert excess[0] == pytest.approx(0.2, rel=1e-6)  # (0.05 - 0.01) * 2 over 0.02 of the usual 0.05 seconds
    assert np.isnan(excess[1])


def test_who_has_just_recovered_costs_nothing(topology: Topology) -> None:
    of = history(topology, [HEALTHY_S + 0.13] * FRAMES, 0)
    found, span = suspect(topology), Span(start=FRAMES - 8, stop=FRAMES)
    assert search(topology, of).felt_s(found, span, FRAMES) == 0.0
    assert search(topology, of).felt_s(found, span, 0) > 0.0
