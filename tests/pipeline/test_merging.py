"""Records of several partitions, in order of time, and never held for long."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import merging
from pipeline.lookback import Partition
from pipeline.merging import HOLD_S, Merge
from pipeline.record import Record

PARTITIONS: list[Partition] = [("t", number) for number in range(5)]


def record(partition: int, offset: int, time_ns: int, size: int = 0) -> Record:
    return Record("t", partition, offset, time_ns, b"", b"v" * size)


def drain(merge: Merge, ends: dict[Partition, int], now_s: float = 0.0) -> list[Record]:
    out = []
    while (one := merge.pop(PARTITIONS, lambda p, offset: ends.get(p, 0) > offset, now_s)) is not None:
        out.append(one)
    return out


@given(st.integers(0, 2**32), st.integers(1, 17))
def test_a_backlog_leaves_in_order_of_time_however_it_is_handed_out(seed: int, stretch: int) -> None:
    draw = random.Random(seed)
    queues = {
        p: [record(p, offset, 1000 * offset + draw.randrange(1000)) for offset in range(draw.randrange(41))]
        for _, p in PARTITIONS
    }
    ends = {("t", p): len(queue) for p, queue in queues.items()}
    everything = sorted(itertools.chain(*queues.values()), key=lambda one: (one.time_ns, one.partition, one.offset))
    merge, out = Merge(), []
    while any(queues.values()):
        p = draw.choice([p for p, queue in queues.items() if queue])
        for one in queues[p][:stretch]:
            merge.add(one, 0.0)
        queues[p] = queues[p][stretch:]
        out += drain(merge, ends)
    assert out == everything
    assert merge.n_forced == 0


def test_who_has_caught_up_waits_for_nobody() -> None:
    merge = Merge()
    merge.add(record(3, 7, 500), 0.0)
    ends = {("t", 0): 0, ("t", 3): 8}
    assert [one.offset for one in drain(merge, ends)] == [7]
    assert drain(merge, ends) == []


def test_a_record_waits_for_a_partition_that_has_more_but_not_for_ever() -> None:
    merge = Merge()
    merge.add(record(3, 0, 500), 10.0)
    ends = {("t", 0): 1, ("t", 3): 1}
    assert drain(merge, ends, 10.0 + 0.9 * HOLD_S) == []
    assert [one.partition for one in drain(merge, ends, 10.0 + HOLD_S)] == [3]
    assert merge.n_forced == 1


@pytest.mark.parametrize(("bound", "size"), [("RECORDS_MAX", 0), ("BYTES_MAX", 1)])
def test_what_waits_is_bounded(bound: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, bound, 11)
    merge = Merge()
    ends = {("t", 0): 1, ("t", 3): 13}
    for offset in range(11):
        merge.add(record(3, offset, offset, size), 0.0)
    assert drain(merge, ends) == []
    merge.add(record(3, 11, 11, size), 0.0)
    assert [one.offset for one in drain(merge, ends)] == [0]


def test_what_was_fetched_before_a_rebalance_is_forgotten() -> None:
    merge = Merge()
    merge.add(record(3, 7, 500), 0.0)
    merge.clear()
    assert drain(merge, {}) == []
    merge.add(record(3, 5, 500), 0.0)
    assert [one.offset for one in drain(merge, {("t", 3): 6})] == [5]
