"""Finding the place of Inspector's records among the host's calls."""

import itertools
from typing import Any

import numpy as np
import pytest

from agents.collector import ProcessKey
from agents.inspector_placing import HOLD_NS, WAITING_MAX, Placed, Placer
from agents.inspector_records import Record
from agents.placing import CallTimes
from schemas.events import Calls, Op

KEY = ProcessKey(101, 7)
COMM = 0xF0F0_F0F0_F0F0_F0F1
T0 = 1_790_000_000_000_000_000
MS = 1_000_000


def host(starts_ms: list[int], *, first: int = 0, op: Op = Op.ALL_REDUCE, **columns: Any) -> Calls:
    """One call of 1 microsecond at each time."""
    start_ns = T0 + np.array(starts_ms, np.int64) * MS
    given: dict[str, Any] = {
        "rank": 0,
        "comm": COMM,
        "op": int(op),
        "source": 0,
        "bytes": 4096,
        "count": 1,
        "first_seq": first + np.arange(len(starts_ms)),
        "seq_known": 1,
        "start_ns": start_ns,
        "end_ns": start_ns + 1000,
        "duration_ns": 1000,
        "duration_min_ns": 1000,
    }
    return Calls.build(len(starts_ms), **(given | columns))


def record(
    number: int, took_ms: int, *, dump_ms: int | None = 10_000, start_ms: int | None = None, **changes: Any
) -> Record:
    whole = Record(
        comm=COMM,
        op=int(Op.ALL_REDUCE),
        number=number,
        peer=None,
        bytes=4096,
        duration_ns=took_ms * MS,
        start_ns=None if start_ms is None else T0 + start_ms * MS,
        dump_ns=None if dump_ms is None else T0 + dump_ms * MS,
    )
    return whole._replace(**changes)


def send(number: int, peer: int = 1, *, op: Op = Op.SEND, **changes: Any) -> Record:
    return record(number, 2, op=int(op), peer=peer, **changes)


def place(placer: Placer, *records: Record, at_ms: int = 10_000) -> list[Placed]:
    placer.add(records, T0 + at_ms * MS)
    return placer.take(T0 + at_ms * MS)


def starts_ms(placed: list[Placed]) -> list[float]:
    return [(p.start_ns - T0) / MS for p in placed]


def test_a_record_begins_when_the_host_called() -> None:
    times = CallTimes()
    times.note(KEY, host([0, 10, 30]))
    placer = Placer(KEY, times)
    (first, second) = place(placer, record(0, 2), record(2, 3))
    assert (first.seq, first.start_ns, first.end_ns, first.is_known) == (0, T0, T0 + 2 * MS, True)
    assert (second.seq, second.start_ns, second.end_ns) == (2, T0 + 30 * MS, T0 + 33 * MS)
    tally = placer.comms[COMM].tally
    assert (tally.records, tally.placed, tally.on_calls, tally.unplaced) == (2, 2, 2, 0)


def test_operations_of_a_communicator_do_not_overlap_where_the_host_runs_ahead() -> None:
    times = CallTimes()
    times.note(KEY, host([0, 1, 2, 100]))
    times.note(KEY, host([3], op=Op.BROADCAST))
    records = [record(0, 10), record(1, 20), record(2, 5), record(0, 7, op=int(Op.BROADCAST)), record(3, 5)]
    assert starts_ms(place(Placer(KEY, times), *records)) == [0, 10, 30, 35, 100]


def test_operations_of_different_communicators_may_overlap() -> None:
    times = CallTimes()
    times.note(KEY, host([0]))
    times.note(KEY, host([1], comm=COMM - 2))
    placed = place(Placer(KEY, times), record(0, 10), record(0, 10, comm=COMM - 2))
    assert starts_ms(placed) == [0, 1]


def test_an_operation_is_over_when_its_record_is_dumped() -> None:
    times = CallTimes()
    times.note(KEY, host([0, 1]))
    placed = place(Placer(KEY, times), record(0, 10, dump_ms=12), record(1, 10, dump_ms=12))
    assert starts_ms(placed) == [0, 2]  # they ran together, in a group


