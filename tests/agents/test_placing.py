"""Remembering when the host made which call."""

from typing import Any

import numpy as np
import pytest

from agents.collector import ProcessKey
from agents.placing import ROWS_MAX, SPAN_NS, TRANSFERS_MAX, CallTimes, Standing
from schemas.events import Calls, Op

KEY = ProcessKey(101, 7)
OTHER = ProcessKey(101, 9)
COMM = 0xF0F0_F0F0_F0F0_F0F1
T0 = 1_790_000_000_000_000_000
MS = 1_000_000


def rows(*runs: tuple[int, int, int], op: Op = Op.ALL_REDUCE, step_ns: int = 3 * MS, **columns: Any) -> Calls:
    """Runs of (first number, count, start in ms), whose calls begin step_ns apart and take 1 ms each."""
    first, count, start = (np.array(column, np.int64) for column in zip(*runs, strict=True))
    given: dict[str, Any] = {
        "rank": 0,
        "comm": COMM,
        "op": int(op),
        "source": 0,
        "bytes": 4096,
        "count": count,
        "first_seq": first,
        "seq_known": 1,
        "start_ns": T0 + start * MS,
        "end_ns": T0 + start * MS + (count - 1) * step_ns + MS,
        "duration_ns": count * MS,
        "duration_min_ns": MS,
    }
    return Calls.build(len(runs), **(given | columns))


def test_a_call_is_found_by_its_number() -> None:
    times = CallTimes()
    times.note(KEY, rows((0, 1, 5), (1, 1, 11), (2, 1, 13)))
    assert [times.find(KEY, COMM, Op.ALL_REDUCE, n) for n in range(4)] == [
        T0 + 5 * MS,
        T0 + 11 * MS,
        T0 + 13 * MS,
        None,
    ]
    assert times.find(OTHER, COMM, Op.ALL_REDUCE, 1) is None
    assert times.find(KEY, COMM + 1, Op.ALL_REDUCE, 1) is None
    assert times.find(KEY, COMM, Op.BROADCAST, 1) is None


def test_within_a_run_calls_are_taken_to_be_evenly_spaced() -> None:
    times = CallTimes()
    times.note(KEY, rows((10, 7, 0)))
    assert [times.find(KEY, COMM, Op.ALL_REDUCE, 10 + i) for i in range(7)] == [T0 + 3 * i * MS for i in range(7)]
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 9) is None
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 17) is None


def test_a_gap_between_runs_stays_a_gap() -> None:
    times = CallTimes()
    times.note(KEY, rows((0, 2, 0)))
    times.note(KEY, rows((5, 2, 100)))
    found = [times.find(KEY, COMM, Op.ALL_REDUCE, n) is not None for n in range(8)]
    assert found == [True, True, False, False, False, True, True, False]


def test_calls_that_were_counted_from_later_cannot_be_found_by_number() -> None:
    times = CallTimes()
    assert times.standing(KEY, COMM, Op.ALL_REDUCE) is Standing.UNSEEN
    times.note(KEY, rows((0, 3, 0), seq_known=0))
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 1) is None
    assert times.standing(KEY, COMM, Op.ALL_REDUCE) is Standing.UNCOUNTED
    assert times.observes(KEY)
    assert times.n_calls(KEY) == {COMM: 3}


def test_a_counter_that_begins_anew_forgets_the_old_numbers() -> None:
    times = CallTimes()
    times.note(KEY, rows((0, 20, 0)))
    times.note(KEY, rows((0, 2, 500)))
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 1) == T0 + 503 * MS
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 15) is None


def test_after_a_call_that_outlasts_the_memory_calls_are_remembered_again() -> None:
    # Its end makes all that began before it too old, itself included: a hung collective, or the first with its set-up.
    long_ms = SPAN_NS // MS + 10_007
    times = CallTimes()
    for number, (start_ms, took_ms) in enumerate([(0, long_ms), (long_ms + 5, 1), (long_ms + 11, 1)]):
        took: dict[str, Any] = {"end_ns": T0 + (start_ms + took_ms) * MS, "duration_ns": took_ms * MS}
        times.note(KEY, rows((number, 1, start_ms), **took))
    found = [times.find(KEY, COMM, Op.ALL_REDUCE, n) for n in range(3)]
    assert found == [None, T0 + (long_ms + 5) * MS, T0 + (long_ms + 11) * MS]
    assert times.n_calls(KEY) == {COMM: 3}
    assert times.standing(KEY, COMM, Op.ALL_REDUCE) is Standing.WHOLE


