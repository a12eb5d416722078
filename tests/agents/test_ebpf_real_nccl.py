"""The probes in NVIDIA's own library, newest and older: all symbols are there, and every call says what it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.ebpf import functions
from agents.ebpf.records import CommCreated, CommEnded
from agents.ebpf.symbols import read_image
from agents.ebpf.tracer import Tracer
from tests.agents.probed import OPS, Victim, attach, check_times, open_tracer, take_all
from tests.agents.real_nccl import NEWEST, OLDER, NcclMissing, real_library
from tests.conftest import give_up

pytestmark = pytest.mark.kernel

SYMBOLS = [function.symbol for function in (*functions.NCCL, functions.BCAST)]
LATER = {  # than the older version
    *(symbol for symbol in SYMBOLS if symbol.endswith("Config") and symbol != "ncclCommInitRankConfig"),
    *("ncclAlltoAll", "ncclGather", "ncclScatter"),
    *("ncclGroupSimulateEnd", "ncclCommInitRankScalable", "ncclCommShrink", "ncclCommGrow"),
}
HAVE_PEER = ("ncclBroadcast", "ncclBcast", "ncclReduce", "ncclSend", "ncclRecv", "ncclGather", "ncclScatter")
INVALID_ARGUMENT = 4


@pytest.fixture(scope="module", params=[NEWEST, OLDER])
def library(request: pytest.FixtureRequest) -> Path:
    try:
        return real_library(request.param)
    except NcclMissing as error:
        give_up(str(error))


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    tracer = open_tracer(aggregate=False)
    yield tracer
    tracer.close()


def test_every_function_is_where_it_is_looked_for(library: Path) -> None:
    image = read_image(str(library), SYMBOLS)
    assert image.symbols.keys() == set(SYMBOLS) - (LATER if OLDER in str(library) else set())
    assert image.build_id
    hot = {f.symbol for f in functions.NCCL if f.is_hot}
    assert [name for name, symbol in image.symbols.items() if name in hot and not symbol.is_cheap] == []


def test_every_refused_call_is_seen_with_its_arguments(tracer: Tracer, library: Path) -> None:
    """The communicator is memory of ours without NCCL's magic numbers, which NCCL refuses."""
    names = [name for name in OPS if OLDER not in str(library) or name not in LATER]
    with Victim(library) as victim:
        attach(tracer, victim)
        comm = victim.do(
            f"""
            room = ctypes.create_string_buffer(1 << 20)
            comm = ctypes.addressof(room)
            for turn in range(7):
                for place, name in enumerate({names}):
                    peer = turn + 3 if name in {HAVE_PEER} else 0
                    me.call(name, count=turn * 1009 + place + 5, type=(turn + place) % 10, peer=peer, comm=comm)
            answer = comm
            """
        )
        truth = victim.truth()
        seen = take_all(tracer, victim)
    assert {each.result for each in truth} == {INVALID_ARGUMENT}
    assert {each.comm for each in truth} == {comm}
    assert len(truth) == 7 * len(names)
    assert seen.run_keys == [each.key for each in truth]
    assert set(seen.runs["result"].tolist()) == {INVALID_ARGUMENT}
    check_times(seen.runs, truth)
    assert seen.lost_calls == 0


def test_groups_are_followed(tracer: Tracer, library: Path) -> None:
    with Victim(library) as victim:
        attach(tracer, victim)
        victim.do(
            """
            for peer in range(3):
                me.library.ncclGroupStart()
                me.call("ncclSend", peer=peer, comm=0)
                me.library.ncclGroupEnd()
                me.call("ncclSend", peer=peer, comm=0)
            """
        )
        seen = take_all(tracer, victim)
    assert seen.runs["depth"].tolist() == [1, 0] * 3


def test_communicators_are_asked_for_in_vain_but_seen(tracer: Tracer, library: Path) -> None:
    with Victim(library) as victim:
        attach(tracer, victim)
        answers = victim.do(
            """
            made = c_void_p()
            config = Config(48, name=None)
            answer = [
                me.library.ncclCommInitRank(byref(made), 7, unique_id(3), 5),
                me.library.ncclCommSplit(None, 2, 3, byref(made), None),
                me.library.ncclCommDestroy(None),
                me.library.ncclCommAbort(None),
            ]
            """
        )
        seen = take_all(tracer, victim)
    assert 0 not in answers[:2], "without a GPU no communicator is made"
    init, split, destroyed, aborted = seen.communicators
    assert isinstance(init, CommCreated)
    assert isinstance(split, CommCreated)
    assert (init.n_ranks, init.rank, init.comm, init.result) == (7, 5, 0, answers[0])
    assert init.unique_id == bytes(range(3, 131))
    assert (split.color, split.key, split.comm, split.result) == (2, 3, 0, answers[1])
    assert isinstance(destroyed, CommEnded)
    assert isinstance(aborted, CommEnded)
    assert (destroyed.function, aborted.function) == ("ncclCommDestroy", "ncclCommAbort")