def test_its_own_time_is_better_than_the_hosts() -> None:
    times = CallTimes()
    times.note(KEY, host([0]))
    assert starts_ms(place(Placer(KEY, times), record(0, 10, start_ms=7))) == [7]


def test_an_operation_follows_the_one_that_ends_last() -> None:
    times = CallTimes()
    times.note(KEY, host([0, 1, 5]))
    placed = place(Placer(KEY, times), record(0, 10), record(1, 1, start_ms=3), record(2, 1))
    assert starts_ms(placed) == [0, 3, 10]


def test_what_the_host_has_not_told_yet_is_waited_for() -> None:
    times = CallTimes()
    times.note(KEY, host([0]))
    placer = Placer(KEY, times)
    assert starts_ms(place(placer, record(0, 1), record(1, 1), record(2, 1, start_ms=21))) == [0]
    times.note(KEY, host([5, 20], first=1))
    assert starts_ms(placer.take(T0 + 11_000 * MS)) == [5, 21]
    assert placer.take(T0 + 12_000 * MS) == []


def test_what_stays_without_a_call_is_given_up_unless_it_has_its_own_time() -> None:
    times = CallTimes()
    times.note(KEY, host([0]))
    placer = Placer(KEY, times)
    assert place(placer, record(1, 1), record(2, 1, start_ms=21)) == []
    assert placer.take(T0 + 10_000 * MS + HOLD_NS - 1) == []
    assert starts_ms(placer.take(T0 + 10_000 * MS + HOLD_NS)) == [21]
    tally = placer.comms[COMM].tally
    assert (tally.placed, tally.on_calls, tally.unplaced) == (1, 0, 1)


def test_calls_that_become_known_after_their_record_are_counted_once() -> None:
    times = CallTimes()
    placer = Placer(KEY, times)
    place(placer, record(0, 1, start_ms=3), record(1, 1, start_ms=5), send(1, start_ms=7))
    placer.settle()
    assert placer.comms[COMM].tally.on_calls == 0
    times.note(KEY, host([0]))
    times.note(KEY, host([6], op=Op.SEND, peer=1))
    for _ in range(2):
        placer.settle()
        assert placer.comms[COMM].tally.on_calls == 2


def test_without_the_hosts_calls_only_records_with_their_own_time_have_a_place() -> None:
    placer = Placer(KEY, CallTimes())
    assert place(placer, record(0, 1)) == []
    assert placer.take(T0 + 10_000 * MS + HOLD_NS) == []
    assert placer.comms[COMM].tally.unplaced == 1
    (placed,) = place(placer, record(5, 1, start_ms=3), at_ms=20_000)
    assert (placed.seq, placed.is_known, placed.start_ns) == (5, True, T0 + 3 * MS)


def test_where_the_host_counts_from_later_there_is_nothing_to_wait_for() -> None:
    times = CallTimes()
    times.note(KEY, host([0, 1], seq_known=0))
    placer = Placer(KEY, times)
    (placed,) = place(placer, record(100, 1, start_ms=3), record(101, 1))
    assert (placed.seq, placed.start_ns) == (100, T0 + 3 * MS)
    assert placer.comms[COMM].tally.unplaced == 1


@pytest.mark.parametrize("early", [{"dump_ms": 500}, {"start_ms": 500}])
def test_what_ran_before_its_call_has_no_place(early: dict[str, int]) -> None:
    times = CallTimes()
    times.note(KEY, host([0, 1000]))
    placer = Placer(KEY, times)
    assert starts_ms(place(placer, record(0, 1), record(1, 1, **early))) == [0]
    tally = placer.comms[COMM].tally
    assert (tally.contradicting, tally.unplaced) == (1, 0)


