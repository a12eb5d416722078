"""An agent that comes late finds communicators again where nothing else fits, and says where it cannot."""

from typing import Any

import numpy as np
import pytest

from agents.collector import Observations, ProcessKey, RankProcess
from agents.communicators import Membership, Registry
from agents.ebpf.records import RUN_DTYPE, CommCreated
from agents.late import STRANGER_NS, Late
from schemas.events import Calls, CallSource, Communicators, Op

S = 1_000_000_000
KEY = ProcessKey(1009, 7)
RANK = RankProcess(
    key=KEY, job_id="job", incarnation="0", world_size=16, rank=3, local_rank=3, namespace_pid=9, start_ns=S
)
ROWS = np.dtype([*RUN_DTYPE.descr, ("hash", "<u8"), ("is_counted", "u1")], align=False)
AR, AG, RS, SEND = Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.SEND
Kinds = list[tuple[Op, int]]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """A Late whose clock goes on by more than STRANGER_NS at each look."""
    ticks = iter(range(0, 10**18, STRANGER_NS))
    monkeypatch.setattr("agents.late.time.monotonic_ns", lambda: next(ticks))
    return Late(Registry())


def call(late: Late, pointer: int, kinds: Kinds, *, span_s: int = 11) -> None:
    """Let the process call NCCL on a pointer, as NcclCollector does."""
    late.find(KEY, pointer)
    late.find(KEY, pointer)
    rows = np.zeros(2 * len(kinds), ROWS)
    rows["comm"] = pointer
    for place, (op, n_bytes) in enumerate(kinds):
        rows["op"][place :: len(kinds)] = op
        rows["bytes"][place :: len(kinds)] = n_bytes
    rows["start_ns"] = rows["end_ns"] = np.repeat([S, (1 + span_s) * S], len(kinds))
    late.see(KEY, rows)


def tell(
    late: Late, *communicators: tuple[int, int, int, Kinds], span_s: int = 11, ranks: tuple[RankProcess, ...] = (RANK,)
) -> None:
    """Let the Inspector tell hash, rank, size and calls of communicators."""
    kinds = [(comm, op, n_bytes) for comm, _, _, own in communicators for op, n_bytes in own]
    start_ns = np.repeat([100 * S, (100 + span_s) * S], len(kinds))
    late.learn(
        ranks,
        Observations(
            communicators=Communicators.build(
                len(communicators),
                rank=0,
                comm=[comm for comm, _, _, _ in communicators],
                comm_rank=[rank for _, rank, _, _ in communicators],
                size=[size for _, _, size, _ in communicators],
            ),
            calls=Calls.build(
                2 * len(kinds),
                rank=0,
                comm=[comm for comm, _, _ in kinds] * 2,
                op=[int(op) for _, op, _ in kinds] * 2,
                source=int(CallSource.GPU),
                bytes=[n_bytes for _, _, n_bytes in kinds] * 2,
                count=1,
                first_seq=0,
                seq_known=0,
                start_ns=start_ns,
                end_ns=start_ns,
                duration_ns=1,
                duration_min_ns=1,
            ),
        ),
    )


def matched(late: Late, *pointers: int) -> list[int | None]:
    return [None if (m := late.find(KEY, pointer)) is None else m.comm for pointer in pointers]


def test_a_pointer_is_the_only_communicator_that_carries_what_it_does(late: Late) -> None:
    call(late, 0x1000, [(AR, 4), (AR, 1 << 20)])
    call(late, 0x2000, [(AG, 1 << 16), (RS, 1 << 20), (SEND, 1 << 20)])
    tell(late, (23, 3, 16, [(AR, 1 << 20)]), (29, 1, 4, [(AG, 1 << 16), (RS, 1 << 20)]))
    assert matched(late, 0x1000, 0x2000) == [23, 29]
    assert late.memberships(KEY) == [
        Membership(23, 3, 16, is_counted_from_creation=False, generation=0),
        Membership(29, 1, 4, is_counted_from_creation=False, generation=0),
    ]
    assert late.limits() == []


def test_two_that_carry_the_same_are_told_apart_by_nobody(late: Late) -> None:
    for pointer in (0x1000, 0x2000):
        call(late, pointer, [(AR, 1 << 20)])
    tell(late, (23, 3, 16, [(AR, 1 << 20)]), (29, 1, 4, [(AR, 1 << 20)]))
    assert matched(late, 0x1000, 0x2000) == [None, None]
    late.name(KEY, 0x1000)
    late.name(KEY, 0x2000)
    (limit,) = late.limits()
    assert limit.what == "members of 2 communicators (processes 1009)"


def test_what_is_left_when_others_are_found_is_found_as_well(late: Late) -> None:
    call(late, 0x1000, [(AR, 1 << 20), (AG, 1 << 20), (AR, 16)])
    call(late, 0x2000, [(AR, 1 << 20)])
    tell(late, (23, 3, 16, [(AR, 1 << 20), (AG, 1 << 20)]), (29, 1, 4, [(AR, 1 << 20)]))
    assert matched(late, 0x1000, 0x2000) == [23, 29]


def test_a_communicator_that_was_not_told_all_it_should_have_been_does_not_fit(late: Late) -> None:
    call(late, 0x1000, [(AR, 1 << 20), (AG, 1 << 20)])
    tell(late, (23, 3, 16, [(AR, 1 << 20)]))
    assert matched(late, 0x1000) == [None]
    tell(late, (23, 3, 16, [(AG, 1 << 20)]))
    assert matched(late, 0x1000) == [23], "the Inspector skips records, and in time tells each kind"


