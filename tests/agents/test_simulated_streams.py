"""What the agents send: sensors, flushes, sequence numbers, clocks, and what gets lost on the way."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pytest

from agents.simulated import Cluster, Scenario, load_scenario
from schemas import codec
from schemas.events import (
    Calls,
    CallSource,
    EventBatch,
    GpuSamples,
    HostSamples,
    MarkerKind,
    Op,
    Sensor,
    ThrottleReason,
)

ITERATIONS = 23
N_RANKS, N_NODES = 12, 3
TABLES = {
    "host_call": "calls",
    "gpu": "calls",
    "sync": "syncs",
    "nvml": "gpu_samples",
    "host": "host_samples",
    "marker": "markers",
    "span": "spans",
}


def scenario(more: str = "", faults: str = "", benign: str = "", gpus_per_node: int = 4) -> Scenario:
    return load_scenario(
        f"""
title = "streams"
seed = 17
iterations = {ITERATIONS}
micro_batches = 5
layout = {{ tp = 2, pp = 2, dp = 3, gpus_per_node = {gpus_per_node} }}
agents.flush_interval_s = 0.11
agents.sample_interval_s = 0.13
faults = [{faults}]
benign = [{benign}]
{more}
"""
    )


def batches(given: Scenario) -> list[EventBatch]:
    return list(Cluster(given).batches())


def all_calls(sent: Iterable[EventBatch]) -> Calls:
    return Calls.concatenate([batch.calls for batch in sent])


def by_node(sent: Iterable[EventBatch]) -> dict[str, list[EventBatch]]:
    nodes: dict[str, list[EventBatch]] = defaultdict(list)
    for batch in sent:
        nodes[batch.node].append(batch)
    return nodes


def only(table: Calls, source: CallSource, op: Op | None = None) -> Calls:
    chosen = table.source == source
    return table.take(chosen if op is None else chosen & (table.op == op))


@pytest.mark.parametrize("sensor", list(TABLES))
def test_every_sensor_can_be_switched_on_alone(sensor: str) -> None:
    sent = batches(scenario(f'agents.sensors = ["{sensor}"]'))
    assert {batch.sensors for batch in sent} == {Sensor[sensor.upper()]}
    for table in set(TABLES.values()):
        n_rows = sum(len(getattr(batch, table)) for batch in sent)
        assert (n_rows > 0) == (table == TABLES[sensor])
    if sensor in ("host_call", "gpu"):
        assert set(all_calls(sent).source.tolist()) == {CallSource[sensor.upper()]}


def test_nothing_is_lost_or_said_twice() -> None:
    sent = batches(scenario('agents.sensors = ["host_call", "gpu", "sync", "marker", "span"]'))
    calls = all_calls(sent)
    # Of a rank: 10 computes, 10 messages and 3 collectives.
    assert len(only(calls, CallSource.HOST_CALL)) == len(only(calls, CallSource.GPU)) == ITERATIONS * N_RANKS * 23
    names = (calls.rank, calls.source, calls.op, calls.comm, calls.first_seq)
    assert len(set(zip(*(column.tolist() for column in names), strict=True))) == len(calls)
    assert sum(len(batch.syncs) for batch in sent) == ITERATIONS * N_RANKS
    assert sum(len(batch.markers) for batch in sent) == ITERATIONS * N_RANKS
    assert sum(len(batch.spans) for batch in sent) == ITERATIONS * N_RANKS * 11


def test_an_event_belongs_to_the_flush_after_its_end_and_gpu_times_follow_within_two() -> None:
    for node in by_node(batches(scenario())).values():
        before_ns = 0
        for batch in node[:-1]:
            host = only(batch.calls, CallSource.HOST_CALL)
            ends = [host.end_ns, batch.syncs.start_ns + batch.syncs.duration_ns, batch.markers.time_ns]
            for end_ns in [*ends, batch.gpu_samples.time_ns, batch.host_samples.time_ns]:
                assert np.all((before_ns < end_ns) & (end_ns <= batch.flush_ns))
            gpu = only(batch.calls, CallSource.GPU)
            assert np.all(gpu.end_ns <= batch.flush_ns)
            assert np.all(gpu.end_ns > batch.flush_ns - 2.6 * batch.flush_interval_ns)
            before_ns = batch.flush_ns
        delayed = [np.any(only(b.calls, CallSource.GPU).end_ns < b.flush_ns - b.flush_interval_ns) for b in node]
        assert any(delayed)


def test_a_node_numbers_its_batches_sends_pulses_and_says_which_is_the_last() -> None:
    pause = '{ kind = "checkpoint", every = 11, pause_s = 0.6 }'
    for node in by_node(batches(scenario(benign=pause))).values():
        assert [batch.seq for batch in node] == list(range(len(node)))
        assert set(np.diff([batch.flush_ns for batch in node]).tolist()) <= {110_000_000, 110_000_001, 109_999_999}
        assert [batch.is_last for batch in node] == [False] * (len(node) - 1) + [True]
        assert any(len(batch.calls) == 0 for batch in node)


def test_batches_come_in_the_order_of_their_flush_but_for_the_way() -> None:
    flush_ns = np.array([batch.flush_ns for batch in batches(scenario("clocks.skew_s = 0.0"))])
    assert np.any(np.diff(flush_ns) < 0)
    assert np.diff(flush_ns).min() > -100_000_000


def test_calls_are_in_the_order_of_their_start_and_their_columns_agree() -> None:
    for batch in batches(scenario()):
        calls = batch.calls
        assert np.all(np.diff(calls.start_ns) >= 0)
        assert np.all(calls.duration_min_ns * calls.count <= calls.duration_ns + calls.count)
        single = calls.count == 1
        np.testing.assert_array_equal(calls.duration_ns[single], (calls.end_ns - calls.start_ns)[single])
        assert np.all(calls.duration_min_ns > 0)


def test_members_of_a_communicator_agree_on_every_call_of_a_sequence_number() -> None:
    sent = batches(scenario())
    calls = all_calls(sent)
    sizes = {(c, r): s for b in sent for c, r, s in zip(*_columns(b, "comm", "rank", "size"), strict=True)}
    collective = only(calls.take((calls.op != Op.SEND) & (calls.op != Op.RECV)), CallSource.GPU)
    met: dict[tuple[int, int, int], set[tuple[int, int, int]]] = defaultdict(set)
    fields = ("comm", "op", "first_seq", "bytes", "count", "rank")
    for comm, op, seq, size, count, rank in zip(*(getattr(collective, f).tolist() for f in fields), strict=True):
        met[comm, op, seq].add((size, count, rank))
    for (comm, _, _), rows in met.items():
        assert len({row[:2] for row in rows}) == 1
        assert {len(rows)} == {sizes[comm, row[2]] for row in rows}


def test_every_send_has_its_receive_at_the_other_stage() -> None:
    given = scenario("clocks.skew_s = 0.0\nclocks.error_s = 0.0")
    sent = batches(given)
    stage = {
        (rank, comm): place
        for batch in sent
        for rank, comm, place in zip(*_columns(batch, "rank", "comm", "comm_rank"), strict=True)
    }
    ends: dict[Op, list[tuple[int, int, int, int]]] = {Op.SEND: [], Op.RECV: []}
    for op, found in ends.items():
        rows = only(all_calls(sent), CallSource.GPU, op)
        columns = (getattr(rows, name).tolist() for name in ("rank", "comm", "peer", "end_ns"))
        for rank, comm, peer, end in zip(*columns, strict=True):
            here = stage[rank, comm]
            found.append((comm, end, *((here, peer) if op == Op.SEND else (peer, here))))
    assert sorted(ends[Op.SEND]) == sorted(ends[Op.RECV])
    assert len(ends[Op.SEND]) == ITERATIONS * 5 * N_RANKS


def _columns(batch: EventBatch, *names: str) -> list[list[int]]:
    return [getattr(batch.communicators, name).tolist() for name in names]


def transfers(given: Scenario) -> dict[tuple[int, Op, int], float]:
    """Median nanoseconds of the shortest member of every call, by communicator, op and peer."""
    calls = only(all_calls(batches(given)), CallSource.GPU)
    columns = (getattr(calls, name).tolist() for name in ("comm", "op", "peer", "end_ns", "duration_min_ns"))
    rows = [(comm, Op(op), peer, end, least) for comm, op, peer, end, least in zip(*columns, strict=True)]
    shortest: dict[tuple[int, int], int] = {}
    for comm, _, _, end, least in rows:
        shortest[comm, end] = min(shortest.get((comm, end), least), least)
    found: dict[tuple[int, Op, int], list[int]] = defaultdict(list)
    for comm, op, peer, end, _ in rows:
        found[comm, op, peer].append(shortest[comm, end])
    return {key: float(np.median(values)) for key, values in found.items()}


def test_transfers_show_the_slow_link_and_only_it() -> None:
    exact = "clocks.skew_s = 0.0"
    healthy = transfers(scenario(exact, gpus_per_node=2))
    slow = transfers(scenario(exact, '{ kind = "slow_link", nodes = [1, 4], factor = 12.0 }', gpus_per_node=2))
    ratios = {key: slow[key] / healthy[key] for key in healthy}
    is_slow = {key for key, ratio in ratios.items() if ratio > 8}
    # Two pipelines go over the link, with both ops at either side.
    assert len({comm for comm, _, _ in is_slow}) == 2
    assert {(op, peer) for _, op, peer in is_slow} == {(Op.SEND, 0), (Op.SEND, 1), (Op.RECV, 0), (Op.RECV, 1)}
    assert max(ratio for key, ratio in ratios.items() if key not in is_slow) < 1.3


def test_transfers_show_a_slow_interface_in_all_that_goes_through_it() -> None:
    exact = "clocks.skew_s = 0.0"
    healthy = transfers(scenario(exact, gpus_per_node=2))
    slow = transfers(scenario(exact, '{ kind = "slow_nic", node = 1, factor = 5.0 }', gpus_per_node=2))
    is_slow = {key for key in healthy if slow[key] > 3 * healthy[key]}
    # Two pipelines, the two data-parallel rings of the stage (both collectives), and the world's.
    assert len({comm for comm, op, _ in is_slow if op in (Op.SEND, Op.RECV)}) == 2
    assert len({comm for comm, op, _ in is_slow if op in (Op.REDUCE_SCATTER, Op.ALL_GATHER)}) == 2
    assert len([op for _, op, _ in is_slow if op == Op.ALL_REDUCE]) == 1
    assert len(is_slow) == 8 + 4 + 1


def test_each_node_has_its_own_clock_within_the_bound() -> None:
    exact = batches(scenario("clocks.skew_s = 0.0"))
    skewed = batches(scenario("clocks.skew_s = 0.004"))
    offset: dict[str, set[int]] = defaultdict(set)
    for one, other in zip(exact, skewed, strict=True):
        assert (one.node, one.seq) == (other.node, other.seq)
        assert other.clock_error_ns == 5_000_000
        difference = np.unique(other.calls.start_ns - one.calls.start_ns)
        offset[one.node] |= {int(value) for value in difference} | {other.flush_ns - one.flush_ns}
    assert {len(values) for values in offset.values()} == {1}
    values = {value for one in offset.values() for value in one}
    assert len(values) == N_NODES
    assert max(map(abs, values)) <= 4_000_000


def test_an_unknown_clock_error_is_none() -> None:
    assert {batch.clock_error_ns for batch in batches(scenario("clocks.is_error_known = false"))} == {None}


def test_markers_tell_the_true_iteration_times() -> None:
    given = scenario("clocks.skew_s = 0.0")
    done = Cluster(given).truth()
    for batch in batches(given):
        for iteration, time_ns in zip(batch.markers.iteration.tolist(), batch.markers.time_ns.tolist(), strict=True):
            assert abs((time_ns - given.epoch_ns) * 1e-9 - done.end_s[iteration]) < 0.012 * done.duration_s[iteration]


def test_a_host_that_synchronises_seldom_waits_once_a_block() -> None:
    sent = batches(scenario("work.sync_every = 5"))
    assert sum(len(batch.syncs) for batch in sent) == (ITERATIONS // 5) * N_RANKS


def test_a_late_agent_counts_from_its_attachment_and_says_so() -> None:
    given = scenario("agents.late = [{ node = 1, at_iteration = 7 }]")
    done = Cluster(given).truth()
    late, other = by_node(batches(given))["node1"], by_node(batches(given))["node0"]
    attach_ns = late[0].agent_start_ns
    assert done.start_s[7] < (attach_ns - given.epoch_ns) * 1e-9 < done.end_s[7]
    assert other[0].agent_start_ns < given.epoch_ns
    calls = all_calls(late)
    host, gpu = only(calls, CallSource.HOST_CALL), only(calls, CallSource.GPU)
    assert calls.start_ns.min() >= attach_ns
    assert not host.seq_known.any()
    assert gpu.seq_known.all()
    keys = np.stack([host.rank.astype("u8"), host.comm, host.op.astype("u8")], axis=1)
    for key in np.unique(keys, axis=0):
        mine = host.take((keys == key).all(axis=1))
        assert mine.first_seq[0] == 0
        np.testing.assert_array_equal(np.diff(mine.first_seq), mine.count[:-1])
    assert all(all_calls(other).seq_known)


def test_a_checkpoint_pauses_all_ranks_and_says_so_if_asked_to() -> None:
    silent = scenario(benign='{ kind = "checkpoint", every = 7, pause_s = 0.5, marker = false }')
    done = Cluster(silent).truth()
    gaps = done.start_s[1:] - done.end_s[:-1]
    np.testing.assert_allclose(gaps[6::7], 0.5)
    assert np.all(np.delete(gaps, [6, 13, 20]) == 0)
    kinds = {kind for batch in batches(silent) for kind in batch.markers.kind.tolist()}
    assert kinds == {MarkerKind.ITERATION_END}
    told = scenario(benign='{ kind = "checkpoint", every = 7, pause_s = 0.5 }')
    pauses = [b.markers.take(b.markers.kind == MarkerKind.CHECKPOINT) for b in batches(told)]
    assert sum(map(len, pauses)) == 3 * N_RANKS
    np.testing.assert_allclose(np.concatenate([p.duration_ns for p in pauses]) * 1e-9, 0.5, atol=0.01)
    assert {i for p in pauses for i in p.iteration.tolist()} == {6, 13, 20}


def test_an_evaluation_adds_forward_passes_without_gradients() -> None:
    plain = batches(scenario())
    evaluated = batches(scenario(benign='{ kind = "evaluation", every = 7, micro_batches = 4 }'))
    n_calls = [[len(only(all_calls(sent), CallSource.GPU, op)) for op in Op] for sent in (plain, evaluated)]
    n_more = {op: after - before for op, before, after in zip(Op, *n_calls, strict=True)}
    assert n_more[Op.REDUCE_SCATTER] == n_more[Op.ALL_GATHER] == 0
    assert n_more[Op.ALL_REDUCE] == 3 * 4 * N_RANKS
    assert n_more[Op.SEND] == n_more[Op.RECV] == 3 * 4 * N_RANKS // 2
    kinds = np.concatenate([batch.markers.kind for batch in evaluated])
    assert (kinds == MarkerKind.EVALUATION).sum() == 3 * N_RANKS


def test_a_restart_ends_every_node_and_begins_anew_with_other_ranks() -> None:
    sent = batches(scenario(benign='{ kind = "restart", at_iteration = 11, node_shift = 1 }'))
    incarnations = list(dict.fromkeys(batch.incarnation for batch in sent))
    assert len(incarnations) == 2
    places = []
    for name in incarnations:
        nodes = by_node(batch for batch in sent if batch.incarnation == name)
        assert [len(nodes), sum(b.is_last for n in nodes.values() for b in n)] == [N_NODES, N_NODES]
        assert all([b.seq for b in node] == list(range(len(node))) for node in nodes.values())
        places.append({info.rank: info for node in nodes.values() for info in node[0].ranks})
        assert only(all_calls(nodes["node0"]), CallSource.GPU).first_seq.min() == 0
    first, second = places
    for rank, info in first.items():
        moved = second[(rank - 4) % N_RANKS]
        assert (moved.gpu_uuid, moved.gpu) == (info.gpu_uuid, info.gpu)
        assert moved.pid != info.pid
    by_incarnation = [[batch for batch in sent if batch.incarnation == name] for name in incarnations]
    comms = [{comm for batch in some for comm in batch.communicators.comm.tolist()} for some in by_incarnation]
    assert not comms[0] & comms[1]
    iterations = [{number for batch in some for number in batch.markers.iteration.tolist()} for some in by_incarnation]
    assert iterations == [set(range(11)), set(range(11, ITERATIONS))]


@pytest.mark.parametrize("cause", ["thermal", "power"])
def test_gpu_telemetry_follows_the_fault_unless_it_is_to_show_nothing(cause: str) -> None:
    fault = f'kind = "slow_gpu", node = 1, gpu = 2, factor = 1.5, onset = 11, cause = "{cause}"'
    given = scenario(faults=f"{{ {fault} }}")
    onset_ns = given.epoch_ns + round(Cluster(given).truth().start_s[11] * 1e9)
    samples = GpuSamples.concatenate([batch.gpu_samples for batch in by_node(batches(given))["node1"]])
    is_slow = (samples.gpu == 2) & (samples.time_ns > onset_ns + 10_000_000)
    ratio = samples.sm_clock_hz / samples.sm_clock_max_hz
    assert 4 < is_slow.sum() < len(is_slow) / 4
    np.testing.assert_allclose(ratio[is_slow], 0.985 / 1.5, atol=0.02)
    np.testing.assert_allclose(ratio[~is_slow], 0.985, atol=0.02)
    bit = ThrottleReason.HW_THERMAL_SLOWDOWN if cause == "thermal" else ThrottleReason.SW_POWER_CAP
    np.testing.assert_array_equal((samples.throttle_reasons & int(bit)) != 0, is_slow)
    hidden = batches(scenario(faults=f"{{ {fault}, telemetry = false }}"))
    for batch in hidden:
        assert np.all(batch.gpu_samples.throttle_reasons == 0)
        assert np.all(batch.gpu_samples.sm_clock_hz > 0.96 * batch.gpu_samples.sm_clock_max_hz)


def test_a_contended_host_shows_in_the_run_queue_unless_it_is_to_show_nothing() -> None:
    fault = 'kind = "slow_host", node = 2, factor = 5.0'
    for hides, least in ((False, 0.6), (True, 0.0)):
        nodes = by_node(batches(scenario(faults=f"{{ {fault}, telemetry = {str(not hides).lower()} }}")))
        for name, node in nodes.items():
            samples = HostSamples.concatenate([batch.host_samples for batch in node])
            is_slow = name == "node2" and not hides
            assert np.all(samples.run_queue_ratio >= (least if is_slow else 0))
            assert np.all(samples.run_queue_ratio <= (1.0 if is_slow else 0.1))


def test_lost_batches_leave_gaps_and_nothing_else() -> None:
    clean = {(b.node, b.seq): b for b in batches(scenario())}
    kept = batches(scenario(benign='{ kind = "lost_batches", probability = 0.2 }'))
    assert 0 < len(kept) < len(clean)
    for batch in kept:
        assert batch.calls == clean[batch.node, batch.seq].calls
    assert sum(batch.is_last for batch in kept) == N_NODES


def test_the_last_batch_of_a_node_is_never_lost() -> None:
    kept = batches(scenario(benign='{ kind = "lost_batches", probability = 1.0 }'))
    assert sorted((batch.node, batch.is_last) for batch in kept) == [(f"node{n}", True) for n in range(N_NODES)]


def test_an_agent_that_knows_its_loss_says_how_much() -> None:
    clean = {(b.node, b.seq): b for b in batches(scenario())}
    sent = batches(scenario(benign='{ kind = "lost_batches", probability = 0.2, known = true }'))
    assert len(sent) == len(clean)
    losses = [batch for batch in sent if batch.lost_events]
    assert losses
    for batch in losses:
        assert len(batch.calls) == len(batch.markers) == 0
        assert batch.lost_events >= len(clean[batch.node, batch.seq].calls)


def test_a_duplicate_is_the_same_batch_again_later() -> None:
    sent = batches(scenario(benign='{ kind = "duplicated_batches", probability = 0.2, delay_s = 0.3 }'))
    places: dict[tuple[str, int], list[int]] = defaultdict(list)
    for place, batch in enumerate(sent):
        places[batch.node, batch.seq].append(place)
    assert len(places) == len(batches(scenario()))
    twice = [both for both in places.values() if len(both) > 1]
    assert 0.05 * len(places) < len(twice) < 0.5 * len(places)
    for first, second in twice:
        assert codec.encode_events(sent[first]) == codec.encode_events(sent[second])
    assert any(second - first > 1 for first, second in twice)


def test_a_late_batch_holds_up_its_node_and_no_other() -> None:
    clean = batches(scenario())
    sent = batches(scenario(benign='{ kind = "late_batches", probability = 0.1, delay_s = 0.5 }'))
    for node in by_node(sent).values():
        assert [batch.seq for batch in node] == list(range(len(node)))
    assert [(b.node, b.seq) for b in sent] != [(b.node, b.seq) for b in clean]
    assert sorted((b.node, b.seq) for b in sent) == sorted((b.node, b.seq) for b in clean)
    behind = np.maximum.accumulate([b.flush_ns for b in sent]) - np.array([b.flush_ns for b in sent])
    assert 300_000_000 < behind.max() < 800_000_000