def test_where_the_two_counts_disagree_for_long_nothing_is_placed_until_they_agree() -> None:
    times = CallTimes()
    times.note(KEY, host(list(range(0, 40_000, 100))))
    times.note(KEY, host([0], op=Op.BROADCAST))
    placer = Placer(KEY, times)
    graph = [record(n, 1, start_ms=n) for n in range(1, 30)]  # replayed without a call of the host
    assert place(placer, *graph, record(0, 1, op=int(Op.BROADCAST)))[0].record.op == Op.BROADCAST
    assert place(placer, record(30, 1, start_ms=3000)) == []
    assert placer.comms[COMM].tally.contradicting == 30
    agreeing = [record(n, 1, start_ms=n * 100, dump_ms=None) for n in range(31, 331)]
    assert 0 < len(place(placer, *agreeing)) < 300
    assert starts_ms(place(placer, record(331, 1, start_ms=33_100, dump_ms=None))) == [33_100]


def test_a_slightly_early_time_is_a_matter_of_clocks() -> None:
    times = CallTimes()
    times.note(KEY, host([100]))
    assert starts_ms(place(Placer(KEY, times), record(0, 1, start_ms=90))) == [90]


def test_too_many_waiting_records_are_counted_and_not_kept() -> None:
    placer = Placer(KEY, CallTimes())
    assert place(placer, *[record(n, 1) for n in range(WAITING_MAX + 11)]) == []
    assert placer.comms[COMM].tally.unplaced == 11


def test_the_share_of_numbers_without_a_record_is_known() -> None:
    placer = Placer(KEY, CallTimes())
    assert placer.gap_share == 0
    place(placer, record(10, 1), record(12, 1), record(19, 1), record(3, 1, op=int(Op.BROADCAST)))
    assert placer.gap_share == pytest.approx(1 - 4 / 11)


def exchanges(n: int) -> Calls:
    """Groups of one send to rank 1 and one receive from rank 2, 10 ms apart, each called in this order."""
    sends = host([10 * i for i in range(n)], op=Op.SEND, peer=1)
    receives = host([10 * i for i in range(n)], op=Op.RECV, peer=2)
    receives = receives.replace(start_ns=receives.start_ns + 1000)
    calls = Calls.concatenate([sends, receives])
    return calls.take(np.argsort(calls.start_ns, kind="stable"))