def test_nothing_is_concluded_from_a_short_look(late: Late) -> None:
    call(late, 0x1000, [(AR, 1 << 20)], span_s=9)
    tell(late, (23, 3, 16, [(AR, 1 << 20)]))
    assert matched(late, 0x1000) == [None]
    call(late, 0x1000, [(AR, 1 << 20)], span_s=11)
    tell(late, (23, 3, 16, [(AR, 1 << 20)]))
    assert matched(late, 0x1000) == [23]


def test_a_conclusion_that_turns_out_wrong_is_taken_back_for_good(late: Late) -> None:
    call(late, 0x1000, [(AR, 1 << 20)])
    tell(late, (23, 3, 16, [(AR, 1 << 20)]))
    tell(late, (23, 3, 16, [(AG, 1 << 20)]))
    assert matched(late, 0x1000) == [None]
    call(late, 0x1000, [(AG, 1 << 20)])
    tell(late, (23, 3, 16, [(AG, 1 << 20)]))
    assert matched(late, 0x1000) == [None]


def test_a_communicator_that_the_registry_knows_is_no_strangers(late: Late) -> None:
    unique_id = bytes(128)
    fields: dict[str, Any] = dict.fromkeys(("parent", "color", "key", "name", "nth_child"))
    late._registry.note(
        KEY,
        CommCreated(
            tgid=KEY.pid, tid=KEY.pid, time_ns=S, comm=0x3000, function="ncclCommInitRank", unique_id=unique_id,
            n_ranks=16, rank=3, result=0, **fields,
        ),
    )  # fmt: skip
    known = late._registry.find(KEY, 0x3000)
    assert known is not None
    call(late, 0x1000, [(AR, 1 << 20)])
    tell(late, (known.comm, 3, 16, [(AR, 1 << 20)]))
    assert matched(late, 0x1000) == [None]
    assert late.memberships(KEY) == []


def test_what_the_inspector_tells_of_a_late_process_tells_the_registry_its_world(late: Late) -> None:
    call(late, 0x1000, [(AR, 4)])
    assert late._registry.is_late(KEY)
    tell(late, (23, 3, 16, []), (29, 1, 4, []))
    world = late._registry.world(KEY, 16)
    assert world is not None
    assert world.comm == 23


def test_a_pointer_is_a_stranger_only_after_its_creation_could_have_been_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    monkeypatch.setattr("agents.late.time.monotonic_ns", lambda: now_ns)
    registry = Registry()
    late = Late(registry)
    for now_ns, is_late in ((0, False), (STRANGER_NS - 1, False), (STRANGER_NS, True)):  # noqa: B007
        late.find(KEY, 0x1000)
        assert registry.calls_nccl(KEY)
        assert registry.is_late(KEY) is is_late


def test_a_name_of_our_own_is_the_pointers_for_as_long_as_its_process_lives(late: Late) -> None:
    name = late.name(KEY, 0x1000)
    late.forget(KEY)
    assert late.name(KEY, 0x1000) == name == Late(Registry()).name(KEY, 0x1000)
    others = [
        late.name(KEY, 0x2000),
        late.name(KEY._replace(start_ticks=8), 0x1000),
        late.name(ProcessKey(11, 7), 0x1000),
    ]
    assert len({name, *others}) == 4
    assert all(0 < n < 1 << 64 for n in (name, *others))


def test_other_processes_and_places_are_not_mixed_up(late: Late) -> None:
    call(late, 0x1000, [(AR, 1 << 20)])
    other = RankProcess(
        key=ProcessKey(11, 7),
        job_id="job",
        incarnation="0",
        world_size=16,
        rank=4,
        local_rank=4,
        namespace_pid=9,
        start_ns=S,
    )
    tell(late, (23, 3, 16, [(AR, 1 << 20)]), ranks=(other, RANK))
    assert matched(late, 0x1000) == [None]


def test_what_keeps_communicators_from_having_a_name_is_said_as_well(late: Late) -> None:
    fields: dict[str, Any] = dict.fromkeys(("unique_id", "n_ranks", "rank", "name"))
    late._registry.note(
        KEY,
        CommCreated(
            tgid=KEY.pid, tid=KEY.pid, time_ns=S, comm=0x3000, function="ncclCommSplit", parent=0x1000, color=0, key=0,
            nth_child=0, result=0, **fields,
        ),
    )  # fmt: skip
    assert late.find(KEY, 0x3000) is None
    late.name(KEY, 0x3000)
    assert [limit.what[:15] for limit in late.limits()] == ["1 communicators", "members of 1 co"]
    assert not late._registry.is_late(KEY), "its creation was seen"


def test_kinds_and_pointers_are_bounded(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.late.POINTERS_MAX", 5)
    monkeypatch.setattr("agents.late.KINDS_MAX", 7)
    for pointer in range(1, 12):
        call(late, pointer, [(AR, n) for n in range(11)])
        late.name(KEY, pointer)
    process = late._processes[KEY]
    assert (len(process.first_seen_ns), len(process.by_pointer), len(process.named)) == (5, 5, 5)
    assert all(len(pattern.kinds) == 7 for pattern in process.by_pointer.values())
