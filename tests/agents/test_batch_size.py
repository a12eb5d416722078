"""A batch too large for one message goes in several, and nothing is lost, repeated or out of order."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from agents.batch_size import BYTES_MAX, split
from schemas.codec import decode_events, encode_events
from schemas.events import (
    Calls,
    Communicators,
    EventBatch,
    GpuSamples,
    HostSamples,
    Markers,
    PeerSamples,
    PortSamples,
    RankInfo,
    Sensor,
    Spans,
    Syncs,
)
from schemas.topics import MAX_MESSAGE_BYTES

ROWS = ("calls", "spans", "syncs", "host_samples", "markers", "peer_samples")
ONCE = ("communicators", "gpu_samples", "port_samples")


def calls(n: int) -> Calls:
    number = np.arange(n)
    return Calls.build(
        n, rank=number % 2, comm=number * 2654435761 + 2**40, op=0, source=0, bytes=8, count=1, first_seq=number,
        seq_known=1, start_ns=number * 7, end_ns=number * 7 + 5, duration_ns=5, duration_min_ns=5,
    )  # fmt: skip


def batch(n: int = 1009) -> EventBatch:
    return EventBatch(
        job_id="job",
        incarnation="0",
        node="node-3",
        agent_version="0.1",
        seq=41,
        agent_start_ns=13,
        flush_ns=10**18,
        flush_interval_ns=10**9,
        world_size=2,
        sensors=Sensor.HOST_CALL | Sensor.SYNC,
        lost_events=17,
        clock_error_ns=19,
        is_last=True,
        ranks=tuple(
            RankInfo(rank=r, local_rank=r, pid=23 + r, process_start_ns=29, gpu=None, gpu_uuid=None) for r in (0, 1)
        ),
        ports=("mlx5_0/1",),
        communicators=Communicators.build(3, rank=0, comm=np.arange(3), comm_rank=0, size=2),
        calls=calls(n),
        spans=Spans.build(5, rank=1, kind=0, micro_batch=0, start_ns=np.arange(5), duration_ns=3),
        syncs=Syncs.build(211, rank=1, start_ns=np.arange(211), duration_ns=3),
        gpu_samples=GpuSamples.build(7, gpu=0, time_ns=np.arange(7)),
        host_samples=HostSamples.build(2, rank=np.arange(2), time_ns=31),
        markers=Markers.build(1, rank=0, kind=0, iteration=37, time_ns=3),
        peer_samples=PeerSamples.build(
            11, rank=0, time_ns=np.arange(11), peer_high=0, peer_low=np.arange(11), connections=1
        ),
        port_samples=PortSamples.build(1, port=0, time_ns=43, is_active=1),
    )


def test_a_batch_that_fits_stays_whole() -> None:
    whole = batch()
    assert split(whole) == [whole]
    assert split(whole, len(encode_events(whole))) == [whole]


@pytest.mark.parametrize("share", [2, 3, 13])
def test_the_pieces_have_all_rows_once_and_in_order(share: int) -> None:
    whole = batch()
    bytes_max = len(encode_events(whole)) // share
    pieces = split(whole, bytes_max)
    assert len(pieces) >= share
    assert all(len(encode_events(piece)) <= bytes_max for piece in pieces)
    for name in ROWS:
        table = getattr(whole, name)
        assert type(table).concatenate([getattr(piece, name) for piece in pieces]) == table


def test_all_tables_are_cut_at_the_same_time() -> None:
    whole = replace(batch(), syncs=Syncs.build(7, rank=1, start_ns=1000 + np.arange(7) * 1000, duration_ns=3))
    pieces = split(whole, 20_011)
    assert len(pieces) > 2
    for before, after in itertools.pairwise(pieces):
        ends = [table.start_ns.max() for table in (before.calls, before.syncs) if len(table)]
        begins = [table.start_ns.min() for table in (after.calls, after.syncs) if len(table)]
        assert max(ends) <= min(begins)


def test_the_numbers_follow_each_other_and_only_the_last_piece_is_the_jobs_last() -> None:
    pieces = split(batch(), 10_007)
    assert [piece.seq for piece in pieces] == list(range(41, 41 + len(pieces)))
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert not any(piece.is_last for piece in split(replace(batch(), is_last=False), 10_007))


def test_what_is_said_once_is_in_the_first_piece_and_what_holds_throughout_in_each() -> None:
    whole = batch()
    first, *others = split(whole, 10_007)
    assert (first.lost_events, first.ports) == (17, ("mlx5_0/1",))
    assert all(getattr(first, name) == getattr(whole, name) for name in ONCE)
    assert others
    for piece in others:
        assert (piece.lost_events, piece.ports) == (0, ())
        assert not any(len(getattr(piece, name)) for name in ONCE)
    for piece in (first, *others):
        kept = ("job_id", "incarnation", "node", "agent_start_ns", "flush_ns", "sensors", "world_size", "ranks")
        assert all(getattr(piece, name) == getattr(whole, name) for name in kept)
        decode_events(encode_events(piece))  # each is a valid record by itself


def test_rows_are_never_cut_further_than_one_a_piece() -> None:
    whole = batch(3)
    pieces = split(whole, 1)
    assert [sum(len(getattr(piece, name)) for name in ROWS) for piece in pieces] == [1] * sum(
        len(getattr(whole, name)) for name in ROWS
    )
    assert split(replace(whole, **{name: type(getattr(whole, name)).empty() for name in ROWS}), 1)[0].lost_events == 17


def test_pieces_of_the_largest_batches_fit_a_message_uncompressed() -> None:
    assert BYTES_MAX <= MAX_MESSAGE_BYTES // 2
    pieces = split(replace(batch(), calls=calls(130_003)))
    assert len(pieces) > 1
    assert all(len(encode_events(piece)) <= BYTES_MAX for piece in pieces)
    assert sum(len(piece.calls) for piece in pieces) == 130_003