def test_old_calls_are_forgotten_by_time() -> None:
    times = CallTimes()
    times.note(KEY, rows((0, 1, 0)))
    times.note(KEY, rows((1, 1, SPAN_NS // MS - 5)))
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 0) is not None
    times.note(KEY, rows((2, 1, SPAN_NS // MS + 5)))
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 0) is None
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 2) is not None


def test_old_calls_are_forgotten_by_number_of_rows() -> None:
    times = CallTimes()
    n = ROWS_MAX + 13
    first = np.arange(n)
    start_ns = T0 + first * 1000
    times.note(KEY, rows(*[(0, 1, 0)] * n).replace(first_seq=first, start_ns=start_ns, end_ns=start_ns + 7))
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 12) is None
    assert times.find(KEY, COMM, Op.ALL_REDUCE, 13) == T0 + 13_000


def test_sends_and_receives_come_in_their_common_order() -> None:
    times = CallTimes()
    sends = rows((0, 2, 0), (2, 1, 20), op=Op.SEND, peer=[3, 4])
    receives = rows((0, 1, 10), op=Op.RECV, peer=5)
    calls = Calls.concatenate([sends, receives])
    times.note(KEY, calls.take(np.argsort(calls.start_ns)))
    found, standing = times.take_transfers(KEY, COMM)
    assert standing is Standing.WHOLE
    assert [(t.order, t.op, t.peer, t.seq, t.start_ns) for t in found] == [
        (0, Op.SEND, 3, 0, T0),
        (1, Op.SEND, 3, 1, T0 + 3 * MS),
        (2, Op.RECV, 5, 0, T0 + 10 * MS),
        (3, Op.SEND, 4, 2, T0 + 20 * MS),
    ]
    assert times.take_transfers(KEY, COMM) == ([], Standing.WHOLE)
    assert times.take_transfers(KEY, COMM + 1) == ((), Standing.UNSEEN)


def test_sends_below_the_least_size_are_not_in_the_order() -> None:
    times = CallTimes()
    times.count_transfers_from(KEY, 8192)
    assert not times.observes(KEY)
    times.note(KEY, rows((0, 1, 0), (1, 1, 5), (2, 1, 9), op=Op.SEND, peer=1, bytes=np.array([8192, 8191, 8193])))
    found, _ = times.take_transfers(KEY, COMM)
    assert [(t.order, t.seq) for t in found] == [(0, 0), (1, 2)]


def test_sends_of_which_some_were_not_seen_are_said_to_be_broken() -> None:
    times = CallTimes()
    times.note(KEY, rows((0, 2, 0), op=Op.SEND, peer=1))
    times.note(KEY, rows((3, 1, 50), op=Op.SEND, peer=1))
    assert times.take_transfers(KEY, COMM)[1] is Standing.BROKEN
    times.note(OTHER, rows((0, 2, 0), op=Op.SEND, peer=1, seq_known=0))
    assert times.take_transfers(OTHER, COMM)[1] is Standing.UNCOUNTED


def test_sends_that_nobody_asks_for_do_not_pile_up() -> None:
    times = CallTimes()
    times.note(KEY, rows((0, TRANSFERS_MAX + 3, 0), op=Op.SEND, peer=1))
    found, standing = times.take_transfers(KEY, COMM)
    assert len(found) == TRANSFERS_MAX
    assert standing is Standing.BROKEN


@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.SEND])
def test_a_process_that_has_ended_is_forgotten(op: Op) -> None:
    times = CallTimes()
    times.note(KEY, rows((0, 3, 0), op=op, peer=2))
    times.note(OTHER, rows((0, 5, 0), op=op, peer=2))
    times.note(KEY, rows((0, 3, 0), op=Op.REDUCE, seq_known=0))
    times.forget(KEY)
    assert not times.observes(KEY)
    assert times.find(KEY, COMM, op, 1) is None
    assert times.standing(KEY, COMM, Op.REDUCE) is Standing.UNSEEN
    assert times.find(OTHER, COMM, op, 1) == T0 + 3 * MS
    times.forget(KEY)


def test_no_calls_are_nothing() -> None:
    times = CallTimes()
    times.note(KEY, Calls.empty())
    assert not times.observes(KEY)
    assert times.n_calls(KEY) == {}
