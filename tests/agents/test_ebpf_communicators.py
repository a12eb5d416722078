"""Communicators as the tracer tells of them: how each was asked for, when it is known, and when its address is free."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.ebpf.records import CommCreated, CommEnded
from agents.ebpf.tracer import Tracer
from tests.agents.probed import Seen, Victim, attach, build_library, open_tracer, take, take_all

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("probed"))


@pytest.fixture(scope="module")
def tracer(library: Path) -> Iterator[Tracer]:
    tracer = open_tracer()
    with Victim(library) as victim:
        attach(tracer, victim)
    yield tracer
    tracer.close()


@pytest.fixture
def victim(library: Path) -> Iterator[Victim]:
    with Victim(library) as victim:
        yield victim


def created(seen: Seen) -> list[CommCreated]:
    return [each for each in seen.communicators if isinstance(each, CommCreated)]


def test_a_communicator_is_told_with_its_id_and_its_place(tracer: Tracer, victim: Victim) -> None:
    comm, before_ns, after_ns = victim.do(
        """
        before_ns = time.monotonic_ns()
        comm = me.create(n_ranks=11, rank=7, first=200)
        answer = comm, before_ns, time.monotonic_ns()
        """
    )
    (told,) = created(take_all(tracer, victim))
    assert before_ns < told.time_ns < after_ns
    assert told == CommCreated(
        tgid=victim.pid,
        tid=victim.pid,
        time_ns=told.time_ns,
        comm=comm,
        function="ncclCommInitRank",
        parent=None,
        unique_id=bytes((200 + i) % 256 for i in range(128)),
        n_ranks=11,
        rank=7,
        color=None,
        key=None,
        name=None,
        result=0,
        nth_child=None,
    )


def test_the_other_functions_that_make_communicators(tracer: Tracer, victim: Victim) -> None:
    comms = victim.do(
        """
        made = [c_void_p() for _ in range(5)]
        config = Config(64, name=b"tensor parallel")
        short = Config(48, name=b"not there in this version")
        ids = (Id * 2)(unique_id(3), unique_id(5))
        nccl = me.library
        nccl.ncclCommInitRankConfig(byref(made[0]), 5, unique_id(1), 2, byref(config))
        nccl.ncclCommInitRankConfig(byref(made[1]), 5, unique_id(2), 3, byref(short))
        nccl.ncclCommInitRankScalable(byref(made[2]), 7, 6, 2, ids, byref(config))
        nccl.ncclCommShrink(made[0], None, 1, byref(made[3]), None, 0)
        nccl.ncclCommGrow(made[0], 9, byref(ids[1]), -1, byref(made[4]), None)
        answer = [each.value for each in made]
        """
    )
    told = created(take_all(tracer, victim))
    assert [each.comm for each in told] == comms
    rows = [(each.function, each.n_ranks, each.rank, each.parent, each.name, each.nth_child) for each in told]
    assert rows == [
        ("ncclCommInitRankConfig", 5, 2, None, "tensor parallel", None),
        ("ncclCommInitRankConfig", 5, 3, None, None, None),
        ("ncclCommInitRankScalable", 7, 6, None, "tensor parallel", None),
        ("ncclCommShrink", None, None, comms[0], None, 0),
        ("ncclCommGrow", 9, None, comms[0], None, None),
    ]
    firsts = [each.unique_id[0] if each.unique_id else None for each in told]
    assert firsts == [1, 2, 3, None, 5]


def test_one_process_with_many_devices_gets_a_communicator_for_each(tracer: Tracer, victim: Victim) -> None:
    comms = victim.do(
        """
        made = (c_void_p * 5)()
        me.library.ncclCommInitAll(made, 5, None)
        answer = list(made)
        """
    )
    told = created(take_all(tracer, victim))
    assert [(each.comm, each.rank, each.n_ranks) for each in told] == [(comm, i, 5) for i, comm in enumerate(comms)]


def test_a_failed_creation_is_told_with_its_result(tracer: Tracer, victim: Victim) -> None:
    victim.do("me.create(n_ranks=3, rank=5)")
    (told,) = created(take_all(tracer, victim))
    assert (told.comm, told.result, told.n_ranks, told.rank) == (0, 4, 3, 5)


def test_a_split_is_told_with_its_parent(tracer: Tracer, victim: Victim) -> None:
    parent, child = victim.do("parent = me.create(5, 1); answer = parent, me.split(parent, color=3, key=-2).value")
    told = created(take_all(tracer, victim))[1]
    assert (told.parent, told.comm, told.color, told.key) == (parent, child, 3, -2)
    assert (told.n_ranks, told.rank, told.unique_id, told.nth_child) == (None, None, None, 0)


def test_a_rank_that_takes_no_part_in_a_split_is_told_without_a_communicator(tracer: Tracer, victim: Victim) -> None:
    victim.do("parent = me.create(5, 1); me.split(parent, -1, 0); me.split(parent, 1, 0)")
    told = created(take_all(tracer, victim))[1:]
    assert [(each.color, each.nth_child) for each in told] == [(-1, 0), (1, 1)]
    assert told[0].comm == 0
    assert told[1].comm != 0


def test_splits_that_finish_late_are_told_when_they_are_used(tracer: Tracer, victim: Victim) -> None:
    parent, first, second = victim.do(
        """
        parent = me.create(5, 1)
        me.library.ncclGroupStart()
        made = me.split(parent, 1, 0), me.split(parent, 2, 0)
        me.library.ncclGroupEnd()
        answer = parent, made[0].value, made[1].value
        """
    )
    assert [each.comm for each in created(take(tracer, victim.pid))] == [parent]
    victim.do("for _ in range(3): me.call('ncclAllReduce', comm=made[1].value)")
    told = created(take(tracer, victim.pid))
    assert [(each.comm, each.color, each.nth_child) for each in told] == [(second, 2, 1)]
    victim.do("for _ in range(3): me.call('ncclAllReduce', comm=made[0].value)")
    seen = take_all(tracer, victim)
    assert [(each.comm, each.color, each.nth_child) for each in created(seen)] == [(first, 1, 0)]
    assert created(seen)[0].time_ns < told[0].time_ns, "the time is that of the call"
    assert set(seen.runs["first_seq"].tolist()) == {0}


@pytest.mark.parametrize(
    "use",
    ["me.split(made.value, 0, 0)", "me.library.ncclCommDestroy(made.value)", "me.call('ncclSend', comm=made.value)"],
)
def test_a_communicator_that_is_made_without_waiting_is_told_at_any_first_use(
    tracer: Tracer, victim: Victim, use: str
) -> None:
    child = victim.do(
        """
        parent = me.create(5, 1)
        made = me.split(parent, 1, 13)
        me.call("ncclAllReduce", comm=parent)
        me.library.probed_finish()
        answer = made.value
        """
    )
    assert child not in [each.comm for each in created(take(tracer, victim.pid))]
    victim.do(use)
    told = created(take_all(tracer, victim))[0]
    assert (told.comm, told.result, told.key) == (child, 7, 13)


@pytest.mark.parametrize("function", ["ncclCommDestroy", "ncclCommAbort"])
def test_an_address_that_is_used_again_counts_from_the_start(tracer: Tracer, victim: Victim, function: str) -> None:
    first, second = victim.do(
        f"""
        first = me.create(2, 0, first=1)
        for _ in range(7): me.call("ncclAllReduce", comm=first)
        me.library.{function}(first)
        second = me.create(2, 0, first=2)
        for _ in range(3): me.call("ncclAllReduce", comm=second)
        answer = first, second
        """
    )
    assert first == second
    truth = victim.truth()
    seen = take_all(tracer, victim)
    made, ended, again = seen.communicators
    assert isinstance(made, CommCreated)
    assert isinstance(again, CommCreated)
    assert (made.unique_id or b"")[0] == 1
    assert (again.unique_id or b"")[0] == 2
    assert ended == CommEnded(tgid=victim.pid, time_ns=ended.time_ns, comm=first, function=function)
    assert truth[6].after_ns < ended.time_ns < again.time_ns < truth[7].before_ns
    assert seen.runs["count"].tolist() == [7, 3]
    assert seen.runs["first_seq"].tolist() == [0, 0]


def test_an_address_whose_end_nobody_saw_counts_from_its_new_creation(tracer: Tracer, victim: Victim) -> None:
    first, second = victim.do(
        """
        first = me.create(2, 0)
        for _ in range(7): me.call("ncclAllReduce", comm=first)
        ctypes.memset(first, 0, 4)  # free, as the library sees it
        second = me.create(2, 0)
        for _ in range(3): me.call("ncclAllReduce", comm=second)
        answer = first, second
        """
    )
    assert first == second
    seen = take_all(tracer, victim)
    numbers = [int(run["first_seq"]) + i for run in seen.runs for i in range(int(run["count"]))]
    assert numbers == [*range(7), *range(3)]


def test_an_address_that_is_used_again_by_a_late_split_counts_from_the_start(tracer: Tracer, victim: Victim) -> None:
    first, second = victim.do(
        """
        parent = me.create(2, 0)
        first = me.split(parent, 0, 0).value
        for _ in range(7): me.call("ncclAllReduce", comm=first)
        me.library.ncclCommDestroy(first)
        me.library.ncclGroupStart()
        made = me.split(parent, 0, 0)
        me.library.ncclGroupEnd()
        for _ in range(3): me.call("ncclAllReduce", comm=made.value)
        answer = first, made.value
        """
    )
    assert first == second
    seen = take_all(tracer, victim)
    assert seen.runs["first_seq"].tolist() == [0, 0]
    assert [each.nth_child for each in created(seen)] == [None, 0, 1]


def test_the_children_of_a_parent_at_the_same_address_are_others(tracer: Tracer, victim: Victim) -> None:
    victim.do(
        """
        for _ in range(2):
            parent = me.create(2, 0)
            children = [me.split(parent, 0, 0).value for _ in range(3)]
            for comm in (*children, parent): me.library.ncclCommDestroy(comm)
        """
    )
    told = created(take_all(tracer, victim))
    assert told[0].comm == told[4].comm
    assert [each.nth_child for each in told] == [None, 0, 1, 2] * 2


def test_a_job_that_was_there_before_us_is_counted_from_our_coming(tracer: Tracer, library: Path) -> None:
    late = open_tracer()
    try:
        with Victim(library) as victim:
            victim.do("comm = me.create(2, 0)\nfor _ in range(7): me.call('ncclAllReduce', comm=comm)")
            attach(late, victim)
            victim.do("for _ in range(11): me.call('ncclAllReduce', comm=comm)")
            truth = victim.truth()
            seen = take_all(late, victim)
            tracer.forget(victim.pid)
        assert seen.keys == [each.key for each in truth[7:]]
        assert int(seen.runs["first_seq"][0]) == 0
        assert seen.communicators == []
    finally:
        late.close()