def test_sends_and_receives_get_the_numbers_of_their_calls() -> None:
    times = CallTimes()
    times.note(KEY, exchanges(3))
    placer = Placer(KEY, times)
    # NCCL starts the receive of a group first, and the send is done first.
    records = [send(2), send(1, 2, op=Op.RECV), send(3, 2, op=Op.RECV), send(4), send(6), send(5, 2, op=Op.RECV)]
    placed = place(placer, *records)
    assert [(Op(p.record.op), p.seq, (p.start_ns - T0) // MS) for p in placed] == [
        (Op.SEND, 0, 0),
        (Op.RECV, 0, 0),
        (Op.RECV, 1, 10),
        (Op.SEND, 1, 10),
        (Op.SEND, 2, 20),
        (Op.RECV, 2, 20),
    ]
    assert placer.comms[COMM].tally.on_calls == 6


@pytest.mark.parametrize("lost", [{3}, {4}, {5, 6}, {6, 9}, {3, 4, 5, 6, 7}])
def test_after_lost_records_the_others_still_find_their_calls(lost: set[int]) -> None:
    times = CallTimes()
    times.note(KEY, exchanges(11))
    records = []
    for group in range(11):
        records += [send(2 * group + 1, 2, op=Op.RECV), send(2 * group + 2)]
    placed = place(Placer(KEY, times), *[r for r in records if r.number not in lost])
    assert [p.record.number for p in placed if p.seq != (p.record.number - 1) // 2] == []
    assert len(placed) == 22 - len(lost)


def test_where_the_first_record_is_lost_the_others_are_off_by_one_at_most() -> None:
    times = CallTimes()
    times.note(KEY, exchanges(11))
    records = [send(2 * group + 1, 2, op=Op.RECV) for group in range(1, 11)]
    placed = place(Placer(KEY, times), *records)
    assert {p.seq - (p.record.number - 1) // 2 for p in placed} <= {0, -1}


def test_what_nccl_sorts_within_a_group_is_no_loss() -> None:
    times = CallTimes()
    receive, sends = host([0], op=Op.RECV, peer=2), host([1, 2, 3], op=Op.SEND, peer=1)
    times.note(KEY, Calls.concatenate([receive, sends]))
    placed = place(Placer(KEY, times), send(1), send(2, 2, op=Op.RECV), send(3), send(4))
    assert [p.seq for p in placed] == [0, 0, 1, 2]


def test_sends_to_different_peers_are_told_apart() -> None:
    times = CallTimes()
    times.note(KEY, host([0, 1, 2, 3], op=Op.SEND, peer=np.array([1, 2, 1, 2])))
    placed = place(Placer(KEY, times), send(2, 2), send(1, 1), send(4, 2), send(3, 1))
    assert [(p.record.peer, p.seq) for p in placed] == [(2, 1), (1, 0), (2, 3), (1, 2)]


def test_sends_that_the_plug_in_does_not_record_are_left_out() -> None:
    times = CallTimes()
    times.count_transfers_from(KEY, 8192)
    times.note(KEY, host([0, 1, 2], op=Op.SEND, peer=1, bytes=np.array([16384, 16, 16384])))
    placed = place(Placer(KEY, times), send(1, bytes=16384), send(2, bytes=16384))
    assert [p.seq for p in placed] == [0, 2]


def test_a_send_that_no_call_fits_is_given_up() -> None:
    times = CallTimes()
    times.note(KEY, host([0], op=Op.SEND, peer=1))
    placer = Placer(KEY, times)
    assert place(placer, send(1, bytes=5), send(2, peer=9), send(3, start_ms=4, bytes=5)) == []
    assert placer.take(T0 + 10_000 * MS + HOLD_NS) == []
    assert placer.comms[COMM].tally.unplaced == 3


def test_without_the_hosts_calls_sends_are_counted_here_and_losses_leave_holes() -> None:
    placer = Placer(KEY, CallTimes())
    numbers = [2, 1, *range(3, 20), *range(21, 700)]
    placed = place(placer, *[send(n, op=Op.SEND if n % 2 else Op.RECV, start_ms=n) for n in numbers])
    sends = [p.seq for p in placed if p.record.op == Op.SEND]
    assert sends[:9] == list(range(9))
    assert [b - a for a, b in itertools.pairwise(sends) if b - a != 1] == [2]
    assert all(p.is_known for p in placed[1:])


def test_sends_that_were_counted_before_the_hosts_became_known_are_counted_once() -> None:
    times = CallTimes()
    placer = Placer(KEY, times)
    early = place(placer, *[send(n, 1 + n % 2, start_ms=n) for n in range(1, 6)])
    times.note(KEY, host(list(range(11)), op=Op.SEND, peer=np.array([2, 1] * 6)[:11]))
    late = place(placer, *[send(n, 1 + n % 2, start_ms=n) for n in range(6, 12)])
    assert [p.seq for p in early + late] == list(range(11))


def test_sends_counted_from_later_are_said_to_be() -> None:
    (placed,) = place(Placer(KEY, CallTimes()), send(40, start_ms=2))
    assert (placed.seq, placed.is_known) == (0, False)


def test_where_some_host_calls_were_not_seen_sends_have_no_place() -> None:
    times = CallTimes()
    times.note(KEY, host([0], op=Op.SEND, peer=1))
    times.note(KEY, host([5], first=7, op=Op.SEND, peer=1))
    placer = Placer(KEY, times)
    assert place(placer, send(1), send(2, start_ms=9)) == []
    placer.take(T0 + 10_000 * MS + HOLD_NS)
    assert placer.comms[COMM].tally.unplaced == 2
